"""Opening the sources that a config names: whatever they are, they come out as rows, or as a stream of documents."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable

import numpy as np

from titanlike.data import custom
from titanlike.data.config import SourceConfig
from titanlike.data.encoding import Encoder, in_memory
from titanlike.data.packing import BestFitRows
from titanlike.data.records import list_pieces, open_dataset, read_pieces
from titanlike.data.rows import ConcatRows, RowOrder
from titanlike.data.source_errors import SourceError
from titanlike.data.store import TokenStore, View, split
from titanlike.data.streams import CustomStream, DatasetStream, DocumentStream
from titanlike.data.synthetic import SyntheticRows
from titanlike.data.token_files import FileShard, open_shards, read_metadata
from titanlike.errors import UserError
from titanlike.tokenizer import Tokenizer

MakeRows = Callable[[int], RowOrder]
"""The rows of a source at a seq_len."""


@dataclasses.dataclass(frozen=True)
class Opener:
    """What sources are opened with, the same for all."""

    tokenizer: Tokenizer
    tokenizer_name: str
    seed: int
    seq_len: int
    """train.seq_len"""
    shortest: int
    """the smallest seq_len of all stages"""
    packing: str
    document_mask: bool


@dataclasses.dataclass(frozen=True)
class Opened:
    """An open source: `training` or `stream`."""

    fingerprint: str
    """equal for equal content"""
    size: str
    """in words"""
    training: MakeRows | None = None
    held_out: MakeRows | None = None
    stream: DocumentStream | None = None
    endless: bool = False
    """there is no second pass"""


def open_source(source: SourceConfig, name: str, fraction: float, by: Opener) -> Opened:
    """Open a source, and hold out `fraction` of it if it is not a stream.

    Raises:
        UserError: it cannot be opened, or has no text.
    """
    if source.source == "synthetic":
        rows = lambda seq_len: SyntheticRows(by.tokenizer.vocab_size, seq_len, name, by.seed)  # noqa: E731
        return Opened(f"synthetic {by.tokenizer.vocab_size}", "random ids, no end", training=rows, endless=True)
    if source.own_class:
        return _open_own(source, name, fraction, by)
    if source.streaming:
        return _open_streamed(source, by)
    if source.source == "tokens":
        shards = [shard for path in source.paths for shard in open_shards(path, by.tokenizer, by.tokenizer_name)]
        store = TokenStore(shards)
        fingerprint = hashlib.sha256(
            " ".join(read_metadata(path)["plan"] for path in source.paths).encode()
        ).hexdigest()
        if by.packing == "best_fit" and store.has_learnt:
            _check_longest(shards, by.shortest + 1)
    else:
        encoder = Encoder(source, by.tokenizer, _longest(source, by))
        store = in_memory(encoder.encode(read_pieces(list_pieces(source, 2**62), source.fields)), described(source))
        fingerprint = store.digest()
    training, held_out = split(store, fraction, by.seed)
    return Opened(
        fingerprint[:32],
        f"{store.n_documents:,} documents, {store.n_tokens:,} tokens",
        training=functools.partial(_rows, training, name, by),
        held_out=None if held_out is None else functools.partial(_rows, held_out, name, by),
    )


def _rows(view: View, name: str, by: Opener, seq_len: int) -> RowOrder:
    if by.packing == "best_fit":
        return BestFitRows(view, seq_len, name, by.seed)
    return ConcatRows(view, seq_len, name, by.seed, find_starts=by.document_mask)


def _open_own(source: SourceConfig, name: str, fraction: float, by: Opener) -> Opened:
    make = functools.partial(custom.make, source.source, by.tokenizer, arguments=source.arguments)
    made = make(by.seq_len)
    fingerprint = custom.fingerprint(source.source, made, source.arguments)
    if custom.is_stream(made):
        _check_stream(name, by)
        stream = CustomStream(functools.partial(make, by.seq_len), by.tokenizer, name)
        return Opened(fingerprint, "a stream", stream=stream)

    def rows(held_out: bool, seq_len: int) -> RowOrder:
        of_length = made if seq_len == by.seq_len else make(seq_len)
        return custom.CollectionRows(
            of_length, by.tokenizer, seq_len, name, by.seed, fraction=fraction, held_out=held_out
        )

    held_out = functools.partial(rows, True) if min(round(len(made) * fraction), len(made) - 1) else None
    return Opened(fingerprint, f"{len(made):,} samples", training=functools.partial(rows, False), held_out=held_out)


def _open_streamed(source: SourceConfig, by: Opener) -> Opened:
    assert source.dataset is not None
    _check_stream(source.dataset, by)
    dataset = open_dataset(source.dataset, source.subset, source.split, streaming=True)
    columns = dataset.column_names
    for field in source.fields if columns is not None else ():
        if field not in columns:
            raise SourceError(f"dataset: {source.dataset} has no field {field!r}; its fields: {', '.join(columns)}")
    stream = DatasetStream(dataset, Encoder(source, by.tokenizer), source.dataset)
    return Opened(f"stream {source.dataset} {source.subset} {source.split}", "a stream", stream=stream)


def _check_stream(name: str, by: Opener) -> None:
    if by.packing == "best_fit":
        raise UserError(
            f'the source {name} is a stream, which data.packing = "best_fit" cannot pack: use "concat", or prepare it '
            "with scripts/prepare_data.py"
        )


def _longest(source: SourceConfig, by: Opener) -> int | None:
    """Text may be cut; half of an answer, or an answer without its question, is no example."""
    return by.shortest + 1 if by.packing == "best_fit" and source.format != "text" else None


def _check_longest(shards: list[FileShard], longest: int) -> None:
    for shard in shards:
        lengths = np.diff(shard.starts)
        if lengths.max() > longest:
            document = int(lengths.argmax())
            raise UserError(
                f"{shard.path}.tokens, document {document}, has {lengths[document]} tokens, and a row takes {longest}: "
                'raise train.seq_len, shorten it, or use data.packing = "concat"'
            )


def described(source: SourceConfig) -> str:
    """A source in a few words."""
    if source.source == "huggingface":
        return f"the dataset {source.dataset}, split {source.split}"
    return f"{source.source} ({', '.join(source.paths)})" if source.paths else source.source
