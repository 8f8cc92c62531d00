"""How long it took from the command to the first step, in parts. Rank 0's clock, a wait for slower ranks included.

| part | from | to |
|---|---|---|
| `launcher` | torchrun started | it started this process; only under torchrun, and not for its restarts |
| `imports` | this process started | Python and what it imports are there, the config is read and checked |
| `data` | | the data is open |
| `process_group` | | all ranks have met, and the groups of the mesh are made |
| `build` | | the model is cut, its weights drawn, the optimizer made |
| `checkpoint` | | the newest checkpoint is loaded, or there is none; one of step 0 is saved, if one is |
| `first_step` | | the first batch has come and its step is done, compilation included |
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

PARTS = ("launcher", "imports", "data", "process_group", "build", "checkpoint", "first_step")


class StartupTimes:
    """A stopwatch: `done(part)` ends a part, which began where the one before it ended.

    `clock` gives seconds since the epoch; `began` is when this process began, `launched` when its launcher did.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.time,
        began: float | None = None,
        launched: float | None = None,
    ) -> None:
        self._clock = clock
        self._last = clock() if began is None else began
        self.seconds: dict[str, float] = {}
        """of the parts that are done, in their order"""
        if launched is not None:
            self.seconds["launcher"] = self._last - launched

    @classmethod
    def of_this_process(cls) -> StartupTimes:
        """Begins where this process did, or its launcher, as far as the system tells."""
        began = process_began(os.getpid())
        launched = None
        if began is not None and os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
            launched = process_began(os.getppid())
        return cls(began=began, launched=launched)

    def done(self, part: str) -> None:
        """The part `part`, one of PARTS, ends now."""
        assert part in PARTS and part not in self.seconds, part
        now = self._clock()
        self.seconds[part] = now - self._last
        self._last = now

    @property
    def total(self) -> float:
        """Seconds of all parts that are done."""
        return sum(self.seconds.values())

    def line(self) -> str:
        """One line for people."""
        parts = ", ".join(f"{part.replace('_', ' ')} {seconds:.1f}" for part, seconds in self.seconds.items())
        return f"start-up {self.total:.1f} s: {parts}"

    def fields(self) -> dict[str, float]:
        """What the event `startup` says: seconds of each part as `<part>_s`, and of all as `total_s`."""
        return {**{f"{part}_s": seconds for part, seconds in self.seconds.items()}, "total_s": self.total}


def process_began(pid: int) -> float | None:
    """When a process began, in seconds since the epoch, to some hundredths; None where the system does not tell."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            after_name = file.read().rpartition(")")[2].split()
        since_boot = int(after_name[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5), in ticks since boot
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    # A sandbox may tell nonsense; no start is told rather than one of last year.
    return time.time() - age if 0 <= age < 30 * 86400 else None
