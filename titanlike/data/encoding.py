"""From records to documents of token ids, each with the end token after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from titanlike.data.records import Piece, Record
from titanlike.data.store import ArrayShard, TokenStore
from titanlike.errors import UserError
from titanlike.tokenizer import Tokenizer, token_dtype

BATCH_DOCUMENTS, BATCH_CHARACTERS = 1024, 2**20  # tokenised together, at most


def encode(
    records: Iterable[tuple[Piece, int, Record]], tokenizer: Tokenizer, text_field: str
) -> Iterator[list[np.ndarray]]:
    """Batches of documents: ids and the end token, of `token_dtype`. Records with an empty text are left out.

    Raises:
        UserError: a record without the field, or whose field is not a string; names file and record.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.end_id], dtype=dtype)

    def flush() -> list[np.ndarray]:
        return [
            np.concatenate((ids.astype(dtype, copy=False), end)) for ids in tokenizer.encode_batch(batch) if len(ids)
        ]

    batch: list[str] = []
    characters = 0
    for piece, number, record in records:
        text = record if isinstance(record, str) else _field(record, text_field, piece, number)
        batch.append(text)
        characters += len(text)
        if len(batch) == BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield flush()
            batch, characters = [], 0
    if batch:
        yield flush()


def _field(record: dict[str, object], field: str, piece: Piece, number: int) -> str:
    value = record.get(field)
    if isinstance(value, str):
        return value
    if field not in record:
        raise UserError(f"{piece.where(number)} has no field {field!r}; its fields: {', '.join(record) or 'none'}")
    raise UserError(f"{piece.where(number)}: the field {field!r} is not a string but {type(value).__name__}")


def in_memory(batches: Iterable[list[np.ndarray]], name: str) -> TokenStore:
    """A store of documents that are not on disk.

    Raises:
        UserError: there is none; `name` says of what.
    """
    documents = [document for batch in batches for document in batch]
    if not documents:
        raise UserError(f"{name} has no text")
    lengths = np.array([0, *map(len, documents)], dtype=np.int64)
    return TokenStore([ArrayShard(np.concatenate(documents), np.cumsum(lengths))])
