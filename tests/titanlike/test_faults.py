"""What happens to a job when one of its ranks stops, sleeps, raises, dies, or does not do what the others do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import ROOT, RankError, launch, launching
from tests.titanlike.runs import FLOAT64, arguments, columns, digest, run_on
from tests.titanlike.test_run_errors import ENDLESS, a_rank_spoke_python, logged, ours, wait_for
from titanlike.metrics import files

PATH = {"PYTHONPATH": str(ROOT)}


def hook(name: str) -> dict[str, Any]:
    return {"run.hooks": [f"tests.titanlike.fault_hooks:{name}"]}


def report(run_dir: Path, rank: int) -> dict[str, Any]:
    return json.loads((run_dir / "hang" / f"rank-{rank}.json").read_text())


# --- a hang ---


def test_a_stopped_rank_is_named_by_the_others_and_the_job_ends(tmp_path: Path) -> None:
    """Symptom: a machine is swapped out or its process stopped; the job stands until somebody looks at it."""
    run_dir = tmp_path / "run"
    with launching(arguments(run_dir, **ENDLESS, **{"run.hang_timeout": 4}), 2) as run:
        wait_for(logged(run_dir, 5), run)
        pid = run.rank_pids()[1]
        os.kill(pid, signal.SIGSTOP)
        done = run.wait(120.0)
        assert run.rank_pids() == {}
    assert done.returncode != 0
    (line,) = ours(done.stderr)
    assert f"rank 1 (process {pid} on " in line and "does not answer" in line
    assert "; rank 0 waits in " in line and str(run_dir / "hang") in line
    assert not a_rank_spoke_python(done.stderr)
    assert "titanlike" in (run_dir / "hang" / "rank-0.stacks").read_text()
    told = report(run_dir, 0)
    assert told["recent_phases"] and any(group["last"] for group in told["collectives"].values())
    assert not (run_dir / "hang" / "rank-1.json").exists()


def test_a_rank_that_sleeps_in_a_hook_is_named_with_its_phase_and_stack(tmp_path: Path) -> None:
    """Symptom: one rank waits for a lock or a download in a user's code, and all the others are blamed."""
    run_dir = tmp_path / "run"
    with pytest.raises(RankError, match="exit code 1"):
        run_on(2, run_dir, **hook("Sleeps"), **{"run.hang_timeout": 2})
    why = (run_dir / "hang" / "why").read_text()
    assert "rank 1 is behind" in why
    assert "in the hook tests.titanlike.fault_hooks:Sleeps before_step of step 3, at before_step (titanlike/" in why
    assert "; rank 0 waits in " in why
    assert "in before_step" in (run_dir / "hang" / "rank-1.stacks").read_text()
    assert report(run_dir, 1)["step"] == 3
    run_on(2, run_dir, **{"train.steps": 4})  # the next start goes on, and keeps what was written
    assert len(columns(run_dir)) == 4 and [path.parent.name[:7] for path in run_dir.glob("hang*/why")] == ["hang-20"]


def test_a_rank_that_calls_another_collective_is_told_as_such(tmp_path: Path) -> None:
    """Symptom: a branch that only one rank takes; the ranks wait for each other in different collectives."""
    with pytest.raises(RankError, match="exit code 1"):
        run_on(2, tmp_path / "run", **hook("Mismatches"), **{"run.hang_timeout": 2})
    why = (tmp_path / "run" / "hang" / "why").read_text()
    assert "ranks call different collectives on the group" in why
    assert "rank 0 called all_reduce of 3 in before_step (titanlike/fault_hooks.py:" in why
    assert "and rank 1 broadcast of 2 in before_step (titanlike/fault_hooks.py:" in why


@pytest.mark.slow
def test_mismatched_collectives_are_an_error_at_once_when_asked_for(tmp_path: Path) -> None:
    done = launch(arguments(tmp_path / "run", **hook("Mismatches"), **{"run.debug_collectives": True}), 2, PATH)
    assert done.returncode != 0
    assert "Detected mismatch between collectives on ranks. Rank 0 is running collective" in done.stderr
    assert "OpType=ALLREDUCE" in done.stderr and "OpType=BROADCAST" in done.stderr


# --- a rank that raises, runs out of memory, or dies ---


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{}, {"mesh.pp": 2}], ids=["dp2", "pp2"])
def test_an_exception_on_one_rank_ends_the_job_and_is_what_is_shown_first(tmp_path: Path, mesh: dict[str, int]) -> None:
    """Symptom: the error that began it all stands below hundreds of lines of lost connections."""
    done = launch(arguments(tmp_path / "run", **ENDLESS, **hook("Raises"), **mesh), 2, PATH)
    assert done.returncode != 0
    assert done.stderr.startswith("Traceback") and done.stderr.count('raise KeyError("a bug in a hook")') == 1
    assert "fault_hooks:Raises failed in before_step of step 3 on rank 1: KeyError" in done.stderr
    assert "lost another rank" not in done.stderr


def test_out_of_memory_tells_what_was_configured_and_what_to_change(tmp_path: Path) -> None:
    """Symptom: "you tried to allocate 144115188075855872 bytes", and nothing about which of forty keys to change."""
    (seen,) = run_on(1, tmp_path / "run", **hook("RunsOutOfMemory"), **{"train.microbatch_size": 2})
    assert seen.error is not None and seen.error[0] == "UserError"
    assert seen.error[1].startswith(
        "out of memory in forward_backward of step 3 on rank 0 (DefaultCPUAllocator: can't allocate memory: you tried"
    )
    assert "train.microbatch_size = 2" in seen.error[1] and "what would help most: " in seen.error[1]


