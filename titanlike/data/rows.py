"""How a view of documents becomes rows of seq_len tokens, and the shuffled order of a source's rows."""

from __future__ import annotations

from typing import TypedDict

import numpy as np

from titanlike.data.batch import Row
from titanlike.data.permutation import key_of, permute
from titanlike.data.store import View


class Position(TypedDict):
    """How far a source has been read."""

    epoch: int
    """passes that are complete"""
    index: int
    """rows of the current pass that have been read, below the number of rows"""


class ConcatRows:
    """The documents as one text, cut every `seq_len` tokens. Row i has the tokens [i * seq_len, (i + 1) * seq_len], so
    that every token but the very first is a label exactly once; the last row may be shorter."""

    def __init__(self, view: View, seq_len: int, name: str, seed: int) -> None:
        self._view = view
        self._seq_len = seq_len
        self._name = name
        self._seed = seed
        self.n_rows = -(-(view.n_tokens - 1) // seq_len)

    def take(self, position: Position, count: int) -> tuple[list[tuple[int, int]], Position]:
        """The next `count` rows from `position`, as (epoch, index in the epoch), and the position after them."""
        first = position["epoch"] * self.n_rows + position["index"]
        taken = [divmod(i, self.n_rows) for i in range(first, first + count)]
        epoch, index = divmod(first + count, self.n_rows)
        return taken, Position(epoch=epoch, index=index)

    def read(self, address: tuple[int, int]) -> Row:
        """The row at (epoch, index in the epoch): a pure function of the seed, the source's name and the address."""
        epoch, index = address
        number = int(permute(np.array([index]), self.n_rows, key_of("order", self._seed, self._name, epoch))[0])
        return Row(self.row(number), f"{self._name}:{epoch}:{number}")

    def row(self, number: int) -> np.ndarray:
        """The tokens of row `number` in the order of the text."""
        start = number * self._seq_len
        return self._view.read(start, min(start + self._seq_len + 1, self._view.n_tokens))
