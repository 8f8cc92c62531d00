"""Runs as one self-contained HTML page: what `scripts/report.py` writes.

- The page loads nothing from anywhere: data, style and script are inside. It opens from a disk without a network.
- Whatever state a run is in, there is a page: no steps yet, losses that are not finite, a torn last line, a run that is
  still going on. Only a folder without metrics.jsonl and events.jsonl is a mistake.
- Long runs are drawn from buckets of steps, each with its mean, minimum and maximum, so a spike of one step is seen.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from html import escape
from importlib.resources import files as package_files
from pathlib import Path
from typing import Any

from titanlike.errors import UserError
from titanlike.metrics import files, names
from titanlike.metrics.timers import PHASES

MAX_POINTS = 3000  # a page draws about 1,000 pixels across; more points make it slow, not better
MAX_NONFINITE = 500
CONFIG_FILE = "config.toml"


@dataclass(frozen=True)
class Run:
    """One run as it lies in its folder."""

    name: str
    rows: list[dict[str, Any]]
    """metrics.jsonl, by ascending step."""
    dropped: list[dict[str, Any]]
    """Steps that were run and then run again after a resume."""
    events: list[dict[str, Any]]
    config: dict[str, Any]
    """Resolved config by dotted key; empty if the run has none."""


def load_runs(run_dirs: Sequence[Path]) -> list[Run]:
    """Read the runs and name them: by their folders' last parts, as many as it takes to tell them apart.

    Raises UserError for a folder that is missing, or holds no run.
    """
    paths = [Path(path) for path in run_dirs]
    resolved = [path.resolve() for path in paths]
    for path in paths:
        if not path.is_dir():
            raise UserError(f"{path} is not a folder; give the folder of a run, such as runs/llama")
        if not (path / files.METRICS_FILE).exists() and not (path / files.EVENTS_FILE).exists():
            raise UserError(f"{path} holds no {files.METRICS_FILE}; give the folder of a run, such as runs/llama")
    for path in resolved:
        if resolved.count(path) > 1:
            raise UserError(f"{path} is given twice")
    depth = 1
    while len({path.parts[-depth:] for path in resolved}) < len(resolved):
        depth += 1
    return [
        Run(
            name="/".join(absolute.parts[-depth:]).replace("//", "/"),
            rows=files.read_metrics(path),
            dropped=files.read_dropped(path),
            events=[{"step": 0, **event} for event in files.read_events(path)],
            config=_read_config(path / CONFIG_FILE),
        )
        for path, absolute in zip(paths, resolved)
    ]


def render(runs: Sequence[Run], now: datetime | None = None) -> str:
    """The page, as HTML text."""
    data = {
        "runs": [_run_data(run) for run in runs],
        "phases": list(PHASES),
        "names": {
            entry.name: {"unit": entry.unit, "meaning": entry.meaning}
            for entries in names.SECTIONS.values()
            for entry in entries
        },
        "config": _config_rows(runs),
    }
    # "<" would let a name in the data end the script element.
    text = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    page = package_files("titanlike.metrics") / "page"
    title = escape(", ".join(run.name for run in runs))
    made = (now or datetime.now(timezone.utc)).strftime("%Y-%m-%d %H:%M UTC")
    return (
        "<!doctype html>\n"
        f'<html lang="en"><head><meta charset="utf-8"><title>{title} – titanlike</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>\n{(page / 'report.css').read_text(encoding='utf-8')}</style></head>\n"
        f'<body data-made="{made}"><main id="page"><noscript>This page draws its charts with JavaScript.</noscript>'
        "</main>\n"
        f'<script type="application/json" id="data">{text}</script>\n'
        f"<script>\n{(page / 'report.js').read_text(encoding='utf-8')}</script></body></html>\n"
    )


def _run_data(run: Run) -> dict[str, Any]:
    rows = run.rows
    buckets = _buckets(len(rows))
    elapsed = _elapsed(rows, run.events)
    nonfinite = [
        [row["step"], name, str(value)] for row in rows for name, value in row.items() if not math.isfinite(value)
    ]
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        if name not in ("step", "wall_time"):
            column = _column([row.get(name) for row in rows], buckets)
            if column is not None:
                columns[name] = column
    return {
        "name": run.name,
        "steps": [rows[bucket[-1]]["step"] for bucket in buckets],
        "elapsed": [_short(elapsed[bucket[-1]]) for bucket in buckets],
        "bucket": len(buckets[0]) if buckets else 1,
        "columns": columns,
        "nonfinite": nonfinite[:MAX_NONFINITE],
        "nonfinite_count": len(nonfinite),
        "dropped": _dropped(run.dropped),
        "events": [{key: _finite(value) for key, value in event.items()} for event in run.events],
        "summary": _summary(run, elapsed),
    }


def _buckets(count: int) -> list[range]:
    """Consecutive ranges of row indices, all of the same length but the last."""
    size = max(1, -(-count // MAX_POINTS))
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def _column(values: Sequence[Any], buckets: Sequence[range]) -> dict[str, Any] | None:
    """One metric over the buckets, or None if it has no values.

    `i` are the indices of the buckets that have it (left out if all do), `v` their means, `lo` and `hi` their minima
    and maxima (left out if they are the means). A bucket without a finite value has None.
    """
    index, mean, low, high = [], [], [], []
    for number, bucket in enumerate(buckets):
        present = [values[i] for i in bucket if values[i] is not None]
        if not present:
            continue
        finite = [value for value in present if math.isfinite(value)]
        index.append(number)
        mean.append(_short(sum(finite) / len(finite)) if finite else None)
        low.append(_short(min(finite)) if finite else None)
        high.append(_short(max(finite)) if finite else None)
    if not index:
        return None
    column: dict[str, Any] = {"v": mean}
    if len(index) < len(buckets):
        column["i"] = index
    if low != high:
        column |= {"lo": low, "hi": high}
    return column


def _elapsed(rows: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> list[float]:
    """Seconds of training up to each row, without the time between a run's death and its resume."""
    resumed = {event.get("step") for event in events if event["event"] in ("start", "resume")}
    total, elapsed = 0.0, []
    previous: Any = None
    for row in rows:
        step_time = row.get("step_time_s", 0.0)
        gap = previous is None or previous["step"] in resumed or "wall_time" not in row or "wall_time" not in previous
        seconds = step_time if gap else row["wall_time"] - previous["wall_time"]
        if math.isfinite(seconds):
            total += max(seconds, 0.0)
        elapsed.append(total)
        previous = row
    return elapsed


