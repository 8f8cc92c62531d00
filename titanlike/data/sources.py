"""Opening the sources that a config names."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from titanlike.data.config import SourceConfig
from titanlike.data.encoding import encode, in_memory
from titanlike.data.records import list_pieces, read_pieces
from titanlike.data.store import TokenStore
from titanlike.data.token_files import open_shards, read_metadata
from titanlike.tokenizer import Tokenizer


class Source(NamedTuple):
    """A source's documents."""

    store: TokenStore
    fingerprint: str
    """equal for equal documents"""


def open_source(source: SourceConfig, tokenizer: Tokenizer, tokenizer_name: str) -> Source:
    """The documents of a source, memory-mapped or tokenised now.

    Raises:
        UserError: it cannot be opened, or has no text.
    """
    if source.source == "tokens":
        shards = [shard for folder in source.paths for shard in open_shards(folder, tokenizer, tokenizer_name)]
        plans = [read_metadata(folder)["plan"] for folder in source.paths]
        return Source(TokenStore(shards), hashlib.sha256(" ".join(plans).encode()).hexdigest()[:32])
    records = read_pieces(list_pieces(source, piece_bytes=2**62), source.text_field)
    store = in_memory(encode(records, tokenizer, source.text_field), described(source))
    return Source(store, store.digest())


def described(source: SourceConfig) -> str:
    """A source in a few words."""
    if source.source == "huggingface":
        return f"the dataset {source.dataset}, split {source.split}"
    return f"{source.source} ({', '.join(source.paths)})" if source.paths else source.source
