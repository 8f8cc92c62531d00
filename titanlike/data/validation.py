"""Held-out rows: the same ones for every mesh, in batches of which every dp coordinate has the same number."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from titanlike.data.batch import IGNORE, Batch, Row, collate
from titanlike.data.rows import Addresses, Position, RowOrder

CHUNK = 256  # rows of a pass that are listed at a time


class ValidationSet:
    """A fixed list of rows."""

    def __init__(
        self,
        rows: RowOrder,
        *,
        seq_len: int,
        samples: int,
        document_mask: bool,
        vocab_size: int,
        dp_coordinate: int,
        dp: int,
    ) -> None:
        """The first `samples` rows of a pass, which is shuffled by the seed, or all of it (0)."""
        self._rows = rows
        self._seq_len = seq_len
        self._document_mask = document_mask
        self._vocab_size = vocab_size
        self._dp_coordinate, self._dp = dp_coordinate, dp
        chunks, position = [], rows.begin()
        while position["epoch"] == 0 and (not samples or len(chunks) * CHUNK < samples):
            taken, position = rows.take(position, CHUNK)
            chunks.append(taken[taken[:, 0] == 0])
        self._addresses = np.concatenate(chunks)[: samples or None]
        self.n_rows = len(self._addresses)

    def batches(self, rows: int) -> Iterator[Batch]:
        """This dp coordinate's part: batches of `rows` rows, filled up with rows without labels."""
        for first in range(0, self.n_rows, rows * self._dp):
            yield self._batch(first + rows * self._dp_coordinate, rows)

    def unigram_entropy(self) -> float:
        """The entropy in nats/token of the labels' own distribution: the loss of a model that knows how often each
        token comes in this very text and nothing else. A yardstick for the loss on it."""
        counts = np.zeros(0, dtype=np.int64)
        for first in range(0, self.n_rows, CHUNK):
            labels = self._batch(first, min(CHUNK, self.n_rows - first)).labels.numpy()
            found = np.bincount(labels[labels != IGNORE], minlength=len(counts))
            found[: len(counts)] += counts
            counts = found
        return unigram_entropy(counts)

    def _batch(self, first: int, rows: int) -> Batch:
        mine = self._addresses[first : first + rows]
        read = self._rows.read(mine) if len(mine) else []
        return collate(
            [*read, *[None] * (rows - len(read))],
            self._seq_len,
            {},
            document_mask=self._document_mask,
            vocab_size=self._vocab_size,
        )


class ListedRows:
    """Rows that are at hand, as an order of one pass."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows

    def begin(self) -> Position:
        return {"epoch": 0, "index": 0, "of": len(self._rows)}

    def carry(self, position: Position) -> Position:
        return position

    def take(self, position: Position, count: int) -> tuple[Addresses, Position]:
        stop = min(position["index"] + count, len(self._rows))
        indices = np.arange(position["index"], stop)
        after = {"epoch": int(stop == len(self._rows)), "index": stop, "of": len(self._rows)}
        return np.stack((np.zeros_like(indices), indices), axis=1), after

    def read(self, addresses: Addresses) -> list[Row]:
        return [self._rows[i] for i in addresses[:, 1]]

    @property
    def rows_per_pass(self) -> float:
        return len(self._rows)


def unigram_entropy(counts: np.ndarray) -> float:
    """The entropy in nats of a distribution given by counts; 0 if there are none."""
    counts = counts[counts > 0].astype(np.float64)
    total = counts.sum()
    return float(np.log(total) - (counts * np.log(counts)).sum() / total) if total else 0.0