def _dropped(rows: Sequence[Mapping[str, Any]]) -> list[list[list[float]]]:
    """The loss of steps that were run again, as separate pieces of (step, loss) of consecutive steps."""
    pieces: list[list[list[float]]] = []
    last = None
    for row in rows:
        loss = row.get("loss")
        if loss is None or not math.isfinite(loss):
            continue
        if last is None or row["step"] != last + 1:
            pieces.append([])
        pieces[-1].append([row["step"], _short(loss)])
        last = row["step"]
    return [piece[:: -(-len(piece) // MAX_POINTS)] for piece in pieces[-50:]]


def _summary(run: Run, elapsed: Sequence[float]) -> dict[str, Any]:
    """The numbers of the table at the top. A number that the run does not have is None."""
    rows = run.rows

    def last(name: str) -> Any:
        return next((_finite(row[name]) for row in reversed(rows) if name in row), None)

    def finite(name: str) -> list[float]:
        return [row[name] for row in rows if name in row and math.isfinite(row[name])]

    rates, validation, memory = finite("tokens_per_s"), finite("val_loss"), finite("memory/peak_max_bytes")
    meshes = [event["mesh"] for event in run.events if isinstance(event.get("mesh"), dict)]
    return {
        "step": rows[-1]["step"] if rows else 0,
        "tokens": last("tokens"),
        "loss": last("loss"),
        "val_loss": last("val_loss"),
        "best_val_loss": min(validation) if validation else None,
        "tokens_per_s": sorted(rates)[len(rates) // 2] if rates else None,
        "memory_bytes": max(memory) if memory else None,
        "seconds": elapsed[-1] if elapsed else None,
        "resumes": sum(event["event"] == "resume" for event in run.events),
        "mesh": meshes[-1] if meshes else None,
    }


def _read_config(path: Path) -> dict[str, Any]:
    """The resolved config, flat; empty if the file is missing or not TOML, which is no reason to refuse a report."""
    import tomli

    try:
        tables = tomli.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomli.TOMLDecodeError):
        return {}
    flat: dict[str, Any] = {}

    def walk(table: Mapping[str, Any], prefix: str) -> None:
        for key, value in table.items():
            if isinstance(value, dict):
                walk(value, f"{prefix}{key}.")
            else:
                flat[prefix + key] = value

    walk(tables, "")
    return flat


def _config_rows(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Each config key with its value, as text, in each run, and whether the runs differ in it."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    return [
        {
            "key": key,
            "values": [_config_text(run.config, key) for run in runs],
            "differs": len({_config_text(run.config, key) for run in runs if run.config}) > 1,
        }
        for key in keys
    ]


def _config_text(config: Mapping[str, Any], key: str) -> str | None:
    return json.dumps(config[key], default=str) if key in config else None


def _short(value: float) -> float | int:
    """Enough digits to draw."""
    return value if isinstance(value, int) else float(f"{value:.6g}")


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
