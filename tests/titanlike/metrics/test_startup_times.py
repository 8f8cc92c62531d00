"""From the command to the first step, in parts that add up."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from tests.ranks import launch
from tests.titanlike.runs import arguments
from titanlike.metrics import files
from titanlike.metrics.startup_times import PARTS, StartupTimes, process_began


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


def test_the_beginning_of_a_process_is_that_of_the_system(tmp_path: Path) -> None:
    began = process_began(os.getpid())
    assert began is None or 0 <= time.time() - began < 30 * 86400
    assert process_began(2**22 + 1) is None  # there is no such process


def test_a_run_under_torchrun_tells_all_parts(tmp_path: Path) -> None:
    """Symptom: it takes a minute until something happens, and nobody knows what of."""
    result = launch(arguments(tmp_path / "run", **{"train.steps": 1}), 2)
    assert result.returncode == 0, result.stderr
    (event,) = [each for each in files.read_events(tmp_path / "run") if each["event"] == "startup"]
    parts = {name.removesuffix("_s"): value for name, value in event.items() if name.endswith("_s")}
    assert set(PARTS) - {"launcher", "imports"} <= set(parts) and all(value >= 0 for value in parts.values())
    if process_began(os.getpid()) is not None:
        assert set(parts) == {*PARTS, "total"}
    said = [line for line in result.stdout.splitlines() if line.startswith("start-up ")]
    assert len(said) == 1 and json.dumps(f"{event['total_s']:.1f}").strip('"') in said[0]
