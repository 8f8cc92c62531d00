"""Steps that must not be learnt from: numbers that are not finite, and spikes. `[guard]` says what happens then.

Properties:
- A step is judged by its loss and gradient norm, which are global numbers, the same on all ranks: all decide alike,
  when the gradients are reduced and before weights, moments and step counts are touched.
- A spike is a loss or a gradient norm above mean + sigma * standard deviation of the last `spike_window` good steps.
- The guard's memory is plain JSON and is saved with the run, so a resumed run judges as the uninterrupted one.
- It gives up: ten skipped steps in a row, or three rollbacks to one checkpoint, end the run.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from titanlike.section import Section

MAX_SKIPS_IN_A_ROW = 10
MAX_ROLLBACKS_TO_A_STEP = 3

Action = Literal["skip", "stop", "rollback"]


class GuardConfig(Section):
    """What happens to a step whose loss or gradient is bad (docs/guard.md)."""

    nonfinite: Literal["stop", "skip", "rollback"] = "stop"
    """Loss or gradient norm infinite or not a number: end the run; leave the update out and go on; or go back to the
    newest checkpoint and on with the data after this step's."""

    spike: Literal["off", "stop", "skip", "rollback"] = "off"
    """The same for a loss or a gradient norm that is far above those of the steps before."""

    spike_sigma: float = Field(6.0, gt=0)
    """How far: so many standard deviations above the mean."""

    spike_window: int = Field(100, ge=2)
    """Of how many good steps. Until there are so many, nothing is a spike."""


@dataclass(frozen=True)
class Verdict:
    """What to do with a bad step, and why."""

    action: Action
    reason: str
    finite: bool
    """whether it is a spike"""


class Guard:
    """Judges the steps of a run. All ranks have one and give it the same numbers."""

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self._good: dict[str, list[float]] = {"loss": [], "grad_norm": []}
        self._skipped = 0
        self._skips_in_a_row = 0
        self._rollbacks: dict[str, int] = {}

    @property
    def must_look_first(self) -> bool:
        """Whether a bad step has to be known before the update, for the state is kept. On an accelerator the look makes
        the host wait for the backward."""
        return self.config.nonfinite != "stop" or self.config.spike != "off"

    @property
    def rolls_back(self) -> bool:
        """Whether there should always be a checkpoint to go back to."""
        return "rollback" in (self.config.nonfinite, self.config.spike)

    def judge(self, loss: float, grad_norm: float) -> Verdict | None:
        """The verdict on a step, None for a good one, which is remembered. Call once for each step."""
        numbers = {"loss": loss, "grad_norm": grad_norm}
        bad = [f"{name} {value}" for name, value in numbers.items() if not math.isfinite(value)]
        if bad:
            return self._limited(Verdict(self.config.nonfinite, " and ".join(bad), finite=False))
        if self.config.spike != "off":
            for name, value in numbers.items():
                reason = self._spike(name, value)
                if reason:
                    return self._limited(Verdict(self.config.spike, reason, finite=True))
            for name, value in numbers.items():
                self._good[name] = [*self._good[name], value][-self.config.spike_window :]
        self._skips_in_a_row = 0
        return None

    def _spike(self, name: str, value: float) -> str | None:
        window = self._good[name]
        if len(window) < self.config.spike_window:
            return None
        mean, deviation = statistics.fmean(window), statistics.stdev(window)
        if value <= mean + self.config.spike_sigma * deviation:
            return None
        return f"{name} {value:.6g} is a spike: the last {len(window)} good steps have {mean:.6g} ± {deviation:.2g}"

    def _limited(self, verdict: Verdict) -> Verdict:
        if verdict.action != "skip":
            return verdict
        if self._skips_in_a_row == MAX_SKIPS_IN_A_ROW:
            reason = f"{verdict.reason}, after {MAX_SKIPS_IN_A_ROW} skipped steps in a row"
            return Verdict("stop", reason, verdict.finite)
        self._skipped += 1
        self._skips_in_a_row += 1
        return verdict

    def rolled_back(self, step: int, saved: dict[str, Any]) -> bool:
        """The run goes back to the checkpoint of `step`, whose guard state was `saved`. False if it has done so too
        often: then it should end."""
        rollbacks = {str(step): self._rollbacks.get(str(step), 0) + 1}
        self.load(saved)
        self._rollbacks = rollbacks
        return rollbacks[str(step)] <= MAX_ROLLBACKS_TO_A_STEP

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""
        return {
            "good": self._good,
            "skipped": self._skipped,
            "skips_in_a_row": self._skips_in_a_row,
            "rollbacks": self._rollbacks,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Take up what `state` gave. The window may have another length now."""
        self._good = {name: list(values)[-self.config.spike_window :] for name, values in state["good"].items()}
        self._skipped, self._skips_in_a_row = state["skipped"], state["skips_in_a_row"]
        self._rollbacks = dict(state["rollbacks"])
