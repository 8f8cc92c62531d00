"""Sources that can only be read from one end to the other: a streamed dataset, or a user's iterator.

A stream is read whole by every dp coordinate, which keeps its own rows: so the rows of a global batch do not depend on
dp. It is read by one process, in order, and the worker that reads it puts the position into the cursor.

Documents are concatenated and cut every seq_len tokens. Rows are shuffled within blocks of BLOCK; the position is where
the block begins, so that a resume reads at most one block again. Where a block begins is the stream's own state before
the document it begins in, and the number of that document's tokens before the block.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from titanlike.data.batch import Row
from titanlike.data.custom import ids_of
from titanlike.data.encoding import Document, Encoder
from titanlike.data.permutation import key_of, permute
from titanlike.data.records import Piece
from titanlike.data.rows import Position
from titanlike.errors import UserError
from titanlike.tokenizer import Tokenizer

BLOCK = 256  # rows that are shuffled together


class DocumentStream(Protocol):
    """Documents from a place on."""

    def __call__(self, state: Any, epoch: int) -> Iterator[tuple[Document, Any]]:
        """The documents of one pass from `state` on (None: from the beginning), each with the state after it, JSON."""
        ...


class DatasetStream:
    """A dataset of Hugging Face that is streamed, with its own state."""

    def __init__(self, dataset: Any, encoder: Encoder, name: str) -> None:
        self._dataset = dataset
        self._encoder = encoder
        self._name = name

    def __call__(self, state: Any, epoch: int) -> Iterator[tuple[Document, Any]]:
        dataset = copy.deepcopy(self._dataset)  # iterating leaves its state in it
        if state is not None:
            dataset.load_state_dict(state)
        dataset.set_epoch(epoch)
        for number, example in enumerate(dataset):
            after = dataset.state_dict()
            record = (Piece("stream", f"the dataset {self._name}", 0), number, example)
            for documents in self._encoder.encode([record]):
                for document in documents:
                    yield document, after


class CustomStream:
    """A user's stream."""

    def __init__(self, make: Callable[[], Any], tokenizer: Tokenizer, name: str) -> None:
        self._make = make
        self._tokenizer = tokenizer
        self._name = name

    def __call__(self, state: Any, epoch: int) -> Iterator[tuple[Document, Any]]:
        made = self._make()
        if state is not None:
            made.load_state_dict(state)
        for number, item in enumerate(made):
            ids = ids_of(item, self._tokenizer, f"document {number} of the source {self._name}")
            yield Document(ids, None), copy.deepcopy(made.state_dict())


class Place(NamedTuple):
    """A place in the concatenated documents, as JSON."""

    epoch: int
    state: Any
    """before the document it is in"""
    offset: int
    """tokens of that document before the place"""


class StreamRows:
    """The rows of a stream, from a position on. It has a position, unlike other orders: a stream can't be pure."""

    def __init__(self, stream: DocumentStream, name: str, seed: int, position: Position | None) -> None:
        self._stream = stream
        self._name = name
        self._seed = seed
        self.position: Position = position or {
            "epoch": 0, "index": 0, "of": 1, "block": 0, "row": 0, "seq_len": 0, "place": Place(0, None, 0)._asdict()
        }  # fmt: skip
        self._block: list[Row] = []
        self._next: Place | None = None
        """where the next block begins, if a block is at hand"""
        self._documents: Iterator[tuple[Place, Document]] | None = None
        self._buffer: deque[tuple[Place, Document]] = deque()
        """documents that are read and not used up; the first one's place is that of the next block"""

    def take(self, count: int, seq_len: int) -> list[Row]:
        """The next rows. With another seq_len than before, what is left of the block is passed over."""
        rows: list[Row] = []
        while len(rows) < count:
            if self.position["row"] == BLOCK or (self.position["row"] and self.position["seq_len"] != seq_len):
                if self._next is None:
                    self._read_block(self.position["seq_len"])
                assert self._next is not None
                self._begin_block(self._next, self.position["block"] + 1, seq_len)
            if self._next is None:
                self._read_block(seq_len)
            row = self.position["row"]
            some = self._block[row : row + count - len(rows)]
            rows += some
            self.position = {**self.position, "row": row + len(some), "seq_len": seq_len}
        return rows

    def _begin_block(self, place: Place, block: int, seq_len: int) -> None:
        self.position = {
            **self.position, "epoch": place.epoch, "block": block, "row": 0, "seq_len": seq_len, "place":
            place._asdict()
        }  # fmt: skip
        self._block, self._next = [], None

    def _read_block(self, seq_len: int) -> None:
        """Read the block at the position, and find where the next one begins."""
        place = Place(**self.position["place"])
        if not self._buffer or self._buffer[0][0] != place:
            self._buffer.clear()
            self._documents = self._documents_from(place)
        assert self._documents is not None
        wanted = BLOCK * seq_len + 1
        have = sum(len(document.ids) - place.offset for place, document in self._buffer)
        while have < wanted:
            place, document = next(self._documents)
            self._buffer.append((place, document))
            have += len(document.ids) - place.offset
        ids = np.concatenate([document.ids[place.offset :] for place, document in self._buffer])
        learnt = None
        if any(document.learnt is not None for _, document in self._buffer):
            learnt = np.concatenate([document.all_learnt()[place.offset :] for place, document in self._buffer])
        lengths = [len(document.ids) - place.offset for place, document in self._buffer]
        begins = np.cumsum([0, *lengths[:-1]])
        starts = begins[[place.offset == 0 for place, _ in self._buffer]]
        block = self.position["block"]
        order = permute(np.arange(BLOCK), BLOCK, key_of("stream", self._seed, self._name, block))
        self._block = []
        for number in order.tolist():
            low, high = number * seq_len, (number + 1) * seq_len + 1
            within = starts[(starts > low) & (starts < high)] - low
            name = f"{self._name}:{self.position['epoch']}:{block}.{number}"
            self._block.append(Row(ids[low:high], within, name, None if learnt is None else learnt[low:high]))
        # The last label of this block is the first input of the next.
        used = BLOCK * seq_len
        while used >= lengths[0]:
            used -= lengths.pop(0)
            self._buffer.popleft()
        place, document = self._buffer[0]
        self._next = place._replace(offset=place.offset + used)
        self._buffer[0] = (self._next, document)

    def _documents_from(self, place: Place) -> Iterator[tuple[Place, Document]]:
        """Documents, each with the place where what is wanted of it begins, pass after pass."""
        epoch, state, offset = place
        while True:
            empty = state is None
            for document, after in self._stream(state, epoch):
                yield Place(epoch, state, offset), document
                empty, state, offset = False, after, 0
            if empty:
                raise UserError(f"the source {self._name} is empty: its stream has no document")
            epoch, state, offset = epoch + 1, None, 0
