"""From the command to the first step, in parts that add up."""

from __future__ import annotations

import os
import time

import pytest

from titanlike.metrics.startup_times import StartupTimes, process_began


def test_parts_follow_each_other_without_gaps() -> None:
    now = [100.0]
    times = StartupTimes(lambda: now[0], began=90.0, launched=87.0)
    for part, seconds in (("imports", 10.0), ("data", 1.0), ("first_step", 4.0)):
        now[0] = now[0] if part == "imports" else now[0] + seconds
        times.done(part)
    assert times.seconds == {"launcher": 3.0, "imports": 10.0, "data": 1.0, "first_step": 4.0}
    assert times.line() == "start-up 18.0 s: launcher 3.0, imports 10.0, data 1.0, first step 4.0"
    assert times.fields()["total_s"] == 18.0 and times.fields()["first_step_s"] == 4.0


def test_no_part_is_counted_twice_and_none_is_unknown() -> None:
    times = StartupTimes(time.time)
    times.done("data")
    for part in ("data", "lunch"):
        with pytest.raises(AssertionError):
            times.done(part)


def test_the_beginning_of_a_process_is_that_of_the_system() -> None:
    began = process_began(os.getpid())
    assert began is None or 0 <= time.time() - began < 30 * 86400
    assert process_began(2**22 + 1) is None  # there is no such process
