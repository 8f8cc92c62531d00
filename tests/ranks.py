"""Run a function on N gloo ranks, or a script under torchrun, from a test.

`run_ranks` has one pool of ranks per world size. Its properties:

- Ranks are forked from a server that has torch imported, so a pool starts in a fraction of a second, and it is reused
  over tests and test modules. Each call finds the seed, default dtype, gradient mode, environment and working folder
  as in a new process.
- A rank that raises, dies or hangs fails the calling test with that rank's traceback or stack, and ends the whole pool:
  the other ranks may wait in a collective for ever. The next call starts a new one.
- No rank outlives the test session, however it ends: each watches a pipe that closes with its parent.

`launch` and `launching` do the same for a script under `torchrun`: nothing that they start outlives the call.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

ROOT = Path(__file__).resolve().parent.parent

# DTensor's caches hold what past calls made, so ranks grow: after so many calls they are replaced.
CALLS_PER_POOL = 60

GOODBYE = b"goodbye"

# What a rank says when another one went away. The cause is then in the other rank.
CONNECTION_ERRORS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Socket closed",
    "Failed to recv",
)


class RankError(AssertionError):
    """A rank raised, died or did not finish in time. The message begins with the rank where it began.

    `rank` is that rank; `reports` has what is known of each failed rank: a traceback, a cause of death or a stack.
    """

    def __init__(self, message: str, rank: int, reports: dict[int, str]) -> None:
        super().__init__(message)
        self.rank = rank
        self.reports = reports


def run_ranks(world_size: int, fn: Callable[..., T], *args: Any, timeout: float = 120.0) -> list[T]:
    """Call `fn(*args)` on each of `world_size` gloo ranks and return the results, by rank.

    `fn` is a module-level function, `args` and the results are pickled (tensors by value). The default process group
    is initialised, one thread per rank. `timeout` is in seconds. Raises `RankError`.
    """
    pool = _pools.get(world_size)
    if pool is not None and (pool.calls >= CALLS_PER_POOL or not pool.alive()):
        pool.close()
        pool = None
    if pool is None:
        pool = _pools[world_size] = _Pool(world_size)
    try:
        return pool.call(fn, args, timeout)
    except BaseException:
        # Also for Ctrl-C and pytest's own time-out: the ranks are in the middle of something.
        pool.kill()
        del _pools[world_size]
        raise


def close_pools() -> None:
    """End all ranks. The next `run_ranks` starts new ones."""
    while _pools:
        _pools.popitem()[1].close()


_pools: dict[int, _Pool] = {}
atexit.register(close_pools)


class _Pool:
    """The ranks of one world size, seen from the test's process."""

    def __init__(self, world_size: int) -> None:
        import torch.distributed as dist

        context = _forkserver()
        self.calls = 0
        # The store lives here, on a port the system chose: it survives the death of any rank, and nobody races for it.
        self.store = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
        self.stacks = tempfile.TemporaryDirectory(prefix="ranks-")
        self.connections = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_rank_main,
                args=(rank, world_size, self.store.port, theirs, self._stack_file(rank)),
                name=f"rank {rank} of {world_size}",
                daemon=True,
            )
            process.start()
            theirs.close()  # so that a rank's death is an end of file here
            self.connections.append(ours)
            self.processes.append(process)

    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def call(self, fn: Callable[..., T], args: tuple[Any, ...], timeout: float) -> list[T]:
        self.calls += 1
        deadline = time.monotonic() + timeout
        # Plain pickle: the pickler of multiprocessing would share a tensor's memory, which ends with the rank.
        task = pickle.dumps((fn, args))
        for connection in self.connections:
            with contextlib.suppress(OSError):  # a rank that died is reported below
                connection.send_bytes(task)
        results: dict[int, T] = {}
        failures: dict[int, _Failure] = {}
        while len(results) + len(failures) < len(self.processes):
            waiting = {
                self.connections[rank]: rank
                for rank in range(len(self.processes))
                if rank not in results and rank not in failures
            }
            left = max(0.0, deadline - time.monotonic())
            ready = multiprocessing.connection.wait(list(waiting), timeout=left)
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]
                answer = self._receive(rank)
                if isinstance(answer, _Failure):
                    failures[rank] = answer
                    # Others fail within moments or not at all. A lost connection has its cause in another rank, so
                    # there it pays to wait for that one.
                    grace = 5.0 if all(failure.secondary for failure in failures.values()) else 0.3
                    deadline = min(deadline, time.monotonic() + grace)
                else:
                    results[rank] = answer
            if not ready:
                break
        if failures:
            self._raise_failure(failures, results)
        if len(results) < len(self.processes):
            self._raise_timeout(results, timeout)
        return [results[rank] for rank in range(len(self.processes))]

    def _receive(self, rank: int) -> Any:
        try:
            kind, content = pickle.loads(self.connections[rank].recv_bytes())
        except (EOFError, OSError):
            process = self.processes[rank]
            process.join(5.0)
            code = process.exitcode
            how = f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
            return _Failure(time.monotonic(), f"died: {how}")
        if kind == "failure":
            return content
        try:
            return pickle.loads(content)
        except Exception:
            return _Failure(time.monotonic(), f"its result can't be unpickled here:\n{traceback.format_exc()}")

    def _raise_failure(self, failures: dict[int, _Failure], results: dict[int, Any]) -> NoReturn:
        order = sorted(failures, key=lambda rank: (failures[rank].secondary, failures[rank].when))
        size = len(self.processes)
        lines = [f"rank {order[0]} of {size} failed first: {failures[order[0]].text.rstrip()}"]
        for rank in order[1:]:
            lines.append(f"then rank {rank}: {failures[rank].text.rstrip().splitlines()[-1]}")
        for rank in range(size):
            if rank not in failures:
                lines.append(f"rank {rank} had {'finished' if rank in results else 'not finished and was killed'}")
        raise RankError("\n".join(lines), order[0], {rank: failures[rank].text for rank in order})

    def _raise_timeout(self, results: dict[int, Any], timeout: float) -> NoReturn:
        hanging = [rank for rank in range(len(self.processes)) if rank not in results]
        for rank in hanging:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid or 0, signal.SIGUSR1)
        time.sleep(0.5)
        stacks = {rank: Path(self._stack_file(rank)).read_text(errors="replace") for rank in hanging}
        lines = [f"rank {' and '.join(map(str, hanging))} of {len(self.processes)} did not finish in {timeout:g} s"]
        lines += [f"rank {rank} was at:\n{stacks[rank].rstrip()}" for rank in hanging]
        raise RankError("\n".join(lines), hanging[0], stacks)

    def close(self) -> None:
        """Let idle ranks leave; kill those that don't."""
        for connection in self.connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(GOODBYE)
        deadline = time.monotonic() + 5.0
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        for process in self.processes:
            # A rank leads a process group: what the tested function started goes with it.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid or 0, signal.SIGKILL)
            if process.is_alive():
                process.kill()
        for process in self.processes:
            process.join(5.0)
        for connection in self.connections:
            connection.close()
        self.stacks.cleanup()

    def _stack_file(self, rank: int) -> str:
        return str(Path(self.stacks.name) / f"rank-{rank}.txt")


