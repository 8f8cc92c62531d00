"""The times of a step add up, and a GPU is never waited for in the step that is under way."""

from __future__ import annotations

import pytest

from titanlike.metrics.timers import PHASES, Timers


class Clock:
    """Counts seconds, as told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_and_the_rest_add_up_to_the_step() -> None:
    clock = Clock()
    timers = Timers("cpu", clock=clock)
    for name, seconds in (("data", 1.0), ("forward_backward", 5.0), ("data", 2.0), ("validation", 16.0)):
        with timers.phase(name):
            clock.now += seconds
        clock.now += 0.25
    values = timers.end_step()
    assert values == {
        "step_time_s": 9.0,
        "time/data_s": 3.0,
        "time/forward_backward_s": 5.0,
        "time/validation_s": 16.0,
        "time/other_s": 1.0,
    }


def test_what_happens_between_steps_belongs_to_the_next() -> None:
    """A save after a step was logged would be in no step's time, and the breakdown would not add up to the run's."""
    clock = Clock()
    timers = Timers("cpu", clock=clock)
    timers.end_step()
    with timers.phase("checkpoint"):
        clock.now += 3.0
    assert timers.end_step() == {"step_time_s": 3.0, "time/checkpoint_s": 3.0, "time/other_s": 0.0}


def test_inner_phase_pauses_the_outer_one() -> None:
    clock = Clock()
    timers = Timers("cpu", clock=clock)
    with timers.phase("optimizer"):
        clock.now += 1.0
        with timers.phase("param_gather"):
            clock.now += 2.0
        clock.now += 4.0
    values = timers.end_step()
    assert (values["time/optimizer_s"], values["time/param_gather_s"], values["step_time_s"]) == (5.0, 2.0, 7.0)


def test_an_exception_closes_its_phase() -> None:
    """The guard may skip a step out of the middle of it."""
    clock = Clock()
    timers = Timers("cpu", clock=clock)
    with pytest.raises(RuntimeError), timers.phase("clip"):
        clock.now += 1.0
        raise RuntimeError
    clock.now += 1.0
    assert timers.end_step() == {"step_time_s": 2.0, "time/clip_s": 1.0, "time/other_s": 1.0}


def test_start_forgets_the_time_before_the_first_step() -> None:
    """Loading a checkpoint is not part of the first step."""
    clock = Clock()
    timers = Timers("cpu", clock=clock)
    clock.now += 50.0
    timers.start()
    clock.now += 1.0
    assert timers.end_step()["step_time_s"] == 1.0


def test_what_is_left_aside_belongs_to_no_step() -> None:
    clock = Clock()
    timers = Timers("cpu", clock=clock)
    timers.start()
    clock.now += 1
    with timers.aside():
        clock.now += 100
    with timers.phase("data"):
        clock.now += 2
    assert timers.end_step() == {"step_time_s": 3.0, "time/data_s": 2.0, "time/other_s": 1.0}
    with timers.aside():
        clock.now += 100
    assert timers.end_step() == {"step_time_s": 0.0, "time/other_s": 0.0}


def test_unknown_phase_and_open_phase_are_our_mistakes() -> None:
    timers = Timers("cpu")
    with pytest.raises(AssertionError, match="unknown phase"), timers.phase("lunch"):
        pass
    with pytest.raises(AssertionError, match="inside the phase data"), timers.phase("data"):
        timers.end_step()


class Device:
    """A device that runs behind the host: an event is done when `finish` says so, `lag` milliseconds of work later."""

    def __init__(self) -> None:
        self.time_ms = 0.0
        self.waited: list[DeviceEvent] = []
        self.events: list[DeviceEvent] = []

    def event(self) -> DeviceEvent:
        event = DeviceEvent(self)
        self.events.append(event)
        return event


class DeviceEvent:
    def __init__(self, device: Device) -> None:
        self.device = device

    def record(self) -> None:
        self.at = self.device.time_ms

    def synchronize(self) -> None:
        self.device.waited.append(self)

    def elapsed_time(self, end: DeviceEvent) -> float:
        assert end in self.device.waited or any(other.at >= end.at for other in self.device.waited), "not finished"
        return end.at - self.at


def test_device_times_come_one_step_late_without_waiting_for_the_step_under_way() -> None:
    """A sync every step drains the device's queue and slows what is measured."""
    device = Device()
    timers = Timers("cuda", make_event=device.event)
    ends, results, spans = [], [], []
    for milliseconds in (10.0, 20.0, 40.0):
        with timers.phase("forward_backward"):
            device.time_ms += milliseconds / 2
            with timers.span("comm/dp"):
                device.time_ms += milliseconds / 2
        results.append(timers.end_step())
        spans.append(timers.spans)
        ends.append(device.events[-1])
    assert results == [
        {},
        {"step_time_s": 0.01, "time/forward_backward_s": 0.01, "time/other_s": 0.0},
        {"step_time_s": 0.02, "time/forward_backward_s": 0.02, "time/other_s": 0.0},
    ]
    assert spans == [{}, {"comm/dp": 0.005}, {"comm/dp": 0.01}]  # of the same step as the times
    assert device.waited == ends[:2]


def test_every_phase_has_a_documented_name() -> None:
    from titanlike.metrics import names

    assert names.unknown(f"time/{phase}_s" for phase in PHASES) == []
