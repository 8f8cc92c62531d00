"""Where two runs part: the columns of two metrics.jsonl side by side."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlike.errors import UserError
from titanlike.metrics import files

COMPARED = ("loss", "val_loss", "grad_norm", "lr", "tokens")


@dataclass(frozen=True)
class Difference:
    """Two values of one step."""

    step: int
    a: float
    b: float

    @property
    def relative(self) -> float:
        """|a - b| / max(|a|, |b|); 0 for equal values (NaN equals NaN), infinite if just one is not finite."""
        if self.a == self.b or (math.isnan(self.a) and math.isnan(self.b)):
            return 0.0
        if not (math.isfinite(self.a) and math.isfinite(self.b)):
            return math.inf
        return abs(self.a - self.b) / max(abs(self.a), abs(self.b))


@dataclass(frozen=True)
class Comparison:
    """One metric of two runs over the steps at which both have it."""

    name: str
    steps: Sequence[int]
    """The common steps, ascending."""
    first_unequal: Difference | None
    """The first step at which the values are not bitwise equal."""
    first_apart: Difference | None
    """The first step at which the relative difference is above the tolerance."""
    largest: Difference | None
    """The step with the largest relative difference."""


def compare_rows(a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]], tolerance: float) -> list[Comparison]:
    """Compare two runs' rows metric by metric; a metric that one of them lacks is left out."""
    b_by_step = {row["step"]: row for row in b}
    comparisons = []
    for name in COMPARED:
        pairs = [
            Difference(row["step"], row[name], b_by_step[row["step"]][name])
            for row in a
            if name in row and name in b_by_step.get(row["step"], {})
        ]
        if not pairs:
            continue
        comparisons.append(
            Comparison(
                name=name,
                steps=[pair.step for pair in pairs],
                first_unequal=next((pair for pair in pairs if pair.relative > 0), None),
                first_apart=next((pair for pair in pairs if pair.relative > tolerance), None),
                largest=max(pairs, key=lambda pair: pair.relative),
            )
        )
    return comparisons


def compare_runs(a: Path, b: Path, tolerance: float) -> tuple[str, bool]:
    """The comparison as text, and whether the runs agree: no compared metric is apart by more than `tolerance`.

    Raises UserError if a folder holds no metrics.jsonl, or the runs have no step in common.
    """
    for path in (a, b):
        if not (path / files.METRICS_FILE).exists():
            raise UserError(f"{path} holds no {files.METRICS_FILE}; give the folder of a run, such as runs/llama")
    rows_a, rows_b = files.read_metrics(a), files.read_metrics(b)
    comparisons = compare_rows(rows_a, rows_b, tolerance)
    if not comparisons:
        raise UserError(f"{a} ({_span(rows_a)}) and {b} ({_span(rows_b)}) have no step in common")
    lines = [f"A  {a}  ({_span(rows_a)})", f"B  {b}  ({_span(rows_b)})"]
    for comparison in comparisons:
        lines += ["", *_describe(comparison, tolerance)]
    return "\n".join(lines), all(comparison.first_apart is None for comparison in comparisons)


def _describe(comparison: Comparison, tolerance: float) -> list[str]:
    count = len(comparison.steps)
    steps = f"{count} common step{'s' if count > 1 else ''}"
    steps += f" ({comparison.steps[0]} to {comparison.steps[-1]})" if count > 1 else f" ({comparison.steps[0]})"
    if comparison.first_unequal is None:
        return [f"{comparison.name}: equal bitwise, {steps}"]
    lines = [f"{comparison.name}: {steps}"]
    since = "never equal, from" if comparison.first_unequal.step == comparison.steps[0] else "bitwise equal before"
    lines.append(f"  {since:<21} {_values(comparison.first_unequal)}")
    if comparison.first_apart is None:
        lines.append(f"  within {tolerance:g} everywhere")
    else:
        lines.append(f"  parts by more than {tolerance:g} at  {_values(comparison.first_apart)}")
    assert comparison.largest is not None
    lines.append(f"  largest difference    {_values(comparison.largest)}")
    return lines


def _values(difference: Difference) -> str:
    return (
        f"step {difference.step}: A {difference.a!r}  B {difference.b!r}  relative difference {difference.relative:.2e}"
    )


def _span(rows: Sequence[Mapping[str, Any]]) -> str:
    return f"steps {rows[0]['step']} to {rows[-1]['step']}" if rows else "no steps"
