"""How documents become rows of seq_len tokens, and the shuffled order of a source's rows.

A `RowOrder` is pure: what it gives depends on the seed, the source and the position, not on what was asked before. So
any process can read any row, and a position, which a checkpoint keeps, is all there is to resume from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from titanlike.data.batch import Row
from titanlike.data.permutation import key_of, permute
from titanlike.data.store import View

Position = dict[str, Any]
"""JSON: how far a source has been read: `epoch` complete passes, and `index` parts `of` so many of the current one."""
Addresses = np.ndarray
"""Where rows are: int64 [rows, 2 or 3], epoch and place in it."""

BLOCK = 512  # places of a pass that are permuted at once: for a batch alone the permutation is mostly overhead


def passes_of(position: Position) -> float:
    """How many times a source has been read at a position; of a stream, the passes that are complete."""
    within = position["row"] / position["rows"] if "rows" in position else 0.0
    return position["epoch"] + (position["index"] + within) / position["of"]


class RowOrder(Protocol):
    """The rows of one source at one seq_len, pass after pass, each pass in an order of its own."""

    def begin(self) -> Position:
        """Before the first row."""
        ...

    def carry(self, position: Position) -> Position:
        """A position of the same source as one of this order, if its rows were cut in another way."""
        ...

    def take(self, position: Position, count: int) -> tuple[Addresses, Position]:
        """The next `count` rows, and the position after them."""
        ...

    def read(self, addresses: Addresses) -> list[Row]:
        """The rows at addresses."""
        ...

    @property
    def rows_per_pass(self) -> float:
        """About how many rows a pass has."""
        ...


class ShuffledRows:
    """Rows that have numbers, in an order that a keyed permutation makes for each pass."""

    def __init__(self, n_rows: int, name: str, seed: int) -> None:
        self.n_rows = n_rows
        self.name = name
        self._seed = seed
        self._blocks: dict[tuple[int, int], np.ndarray] = {}

    def rows(self, numbers: np.ndarray, sample_ids: Sequence[str]) -> list[Row]:
        """Rows by their numbers in [0, n_rows)."""
        raise NotImplementedError

    def begin(self) -> Position:
        return self._position(0)

    def carry(self, position: Position) -> Position:
        """Of rows that were cut in another way, the same share of the pass is taken as read, rounded up to a row."""
        index = -(-(position["index"] + (position.get("row", 0) > 0)) * self.n_rows // position["of"])
        return self._position(position["epoch"] * self.n_rows + index)

    def take(self, position: Position, count: int) -> tuple[Addresses, Position]:
        assert position["of"] == self.n_rows
        first = position["epoch"] * self.n_rows + position["index"]
        addresses = np.stack(np.divmod(np.arange(first, first + count), self.n_rows), axis=1)
        return addresses, self._position(first + count)

    def read(self, addresses: Addresses) -> list[Row]:
        """A sample id is source:epoch:number of the row."""
        parts, names = [], []
        # Addresses are in order, so those of a pass are together, and most often there is one pass.
        for some in np.split(addresses, np.flatnonzero(np.diff(addresses[:, 0])) + 1):
            epoch = int(some[0, 0])
            parts.append(self._numbers(epoch, some[:, 1]))
            names += [f"{self.name}:{epoch}:{number}" for number in parts[-1].tolist()]
        return self.rows(np.concatenate(parts), names)

    def _numbers(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """The numbers of the rows at ascending places of a pass."""
        first, last = int(places[0]) // BLOCK, int(places[-1]) // BLOCK
        if last > first + 1:
            return permute(places, self.n_rows, key_of("order", self._seed, self.name, epoch))
        blocks = [self._block(epoch, block) for block in range(first, last + 1)]
        return (blocks[0] if last == first else np.concatenate(blocks))[places - first * BLOCK]

    def _block(self, epoch: int, block: int) -> np.ndarray:
        """The numbers at a block of places; the blocks used last are kept, for the next batch is most often there."""
        kept = self._blocks.pop((epoch, block), None)
        if kept is None:
            places = np.arange(block * BLOCK, min((block + 1) * BLOCK, self.n_rows))
            kept = permute(places, self.n_rows, key_of("order", self._seed, self.name, epoch))
        self._blocks[epoch, block] = kept
        if len(self._blocks) > 4:
            del self._blocks[next(iter(self._blocks))]
        return kept

    @property
    def rows_per_pass(self) -> float:
        return self.n_rows

    def _position(self, rows: int) -> Position:
        epoch, index = divmod(rows, self.n_rows)
        return {"epoch": epoch, "index": index, "of": self.n_rows}


class ConcatRows(ShuffledRows):
    """The documents as one text, cut every `seq_len` tokens. Row i has the tokens [i * seq_len, (i + 1) * seq_len], so
    that every token but the very first is a label exactly once; the last row may be shorter."""

    def __init__(self, view: View, seq_len: int, name: str, seed: int, *, find_starts: bool) -> None:
        """`find_starts`: rows shall say where documents start in them."""
        super().__init__(-(-(view.n_tokens - 1) // seq_len), name, seed)
        self._view = view
        self._seq_len = seq_len
        self._find_starts = find_starts

    def rows(self, numbers: np.ndarray, sample_ids: Sequence[str]) -> list[Row]:
        start = numbers * self._seq_len
        stop = np.minimum(start + self._seq_len + 1, self._view.n_tokens)
        parts = self._view.parts(start, stop, self._find_starts)
        return [Row(part.tokens, part.starts, name, part.learnt) for part, name in zip(parts, sample_ids)]