def _forkserver() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch.distributed.tensor", "tests.ranks"])
    # The server, and so each rank, takes the environment at its start; OpenMP reads this one once, when it is loaded.
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    return context


# --- in a rank ---


@dataclass
class _Failure:
    when: float  # monotonic seconds, one clock for all processes of a machine
    text: str

    @property
    def secondary(self) -> bool:
        last = self.text.rstrip().splitlines()[-1]
        return any(words in last for words in CONNECTION_ERRORS)


def _rank_main(rank: int, world_size: int, port: int, connection: Any, stack_file: str) -> None:
    os.setsid()  # a process group of its own; Ctrl-C in the terminal goes to the parent alone
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    stacks = open(stack_file, "w")  # noqa: SIM115 - faulthandler writes to it as long as the rank lives
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)

    import torch
    import torch.distributed as dist

    # What torchrun would have set, and the loopback interface for gloo.
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME=_loopback(),
        OMP_NUM_THREADS="1",
    )
    environment, folder = dict(os.environ), os.getcwd()
    group_failure = None
    try:
        store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    except BaseException:
        group_failure = _Failure(time.monotonic(), traceback.format_exc())

    groups = _ReusedGroups()
    while True:
        try:
            task = connection.recv_bytes()
        except (EOFError, OSError):
            _end_group()
        if task == GOODBYE:
            # Not through the interpreter's shutdown: now and then a gloo thread aborts there (pytorch#179291).
            os._exit(0)
        answer: tuple[str, Any]
        try:
            if group_failure is not None:
                answer = ("failure", group_failure)
            else:
                os.environ.clear()
                os.environ.update(environment)
                os.chdir(folder)
                torch.set_num_threads(1)
                torch.set_default_dtype(torch.float32)
                torch.set_grad_enabled(True)
                if torch.are_deterministic_algorithms_enabled():
                    torch.use_deterministic_algorithms(False)  # asked first: the call imports inductor, half a second
                torch.manual_seed(0)
                random.seed(0)
                if "torch._dynamo" in sys.modules:
                    torch._dynamo.reset()
                groups.begin_call()
                fn, args = pickle.loads(task)
                answer = ("result", pickle.dumps(fn(*args)))
        except BaseException:
            answer = ("failure", _Failure(time.monotonic(), traceback.format_exc()))
        sys.stdout.flush()
        sys.stderr.flush()
        with contextlib.suppress(OSError):
            connection.send_bytes(pickle.dumps(answer))


