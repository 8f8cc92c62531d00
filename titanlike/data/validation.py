"""Held-out rows: the same ones for every mesh, in batches of which every dp coordinate has the same number."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from titanlike.data.batch import Batch, Row, collate
from titanlike.data.permutation import key_of, permute
from titanlike.data.rows import ConcatRows


class ValidationSet:
    """A fixed list of rows."""

    def __init__(
        self, rows: ConcatRows, name: str, *, seq_len: int, samples: int, seed: int, dp_coordinate: int, dp: int
    ) -> None:
        """At most `samples` of the rows (0: all), chosen by the seed, kept in the order of the text."""
        self.name = name
        self._rows = rows
        self._seq_len = seq_len
        self._dp_coordinate, self._dp = dp_coordinate, dp
        self.n_rows = min(rows.n_rows, samples or rows.n_rows)
        self._chosen = None
        if self.n_rows < rows.n_rows:
            key = key_of("validation rows", seed, name)
            self._chosen = np.sort(permute(np.arange(self.n_rows), rows.n_rows, key))

    def batches(self, rows: int) -> Iterator[Batch]:
        """This dp coordinate's part: batches of `rows` rows, filled up with rows without labels."""
        for first in range(0, self.n_rows, rows * self._dp):
            mine = range(first + rows * self._dp_coordinate, first + rows * (self._dp_coordinate + 1))
            yield collate([self._row(i) if i < self.n_rows else None for i in mine], self._seq_len, {})

    def unigram_entropy(self) -> float:
        """The entropy in nats/token of the labels' own distribution: the loss of a model that knows how often each
        token comes in this very text and nothing else. A yardstick for the loss on it."""
        counts = np.zeros(0, dtype=np.int64)
        for i in range(self.n_rows):
            found = np.bincount(self._row(i).tokens[1:], minlength=len(counts))
            found[: len(counts)] += counts
            counts = found
        return unigram_entropy(counts)

    def _row(self, i: int) -> Row:
        number = i if self._chosen is None else int(self._chosen[i])
        return self._rows.row(number, f"{self.name}:{number}")


def unigram_entropy(counts: np.ndarray) -> float:
    """The entropy in nats of a distribution given by counts; 0 if there are none."""
    counts = counts[counts > 0].astype(np.float64)
    total = counts.sum()
    return float(np.log(total) - (counts * np.log(counts)).sum() / total) if total else 0.0
