"""Ranks on this machine: start a function on each, wait for what it returns, leave nothing behind.

Properties:
- Ranks are forked from a server that has torch imported, so that eight of them start in a second. Each has one thread.
- A rank that raises or dies ends the others at once; so does the end of the time, an error or Ctrl-C in the parent.
- No rank outlives its parent, however that ends: each watches a pipe that closes with it.
- What ranks print goes to a file each, and is shown when one fails: the parent's output is its own.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

LAST_LINES = 30  # of a failed rank's output
MOST_STACKS = 8  # ranks whose stacks are shown when the time is over
STACK_WAIT_S = 5.0  # for them to be written
STACK_MARK = "most recent call first"
CONNECTION_LOST = ("Connection", "Broken pipe", "Socket closed", "Failed to recv")
"""how an error begins to speak of another rank that went away: the cause is there"""


class RankFailed(RuntimeError):
    """A rank raised, died, or was not done in time. The message says which one and what it was doing."""


class Ranks:
    """`world_size` processes that each run `fn(*args)` with the default gloo group initialised.

    Use it as a context manager: its end kills what still runs. `fn` is a module-level function; arguments and results
    are pickled by value.
    """

    def __init__(self, world_size: int, fn: Callable[..., Any], *args: Any) -> None:
        self.world_size = world_size
        self.task = pickle.dumps((fn, args))
        self.processes: list[Any] = []
        self.connections: list[Any] = []

    def __enter__(self) -> Ranks:
        import torch.distributed as dist

        try:
            self.folder = tempfile.TemporaryDirectory(prefix="verify-")
            # On a port that the system chose, in the process that outlives all ranks.
            self.store = dist.TCPStore("127.0.0.1", 0, self.world_size, is_master=True, wait_for_workers=False)
            context = _forkserver()
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                arguments = (rank, self.world_size, self.store.port, theirs, str(self._output(rank)), self.task)
                process = context.Process(target=_rank_main, args=arguments, name=f"rank {rank}", daemon=True)
                process.start()
                self.processes.append(process)
                self.connections.append(ours)
                theirs.close()  # so that the end of the rank is an end of file here
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def results(self, timeout_s: float) -> list[Any]:
        """What `fn` returned on each rank.

        Raises:
            RankFailed: a rank raised or died, or `timeout_s` seconds went by.
        """
        deadline = time.monotonic() + timeout_s
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while len(results) + len(failures) < self.world_size:
            waiting = {
                connection: rank
                for rank, connection in enumerate(self.connections)
                if rank not in results and rank not in failures
            }
            ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting[connection]
                try:
                    good, content = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    self.processes[rank].join(5.0)
                    good, content = False, f"it died: {_cause_of_death(self.processes[rank].exitcode)}"
                if good:
                    results[rank] = content
                else:
                    failures[rank] = content
                    # Whoever lost a connection did so because of another rank: its error is worth a moment.
                    cause_known = not all(_connection_lost(text) for text in failures.values())
                    deadline = min(deadline, time.monotonic() + (0.5 if cause_known else 5.0))
        if failures:
            first = min(failures, key=lambda rank: _connection_lost(failures[rank]))  # the earliest of the best
            raise RankFailed(f"rank {first} of {self.world_size} failed: {failures[first].rstrip()}{self._tail(first)}")
        if len(results) < self.world_size:
            self._raise_timeout(results, timeout_s)
        return [results[rank] for rank in range(self.world_size)]

    def _raise_timeout(self, results: dict[int, Any], timeout_s: float) -> NoReturn:
        hanging = [rank for rank in range(self.world_size) if rank not in results]
        for rank in hanging:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGUSR1)  # writes its stack to its output
        wait_until = time.monotonic() + STACK_WAIT_S
        while time.monotonic() < wait_until and not all(STACK_MARK in self._written(rank) for rank in hanging):
            time.sleep(0.05)
        ranks = ", ".join(map(str, hanging))
        stacks = "".join(self._tail(rank) for rank in hanging[:MOST_STACKS])
        raise RankFailed(f"rank {ranks} of {self.world_size} not done in {timeout_s:g} s{stacks}")

    def _tail(self, rank: int) -> str:
        lines = self._written(rank).splitlines()
        return f"\nlast output of rank {rank}:\n" + "\n".join(lines[-LAST_LINES:]) if lines else ""

    def _written(self, rank: int) -> str:
        path = self._output(rank)
        return path.read_text(errors="replace") if path.exists() else ""

    def _output(self, rank: int) -> Path:
        return Path(self.folder.name) / f"rank-{rank}.txt"

    def close(self) -> None:
        """Kill the ranks that still run, and whatever they started."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            if process.is_alive():
                process.kill()  # before it had a process group of its own
        for process in self.processes:
            process.join(10.0)
        for connection in self.connections:
            connection.close()
        if hasattr(self, "folder"):
            self.folder.cleanup()


def _cause_of_death(code: int | None) -> str:
    return f"killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"


def _connection_lost(text: str) -> bool:
    last = text.rstrip().splitlines()[-1]
    return any(words in last for words in CONNECTION_LOST)


def _forkserver() -> Any:
    context = multiprocessing.get_context("forkserver")
    # The optimizer imports dynamo at its first step: once for all ranks here, instead of in each.
    context.set_forkserver_preload(["titanlike.verify.rank", "torch._dynamo"])
    # The server, and so each rank, has the environment of its start; OpenMP reads this one when it is loaded.
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.pop("OMP_NUM_THREADS")
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before
    return context


# -- in a rank -------------------------------------------------------------------------------------------------------


def _rank_main(rank: int, world_size: int, port: int, connection: Any, output: str, task: bytes) -> None:
    os.setsid()  # a process group of its own, which Ctrl-C in the terminal does not reach
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)  # type: ignore[arg-type]
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo0" if sys.platform == "darwin" else "lo",
        OMP_NUM_THREADS="1",
    )
    answer: tuple[bool, Any]
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, world_size, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        fn, args = pickle.loads(task)
        answer = (True, fn(*args))
    except BaseException:
        answer = (False, traceback.format_exc())
    with contextlib.suppress(OSError):
        connection.send_bytes(pickle.dumps(answer))
        # Others may still need this rank, so it waits for the parent, who ends it when all are done. That also saves
        # the interpreter's shutdown, in which a gloo thread now and then aborts (pytorch#179291).
        connection.poll(None)
    os._exit(0)


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)
