"""Ends a job in which no rank makes progress any more, and names the rank that the others wait for.

Properties:
- Every rank has a thread that looks at when its rank last crossed the border of a phase (data, forward_backward,
  a hook, ...) or finished a microbatch. It costs a clock reading per border.
- A rank that was silent for `run.hang_timeout` seconds raises the alarm: it writes its stacks and a report (hang.py)
  into RUN/hang, and every rank that finds one there writes its own. All ranks judge alike from these files: the job
  hangs when every rank is silent for so long, or when one does not even answer. One slow rank that goes on is no hang.
- Start-up is not taken for a hang: the first time of a phase (compilation, warm-up), and whatever reads or writes
  checkpoints, may take FIRST times as long.
- It needs no collective, no store and no answer of the main thread: only the run folder, shared by all ranks.
"""

from __future__ import annotations

import collections
import contextlib
import faulthandler
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from titanlike.hang import Place, collectives, main_thread_position, sentence

FIRST = 6
"""The first time of a phase, and phases of SLOW, may take so many times `hang_timeout`."""

SLOW = frozenset({"start-up", "checkpoint", "the end"})
"""Phases whose length is that of the disk, not of a step."""

EXIT_CODE = 1
RECORDED = "500"
"""Collectives that torch's flight recorder keeps, if the environment does not say another number."""


