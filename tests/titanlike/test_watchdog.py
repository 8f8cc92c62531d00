"""When the watchdog speaks, and what it says: two or three of them in one process, on a clock of the test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from titanlike import hang
from titanlike.watchdog import FIRST, Hang, Watchdog, put_away

TIMEOUT = 100.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def watchdogs(folder: Path, ranks: int) -> tuple[Clock, list[Watchdog]]:
    """So many, with all phases seen, in step 5."""
    clock = Clock()
    dogs = [Watchdog(TIMEOUT, folder / "hang", rank, clock=clock) for rank in range(ranks)]
    for dog in dogs:
        dog.places = [hang.Place("host", 1000 + rank, 1) for rank in range(ranks)]
        for step in (4, 5):
            dog.step(step)
            for name in ("data", "other", "forward_backward", "other", "clip", "other"):
                dog.phase(name)
    return clock, dogs


def look_until(clock: Clock, dogs: list[Watchdog], end: float) -> Hang | None:
    """Let all of them look at every interval until the first speaks."""
    while clock.now < end:
        clock.now += dogs[0].interval_s
        for dog in dogs:
            found = dog.look()
            if found is not None:
                return found
    return None


def test_a_rank_that_does_not_answer_is_named(tmp_path: Path) -> None:
    clock, dogs = watchdogs(tmp_path, 3)
    found = look_until(clock, [dogs[0], dogs[2]], 1000.0)
    assert found is not None and found.answering == [0, 2]
    assert "rank 1 (process 1001 on host) does not answer" in found.why and "ranks 0 and 2 wait in other" in found.why
    assert TIMEOUT < clock.now <= TIMEOUT + dogs[0].grace_s + 3 * dogs[0].interval_s
    told = json.loads((tmp_path / "hang" / "rank-0.json").read_text())
    assert (told["step"], told["phase"]) == (5, "other") and told["recent_phases"][-1]["phase"] == "clip"
    assert "test_watchdog" in (tmp_path / "hang" / "rank-2.stacks").read_text()


def test_a_rank_in_an_earlier_phase_is_behind(tmp_path: Path) -> None:
    clock, dogs = watchdogs(tmp_path, 3)
    for dog in dogs:
        dog.step(6)
        dog.phase("data")
    for dog in (dogs[0], dogs[2]):
        dog.phase("forward_backward")
    found = look_until(clock, dogs, 1000.0)
    assert found is not None and found.answering == [0, 1, 2]
    assert "rank 1 is behind, for 1" in found.why and "s in data of step 6" in found.why
    assert "ranks 0 and 2 wait in forward_backward of step 6" in found.why


def test_a_slow_rank_that_goes_on_is_no_hang_and_the_alarm_is_taken_back(tmp_path: Path) -> None:
    """Symptom: one rank of a pipeline computes for a long time, the others wait, and a watchdog kills a good job."""
    clock, dogs = watchdogs(tmp_path, 2)
    for _ in range(20):
        clock.now += 40.0
        dogs[1].alive()  # a microbatch; rank 0 waits for all of them
        assert dogs[0].look() is None and dogs[1].look() is None
    assert sorted(path.name for path in (tmp_path / "hang").iterdir() if path.suffix == ".json") == [
        "rank-0.json", "rank-1.json",
    ]  # fmt: skip
    for dog in dogs:
        dog.phase("clip")
    for dog in dogs * 2:
        assert dog.look() is None
    assert list((tmp_path / "hang").iterdir()) == []
    found = look_until(clock, dogs[:1], clock.now + 1000.0)  # and a later alarm counts from its own beginning
    assert found is not None and "rank 1" in found.why


def test_the_first_time_of_a_phase_and_checkpoints_may_take_longer(tmp_path: Path) -> None:
    """Symptom: a run that compiles for ten minutes is taken for one that hangs."""
    for name in ("validation", "checkpoint", "checkpoint"):
        clock, dogs = watchdogs(tmp_path / name, 1)
        (tmp_path / name).mkdir(exist_ok=True)
        for dog in dogs:
            dog.phase(name)
        assert look_until(clock, dogs, FIRST * TIMEOUT) is None
        assert look_until(clock, dogs, FIRST * TIMEOUT + 50) is not None
    clock, dogs = watchdogs(tmp_path, 1)
    dogs[0].phase("validation")
    dogs[0].phase("other")
    dogs[0].phase("validation")
    assert look_until(clock, dogs, TIMEOUT + 50) is not None


def test_the_reports_of_an_earlier_hang_are_kept_and_not_taken_for_news(tmp_path: Path) -> None:
    clock, dogs = watchdogs(tmp_path, 2)
    assert look_until(clock, dogs, 1000.0) is not None
    put_away(tmp_path / "hang")
    (kept,) = tmp_path.iterdir()
    assert kept.name.startswith("hang-2") and (kept / "rank-1.stacks").exists()
    clock, dogs = watchdogs(tmp_path, 2)
    assert look_until(clock, dogs, 50.0) is None


def test_a_folder_that_cannot_be_written_does_not_stop_the_watchdog(tmp_path: Path) -> None:
    (tmp_path / "hang").write_text("a file in the way")
    clock, dogs = watchdogs(tmp_path, 1)
    found = look_until(clock, dogs, 1000.0)
    assert found is not None and "rank 0 is for" in found.why


# --- the sentence ---


def call(number: int, operation: str, sizes: list[int], done: bool = True) -> dict[str, Any]:
    return {
        "number": number,
        "operation": operation,
        "sizes": [sizes],
        "done": done,
        "where": "finish (titanlike/x.py:1)",
    }


def told(*groups: dict[str, Any]) -> str:
    """The sentence for ranks that are in one place and whose group dp had these last collectives."""
    places = [hang.Place("host", 1, 1)] * len(groups)
    reports = {
        rank: {
            **{"step": 7, "phase": "grad_reduce", "borders": 40, "silent_s": 100.0, "where": f"f{rank} (a/b.py:1)"},
            "collectives": {"3/mesh_dp": group},
        }
        for rank, group in enumerate(groups)
    }
    return hang.sentence(reports, places, 100.0, "runs/x/hang")


def test_different_collectives_under_one_number_are_told() -> None:
    waits, other = call(8, "all_reduce", [3], False), call(8, "broadcast", [2], False)
    first = {"called": 8, "done": 7, "last": [call(7, "all_reduce", [3]), waits]}
    assert (
        "ranks call different collectives on the group dp: as number 8 rank 0 called all_reduce of 3 in finish "
        "(titanlike/x.py:1), and rank 1 broadcast of 2 in"
    ) in told(first, {"called": 8, "done": 7, "last": [call(7, "all_reduce", [3]), other]})
    sizes = {"called": 8, "done": 7, "last": [call(8, "all_reduce", [4, 5], False)]}
    assert "rank 1 all_reduce of 4x5" in told(first, sizes)


def test_a_collective_that_a_rank_has_not_called_is_told() -> None:
    first = {"called": 8, "done": 7, "last": [call(8, "all_gather", [3], False)]}
    why = told(first, first, {"called": 7, "done": 7, "last": [call(7, "all_gather", [9])]})
    assert "ranks 0-1 wait in collective number 8 of the group dp, all_gather of 3 in finish" in why
    assert "which rank 2 has not called, for 100 s in grad_reduce of step 7, at f2 (a/b.py:1)" in why


def test_sizes_that_may_differ_by_rank_are_no_mismatch() -> None:
    """Symptom: a watchdog blames an uneven all_gather."""
    ones = [{"called": 8, "done": 7, "last": [call(8, "all_gather", [size], False)]} for size in (3, 4)]
    assert "all ranks are in grad_reduce of step 7, at f0 (a/b.py:1) and f1 (a/b.py:1)" in told(*ones)


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "rank 3"), ([0, 1], "ranks 0-1"), ([5, 0, 1, 2, 9], "ranks 0-2, 5 and 9")]
)
def test_ranks_are_listed_shortly(ranks: list[int], text: str) -> None:
    assert hang.ranks_text(ranks) == text
