"""The tables before the first step."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from titanlike.metrics import Metrics, MetricsConfig
from titanlike.metrics.tables import (
    BatchFacts,
    MemoryFacts,
    ModelFacts,
    PipelineFacts,
    format_bytes,
    format_count,
    startup_tables,
)

MODEL = ModelFacts("llama 26m", 26_000_000, 4_194_304, {"layers": 6, "dim": 512})
MESH = {"pp": 1, "dp": 2, "tp": 1}
BATCH = BatchFacts(global_batch_size=8, microbatch_size=1, dp=2, seq_len=256, steps=100)


def shown(tmp_path: Path, *args: Any, **kwargs: Any) -> str:
    out = io.StringIO()
    with Metrics(MetricsConfig(tensorboard=False), tmp_path, 10, file=out) as metrics:
        metrics.tables(startup_tables(*args, **kwargs))
    return out.getvalue()


def test_batch_arithmetic_is_spelled_out(tmp_path: Path) -> None:
    text = shown(tmp_path, MODEL, MESH, BATCH)
    assert "pp 1 × dp 2 × tp 1 = 2" in text
    assert "8 = dp 2 × microbatch 1 × accumulation 4" in text
    assert "2,048 = 8 × 256" in text and "204,800 in 100 steps" in text
    assert "26,000,000 (26M)" in text and "21,805,696" in text


def test_piped_tables_are_plain_and_not_cut(tmp_path: Path) -> None:
    """Values are shown as they are: rich would take [/data] for markup, and cut a pipe at 80 columns."""
    path = "/a/very/long/path/" * 5 + "[/data]"
    text = shown(tmp_path, MODEL, MESH, BATCH, data=[("source", path)], run=[("folder", "runs/[x]")])
    assert "\x1b" not in text and "runs/[x]" in text
    assert path in "".join(line[26:].strip() for line in text.splitlines())


def test_pipeline_and_memory_of_each_rank(tmp_path: Path) -> None:
    memory = [MemoryFacts(rank, 100 * 2**20, 100 * 2**20, (100 + rank) * 2**20) for rank in range(2)]
    text = shown(tmp_path, MODEL, MESH, BATCH, memory=memory, pipeline=PipelineFacts("1f1b", 2, 4, 0.2))
    assert "20.0% of each rank's time (predicted)" in text
    lines = [line.split() for line in text.splitlines() if line.startswith("rank")]
    assert [line[-4:] for line in lines] == [["100.0", "MiB", "300.0", "MiB"], ["101.0", "MiB", "301.0", "MiB"]]


def test_many_ranks_are_shown_by_their_extremes(tmp_path: Path) -> None:
    """A table of 512 rows would push everything else off the screen."""
    memory = [MemoryFacts(rank, 0, 0, (rank * 7) % 100 * 2**20) for rank in range(100)]
    text = shown(tmp_path, MODEL, MESH, BATCH, memory=memory)
    assert "least: rank 0" in text and "most: rank 57" in text and "rank 3 " not in text


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (1234, "1.23K"), (999_999, "1M"), (8_030_261_248, "8.03B"), (10**15, "1,000T")],
)
def test_counts(count: int, text: str) -> None:
    assert format_count(count) == text


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 * 2**40, "5.0 TiB")])
def test_bytes(size: int, text: str) -> None:
    assert format_bytes(size) == text
