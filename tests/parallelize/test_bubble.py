"""The predicted idle share of a pipeline is that of the schedule as torch runs it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from parallelize.bubble import Task, action_order, idle_share
from parallelize.pipeline import SCHEDULES, bubble_fraction

SIZES = [(p, m) for p in (2, 3, 4, 8) for m in (p, 2 * p, 4 * p, 32 * p)]


def share(ramp: float, microbatches: int) -> float:
    """The idle share if each rank waits for as long as `ramp` microbatches take it, forward and backward."""
    return ramp / (microbatches + ramp)


@pytest.mark.parametrize(("pp", "microbatches"), SIZES)
def test_the_closed_forms_of_the_papers_are_met(pp: int, microbatches: int) -> None:
    """Symptom: a user grows the batch to hide a bubble that the table has wrong."""
    ramp = pp - 1
    # arXiv:2104.04473, sections 2.2.1 and 2.2.2
    assert bubble_fraction("afab", pp, pp, microbatches) == pytest.approx(share(ramp, microbatches))
    assert bubble_fraction("1f1b", pp, pp, microbatches) == pytest.approx(share(ramp, microbatches))
    for v in (2, 4):
        assert bubble_fraction("interleaved_1f1b", pp, v * pp, microbatches) == pytest.approx(
            share(ramp / v, microbatches)
        )
    # Weight gradients fill the ramp but for the forwards of its start (arXiv:2401.10241, section 2.2, with all three
    # parts of equal length): a third of it, over the stages of a rank.
    assert bubble_fraction("interleaved_zero_bubble", pp, 2 * pp, microbatches) == pytest.approx(
        share(ramp / 6, microbatches)
    )
    for schedule in ("zbv", "dualpipev"):
        if microbatches >= 2 * pp:
            assert bubble_fraction(schedule, pp, 2 * pp, microbatches) == pytest.approx(share(ramp / 6, microbatches))


def test_few_microbatches_are_counted_as_they_are() -> None:
    """Symptom: a formula for many microbatches is used for few. By hand, for one microbatch and pp = 2: what two ranks
    do one after the other is half of the time; the V lets weight gradients run beside."""
    assert bubble_fraction("afab", 2, 2, 1) == pytest.approx(0.5)
    assert bubble_fraction("zbv", 2, 4, 1) == pytest.approx(0.4)
    assert bubble_fraction("interleaved_1f1b", 2, 4, 1) == pytest.approx(0.5)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_rank_does_all_its_work_once(schedule: str) -> None:
    """Symptom: an order that leaves out or repeats a microbatch has too small or too large a bubble."""
    class_name, per_rank, _ = SCHEDULES[schedule]
    for pp, m in ((2, 4), (4, 8), (3, 7)):
        try:
            order = action_order(class_name, pp, pp * per_rank, m)
        except ValueError:
            assert (schedule, pp, m) in {("interleaved_1f1b", 3, 7), ("interleaved_zero_bubble", 3, 7)}
            continue
        tasks = [("I" if letter == "B" else letter, s, i) for part in order for letter, s, i in part]
        weights = [("W", s, i) for part in order for letter, s, i in part if letter == "B"]
        wanted = [(letter, s, i) for letter in "FIW" for s in range(pp * per_rank) for i in range(m)]
        assert sorted(tasks + weights) == sorted(wanted)


def test_a_schedule_that_locks_up_is_told() -> None:
    """Symptom: an endless loop before the first step."""
    with pytest.raises(ValueError, match="wait for each other"):
        idle_share([[("B", 0, 0), ("F", 0, 0)], [("F", 1, 0), ("B", 1, 0)]])


@pytest.mark.parametrize("schedule", ["afab", "1f1b"])
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 2), (3, 5), (4, 8)])
def test_the_order_is_the_one_that_torch_runs(schedule: str, pp: int, microbatches: int, monkeypatch: Any) -> None:
    """Symptom: these two schedules run from a loop of their own, and torch 2.13 reports another order for 1F1B."""
    from torch.distributed.pipelining import schedules

    class Recording:
        """A stage that notes what it is told to run."""

        has_backward, is_last, submod = True, False, None

        def __init__(self, index: int) -> None:
            self.stage_index, self.num_stages, self.group_rank, self.group_size = index, pp, index, pp
            self.ran: list[Task] = []

        def forward_one_chunk(self, index: int, *_args: Any, **_kwargs: Any) -> None:
            self.ran.append(("F", self.stage_index, index))

        def backward_one_chunk(self, index: int, **_kwargs: Any) -> None:
            self.ran.append(("B", self.stage_index, index))

        def get_fwd_recv_ops(self, _index: int) -> list[Any]:
            return []

        get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops

        def perform_reduce_grad(self, _factor: int) -> None:
            pass

    class_name = SCHEDULES[schedule][0]
    wanted = action_order(class_name, pp, pp, microbatches)
    for rank in range(pp):
        stage = Recording(rank)
        made: Any = schedules.get_schedule_class(class_name)(stage, microbatches, loss_fn=lambda *_: None)
        monkeypatch.setattr(made, "_initialize_stage", lambda *_args: None)
        made._step_microbatches([()] * microbatches, [{}] * microbatches, [None] * microbatches, [])
        assert stage.ran == wanted[rank]


def test_the_documented_bubbles_are_those_of_the_code() -> None:
    """Symptom: the table in docs/mesh.md was right once."""
    text = (Path(__file__).parents[2] / "docs" / "mesh.md").read_text()
    rows = re.findall(r"^\| `(\w+)` [^|]*\|[^|]*\|[^|]*\| ([\d.]+) % \| ([\d.]+) % \| ([\d.]+) \|$", text, re.M)
    assert [row[0] for row in rows] == list(SCHEDULES)
    for schedule, small, large, held in rows:
        class_name, per_rank, _ = SCHEDULES[schedule]
        assert float(small) == round(100 * bubble_fraction(schedule, 4, 4 * per_rank, 16), 1)
        assert float(large) == round(100 * bubble_fraction(schedule, 8, 8 * per_rank, 32), 1)
        order = action_order(class_name, 4, 4 * per_rank, 16)
        assert float(held) == max(most_held(tasks) for tasks in order) / per_rank


def most_held(tasks: list[Task]) -> int:
    """How many forwards a rank has ahead of their weight gradients at most."""
    held = most = 0
    for letter, _, _ in tasks:
        held += {"F": 1, "I": 0, "W": -1, "B": -1}[letter]
        most = max(most, held)
    return most
