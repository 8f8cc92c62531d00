"""The learning-rate schedule: warm-up, stable phase, decay. A pure function of the step."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from titanlike.config import ScheduleConfig


def as_steps(value: int | float, total: int) -> int:
    """A length given in steps (int) or as a fraction of all steps (float), in steps."""
    return round(value * total) if isinstance(value, float) else value


def phases(config: ScheduleConfig, total: int) -> tuple[int, int, int]:
    """(warm-up, stable, decay) in steps; they add up to `total`, or to more when warm-up and decay alone exceed it."""
    warmup = as_steps(config.warmup, total)
    if config.decay == "none":
        decay = 0
    elif config.decay_steps is None:
        decay = max(total - warmup, 0)
    else:
        decay = as_steps(config.decay_steps, total)
    return warmup, max(total - warmup - decay, 0), decay


def lr_factor(config: ScheduleConfig, total: int, step: int) -> float:
    """What the peak learning rate is multiplied by at `step`, which counts from 1.

    Warm-up is linear and reaches 1 at its last step. The decay goes from 1 to `min_lr_ratio`, which the last step
    reaches: with t from 0 to 1 over its steps, linear 1 - t; cosine (1 + cos(pi t)) / 2 (arXiv:1608.03983); 1-sqrt 1 -
    sqrt(t) (arXiv:2405.18392). With cosine and no stable phase this is the usual cosine schedule, with a stable phase
    it is WSD.
    """
    warmup, _, decay = phases(config, total)
    if step <= warmup:
        return step / warmup
    done = step - (total - decay)
    if decay == 0 or done <= 0:
        return 1.0
    t = min(done / decay, 1.0)
    shape = {"linear": 1 - t, "cosine": 0.5 * (1 + math.cos(math.pi * t)), "1-sqrt": 1 - math.sqrt(t)}[config.decay]
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * shape
