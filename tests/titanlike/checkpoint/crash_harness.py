"""Kill a rank at every file operation of a save, and see what the next start finds. Run as a module; see test_crash.py.

Every crash point is a pair of freshly forked gloo ranks in a run folder that has step 1 committed (and what else the
scenario says). They save step 2; the victim sends itself SIGKILL just before its k-th file operation. Then a new
process resumes, compares every bit, saves step 3 and resumes again. k goes up until the victim survives.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint  # imported here once rather than in every forked rank

import titanlike.checkpoint.planners
import titanlike.checkpoint.writer  # noqa: F401 - as above
from tests.titanlike.checkpoint.states import blank, equal, shards, whole
from tests.titanlike.checkpoint.states import full_state as every_tensor
from titanlike.checkpoint import CheckpointConfig, Checkpointer, files

MESH = (1, 2, 1)
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # a killed process loses nothing there, and fsync is free
SCENARIOS = ("plain", "retention", "same step")


def full_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """Without the moments: they would only add more writes of the same kind."""
    return {name: tensor for name, tensor in every_tensor(seed).items() if "exp_avg" not in name}


def in_child(action: Callable[[], None]) -> int:
    """Fork; the child's process id. The child leaves with 0, or 1 and a line on stderr."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}"[:500], file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return pid


def exit_code(pid: int, seconds: float = 60.0) -> int:
    """Exit code, or minus the signal. A process that hangs is killed, and the harness fails."""
    deadline = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise TimeoutError(f"process {pid} hung after its peer was killed")
        time.sleep(0.005)


def config(scenario: str, mode: str = "sync") -> CheckpointConfig:
    return CheckpointConfig(mode=mode, keep_last=1 if scenario == "retention" else 0)


def prepare(folder: Path, scenario: str) -> None:
    """The run folder before the save that crashes."""
    checkpointer = Checkpointer(config(scenario), folder)
    checkpointer.save(1, whole(full_state(1)), {"seed": 1})
    if scenario == "same step":  # a first step 2, with other values: what a run that went back to step 1 replaces
        checkpointer.save(2, whole(full_state(20)), {"seed": 20})
    (folder / "checkpoints" / ".tmp-step-00000002-dead").mkdir()
    (folder / "checkpoints" / ".trash-step-00000000-dead").mkdir()


def rank_main(rank: int, folder: Path, store: str, scenario: str, mode: str, victim: int, k: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=30)
    )
    checkpointer = Checkpointer(config(scenario, mode), folder)
    operations = 0

    def count(operation: str, path: str) -> None:
        nonlocal operations
        if operations == k:
            os.kill(os.getpid(), signal.SIGKILL)
        operations += 1

    if rank == victim:
        files.hook = count
    checkpointer.save(2, shards(full_state(2), MESH, rank), {"seed": 2})
    checkpointer.close()


def check(folder: Path, scenario: str, finished: bool) -> None:
    """The next start: it finds step 2 if that was committed, otherwise what was there before, bit for bit."""
    said: list[str] = []
    into = blank(whole(full_state()))
    found = Checkpointer(CheckpointConfig(), folder, say=said.append).load(into)
    assert found is not None, "nothing was found"
    assert not said, said
    seed = found.meta["seed"]
    before = {"same step": 20}.get(scenario, 1)
    assert seed == 2 or (seed == before and not finished), (seed, finished)
    assert equal(into, whole(full_state(seed))), f"the values are not those of {seed}"
    after = Checkpointer(CheckpointConfig(mode="sync"), folder, say=said.append)
    after.save(3, whole(full_state(3)), {"seed": 3})
    into = blank(into)
    found = after.load(into)
    assert found is not None and found.step == 3 and equal(into, whole(full_state(3))), "the next save failed"
    left = [path.name for path in (folder / "checkpoints").iterdir() if path.name.startswith(".")]
    assert not left and not said, (left, said)


def crash(scenario: str, mode: str, victim: int, k: int, show: bool) -> bool:
    """One crash point. False if the save has fewer than k operations on that rank."""
    with tempfile.TemporaryDirectory(prefix="crash-", dir=MEMORY) as name:
        folder = Path(name)
        assert exit_code(in_child(lambda: prepare(folder, scenario))) == 0
        pids = [
            in_child(partial(rank_main, rank, folder, f"{name}/store", scenario, mode, victim, k)) for rank in range(2)
        ]
        codes = [exit_code(pid) for pid in pids]
        if codes[victim] == -signal.SIGKILL:
            assert exit_code(in_child(lambda: check(folder, scenario, finished=codes[1 - victim] == 0))) == 0, (
                f"lost: {scenario}, {mode}, rank {victim} killed before operation {k}"
            )
            if show:
                print(
                    f"{scenario:9} {mode:5} rank {victim} operation {k:2}: other rank's exit code {codes[1 - victim]}"
                )
            return True
        assert codes == [0, 0], codes
        shutil.rmtree(folder / "checkpoints")
        return False


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1, help="try every n-th operation only")
    parser.add_argument("--scenario", nargs="*", default=SCENARIOS)
    parser.add_argument("--mode", nargs="*", default=["sync", "async"])
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    points = lost = 0
    for scenario in args.scenario:
        for mode in args.mode:
            for victim in (0, 1):
                k = 0
                while True:
                    try:
                        if not crash(scenario, mode, victim, k, args.show):
                            break
                    except AssertionError as error:
                        print(error, flush=True)
                        lost += 1
                    points += 1
                    k += args.every
    print(f"{points} crash points, {lost} lost")
    sys.exit(1 if lost or not points else 0)


if __name__ == "__main__":
    main()
