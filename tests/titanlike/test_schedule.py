"""The learning rate at each step, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from titanlike.config import ScheduleConfig
from titanlike.schedule import lr_factor, phases


def factors(total: int, **settings: Any) -> list[float]:
    return [lr_factor(ScheduleConfig(**settings), total, step) for step in range(1, total + 1)]


def test_without_settings_the_rate_is_the_peak() -> None:
    assert factors(3) == [1.0, 1.0, 1.0]


def test_warmup_starts_above_zero_and_reaches_the_peak_at_its_last_step() -> None:
    """Symptom: the first step has a learning rate of 0 and is lost."""
    assert factors(6, warmup=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert factors(8, warmup=0.25) == [0.5] + [1.0] * 7


@pytest.mark.parametrize(
    ("decay", "middle"), [("linear", 0.5), ("cosine", 0.5), ("1-sqrt", 1 - math.sqrt(0.5))], ids=str
)
def test_the_decay_ends_at_its_floor_at_the_last_step(decay: str, middle: float) -> None:
    """Symptom: the last step is one short of the floor, or one past it."""
    found = factors(10, warmup=2, decay=decay, decay_steps=4, min_lr_ratio=0.2)
    assert found[:6] == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert found[7] == pytest.approx(0.2 + 0.8 * middle)
    assert found[9] == pytest.approx(0.2)
    assert found == sorted(found[:2]) + sorted(found[2:], reverse=True)


def test_the_decay_takes_all_that_the_warmup_leaves() -> None:
    assert factors(6, warmup=2, decay="linear") == pytest.approx([0.5, 1.0, 0.75, 0.5, 0.25, 0.0])


def test_phases_are_the_whole_run() -> None:
    for total in (1, 7, 100):
        for warmup in (0, 1, 0.5):
            for decay_steps in (None, 0.25, 0):
                config = ScheduleConfig(warmup=warmup, decay="cosine", decay_steps=decay_steps)
                assert sum(phases(config, total)) == total
