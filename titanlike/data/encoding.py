"""From records to documents of token ids, each with the end token after it.

What is learnt of a document is all of it (format text), its completion, or what the assistant says in a conversation.
The parts of a document that differ in that are tokenised apart, so that a prompt has the ids that it will have when the
model is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from titanlike.data.config import SourceConfig
from titanlike.data.records import Piece, Record
from titanlike.data.store import ArrayShard, TokenStore
from titanlike.errors import UserError
from titanlike.tokenizer import Tokenizer, token_dtype

BATCH_DOCUMENTS, BATCH_CHARACTERS = 1024, 2**20  # tokenised together, at most


class Document(NamedTuple):
    """A document's tokens."""

    ids: np.ndarray
    """of `token_dtype`, the end token included"""
    learnt: np.ndarray | None
    """which of them are labels, bool; None: all"""

    def all_learnt(self) -> np.ndarray:
        """`learnt` as an array in any case."""
        return np.ones(len(self.ids), dtype=bool) if self.learnt is None else self.learnt


class Encoder:
    """What a source's records become."""

    def __init__(self, source: SourceConfig, tokenizer: Tokenizer, longest: int | None = None) -> None:
        """`longest`: more tokens in a document than that are an error.

        Raises:
            UserError: the source's format needs a chat template, and the tokenizer has none.
        """
        self._source = source
        self._tokenizer = tokenizer
        self._longest = longest
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._chat = None
        if source.format == "chat":
            from titanlike.data.chat import ChatTemplate

            self._chat = ChatTemplate(tokenizer)

    def encode(self, records: Iterable[tuple[Piece, int, Record]]) -> Iterator[list[Document]]:
        """Batches of documents. Records without a text, or with nothing to learn, are left out.

        Raises:
            UserError: a record that is not what the format asks for; names file and record.
        """
        batch: list[tuple[Piece, int, list[tuple[str, bool]]]] = []
        characters = 0
        for piece, number, record in records:
            parts = self._parts(piece, number, record)
            if any(text for text, learnt in parts if learnt):
                batch.append((piece, number, parts))
                characters += sum(len(text) for text, _ in parts)
            if len(batch) == BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
                yield self._documents(batch)
                batch, characters = [], 0
        if batch:
            yield self._documents(batch)

    def _parts(self, piece: Piece, number: int, record: Record) -> list[tuple[str, bool]]:
        """The parts of a record's text, and whether each is learnt."""
        source = self._source
        if isinstance(record, str):
            if source.format != "text":
                raise UserError(
                    f'{piece.where(number)} is plain text, and format = "{source.format}" needs records: give .jsonl '
                    "or .parquet"
                )
            return [(record, True)]
        if source.format == "text":
            return [(_text(record, source.text_field, piece, number), True)]
        if source.format == "completion":
            prompt = _text(record, source.prompt_field, piece, number)
            return [(prompt, False), (_text(record, source.completion_field, piece, number), True)]
        assert self._chat is not None
        messages = _field(record, source.messages_field, piece, number)
        return self._chat.parts(messages, lambda: f"{piece.where(number)}, field {source.messages_field!r}")

    def _documents(self, batch: list[tuple[Piece, int, list[tuple[str, bool]]]]) -> list[Document]:
        encoded = iter(self._tokenizer.encode_batch([text for _, _, parts in batch for text, _ in parts]))
        # A completion ends with the end token, which is learnt; a conversation ends as its template says.
        end = np.array([self._tokenizer.end_id], dtype=self._dtype)
        end_learnt = self._source.format != "chat"
        documents = []
        for piece, number, parts in batch:
            ids = [next(encoded).astype(self._dtype, copy=False) for _ in parts]
            learnt = None
            if self._source.format != "text":
                flags = [np.full(len(some), flag) for some, (_, flag) in zip(ids, parts)]
                learnt = np.concatenate((*flags, [end_learnt]))
            document = Document(np.concatenate((*ids, end)), learnt)
            if self._longest is not None and len(document.ids) > self._longest:
                raise UserError(
                    f"{piece.where(number)} has {len(document.ids)} tokens, and a row takes {self._longest}: raise "
                    'train.seq_len, shorten it, or use data.packing = "concat"'
                )
            if len(document.ids) > 1:
                documents.append(document)
        return documents


def _field(record: dict[str, Any], field: str, piece: Piece, number: int) -> Any:
    if field not in record:
        raise UserError(f"{piece.where(number)} has no field {field!r}; its fields: {', '.join(record) or 'none'}")
    return record[field]


def _text(record: dict[str, Any], field: str, piece: Piece, number: int) -> str:
    value = _field(record, field, piece, number)
    if not isinstance(value, str):
        raise UserError(f"{piece.where(number)}: the field {field!r} is not a string but {type(value).__name__}")
    return value


def in_memory(batches: Iterable[list[Document]], name: str) -> TokenStore:
    """A store of documents that are not on disk.

    Raises:
        UserError: there is none; `name` says of what.
    """
    documents = [document for batch in batches for document in batch]
    if not documents:
        raise UserError(f"{name} has no text")
    starts = np.cumsum([0, *(len(document.ids) for document in documents)], dtype=np.int64)
    learnt = None
    if any(document.learnt is not None for document in documents):
        learnt = np.concatenate([document.all_learnt() for document in documents])
    return TokenStore([ArrayShard(np.concatenate([document.ids for document in documents]), starts, learnt)])