class _ReusedGroups:
    """Gives a call the process groups that earlier calls of this rank made with the same arguments.

    A gloo group is never closed while something holds it, and its three threads wake a hundred times a second: the
    groups of twenty calls kept two cores busy for nothing. Within a call every request still gets a group of its own.
    """

    def __init__(self) -> None:
        import torch.distributed.device_mesh as device_mesh
        import torch.distributed.distributed_c10d as c10d

        self._make = c10d.new_group
        self._groups: dict[str, list[Any]] = {}
        self._used: Counter[str] = Counter()
        for module in (sys.modules["torch.distributed"], c10d, device_mesh):
            setattr(module, "new_group", self._get)  # noqa: B010 - no checker accepts the assignment

    def begin_call(self) -> None:
        self._used.clear()

    def _get(self, ranks: Any = None, **settings: Any) -> Any:
        key = repr((None if ranks is None else list(ranks), sorted(settings.items())))
        known, number = self._groups.setdefault(key, []), self._used[key]
        self._used[key] += 1
        if number == len(known):
            known.append(self._make(ranks, **settings))
        return known[number]


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    _end_group()


def _end_group() -> NoReturn:
    # The parent's end is seen by an idle rank's main thread and by the watching one, whichever runs first. Either way
    # what the tested function started has to end too.
    os.killpg(0, signal.SIGKILL)
    raise AssertionError("unreachable")


def _loopback() -> str:
    return "lo0" if sys.platform == "darwin" else "lo"


# --- a script under torchrun ---


class Launched:
    """A running `torchrun`: see `launching`."""

    def __init__(self, process: subprocess.Popen[bytes], command: list[str], mark: str, folder: Path) -> None:
        self.process = process
        self.command = command
        self._mark = mark
        self._folder = folder

    @property
    def stdout(self) -> str:
        """What the launcher and its ranks have written so far."""
        return (self._folder / "stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return (self._folder / "stderr").read_text(errors="replace")

    def rank_pids(self) -> dict[int, int]:
        """Process ids of the live ranks, by rank. Empty until the launcher has started them."""
        pids: dict[int, int] = {}
        for pid, environment in _marked(self._mark):
            if (rank := environment.get("RANK")) is not None and environment.get("TORCHELASTIC_RUN_ID"):
                # A rank's own children have the same environment: the rank itself is the oldest.
                pids[int(rank)] = min(pid, pids.get(int(rank), pid))
        return pids

    def wait(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """Wait for the end; whole stdout and stderr as text. After `timeout` seconds: `RankError` with the stacks."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            ranks = self.rank_pids()
            for pid in ranks.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)  # PYTHONFAULTHANDLER: dumps its stacks to stderr
            time.sleep(1.0)
            self.kill()
            output = f"stdout:\n{self.stdout}\nstderr:\n{self.stderr}"
            raise RankError(
                f"{' '.join(self.command)}\ndid not finish in {timeout:g} s\n{output}",
                min(ranks, default=0),
                {rank: self.stderr for rank in ranks},
            ) from None
        return subprocess.CompletedProcess(self.command, code, self.stdout, self.stderr)

    def kill(self) -> None:
        """Kill the launcher, its ranks and all that they started, wherever these have moved to."""
        while marked := [pid for pid, _ in _marked(self._mark)]:
            for pid in marked:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.02)
        self.process.kill()  # where there is no /proc
        self.process.wait()


@contextlib.contextmanager
def launching(
    argv: Sequence[str | Path],
    nproc: int,
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = ("--standalone", "--local-addr", "127.0.0.1"),
    prefix: Sequence[str] = (),
) -> Generator[Launched]:
    """Start `argv` (a script and its arguments) under torchrun in the repository's root, and go on beside it.

    `options` are torchrun's own; `prefix` is a command that runs another, before all of it. `env` is added to the
    environment. At the end of the block everything that still runs is killed.
    """
    mark = uuid.uuid4().hex
    command = [*prefix, sys.executable, "-m", "torch.distributed.run", *options]
    command += ["--nproc-per-node", str(nproc), *map(str, argv)]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": _loopback(),
        "PYTHONFAULTHANDLER": "1",
        **(env or {}),
        "RANKS_MARK": mark,
    }
    with tempfile.TemporaryDirectory(prefix="launch-") as name:
        folder = Path(name)
        # Files, not pipes: a pipe ends when the last process that inherited it ends, which may be never.
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        launched = Launched(process, command, mark, folder)
        try:
            yield launched
        finally:
            launched.kill()


def launch(
    argv: Sequence[str | Path], nproc: int, env: Mapping[str, str] | None = None, timeout: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Run `argv` (a script and its arguments) under torchrun on `nproc` ranks; whole stdout and stderr as text.

    A code other than 0 is returned, not raised. After `timeout` seconds everything is killed: `RankError` with the
    output and each rank's stack.
    """
    with launching(argv, nproc, env) as launched:
        return launched.wait(timeout)


def _marked(mark: str) -> Iterator[tuple[int, dict[str, str]]]:
    """Processes whose environment has the mark. torchrun starts each rank in a session of its own, and an orphan has
    another parent, so neither the process group nor the tree finds them all."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            environ = (entry / "environ").read_bytes().decode(errors="replace")
        except OSError:
            continue  # gone, or another user's
        if f"RANKS_MARK={mark}" in environ:  # a zombie's environ is empty: it has ended
            pairs = (item.partition("=") for item in environ.split("\0") if item)
            yield int(entry.name), {name: value for name, _, value in pairs}
