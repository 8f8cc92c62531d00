"""The result of a verification: a table for people, JSON for machines."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from titanlike.printable import printable
from titanlike.verify.compare import TOLERANCE, Check, Difference
from titanlike.verify.pieces import ACTIVATIONS, CHECKS, COMPUTE_WEIGHTS, WEIGHTS
from titanlike.verify.shrink import STEPS


@dataclasses.dataclass
class Report:
    """All comparisons, and what the first difference looks like."""

    mesh: dict[str, int]
    about: list[tuple[str, str]]
    """(label, value) lines about what was verified"""
    changes: list[tuple[str, Any, Any]]
    """(key, the user's value, the value that was verified)"""
    notes: list[str]
    """what is not covered"""
    checks: list[Check] = dataclasses.field(repr=False)
    """in the order in which the values were computed"""
    reading: list[str]
    """sentences about the first difference"""
    seconds: float
    """wall time"""

    @property
    def same(self) -> bool:
        """Whether everything is within the tolerance."""
        return all(check.same for check in self.checks)

    @property
    def first(self) -> Check | None:
        """The first comparison that differs."""
        return next((check for check in self.checks if not check.same), None)

    def as_json(self) -> dict[str, Any]:
        """What JSON can hold; an infinite error is the text "inf"."""
        return {
            "same": self.same,
            "tolerance": TOLERANCE,
            "mesh": self.mesh,
            "about": dict(self.about),
            "changes": {key: [old, new] for key, old, new in self.changes},
            "notes": self.notes,
            "checks": [
                {
                    "check": check.key.check,
                    "step": check.key.step,
                    "tensors": check.tensors,
                    "max_abs_error": _number(check.error),
                    "differing": [_difference(difference) for difference in check.differing],
                }
                for check in self.checks
            ],
            "first_difference": None
            if self.first is None
            else {"check": self.first.key.check, "step": self.first.key.step}
            | _difference(self.first.differing[0])
            | {"reading": self.reading},
            "seconds": round(self.seconds, 2),
        }


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _difference(difference: Difference) -> dict[str, Any]:
    return {
        "tensor": difference.name,
        "max_abs_error": _number(difference.error),
        "index": list(difference.index),
        "value": _number(difference.value),
        "wanted": _number(difference.wanted),
        "ratio": _number(difference.ratio),
        "rank": None if difference.record is None else difference.record.rank,
        "problem": difference.problem or None,
    }


def print_report(report: Report, file: Any = None) -> None:
    """The table, and the first difference, on standard output or `file`."""
    from rich.console import Console
    from rich.text import Text

    console = Console(file=file, highlight=False)
    if not console.is_terminal:
        console.width = 120  # a pipe has no width, and rich would cut tables at 80
    console.print(_about_table(report))
    console.print(_table(report))
    for note in report.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    first = report.first
    if first is None:
        mesh = " x ".join(f"{axis} {degree}" for axis, degree in report.mesh.items())
        console.print(
            Text(f"The same run: {mesh} equals one rank to {TOLERANCE:g}. ({report.seconds:.0f} s)", "bold green")
        )
        return
    for line in describe(first, report.reading):
        console.print(Text(line), soft_wrap=True)
    console.print(Text(f"Not the same run. ({report.seconds:.0f} s)", "bold red"))


def describe(check: Check, reading: list[str]) -> list[str]:
    """The first tensor of a comparison that differs, its worst element, and the reading, line by line."""
    difference = check.differing[0]
    when = "before the first step" if check.key.step == 0 else f"in step {check.key.step}"
    lines = [f"first difference: {check.key.check} {when}: {difference.name}"]
    if difference.record is not None:
        index = f"[{', '.join(map(str, difference.index))}]" if difference.index else ""
        lines.append(
            f"  worst element: {index or 'the number'} is {difference.value:.12g} on {difference.record.place}, "
            f"{difference.wanted:.12g} on one rank"
        )
        lines.append(f"  ratio: {difference.ratio:.6g}x")
    lines += [f"  reading: {sentence}" for sentence in reading]
    return lines


def _about_table(report: Report) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for label, value in report.about:
        table.add_row(label, Text(printable(value)))
    if report.changes:
        small = ", ".join(
            f"{key.removeprefix('model.')} {_short(old)} -> {_short(new)}" for key, old, new in report.changes
        )
        table.add_row("made small", Text(small))
    return table


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "none" if value is None else str(value)


def _table(report: Report) -> Any:
    """A row for each comparison, a column for each step; in it the largest absolute error."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold cyan")
    table.add_column("largest absolute error", no_wrap=True)
    table.add_column("tensors", justify="right")
    for name in ("start", *(f"step {step}" for step in range(1, STEPS + 1))):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("first that differs", overflow="fold")
    for label in CHECKS:
        here = {check.key.step: check for check in report.checks if check.key.check == label}
        if not here:
            if label == ACTIVATIONS:
                table.add_row(Text(label, "dim"), Text("not seen in a compiled model", "dim"))
            continue
        cells = [_cell(here.get(step)) for step in range(STEPS + 1)]
        wrong = [check for _, check in sorted(here.items()) if not check.same]
        name = {WEIGHTS: "master weights", COMPUTE_WEIGHTS: "weights in use"}.get(label, label)
        table.add_row(
            name,
            f"{max(check.tensors for check in here.values())}",
            *cells,
            wrong[0].differing[0].name if wrong else "",
        )
    return table


def _cell(check: Check | None) -> Any:
    from rich.text import Text

    if check is None:
        return Text("")
    return Text(f"{check.error:.1e}", "green" if check.same else "bold red")
