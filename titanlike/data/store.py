"""Tokens of a source's documents, one after the other, and views of a part of them.

Properties:
- A document is its tokens and the end token after them. Documents have no gap between them.
- Nothing is copied when a store is opened: tokens and the documents' starts may be memory-mapped.
- A view leaves documents out at the cost of two integers for each, whatever the size of the store.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from titanlike.data.permutation import key_of, permute


class Shard(Protocol):
    """A part of a store."""

    @property
    def tokens(self) -> np.ndarray:
        """Token ids [tokens], of an unsigned type."""
        ...

    @property
    def starts(self) -> np.ndarray:
        """Where each document starts within the shard, and its number of tokens: [documents + 1], ascending."""
        ...

    @property
    def learnt(self) -> np.ndarray | None:
        """Which tokens are labels, bool [tokens]; None: all."""
        ...

    @property
    def n_tokens(self) -> int: ...

    @property
    def n_documents(self) -> int: ...


class ArrayShard(NamedTuple):
    """A shard in memory."""

    tokens: np.ndarray
    starts: np.ndarray
    learnt: np.ndarray | None = None

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def n_documents(self) -> int:
        return len(self.starts) - 1


class Part(NamedTuple):
    """A part of the documents."""

    tokens: np.ndarray
    starts: np.ndarray | None
    """where in it documents start, but for its own beginning, int64; None if nobody asked"""
    learnt: np.ndarray | None
    """which tokens are labels, bool; None: all"""


def joined(parts: Sequence[Part], starts: np.ndarray | None) -> Part:
    """Parts, one after the other, as one that has these starts."""
    learnt = [part.learnt for part in parts if part.learnt is not None]
    return Part(np.concatenate([part.tokens for part in parts]), starts, np.concatenate(learnt) if learnt else None)


def _parts_of(shard: Shard, low: np.ndarray, high: np.ndarray, find_starts: bool, find_learnt: bool) -> list[Part]:
    """The parts of a shard at its positions [low, high)."""
    spans = list(zip(low.tolist(), high.tolist()))
    tokens = [shard.tokens[a:b] for a, b in spans]
    starts: list[np.ndarray | None] = [None] * len(spans)
    learnt: list[np.ndarray | None] = [None] * len(spans)
    if find_starts:
        first, last = np.searchsorted(shard.starts, low, side="right"), np.searchsorted(shard.starts, high, side="left")
        starts = [shard.starts[i:j] - a for i, j, (a, _) in zip(map(int, first), map(int, last), spans)]
    if find_learnt:
        flags = shard.learnt
        learnt = [np.ones(b - a, dtype=bool) if flags is None else flags[a:b] for a, b in spans]
    return [Part(*fields) for fields in zip(tokens, starts, learnt)]


class TokenStore:
    """Documents in one or more shards. Positions and document numbers run over all shards."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        self._shards = list(shards)
        # The first position, and the first document, of each shard; then the totals.
        self._first_position = np.cumsum([0, *(shard.n_tokens for shard in shards)], dtype=np.int64)
        self._first_document = np.cumsum([0, *(shard.n_documents for shard in shards)], dtype=np.int64)
        self.n_tokens = int(self._first_position[-1])
        self.n_documents = int(self._first_document[-1])
        self.has_learnt = any(shard.learnt is not None for shard in shards)

    def digest(self) -> str:
        """A string that is equal for equal documents. Reads all of them."""
        digest = hashlib.blake2b(digest_size=16)
        for shard in self._shards:
            digest.update(np.ascontiguousarray(shard.tokens).data)
            digest.update(np.ascontiguousarray(shard.starts).data)
            if shard.learnt is not None:
                digest.update(np.ascontiguousarray(shard.learnt).data)
        return digest.hexdigest()

    def parts(self, start: np.ndarray, stop: np.ndarray, find_starts: bool) -> list[Part]:
        """The parts at positions [start, stop), any number of them, in the order asked for."""
        shard_of = np.searchsorted(self._first_position, start, side="right") - 1
        low = start - self._first_position[shard_of]
        high = low + stop - start
        found: list[Part] = [None] * len(start)  # type: ignore[list-item]
        for number in map(int, np.unique(shard_of) if len(self._shards) > 1 else (0,)):
            shard, chosen = self._shards[number], np.flatnonzero(shard_of == number)
            parts = _parts_of(shard, low[chosen], high[chosen], find_starts, self.has_learnt)
            for i, part in zip(chosen.tolist(), parts):
                found[i] = part
        for crossing in np.flatnonzero(stop > self._first_position[shard_of + 1]):
            found[crossing] = self._across(int(start[crossing]), int(stop[crossing]), find_starts)
        return found

    def _across(self, start: int, stop: int, find_starts: bool) -> Part:
        """A part that several shards have."""
        ends = self._first_position[(self._first_position > start) & (self._first_position < stop)]
        cuts = np.concatenate(([start], ends, [stop]))
        pieces = self.parts(cuts[:-1], cuts[1:], find_starts)
        if not find_starts:
            return joined(pieces, None)
        starts = [piece.starts + cut - start for piece, cut in zip(pieces, cuts) if piece.starts is not None]
        return joined(pieces, np.sort(np.concatenate((ends - start, *starts))))

    def spans(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The positions [start, stop) of each of `documents` (any order), two int64 arrays."""
        start, stop = np.empty(len(documents), np.int64), np.empty(len(documents), np.int64)
        shard_of = np.searchsorted(self._first_document, documents, side="right") - 1
        for shard in np.unique(shard_of):
            chosen = shard_of == shard
            within = documents[chosen] - self._first_document[shard]
            start[chosen] = self._shards[shard].starts[within].astype(np.int64) + self._first_position[shard]
            stop[chosen] = self._shards[shard].starts[within + 1].astype(np.int64) + self._first_position[shard]
        return start, stop


class View:
    """A part of a store: ascending ranges of its positions, seen as if they were one. Each range is a run of documents,
    of which the first may lack its beginning and the last its end."""

    def __init__(
        self, store: TokenStore, starts: np.ndarray, stops: np.ndarray, first: np.ndarray, counts: np.ndarray
    ) -> None:
        """Range i has the positions [starts[i], stops[i]), and `counts[i]` documents from document `first[i]` on."""
        self.store = store
        self._starts, self._stops, self._first = (np.asarray(a, dtype=np.int64) for a in (starts, stops, first))
        self._position = np.concatenate(([0], np.cumsum(self._stops - self._starts)))
        self._document = np.concatenate(([0], np.cumsum(np.asarray(counts, dtype=np.int64))))
        self.n_tokens = int(self._position[-1])
        self.n_documents = int(self._document[-1])

    def parts(self, start: np.ndarray, stop: np.ndarray, find_starts: bool) -> list[Part]:
        """The parts of the view at positions [start, stop), any number of them, in the order asked for."""
        i = np.searchsorted(self._position, start, side="right") - 1
        low = self._starts[i] + start - self._position[i]
        found = self.store.parts(low, low + stop - start, find_starts)
        for crossing in np.flatnonzero(stop > self._position[i + 1]):
            found[crossing] = self._across(int(start[crossing]), int(stop[crossing]), find_starts)
        return found

    def _across(self, start: int, stop: int, find_starts: bool) -> Part:
        """A part that several ranges have."""
        pieces, starts = [], []
        i = int(np.searchsorted(self._position, start, side="right")) - 1
        position = start
        while position < stop:
            end = min(stop, int(self._position[i + 1]))
            low = self._starts[i] + position - self._position[i]
            piece = self.store.parts(np.array([low]), np.array([low + end - position]), find_starts)[0]
            pieces.append(piece)
            if piece.starts is not None:
                begins = [] if position == start else [position - start]
                starts.append(np.concatenate((np.array(begins, dtype=np.int64), piece.starts + position - start)))
            position, i = end, i + 1
        return joined(pieces, np.concatenate(starts) if find_starts else None)

    def spans(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The view's positions [start, stop) of each of the view's `documents` (any order), two int64 arrays."""
        i = np.searchsorted(self._document, documents, side="right") - 1
        start, stop = self.store.spans(self._first[i] + documents - self._document[i])
        shift = self._position[i] - self._starts[i]
        return np.maximum(start, self._starts[i]) + shift, np.minimum(stop, self._stops[i]) + shift


def whole(store: TokenStore) -> View:
    """All of a store."""
    return View(store, np.array([0]), np.array([store.n_tokens]), np.array([0]), np.array([store.n_documents]))


MOST_HELD_OUT = 10_000  # documents; each costs a read at a random place when the store is opened


def split(store: TokenStore, fraction: float, seed: int) -> tuple[View, View | None]:
    """(the documents to train on, those held out), by the seed alone.

    About `fraction` of the documents is held out, at most MOST_HELD_OUT and all but one. Where that is less than one
    document, the held-out part is the end of the longest one, that share of all tokens but at most half of it: a store
    of a single file has one document.
    """
    n = store.n_documents
    if fraction == 0:
        return whole(store), None
    count = min(round(n * fraction), MOST_HELD_OUT, n - 1)
    if count == 0 or n * fraction < 1:
        return _split_document(store, fraction)
    chosen = np.sort(permute(np.arange(count), n, key_of("validation", seed)))
    start, stop = store.spans(chosen)
    # What is left: from the end of each held-out document to the start of the next.
    left_start, left_stop = np.concatenate(([0], stop)), np.concatenate((start, [store.n_tokens]))
    first, end = np.concatenate(([0], chosen + 1)), np.concatenate((chosen, [n]))
    filled = end > first
    left = View(store, left_start[filled], left_stop[filled], first[filled], (end - first)[filled])
    return left, View(store, start, stop, chosen, np.ones_like(chosen))


def _split_document(store: TokenStore, fraction: float) -> tuple[View, View | None]:
    start, stop = store.spans(np.arange(store.n_documents))
    longest = int(np.argmax(stop - start))
    end = int(stop[longest])
    cut = end - min(max(2, round(store.n_tokens * fraction)), int(end - start[longest]) // 2)
    if end - cut < 2:
        return whole(store), None
    held = View(store, np.array([cut]), np.array([end]), np.array([longest]), np.array([1]))
    starts, stops = np.array([0, end]), np.array([cut, store.n_tokens])
    first, counts = np.array([0, longest + 1]), np.array([longest + 1, store.n_documents - longest - 1])
    filled = counts > 0
    return View(store, starts[filled], stops[filled], first[filled], counts[filled]), held
