"""Tokens of a source's documents, one after the other, and views of a part of them.

Properties:
- A document is its tokens and the end token after them. Documents have no gap between them.
- Nothing is copied when a store is opened: tokens and the documents' starts may be memory-mapped.
- A view leaves documents out at the cost of two integers for each, whatever the size of the store.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
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

    def read(self, start: int, stop: int) -> np.ndarray:
        """The tokens at positions [start, stop)."""
        parts = [self._shards[i].tokens[low:high] for i, low, high in self._parts(start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def read_learnt(self, start: int, stop: int) -> np.ndarray | None:
        """Which of the tokens at positions [start, stop) are labels, bool; None if all of the store are."""
        if not self.has_learnt:
            return None
        parts = []
        for i, low, high in self._parts(start, stop):
            learnt = self._shards[i].learnt
            parts.append(np.ones(high - low, dtype=bool) if learnt is None else learnt[low:high])
        return np.concatenate(parts)

    def _parts(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(shard, start, stop in the shard) of each shard that [start, stop) touches."""
        shard = int(np.searchsorted(self._first_position, start, side="right")) - 1
        while start < stop:
            first, end = int(self._first_position[shard]), int(self._first_position[shard + 1])
            yield shard, start - first, min(stop, end) - first
            start, shard = end, shard + 1

    def document_at(self, position: int) -> int:
        """The number of the document that has the token at `position`; n_documents at the end."""
        if position >= self.n_tokens:
            return self.n_documents
        shard = int(np.searchsorted(self._first_position, position, side="right")) - 1
        within = position - int(self._first_position[shard])
        return int(self._first_document[shard] + np.searchsorted(self._shards[shard].starts, within, side="right")) - 1

    def starts_in(self, start: int, stop: int) -> np.ndarray:
        """The positions in (start, stop) at which documents start, ascending, int64."""
        shard = int(np.searchsorted(self._first_position, start, side="right")) - 1
        parts = [np.empty(0, dtype=np.int64)]
        while shard < len(self._shards) and (first := int(self._first_position[shard])) < stop:
            starts = self._shards[shard].starts[:-1]
            low = np.searchsorted(starts, start - first, side="right")
            high = np.searchsorted(starts, stop - first, side="left")
            parts.append(np.asarray(starts[low:high], dtype=np.int64) + first)
            shard += 1
        return np.concatenate(parts)

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

    def read(self, start: int, stop: int) -> np.ndarray:
        """The tokens at the view's positions [start, stop)."""
        parts = [self.store.read(low, high) for low, high, _ in self._pieces(start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def read_learnt(self, start: int, stop: int) -> np.ndarray | None:
        """Which of the tokens at the view's positions [start, stop) are labels, bool; None if all of the store are."""
        parts = [self.store.read_learnt(low, high) for low, high, _ in self._pieces(start, stop)]
        found = [part for part in parts if part is not None]  # all or none are
        return np.concatenate(found) if found else None

    def starts_in(self, start: int, stop: int) -> np.ndarray:
        """The view's positions in (start, stop) at which documents start, ascending, int64."""
        parts = [np.empty(0, dtype=np.int64)]
        for low, high, position in self._pieces(start, stop):
            if position > start:
                parts.append(np.array([position], dtype=np.int64))
            parts.append(self.store.starts_in(low, high) - low + position)
        return np.concatenate(parts)

    def spans(self, documents: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The view's positions [start, stop) of each of the view's `documents` (any order), two int64 arrays."""
        i = np.searchsorted(self._document, documents, side="right") - 1
        start, stop = self.store.spans(self._first[i] + documents - self._document[i])
        shift = self._position[i] - self._starts[i]
        return np.maximum(start, self._starts[i]) + shift, np.minimum(stop, self._stops[i]) + shift

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(start, stop) in the store and the position in the view of each range that [start, stop) touches."""
        i = int(np.searchsorted(self._position, start, side="right")) - 1
        while start < stop:
            end = min(stop, int(self._position[i + 1]))
            low = int(self._starts[i]) + start - int(self._position[i])
            yield low, low + end - start, start
            start, i = end, i + 1


def whole(store: TokenStore) -> View:
    """All of a store."""
    return View(store, np.array([0]), np.array([store.n_tokens]), np.array([0]), np.array([store.n_documents]))


def split(store: TokenStore, fraction: float, seed: int) -> tuple[View, View | None]:
    """(the documents to train on, those held out), by the seed alone.

    About `fraction` of the documents is held out, at most all but one. Where that is less than one document, the
    held-out part is the end of the longest one, that share of all tokens but at most half of it: a store of a single
    file has one document.
    """
    n = store.n_documents
    if fraction == 0:
        return whole(store), None
    count = min(round(n * fraction), n - 1)
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
