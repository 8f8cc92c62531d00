"""Random tokens, for benchmarks: no files, nothing to tokenise, no end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from titanlike.data.batch import Row
from titanlike.data.rows import ShuffledRows

ROWS = 2**40  # in a pass: more than any run reads


class SyntheticRows(ShuffledRows):
    """Rows of uniformly random ids, each a function of its number. A row is one document."""

    def __init__(self, vocab_size: int, seq_len: int, name: str, seed: int) -> None:
        super().__init__(ROWS, name, seed)
        self._vocab_size = vocab_size
        self._seq_len = seq_len

    def rows(self, numbers: np.ndarray, sample_ids: Sequence[str]) -> list[Row]:
        generators = (np.random.default_rng((self._seed, number)) for number in numbers.tolist())
        size, none = self._seq_len + 1, np.empty(0, dtype=np.int64)
        return [
            Row(generator.integers(self._vocab_size, size=size, dtype=np.uint32), none, name)
            for generator, name in zip(generators, sample_ids)
        ]