def record_collectives() -> None:
    """Have torch keep the last collectives. Before the first process group."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", RECORDED)


def put_away(folder: Path) -> None:
    """Give the reports of an earlier hang another name. Rank 0, before the other ranks can write some."""
    if folder.exists():
        with contextlib.suppress(OSError):
            when = time.strftime("%Y%m%d-%H%M%S", time.localtime(folder.stat().st_mtime))
            kept = folder.with_name(f"{folder.name}-{when}")
            if any(folder.iterdir()) and not kept.exists():
                folder.rename(kept)
            else:
                shutil.rmtree(folder)


class Hang(NamedTuple):
    """Why the job hangs, in a sentence, and the ranks that answered."""

    why: str
    answering: list[int]


class Watchdog:
    """Watches one rank, and its answers to the others' alarms.

    `timeout_s`: with 0 `start` starts nothing. `clock` gives monotonic seconds, `leave` ends
    the process (both for tests).
    """

    def __init__(
        self,
        timeout_s: float,
        folder: Path,
        rank: int = 0,
        *,
        clock: Callable[[], float] = time.monotonic,
        leave: Callable[[int], Any] = os._exit,
    ) -> None:
        self.timeout_s = timeout_s
        self.folder = folder
        self.rank = rank
        self.places: list[Place] = []
        self.interval_s = min(10.0, max(0.1, timeout_s / 20))
        self.grace_s = max(2.0, 3 * self.interval_s)
        """Seconds in which a rank must answer an alarm."""
        self._clock, self._leave = clock, leave
        self._step, self._phase, self._borders = 0, "start-up", 0
        self._since = self._entered = clock()
        self._seen: set[str] = set()
        self._recent: collections.deque[tuple[int, str, float]] = collections.deque(maxlen=30)
        self._alarm_since: float | None = None
        self._dumped_at = -1.0
        self._beat = 0
        self._beats: dict[int, tuple[int, float]] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    # -- told by the loop --------------------------------------------------------------------------------------------

    def step(self, step: int) -> None:
        """Step `step` begins."""
        self._step = step
        self.phase("other")

    def phase(self, name: str) -> None:
        """The border of a phase, which all ranks cross in the same order: `name` begins."""
        now = self._clock()
        self._seen.add(self._phase)
        self._recent.append((self._step, self._phase, now - self._entered))
        self._phase, self._borders = name, self._borders + 1
        self._since = self._entered = now

    def alive(self) -> None:
        """Progress within a phase, such as a microbatch."""
        self._since = self._clock()

    @property
    def where(self) -> str:
        """The phase under way: "forward_backward of step 3"."""
        return f"{self._phase} of step {self._step}" if self._step else self._phase

    # -- the thread --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to watch. All ranks together, after the process group exists: they tell each other where they live."""
        import torch.distributed as dist

        if self.timeout_s <= 0:
            return
        self.rank = dist.get_rank()
        places: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(places, Place(socket.gethostname(), os.getpid(), os.getppid()))
        self.places = places
        self._since = self._entered = self._clock()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Watch no more."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _watch(self) -> None:
        while not self._stop.wait(self.interval_s):
            hang = self.look()
            if hang is not None:
                self._end(hang)
                return

    @property
    def _limit_s(self) -> float:
        return self.timeout_s * (FIRST if self._phase not in self._seen or self._phase in SLOW else 1)

    def look(self) -> Hang | None:
        """Look once: at this rank, and at the others' alarms. Returns why the job hangs, if it does."""
        now = self._clock()
        silent = now - self._since
        tripped = silent > self._limit_s
        others = self._read()
        if not tripped and not any(report["tripped"] for report in others.values()):
            if self._alarm_since is not None:
                self._withdraw()
            return None
        if self._alarm_since is None:
            self._alarm_since, self._beats = now, {}
        mine = self._write(silent, tripped)
        for rank, report in others.items():
            if self._beats.get(rank, (None,))[0] != report["beat"]:
                self._beats[rank] = (report["beat"], now)
        if not tripped:
            return None
        answering = {self.rank: mine} | {
            rank: report for rank, report in others.items() if now - self._beats[rank][1] <= self.grace_s
        }
        all_answer = len(answering) == len(self.places)
        if all_answer and all(report["tripped"] for report in answering.values()):
            return self._hang(answering)
        if not all_answer and now - self._alarm_since > self.grace_s:
            return self._hang(answering)
        return None

    def _hang(self, reports: dict[int, dict[str, Any]]) -> Hang:
        silent = min(report["silent_s"] for report in reports.values() if report["tripped"])
        return Hang(sentence(dict(sorted(reports.items())), self.places, silent, str(self.folder)), sorted(reports))

    # -- the files ---------------------------------------------------------------------------------------------------

    def _file(self, rank: int, kind: str) -> Path:
        return self.folder / f"rank-{rank}.{kind}"

    def _read(self) -> dict[int, dict[str, Any]]:
        reports: dict[int, dict[str, Any]] = {}
        if self.folder.is_dir():
            for rank in range(len(self.places)):
                if rank != self.rank:
                    with contextlib.suppress(OSError, ValueError):
                        reports[rank] = json.loads(self._file(rank, "json").read_text())
        return reports

    def _write(self, silent: float, tripped: bool) -> dict[str, Any]:
        self._beat += 1
        place = self.places[self.rank]
        report = {
            "rank": self.rank,
            "host": place.host,
            "process": place.pid,
            "tripped": tripped,
            "silent_s": silent,
            "step": self._step,
            "phase": self._phase,
            "borders": self._borders,
            "where": main_thread_position(),
            "recent_phases": [{"step": s, "phase": p, "seconds": seconds} for s, p, seconds in list(self._recent)],
            "collectives": collectives(),
            "beat": self._beat,
        }
        with contextlib.suppress(OSError):  # a full disk: the others will name this rank, and its own sentence is said
            self.folder.mkdir(exist_ok=True)
            if self._dumped_at != self._since:
                self._dumped_at = self._since
                with open(self._file(self.rank, "stacks"), "w") as file:
                    faulthandler.dump_traceback(file, all_threads=True)
            beside = self._file(self.rank, "json.new")
            beside.write_text(json.dumps(report, indent=1) + "\n")
            beside.replace(self._file(self.rank, "json"))
        return report

    def _withdraw(self) -> None:
        """The rank goes on, or has ended: what it wrote is no news any more."""
        if self._alarm_since is not None:
            self._alarm_since, self._dumped_at = None, -1.0
            for kind in ("json", "stacks"):
                self._file(self.rank, kind).unlink(missing_ok=True)

    # -- the end -----------------------------------------------------------------------------------------------------

    def _end(self, hang: Hang) -> None:
        """Say why, on one rank of each machine, and end the process: the launcher then ends the others'."""
        host = self.places[self.rank].host
        if self.rank == min(rank for rank in hang.answering if self.places[rank].host == host):
            print(f"error: {hang.why}", file=sys.stderr, flush=True)
            with contextlib.suppress(OSError):
                (self.folder / "why").write_text(hang.why + "\n")
            self._kill_stopped(hang.answering)
        else:
            time.sleep(1.0)  # that one should have spoken before the launcher ends it
        sys.stdout.flush()
        self._leave(EXIT_CODE)

    def _kill_stopped(self, answering: list[int]) -> None:
        """End the ranks of this machine that do not answer. The launcher would ask them first, and wait for 30 s."""
        mine = self.places[self.rank]
        for rank, place in enumerate(self.places):
            if rank not in answering and (place.host, place.parent) == (mine.host, mine.parent):
                with contextlib.suppress(OSError):
                    # The number may be another process's by now: ours has our parent.
                    fields = Path(f"/proc/{place.pid}/stat").read_text().rpartition(")")[2].split()
                    if int(fields[1]) == mine.parent:
                        os.kill(place.pid, signal.SIGKILL)
