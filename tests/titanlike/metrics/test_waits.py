"""The measured bubble and the waits by axis. Real time is never compared; a clock of the test's own is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from parallelize.bubble import DURATION, action_order, bubble_of
from tests.ranks import run_ranks
from tests.titanlike.runs import runs, tiny
from titanlike.metrics import files, names
from titanlike.metrics.timers import Timers
from titanlike.metrics.waits import idle_shares


def timeline(order: list[list[tuple[str, int, int]]]) -> list[list[tuple[float, float]]]:
    """(begin, end) of each action of each rank, as soon as what it needs is there."""
    stages = 1 + max(stage for tasks in order for _, stage, _ in tasks)
    ended: dict[tuple[str, int, int], float] = {}
    spans: list[list[tuple[float, float]]] = [[] for _ in order]
    while any(len(done) < len(tasks) for done, tasks in zip(spans, order)):
        for done, tasks in zip(spans, order):
            while len(done) < len(tasks):
                letter, stage, microbatch = tasks[len(done)]
                if letter == "F":
                    needs = [("F", stage - 1, microbatch)] if stage else []
                else:
                    needs = [("F", stage, microbatch) if stage == stages - 1 else ("B", stage + 1, microbatch)]
                if not all(task in ended for task in needs):
                    break
                begin = max([done[-1][1] if done else 0.0, *(ended[task] for task in needs)])
                done.append((begin, begin + DURATION[letter]))
                ended[letter, stage, microbatch] = done[-1][1]
    return spans


def measured(schedule: str, ranks: int, microbatches: int) -> list[float]:
    """What the timers of the ranks make of such a timeline."""
    whole, busy = [], []
    for actions in timeline(action_order(schedule, ranks, ranks, microbatches)):
        now = [0.0]
        timers = Timers("cpu", clock=lambda now=now: now[0])
        with timers.phase("forward_backward"), timers.span("pipeline"):
            for begin, end in actions:
                now[0] = begin
                with timers.span("pipeline/busy"):
                    now[0] = end
        timers.end_step()
        whole.append(timers.spans["pipeline"])
        busy.append(timers.spans["pipeline/busy"])
    return idle_shares(whole, busy)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
def test_a_measured_bubble_is_that_of_the_timeline(schedule: str) -> None:
    """Symptom: a bubble that counts the wait at the begin of the last stage alone, and not the one at its end."""
    found = {m: measured(schedule, 2, m) for m in (2, 8)}
    for microbatches, shares in found.items():
        assert sum(shares) / 2 == pytest.approx(bubble_of(schedule, 2, 2, microbatches))
        assert sum(shares) / 2 == pytest.approx((2 - 1) / (microbatches + 2 - 1))  # arXiv:2104.04473, section 2.2
    assert found[2] > found[8]


def test_a_slow_stage_leaves_the_other_idle() -> None:
    assert idle_shares([10.0, 9.0], [10.0, 5.0]) == [0.0, 0.5]
    assert idle_shares([0.0, 0.0], [0.0, 0.0]) == [0.0, 0.0]  # a clock that is too coarse


def test_spans_take_nothing_from_the_phases() -> None:
    now = [0.0]
    timers = Timers("cpu", clock=lambda: now[0])
    with timers.phase("grad_reduce"):
        now[0] += 1
        for _ in range(2):
            with timers.span("comm/dp"):
                now[0] += 2
    values = timers.end_step()
    assert values == {"step_time_s": 5.0, "time/grad_reduce_s": 5.0, "time/other_s": 0.0}
    assert timers.spans == {"comm/dp": 4.0}
    timers.end_step()
    assert timers.spans == {}


MESHES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "dp2": ({}, {"comm/dp_s"}),
    "tp2": ({"mesh.tp": 2}, {"comm/tp_s"}),
    "pp2": ({"mesh.pp": 2}, {"comm/pp_s", "bubble", "bubble/0", "bubble/1"}),
    "pp2 interleaved, tied": (
        {"mesh.pp": 2, "model.n_layers": 4, "pipeline.schedule": "interleaved_1f1b", "model.tie_embeddings": True},
        {"comm/pp_s", "bubble", "bubble/0", "bubble/1"},
    ),
}


def test_a_run_has_the_waits_of_its_axes_and_no_others(tmp_path: Path) -> None:
    keys = {"train.steps": 2, "validation.samples": 8}
    run_ranks(2, runs, [tiny(tmp_path / name, **keys, **mesh) for name, (mesh, _) in MESHES.items()])
    for name, (_, expected) in MESHES.items():
        for row in files.read_metrics(tmp_path / name):
            assert {key for key in row if key.startswith(("comm/", "bubble"))} == expected, name
            assert names.unknown(row) == []
            assert row["tokens"] == row["step"] * 8 * 32  # TT #2983: tokens seen are overcounted on some meshes
            for key in expected:
                assert row[key] >= 0 and (not key.startswith("bubble") or row[key] < 1)
            waited = sum(row[f"time/{phase}_s"] for phase in ("forward_backward", "grad_reduce", "param_gather"))
            assert sum(row[key] for key in expected if key.startswith("comm/")) <= waited
