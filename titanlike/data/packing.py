"""Rows of whole documents: best-fit packing.

The documents of a pass are shuffled and taken in windows of a fixed number, and each window is packed by itself: its
documents, longest first, each go into the row with the least room that takes them (best-fit decreasing; Ding et al.
2024, arXiv:2404.10830, on why: fewer truncated documents, hardly any padding). So memory is bounded, a row is a pure
function of (seed, source, pass, window, number in the window), and any window is reached at once. The rows of a window
are shuffled.

A document longer than seq_len + 1 tokens is cut every seq_len tokens, as one text would be.
"""

from __future__ import annotations

import functools
from itertools import islice
from typing import NamedTuple

import numpy as np

from titanlike.data.batch import Row
from titanlike.data.permutation import key_of, permute
from titanlike.data.rows import Addresses, Position
from titanlike.data.store import View

WINDOW_TOKENS = 2**22
WINDOW_DOCUMENTS = (64, 2**14)  # fewest and most in a window


class Window(NamedTuple):
    """A window, packed."""

    start: np.ndarray
    """position in the view of each piece of a document"""
    length: np.ndarray
    rows: list[list[int]]
    """the pieces of each row"""


class BestFitRows:
    """The rows of one source, packed."""

    def __init__(self, view: View, seq_len: int, name: str, seed: int) -> None:
        self._view = view
        self._seq_len = seq_len
        self.name = name
        self._seed = seed
        mean = view.n_tokens / view.n_documents
        fewest, most = WINDOW_DOCUMENTS
        self._documents = min(max(int(WINDOW_TOKENS / mean), fewest), most)
        self.n_windows = -(-view.n_documents // self._documents)
        # Two, because a batch may take the end of one window and the beginning of the next.
        self._window = functools.lru_cache(maxsize=2)(self._pack)

    def __reduce__(self) -> tuple[object, ...]:
        return BestFitRows, (self._view, self._seq_len, self.name, self._seed)

    def begin(self) -> Position:
        return {"epoch": 0, "index": 0, "of": self.n_windows, "row": 0, "rows": 1, "seq_len": self._seq_len}

    def carry(self, position: Position) -> Position:
        """A position in the midst of a window that was packed for another length is moved to the next window."""
        if (position["of"], position.get("seq_len")) == (self.n_windows, self._seq_len):
            return position
        read = position["index"] + (position.get("row", 0) > 0)
        over, index = divmod(-(-read * self.n_windows // position["of"]), self.n_windows)
        return {**self.begin(), "epoch": position["epoch"] + over, "index": index}

    def take(self, position: Position, count: int) -> tuple[Addresses, Position]:
        epoch, window, row = position["epoch"], position["index"], position["row"]
        taken, left = [], count
        while left:
            n = len(self._window(epoch, window).rows)
            some = np.arange(row, min(row + left, n))
            taken.append(np.stack((np.full_like(some, epoch), np.full_like(some, window), some), axis=1))
            left, row = left - len(some), row + len(some)
            if row == n:
                row, window = 0, window + 1
            if window == self.n_windows:
                window, epoch = 0, epoch + 1
        rows = len(self._window(epoch, window).rows) if row else 1
        position = {**self.begin(), "epoch": epoch, "index": window, "row": row, "rows": rows}
        return np.concatenate(taken), position

    def read(self, addresses: Addresses) -> list[Row]:
        """A sample id is source:epoch:window.row."""
        wanted: list[tuple[Window, list[int]]] = []
        for epoch, window, row in addresses.tolist():
            packed = self._window(epoch, window)
            wanted.append((packed, packed.rows[row]))
        start = np.concatenate([packed.start[pieces] for packed, pieces in wanted])
        length = np.concatenate([packed.length[pieces] for packed, pieces in wanted])
        parts = iter(self._view.parts(start, start + length, find_starts=False))
        rows = []
        for (_, pieces), (epoch, window, row) in zip(wanted, addresses.tolist()):
            some = list(islice(parts, len(pieces)))
            starts = np.cumsum([len(part.tokens) for part in some[:-1]], dtype=np.int64)
            learnt = [part.learnt for part in some if part.learnt is not None]
            tokens = np.concatenate([part.tokens for part in some])
            name = f"{self.name}:{epoch}:{window}.{row}"
            rows.append(Row(tokens, starts, name, np.concatenate(learnt) if learnt else None))
        return rows

    @property
    def rows_per_pass(self) -> float:
        """As in the first window."""
        documents = min(self._documents, self._view.n_documents)
        return len(self._window(0, 0).rows) * self._view.n_documents / documents

    @property
    def padding(self) -> float:
        """The share of a row that holds nothing, in the first window."""
        packed = self._window(0, 0)
        return 1 - (int(packed.length.sum()) - len(packed.rows)) / (len(packed.rows) * self._seq_len)

    def _pack(self, epoch: int, window: int) -> Window:
        n = self._view.n_documents
        first = window * self._documents
        places = np.arange(first, min(first + self._documents, n))
        documents = permute(places, n, key_of("documents", self._seed, self.name, epoch))
        start, length = cut(*self._view.spans(documents), self._seq_len)
        rows = best_fit(length, self._seq_len + 1)
        order = permute(np.arange(len(rows)), len(rows), key_of("window", self._seed, self.name, epoch, window))
        return Window(start, length, [rows[i] for i in order.tolist()])


def cut(start: np.ndarray, stop: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """(start, length) of the pieces of documents at [start, stop), of at most seq_len + 1 tokens each. Pieces of one
    document share a token, the last label of one and the first input of the next."""
    pieces = np.maximum(-(-(stop - start - 1) // seq_len), 1)
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    piece_start = np.repeat(start, pieces) + number * seq_len
    return piece_start, np.minimum(np.repeat(stop, pieces) - piece_start, seq_len + 1)


def best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Bins of at most `capacity`, as lists of indices into `lengths` (each at most `capacity`): longest first, each
    into the bin with the least room that takes it."""
    bins: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(capacity)]  # bins by the room that is left
    some = 0  # bit r is set where by_room[r] is not empty
    for item in map(int, np.argsort(-lengths, kind="stable")):
        length = int(lengths[item])
        fitting = some >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            chosen = by_room[room].pop()
            if not by_room[room]:
                some ^= 1 << room
            bins[chosen].append(item)
        else:
            room, chosen = capacity, len(bins)
            bins.append([item])
        left = room - length
        if left > 0:
            by_room[left].append(chosen)
            some |= 1 << left
    return bins
