"""What the benchmarks that compare speeds share: contenders, each a group of ranks, that take training steps in turns.

Properties:
- Every contender has processes of its own, which are stopped (SIGSTOP) while another is measured: the idle threads of
  gloo groups wake a hundred times a second each, and a machine of few cores would measure them.
- Measurements go round by round, each round all contenders, every other round in reverse order. A ratio is that of two
  measurements of one round, so what else the machine does for a while hits both.
- Ranks compute with one thread each.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import multiprocessing
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own log; read when torch is loaded
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # addresses of a namespace have no host names

import torch
import torch.distributed as dist

from models.llama import PRESETS


@dataclasses.dataclass
class Steps:
    """What a contender does on each rank."""

    step: Callable[[Any], None]
    """takes a training step of the variant that is asked for"""
    loss: Callable[[], float]
    """the loss of the last step, over all ranks; on all ranks together"""
    facts: Callable[[Any], Any] = lambda _variant: None
    """says something about a variant, for which it takes steps; on all ranks together"""


class Contender:
    """Ranks that wait to be told what to do.

    `setup(settings)` is a module-level function; it is called on each rank with the environment of torchrun set, and
    returns its Steps. With `network` each rank has a network namespace of its own, and `network(pids)` is called with
    the ranks' process ids, to connect them; rank 0 is then 10.77.0.1 and the device is called `link`.
    """

    def __init__(
        self,
        name: str,
        ranks: int,
        setup: Callable[[Any], Steps],
        settings: Any,
        network: Callable[[list[int]], None] | None = None,
    ) -> None:
        self.name = name
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed.tensor", "titanlike.trainer"])
        if network is None:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                address = ("127.0.0.1", free.getsockname()[1])
        else:
            address = ("10.77.0.1", 29500)
        self._connections = []
        self._processes = []
        for rank in range(ranks):
            here, there = context.Pipe()
            arguments = (setup, settings, rank, ranks, address, network is not None, there)
            process = context.Process(target=_rank_main, args=arguments, daemon=True)
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)
        if network is not None:
            self.answers()  # each is in its namespace
            network(self.pids)
            self._send("connected")

    @property
    def pids(self) -> list[int]:
        return [process.pid or 0 for process in self._processes]

    def _send(self, what: str, *arguments: Any) -> None:
        for connection in self._connections:
            connection.send((what, *arguments))

    def answers(self) -> list[Any]:
        """What each rank answers, in order of ranks.

        Raises RuntimeError with the traceback of a rank that failed.
        """
        found = []
        for rank, connection in enumerate(self._connections):
            try:
                kind, value = connection.recv()
            except EOFError:
                kind, value = "error", "the process ended"
            if kind == "error":
                raise RuntimeError(f"{self.name}, rank {rank}: {value}")
            found.append(value)
        return found

    def signal(self, number: int) -> None:
        for pid in self.pids:
            os.kill(pid, number)

    def ready(self) -> None:
        """Wait until the ranks are set up, then stop them."""
        self.answers()
        self.signal(signal.SIGSTOP)

    def start(self, what: str, *arguments: Any) -> None:
        """Wake the ranks and give them work; `finish` waits for it."""
        self.signal(signal.SIGCONT)
        self._send(what, *arguments)

    def finish(self) -> list[Any]:
        found = self.answers()
        self.signal(signal.SIGSTOP)
        return found

    def seconds(self, variant: Any = None, steps: int = 2) -> float:
        """Seconds per step in the midst of a run: of so many steps after one that does not count, for what a step
        leaves under way is waited for in the next one."""
        self.start("steps", variant, steps)
        return max(self.finish())

    def facts(self, variant: Any = None) -> list[Any]:
        """What `Steps.facts` says on each rank."""
        self.start("facts", variant)
        return self.finish()

    def loss(self) -> float:
        """The loss of the last step."""
        self.start("loss", None)
        return self.finish()[0]

    def end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def _rank_main(
    setup: Callable[[Any], Steps],
    settings: Any,
    rank: int,
    ranks: int,
    address: tuple[str, int],
    own_network: bool,
    connection: Any,
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": address[0], "MASTER_PORT": str(address[1])}
    torch.set_num_threads(1)
    libc = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "linux":
        libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a stopped process would outlive a benchmark that is killed
    try:
        if own_network:
            if libc.unshare(0x40000000):  # CLONE_NEWNET
                raise OSError(ctypes.get_errno(), "a network namespace cannot be made")
            connection.send(("value", None))
            connection.recv()
            os.environ["GLOO_SOCKET_IFNAME"] = "link"
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        made = setup(settings)
        connection.send(("value", None))
        while True:
            what, variant, *arguments = connection.recv()
            if what == "facts":
                connection.send(("value", made.facts(variant)))
                continue
            if what == "loss":
                connection.send(("value", made.loss()))
                continue
            dist.barrier()
            made.step(variant)
            began = time.perf_counter()
            for _ in range(arguments[0]):
                made.step(variant)
            connection.send(("value", (time.perf_counter() - began) / arguments[0]))
    except EOFError:
        pass
    except BaseException:
        connection.send(("error", traceback.format_exc()))


Measured = dict[Any, list[float]]
"""key of a measurement -> seconds per step, by round"""


def in_turns(
    measurements: dict[Any, Callable[[], float]], rounds: int, warm: int = 1, seconds: float = 1e9
) -> Measured:
    """Take all measurements `rounds` times after `warm` times that do not count, or as many rounds (at least 2) as fit
    into about so many seconds."""
    found: Measured = {key: [] for key in measurements}
    began = time.perf_counter()
    for number in range(warm + rounds):
        round_began = time.perf_counter()
        order = list(measurements)
        for key in order if number % 2 == 0 else reversed(order):
            took = measurements[key]()
            if number >= warm:
                found[key].append(took)
        now = time.perf_counter()
        print(f"round {number + 1} of {warm + rounds}: {now - round_began:.1f} s", file=sys.stderr, flush=True)
        if number > warm and now - began + (now - round_began) > seconds:
            break
    return found


def ratio(above: Sequence[float], below: Sequence[float]) -> tuple[float, float, float]:
    """(median, least, most) of the ratios of the rounds."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    return statistics.median(ratios), min(ratios), max(ratios)