@pytest.mark.slow
def test_out_of_memory_on_one_rank_is_one_line_of_that_rank(tmp_path: Path) -> None:
    done = launch(arguments(tmp_path / "run", **ENDLESS, **hook("RunsOutOfMemory")), 2, PATH)
    (line,) = ours(done.stderr)
    assert done.returncode != 0 and line.startswith("error: out of memory in forward_backward of step 3 on rank 1 (")
    assert not a_rank_spoke_python(done.stderr)


TWICE = """
import ctypes, sys, time
from titanlike.checkpoint import StopSignal
StopSignal().install()
print("ready", flush=True)
if sys.argv[1] == "python":
    while True:
        time.sleep(0.01)
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
while True:
    libc.pthread_mutex_lock(mutex)  # the second time it never returns, as a collective whose other rank is gone
"""


@pytest.mark.parametrize("where", ["python", "a call that never returns"])
def test_sigterm_ends_a_rank_at_once_the_second_time(where: str) -> None:
    """Symptom: the first signal is noted and the second too, for the main thread waits in a collective, and Python's
    handlers only run between its instructions."""
    command = [sys.executable, "-c", TWICE, where]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            time.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
            process.send_signal(signal.SIGTERM)
            process.wait(60.0)
        finally:
            process.kill()
        assert process.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM)


# --- starting again ---


def test_torchrun_starts_the_ranks_again_and_the_run_goes_on(tmp_path: Path) -> None:
    """Symptom: after a restart the run begins at step 1, or takes steps twice."""
    run_dir = tmp_path / "run"
    steps = {"train.steps": 6, "checkpoint.interval": 2, "checkpoint.mode": "sync"}
    command = ["--max-restarts", "1", *arguments(run_dir, **hook("DiesOnce"), **steps)]
    done = launch(command, 2, PATH)
    assert done.returncode == 0, done.stderr
    assert f"resumed from {run_dir / 'checkpoints' / 'step-00000002'}: step 2, digest" in done.stdout
    run_on(2, tmp_path / "whole", **steps)
    assert columns(run_dir) == columns(tmp_path / "whole")
    assert digest(run_dir, 6) == digest(tmp_path / "whole", 6)


def agent(port: int, host: bool, address: str = "127.0.0.1") -> list[str]:
    """torchrun's options for one of one or two nodes, with times that suit a test."""
    conf = f"is_host={int(host)},last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"
    return [
        "--nnodes", "1:2", "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-id", "elastic",
        "--rdzv-endpoint", f"{address if host else '127.0.0.1'}:{port}", "--rdzv-conf", conf, "--local-addr", address,
    ]  # fmt: skip


def free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def assert_same_run(run_dir: Path, whole: Path, steps: int) -> None:
    """Each step once, and its numbers to 1e-10 those of the other run: so it had the same global batch."""
    ours, reference = columns(run_dir), columns(whole)
    assert list(ours) == list(range(1, steps + 1))
    for step in ours:
        assert ours[step] == pytest.approx(reference[step], rel=1e-10, abs=0), step


ELASTIC = {**FLOAT64, "train.steps": 300, "checkpoint.interval": 5, "run.hang_timeout": 30}


@pytest.mark.slow
def test_when_a_node_is_lost_the_other_goes_on_with_fewer_ranks(tmp_path: Path) -> None:
    """Symptom: the launcher starts the ranks again, and they refuse the mesh, or read the samples of another dp."""
    run_dir, port = tmp_path / "run", free_port()
    command = arguments(run_dir, **ELASTIC)
    with (
        launching(command, 1, PATH, agent(port, host=True)) as first,
        launching(command, 1, PATH, agent(port, host=False)) as second,
    ):
        wait_for(logged(run_dir, 20), first)
        second.kill()
        done = first.wait(200.0)
    assert done.returncode == 0, done.stderr
    worlds = [event["world_size"] for event in files.read_events(run_dir) if event["event"] in ("start", "resume")]
    assert worlds == [2, 1]
    assert "mesh pp 1 x dp 2 x tp 1 -> pp 1 x dp 1 x tp 1" in done.stdout and "verified" in done.stdout
    run_on(1, tmp_path / "whole", **ELASTIC)
    assert_same_run(run_dir, tmp_path / "whole", 300)


@pytest.mark.slow
def test_when_a_node_comes_the_job_goes_on_with_more_ranks(tmp_path: Path) -> None:
    """Symptom: with torch 2.13's own setting the nodes wait for each other's address (docs/multinode.md)."""
    run_dir, port = tmp_path / "run", free_port()
    command, environment = arguments(run_dir, **ELASTIC), {**PATH, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with launching(command, 1, environment, agent(port, host=True)) as first:
        wait_for(logged(run_dir, 20), first)
        with launching(command, 1, environment, agent(port, host=False)) as second:
            codes = [run.wait(200.0).returncode for run in (first, second)]
            output = first.stdout + second.stdout + first.stderr + second.stderr
    assert codes == [0, 0], output
    worlds = [event["world_size"] for event in files.read_events(run_dir) if event["event"] in ("start", "resume")]
    assert worlds == [1, 2], output
    run_on(1, tmp_path / "whole", **ELASTIC)
    assert_same_run(run_dir, tmp_path / "whole", 300)


def test_a_dp_that_does_not_divide_the_batch_is_one_sentence(tmp_path: Path) -> None:
    """As after an elastic restart on three ranks."""
    run_on(1, tmp_path / "run", **{"train.steps": 1})
    for seen in run_on(3, tmp_path / "run", **{"train.steps": 2}):
        assert seen.error == (
            "UserError",
            "train.global_batch_size (8) must be a multiple of dp (3) * train.microbatch_size (1) = 3",
        )
