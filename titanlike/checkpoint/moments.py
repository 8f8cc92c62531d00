"""When to save: every so many steps or minutes, at the end, and when the machine is about to be taken away."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

from titanlike.checkpoint.config import CheckpointConfig


class Decision(NamedTuple):
    """What to do after a step, the same on all ranks: save a checkpoint; leave the loop."""

    save: bool
    stop: bool


class Moments:
    """The `[checkpoint]` rules about time. Minutes are those of rank 0's clock, since its last save or its start."""

    def __init__(self, config: CheckpointConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.clock = clock  # seconds; injected so that a test need not wait
        self._since = clock()

    def by_step(self, step: int, last: bool) -> bool:
        """Whether the number of the step alone calls for a save."""
        if last and self.config.save_last:
            return True
        if step == 0:
            return self.config.save_initial
        return self.config.interval > 0 and step % self.config.interval == 0

    def by_minutes(self) -> bool:
        minutes = self.config.interval_minutes
        return minutes > 0 and self.clock() - self._since >= 60.0 * minutes

    def saved(self) -> None:
        self._since = self.clock()


class StopSignal:
    """Turns SIGTERM, SIGUSR1 and SIGINT into a wish that the loop reads between steps: finish the step, save, exit 0.

    A scheduler sends the first before it kills, and many can send the second some minutes ahead; the third is Ctrl-C.
    A second SIGTERM or SIGINT acts as it would have without this, and ends the process even where Python's own handlers
    cannot run, because the main thread waits in a collective. Install from the main thread.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    ENDING = (signal.SIGTERM, signal.SIGINT)
    """those of which a second one ends the process at once"""

    def __init__(self) -> None:
        self.received: str | None = None
        """The name of the signal that came, or None."""
        self._before: dict[int, object] = {}
        self._pipe: tuple[int, int] | None = None
        self._fd_before = -1

    def install(self) -> StopSignal:
        # Python's handlers run between two instructions of the main thread; the number of a signal is written here by
        # the C handler at once.
        self._pipe = os.pipe()
        os.set_blocking(self._pipe[1], False)
        self._fd_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._forked)
        threading.Thread(target=self._count, args=(self._pipe[0],), name="signals", daemon=True).start()
        for number in self.SIGNALS:
            self._before[number] = signal.signal(number, self._handle)
        return self

    def restore(self) -> None:
        while self._before:
            number, handler = self._before.popitem()
            signal.signal(number, handler)  # type: ignore[arg-type]
        if self._pipe is not None:
            signal.set_wakeup_fd(self._fd_before)
            os.write(self._pipe[1], b"\0")
            os.close(self._pipe[1])  # the thread closes the other end
            self._pipe = None

    def _forked(self) -> None:
        """In a child, such as a data worker: its signals are not ours to count."""
        if self._pipe is not None:
            signal.set_wakeup_fd(-1)

    @classmethod
    def _count(cls, pipe: int) -> None:
        ends = 0
        while (number := os.read(pipe, 1)) not in (b"\0", b""):
            ends += number[0] in cls.ENDING
            if ends == 2:
                print("told to end a second time: ended at once, nothing saved", file=sys.stderr, flush=True)
                os._exit(128 + number[0])
        os.close(pipe)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        if number in self.ENDING:
            signal.signal(number, self._before[number])  # type: ignore[arg-type]
