"""Ratios of a mesh's numbers to the plain model's, and what a ratio usually means."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from titanlike.config import Config
from titanlike.verify.compare import errors, worst
from titanlike.verify.oracle import Oracle
from titanlike.verify.pieces import RankRecord

CLOSE = 1e-6
"""relative difference up to which two numbers are the same: much more than rounding, much less than chance"""

LOOSE = 1e-4
"""the same for weights that were fitted"""

ROUNDING = "equal to six digits or more: a lower precision somewhere, rather than a wrong factor"


@dataclasses.dataclass
class Facts:
    """What the hypotheses are made from."""

    config: Config
    oracle: Oracle
    records: list[RankRecord]

    def __post_init__(self) -> None:
        self.pp, self.dp, self.tp = self.config.mesh.pp, self.config.mesh.dp or 1, self.config.mesh.tp
        self.accumulation = self.config.accumulation(self.dp)
        self.stages = self.config.n_stages
        self.stage_of: dict[str, int] = {}
        for record in self.records:
            for name, stage in record.stage_of.items():
                self.stage_of[name] = stage if self.stages > 1 else 0
        self.replicated = {name for record in self.records for name in record.replicated}

    def tokens(self, step: int) -> list[int]:
        """Valid labels of each microbatch of the global batch."""
        return self.oracle.valid_labels(step)

    def tokens_of_dp(self, step: int) -> list[int]:
        """Valid labels of each dp coordinate."""
        counts, n = self.tokens(step), self.accumulation
        return [sum(counts[r * n : (r + 1) * n]) for r in range(self.dp)]


def scale(ratio: float, facts: Facts, step: int) -> str:
    """ "2.000x: counted once per tp rank (mesh.tp = 2), or ..." for a ratio to the plain model's value."""
    if close(ratio, 1.0):
        return f"{ratio:.10g}x: {ROUNDING}"
    found: dict[str, None] = {}

    def look(value: float, what: str) -> None:
        if value > 0 and not close(value, 1.0) and close(ratio, value):
            found.setdefault(what)

    for axis, degree in (("tp", facts.tp), ("dp", facts.dp), ("pp", facts.pp)):
        look(degree, f"counted once per {axis} rank (mesh.{axis} = {degree})")
        look(1 / degree, f"divided by mesh.{axis} = {degree} once too often")
    if facts.stages != facts.pp:
        look(facts.stages, f"counted once per stage ({facts.stages})")
        look(1 / facts.stages, f"divided by the number of stages ({facts.stages})")
    a, world = facts.accumulation, facts.pp * facts.dp * facts.tp
    look(a, f"counted once per microbatch (accumulation {a})")
    look(1 / a, f"divided by the number of microbatches (accumulation {a}) although the loss is a sum")
    for value, what in (
        (facts.dp * a, "the number of microbatches of the global batch"),
        (facts.dp * facts.tp, "dp * tp"),
        (facts.pp * facts.dp, "pp * dp"),
        (facts.pp * facts.tp, "pp * tp"),
        (world, "the number of ranks"),
    ):
        if found:
            break
        look(value, f"multiplied by {what} ({value})")
        look(1 / value, f"divided by {what} ({value})")
    if step:
        counts, own = facts.tokens(step), facts.tokens_of_dp(step)
        total = sum(counts)
        look(total, f"a sum over the {total} tokens instead of their mean")
        look(1 / total, f"divided by the number of tokens ({total}) twice")
        for rank, count in enumerate(own):
            if count:
                look(total / count, f"normalised by the local token count ({count} of {total}, dp {rank})")
                look(count / total, f"multiplied by dp {rank}'s share of the tokens ({count} of {total})")
        clip = facts.oracle.clip_factors[step - 1]
        look(clip, f"clipped once too often (the clipping factor is {clip:.4g})")
        look(1 / clip, f"not clipped (the clipping factor is {clip:.4g})")
    if not found:
        if abs(ratio) < 1e-9:
            return "0.000x: nothing of it is there"
        if close(ratio, -1.0):
            return "-1.000x: the sign is wrong"
        for k in range(2, 9):
            look(k, f"counted {k} times")
            look(1 / k, f"counted 1/{k} times")
    return f"{ratio:.4f}x: {', or '.join(found)}" if found else f"{ratio:.6g}x"


def ratio_of(value: Tensor, wanted: Tensor) -> float | None:
    """The number that `wanted` has to be multiplied by to give `value`, if there is one."""
    v, w = value.flatten(), wanted.flatten()
    ratio = float((v @ w) / (w @ w))
    return ratio if math.isfinite(ratio) and near(ratio * w, v, scale=worst(w.abs())) else None


def common_ratio(pairs: list[tuple[Tensor, Tensor]]) -> float | None:
    """The one ratio of all (value, wanted) pairs, if there is one."""
    ratios = [ratio_of(value, wanted) for value, wanted in pairs]
    known = [ratio for ratio in ratios if ratio is not None]
    return known[0] if len(known) == len(ratios) and all_close(known) else None


def near(value: Any, wanted: Tensor, scale: float = 0.0) -> bool:
    """Equal to well within what chance would give, relative to the largest element."""
    size = max(worst(wanted.abs()), scale)
    return math.isfinite(size) and worst(errors(value, wanted)) <= CLOSE * size


def close(a: float, b: float, relative: float = CLOSE) -> bool:
    """The same number but for rounding."""
    return math.isclose(a, b, rel_tol=relative, abs_tol=relative if relative > CLOSE else 1e-12)


def all_close(values: list[float], relative: float = CLOSE) -> bool:
    """All the same number, and one at least."""
    return bool(values) and all(close(value, values[0], relative) for value in values)


def where_is(records: Iterable[RankRecord]) -> str:
    """The ranks, by the coordinates that they share."""
    found = list(records)
    shared = [
        f"{axis} {getattr(found[0], axis)}"
        for axis in ("pp", "dp", "tp")
        if len({getattr(record, axis) for record in found}) == 1
    ]
    ranks = ", ".join(str(record.rank) for record in found)
    return f"rank{'s' if len(found) > 1 else ''} {ranks}" + (f" ({', '.join(shared)})" if shared else "")
