"""Where the time of a step goes.

- The phases and `other` (what no phase covers) add up to the whole time since the previous step ended, but for what is
  left `aside`.
- A phase inside a phase pauses the outer one, so no second is counted twice.
- Spans lie across the phases and take nothing from them: waits for other ranks, the busy time of a pipeline rank.
- On CPU a monotonic clock; on an accelerator events on the current stream, read one step late and so without making the
  host wait for the device (it may run at most one step ahead of what is read).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

PHASES = (
    "data",
    "forward_backward",
    "grad_reduce",
    "clip",
    "optimizer",
    "param_gather",
    "checkpoint",
    "validation",
    "health",
    "other",
)

_ASIDE = "aside"  # between marks: of no step
_NOTHING = nullcontext()


class Timers:
    """Phase timers of one rank.

    `device_type` is "cpu", "cuda", ...; `clock` gives seconds and `make_event` a started timing event (both for tests).

        timers = Timers(device.type)
        for step in ...:
            with timers.phase("data"): ...
            with timers.phase("forward_backward"): ...
            values |= timers.end_step()
    """

    def __init__(
        self,
        device_type: str,
        *,
        clock: Callable[[], float] = time.perf_counter,
        make_event: Callable[[], Any] | None = None,
    ) -> None:
        if device_type == "cpu":
            self._clock: _HostClock | _DeviceClock = _HostClock(clock)
        else:
            self._clock = _DeviceClock(make_event or (lambda: _timing_event(device_type)))
        self.on_border: Callable[[str], object] = lambda name: None
        """called with the name of the phase that begins, at every border between phases"""
        self._active: list[str] = []
        # Boundaries of the step under way: (mark, the phase that is active from here on).
        self._marks: list[tuple[Any, str]] = [(self._clock.mark(), "other")]
        self._previous: list[tuple[Any, str]] | None = None
        # Spans of the step under way, and on an accelerator of the one before: (begin, end, name).
        self._spans: list[tuple[Any, Any, str]] = []
        self._previous_spans: list[tuple[Any, Any, str]] = []
        self.annotate: Callable[[str], AbstractContextManager[Any]] | None = None
        """puts the names of phases and spans into a trace, while one is made"""
        self.spans: dict[str, float] = {}
        """seconds of each span, added up, in the step that `end_step` told of last"""

    def span(self, name: str) -> AbstractContextManager[Any]:
        """Add the time inside the block to `spans[name]`, whatever phase it is in."""
        return _Span(self, name)

    def _named(self, name: str) -> AbstractContextManager[Any]:
        return _NOTHING if self.annotate is None else self.annotate(name)

    @contextmanager
    def phase(self, name: str) -> Generator[None]:
        """Count the time inside the block to the phase `name`, one of `PHASES`."""
        assert name in PHASES, f"unknown phase {name}; known: {', '.join(PHASES)}"
        self._active.append(name)
        self._marks.append((self._clock.mark(), name))
        self.on_border(name)
        try:
            with self._named(name):
                yield
        finally:
            self._active.pop()
            self._marks.append((self._clock.mark(), self._active[-1] if self._active else "other"))
        # Not after an exception: then it is worth knowing in which phase it was raised.
        self.on_border(self._active[-1] if self._active else "other")

    @contextmanager
    def aside(self) -> Generator[None]:
        """Count the time inside the block to no step. Between two steps, or at the beginning of one."""
        assert not self._active, f"time is left out inside the phase {self._active[-1]}"
        self._marks.append((self._clock.mark(), _ASIDE))
        try:
            yield
        finally:
            self._marks.append((self._clock.mark(), "other"))

    def start(self) -> None:
        """Forget the time since the construction or the last step: the next step starts now."""
        self._marks = [(self._clock.mark(), "other")]
        self._previous = None
        self._spans, self._previous_spans = [], []

    def end_step(self) -> dict[str, float]:
        """End the step and return seconds as `time/<phase>_s` and `step_time_s`, which is their sum without validation.

        On CPU they are of the step that ends. On an accelerator they are of the step before, and empty the first time.
        Phases that did not occur are left out, except `other`. `spans` is then that of the same step.
        """
        assert not self._active, f"the step ends inside the phase {self._active[-1]}"
        end = self._clock.mark()
        marks = [*self._marks, (end, "other")]
        self._marks = [(end, "other")]
        spans, self._spans = self._spans, []
        self.spans = {}
        if self._clock.late:
            marks, self._previous = self._previous, marks
            spans, self._previous_spans = self._previous_spans, spans
            if marks is None:
                return {}
        self._clock.wait(marks[-1][0])
        for begin, finish, name in spans:
            self.spans[name] = self.spans.get(name, 0.0) + self._clock.seconds(begin, finish)
        seconds: dict[str, float] = {"other": 0.0}
        for (begin, name), (finish, _) in itertools.pairwise(marks):
            if name != _ASIDE:
                seconds[name] = seconds.get(name, 0.0) + self._clock.seconds(begin, finish)
        values = {f"time/{name}_s": seconds[name] for name in PHASES if name in seconds}
        return {"step_time_s": sum(s for name, s in seconds.items() if name != "validation"), **values}


class _Span:
    """A class, for a step of a long pipeline has hundreds, and a generator's context takes three times as long."""

    __slots__ = ("_begin", "_name", "_named", "_timers")

    def __init__(self, timers: Timers, name: str) -> None:
        self._timers, self._name = timers, name

    def __enter__(self) -> None:
        self._named = self._timers._named(self._name)
        self._begin = self._timers._clock.mark()
        self._named.__enter__()

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self._named.__exit__(kind, error, traceback)
        self._timers._spans.append((self._begin, self._timers._clock.mark(), self._name))


class _HostClock:
    late = False

    def __init__(self, clock: Callable[[], float]) -> None:
        self.mark = clock

    def wait(self, mark: float) -> None:
        pass

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class _DeviceClock:
    late = True

    def __init__(self, make_event: Callable[[], Any]) -> None:
        self._make_event = make_event

    def mark(self) -> Any:
        event = self._make_event()
        event.record()
        return event

    def wait(self, mark: Any) -> None:
        # The event closed the previous step: the device still has the whole of this step queued and does not idle.
        mark.synchronize()

    def seconds(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1000  # events count milliseconds


def _timing_event(device_type: str) -> Any:
    import torch

    return torch.Event(device_type, enable_timing=True)
