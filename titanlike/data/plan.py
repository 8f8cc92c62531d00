"""What decides the order of the data, and what to do when a checkpoint comes from another one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from titanlike.data.config import DataConfig
from titanlike.data.mixture import integer_weights
from titanlike.errors import UserError


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the run with one mixture and one length."""

    start_step: int
    seq_len: int
    weights: dict[str, int]
    """of the sources it reads, in the order of the config; in lowest terms"""

    def described(self) -> dict[str, Any]:
        """As JSON."""
        return {"start_step": self.start_step, "seq_len": self.seq_len, "weights": self.weights}


def make_stages(data: DataConfig, seq_len: int) -> list[Stage]:
    """The stages of a run, the first from step 1."""
    own = {source.name: source.weight for source in data.all_sources}

    def stage(start_step: int, weights: Mapping[str, float], length: int) -> Stage:
        positive = {name: weights[name] for name in own if weights.get(name, 0) > 0}
        return Stage(start_step, length, integer_weights(positive))

    stages = [stage(s.start_step, own if s.mixture is None else s.mixture, s.seq_len or seq_len) for s in data.stages]
    if not stages or stages[0].start_step > 1:
        stages.insert(0, stage(1, own, seq_len))
    return stages


class Plan:
    """The stages, and what the rows of their sources depend on."""

    def __init__(self, stages: list[Stage], sources: Mapping[str, str], settings: Mapping[str, Any]) -> None:
        """`sources`: the fingerprint of each source's content. `settings`: all else that decides the rows, under the
        names of the config's keys."""
        self.stages = stages
        self.described: dict[str, Any] = {
            "settings": dict(settings),
            "sources": dict(sources),
            "stages": [stage.described() for stage in stages],
        }
        """JSON, kept in the cursor"""

    def stage_at(self, step: int) -> Stage:
        """The stage of an optimizer step, which counts from 1."""
        return next(stage for stage in reversed(self.stages) if stage.start_step <= step)

    def changes(self, cursor: Mapping[str, Any]) -> list[str]:
        """How the plan differs from the one that a cursor comes from, in what is still to come. Empty if it does
        not."""
        before, now, step = cursor["plan"], self.described, cursor["step"]
        found = [
            f"{key} {value!r}, was {before['settings'].get(key)!r}"
            for key, value in now["settings"].items()
            if before["settings"].get(key) != value
        ]
        for name in {**before["sources"], **now["sources"]}:
            was, is_ = before["sources"].get(name), now["sources"].get(name)
            if was != is_:
                how = "is new" if was is None else "is gone" if is_ is None else "has other content"
                found.append(f"the source {name} {how}")
        was, is_ = to_come(before["stages"], step), to_come(now["stages"], step)
        if was != is_:
            found.append(f"the mixture from step {step + 1} on is {said(is_)}, was {said(was)}")
        return found

    def check(self, cursor: Mapping[str, Any], allow_changes: bool) -> list[str]:
        """What has changed since the cursor, as sentences for the user.

        Raises:
            UserError: something has, and that is not allowed.
        """
        changes = self.changes(cursor)
        if not changes:
            return []
        if not allow_changes:
            raise UserError(
                f"the data differs from what the checkpoint was trained on: {'; '.join(changes)}. Change it back, or "
                "set data.allow_changes = true to go on with sources that have not changed where they were, others "
                "from their beginning"
            )
        kept = self.kept_positions(cursor)
        new = [name for name in self.described["sources"] if name not in kept]
        return [
            f"the data has changed since the checkpoint: {'; '.join(changes)}",
            f"sources that go on where they were: {', '.join(kept) or 'none'}; that begin: {', '.join(new) or 'none'}",
        ]

    def kept_positions(self, cursor: Mapping[str, Any]) -> dict[str, Any]:
        """The positions of the sources whose content is that of the cursor's plan."""
        before = cursor["plan"]["sources"]
        return {
            name: position
            for name, position in cursor["sources"].items()
            if self.described["sources"].get(name) == before[name]
        }

    def resumed_stage(self, cursor: Mapping[str, Any]) -> tuple[Stage | None, dict[str, int]]:
        """The stage of the cursor's batch and what it has drawn, if this plan has that very stage there."""
        stage = self.stage_at(cursor["step"])
        if stage.described() in cursor["plan"]["stages"] and stage.start_step == cursor["stage"]:
            return stage, dict(cursor["drawn"])
        return None, {}


def to_come(stages: list[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    """The stages after `step`, as JSON; the first is the one that step + 1 is in."""
    current = max(i for i, stage in enumerate(stages) if stage["start_step"] <= step + 1)
    return [{**stages[current], "start_step": step + 1}, *stages[current + 1 :]]


def said(stages: list[dict[str, Any]]) -> str:
    """Stages in words."""
    parts = []
    for i, stage in enumerate(stages):
        total = sum(stage["weights"].values())
        shares = ", ".join(f"{name} {weight / total:.4g}" for name, weight in stage["weights"].items())
        begin = f"then from step {stage['start_step']} on " if i else ""
        parts.append(f"{begin}{shares} at seq_len {stage['seq_len']}")
    return "; ".join(parts)
