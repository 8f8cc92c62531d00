"""The two files that a run writes about itself, and how they are read back.

`metrics.jsonl` holds one JSON object a step, `events.jsonl` one object an event (start, resume, ...).

- Floats are written with all their digits, so two runs can be compared bitwise by their files.
- A number that is not finite is written as the string "NaN", "Infinity" or "-Infinity": plain JSON has no word for it.
- Each line reaches the operating system at once, so a killed process loses at most the line that it was writing; the
  readers pass over such a torn last line.
- There is one line a step. A run that resumes from step k first moves the lines after k, which belong to the steps that
  are about to be run again, to `metrics.dropped.jsonl`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

METRICS_FILE = "metrics.jsonl"
DROPPED_FILE = "metrics.dropped.jsonl"
EVENTS_FILE = "events.jsonl"

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode(values: Mapping[str, Any]) -> str:
    """One line of JSON, without its newline. Floats keep their digits; those that are not finite become strings."""
    return json.dumps({key: _plain(value) for key, value in values.items()}, allow_nan=False)


def decode(line: str) -> dict[str, Any]:
    """The object that `encode` wrote. Raises ValueError for a line that is not a whole JSON object."""
    values = json.loads(line)
    if not isinstance(values, dict):
        raise ValueError("not a JSON object")
    return {key: _NOT_FINITE.get(value, value) if isinstance(value, str) else value for key, value in values.items()}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a .jsonl file, in its order; no file is no objects. Torn or foreign lines are left out."""
    if not path.exists():
        return []
    objects = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            objects.append(decode(line))
        except ValueError:
            continue
    return objects


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The run's metrics, one object a step, by ascending step. Where a step occurs twice the later line counts.

    Only numbers are returned: what else a foreign hand wrote into a line is left out.
    """
    by_step = {row["step"]: row for row in _rows(run_dir / METRICS_FILE)}
    return [by_step[step] for step in sorted(by_step)]


def read_dropped(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of steps that were run again, in the order in which they were dropped."""
    return _rows(run_dir / DROPPED_FILE)


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """The run's events in the order in which they happened."""
    return [values for values in read_lines(run_dir / EVENTS_FILE) if isinstance(values.get("event"), str)]


def drop_after(run_dir: Path, step: int) -> int:
    """Move the lines of metrics.jsonl after `step` to metrics.dropped.jsonl, drop torn ones, and return how many moved.

    The kept lines are written beside the file and renamed onto it, so a kill leaves one whole file or the other.
    """
    path = run_dir / METRICS_FILE
    if not path.exists():
        return 0
    kept, dropped = [], []
    text = path.read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines():
        try:
            values = decode(line)
        except ValueError:
            continue
        if _has_step(values):
            (kept if values["step"] <= step else dropped).append(line + "\n")
    if "".join(kept) == text:
        return 0
    if dropped:
        with open(run_dir / DROPPED_FILE, "a", encoding="utf-8") as file:
            file.writelines(dropped)
    beside = path.with_name(METRICS_FILE + ".new")
    with open(beside, "w", encoding="utf-8") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    return len(dropped)


def open_append(path: Path) -> TextIO:
    """Open for appending, one write a line. Ends a torn last line first, so that the next object has its own line."""
    torn = False
    if path.exists() and path.stat().st_size:
        with open(path, "rb") as file:
            file.seek(-1, os.SEEK_END)
            torn = file.read(1) != b"\n"
    file = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115 - the caller keeps it open
    if torn:
        file.write("\n")
    return file


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = [values for values in read_lines(path) if _has_step(values)]
    return [{name: value for name, value in row.items() if isinstance(value, (int, float))} for row in rows]


def _has_step(values: Mapping[str, Any]) -> bool:
    return isinstance(values.get("step"), int)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
