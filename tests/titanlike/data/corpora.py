"""Small runs for tests of the data: their configs, and the sample ids of their batches."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from titanlike.config import Config, load_config
from titanlike.data import open_data
from titanlike.data.batch import Batch


def write_texts(folder: Path, name: str, documents: int) -> str:
    """Files of growing length; returns their glob."""
    (folder / name).mkdir()
    for i in range(documents):
        (folder / name / f"{i:03}.txt").write_text(f"{name} {i} " * (i % 23 + 5))
    return str(folder / name / "*.txt")


def run_config(**overrides: Any) -> Config:
    """The config of a small run; a double underscore in a name is a dot."""
    values = {"model.preset": "debug", "train.seq_len": 32, "train.global_batch_size": 8}
    return load_config(None, values | {name.replace("__", "."): value for name, value in overrides.items()})


def batches(config: Config, n: int, dp: int = 1, cursor: Any = None) -> list[list[Batch]]:
    """The next `n` global batches: [batch][dp coordinate]. Cursors go through JSON, as in a checkpoint."""
    per_rank = [list(islice(open_data(config, r, dp).train_batches(cursor), n)) for r in range(dp)]
    return [list(ranks) for ranks in zip(*per_rank)]


def ids(steps: Sequence[Sequence[Batch]]) -> list[list[str]]:
    """The sample ids of each global batch."""
    return [[name for batch in ranks for name in batch.sample_ids] for ranks in steps]