def spread(values: tuple[float, float, float]) -> str:
    """`1.02  1.00..1.05`"""
    return f"{values[0]:.2f}  {values[1]:.2f}..{values[2]:.2f}"


def add_arguments(parser: argparse.ArgumentParser, seconds: float) -> None:
    """How long to measure, and where to write; `seconds` by default."""
    parser.add_argument("--rounds", type=int, default=5, help="at most so many (default: %(default)s)")
    parser.add_argument(
        "--seconds", type=float, default=seconds, help="about so long, if 2 rounds fit (default: %(default)s)"
    )
    parser.add_argument("--json", help="write the results here")


def add_preset(parser: argparse.ArgumentParser) -> None:
    """Which Llama; an unknown one is answered with those that there are."""
    parser.add_argument("--preset", default="26m", choices=list(PRESETS), help="of llama (default: %(default)s)")


def alone(arguments: Sequence[str], **environment: str) -> Any:
    """The JSON on the last line that a script prints, run in a process of its own with one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, *arguments], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as they must be; all but the first are flush right."""
    widths = [max(len(row[i]) for row in [heads, *rows]) for i in range(len(heads))]
    for row in [heads, *rows]:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
        print("  ".join(cells).rstrip())


def machine() -> dict[str, Any]:
    """Date, versions and processor, for the results."""
    processor = platform.processor()
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                processor = line.partition(":")[2].strip()
                break
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cores": len(os.sched_getaffinity(0)),
        "processor": processor,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def write_json(path: str | None, benchmark: str, arguments: dict[str, Any], results: Any) -> None:
    """The results with what they were measured on, if a path was given."""
    if path is not None:
        whole = {"benchmark": benchmark, **machine(), "arguments": arguments, "results": results}
        Path(path).write_text(json.dumps(whole, indent=1) + "\n")
