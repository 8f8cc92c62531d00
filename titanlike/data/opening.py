"""What a config's `[data]` and `[validation]` stand for, opened."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from titanlike.data.batch import Batch
from titanlike.data.config import SourceConfig
from titanlike.data.encoding import encode, in_memory
from titanlike.data.loader import GlobalOrder, Reader, load
from titanlike.data.records import list_pieces, read_pieces
from titanlike.data.rows import ConcatRows
from titanlike.data.store import TokenStore, split
from titanlike.data.token_files import open_shards
from titanlike.data.validation import ValidationSet
from titanlike.errors import UserError
from titanlike.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from titanlike.config import Config


class Data:
    """The data of a run as seen from one dp coordinate; made by `open_data`."""

    def __init__(self, config: Config, dp_coordinate: int, dp: int) -> None:
        self._config = config
        data, seq_len, global_batch_size = config.data, config.train.seq_len, config.train.global_batch_size
        if global_batch_size % dp:
            raise UserError(f"train.global_batch_size ({global_batch_size}) must be a multiple of dp ({dp})")
        rows = global_batch_size // dp
        self._mine = slice(rows * dp_coordinate, rows * (dp_coordinate + 1))
        self.tokenizer = load_tokenizer(data.tokenizer)
        store = open_source(data, self.tokenizer, data.tokenizer)
        self._store = store
        view, held_out = split(store, data.validation_fraction, config.run.seed)
        self._rows = ConcatRows(view, seq_len, data.source, config.run.seed)
        self._tokens = view.n_tokens
        self.validation: dict[str, ValidationSet] = {}
        """held-out sets by name"""
        if held_out is not None:
            held_out_rows = ConcatRows(held_out, seq_len, data.source, config.run.seed)
            self.validation[data.source] = ValidationSet(
                held_out_rows,
                data.source,
                seq_len=seq_len,
                samples=config.validation.samples,
                seed=config.run.seed,
                dp_coordinate=dp_coordinate,
                dp=dp,
            )

    def train_batches(self, cursor: dict[str, Any] | None = None) -> Iterator[Batch]:
        """This dp coordinate's rows of every global batch after `cursor`, for ever: when the rows of a pass are used
        up, the next pass has another order. `cursor` is that of the last batch trained on, on any mesh.

        Raises:
            UserError: the cursor belongs to another source.
        """
        data = self._config.data
        order = GlobalOrder(
            self._rows,
            data.source,
            global_batch_size=self._config.train.global_batch_size,
            mine=self._mine,
            cursor=cursor,
        )
        pin_memory = self._config.run.device != "cpu" and torch.accelerator.is_available()
        reader = Reader(self._rows, self._config.train.seq_len)
        return load(order, reader, workers=data.workers, prefetch=data.prefetch, pin_memory=pin_memory)

    def describe(self) -> list[tuple[str, str]]:
        """Label and value of what a person wants to know before the run."""
        train, data = self._config.train, self._config.data
        passes = train.steps * train.global_batch_size / self._rows.n_rows
        table = [
            ("source", f"{data.source}, {self._store.n_documents:,} documents, {self._store.n_tokens:,} tokens"),
            ("tokenizer", f"{data.tokenizer}, {self.tokenizer.vocab_size:,} ids"),
            ("training", f"{self._tokens:,} tokens, {self._rows.n_rows:,} rows; the run makes {passes:.3g} passes"),
        ]
        for name, validation in self.validation.items():
            table.append(("validation", f"{name}, {validation.n_rows:,} rows, by document"))
        return table


def open_source(source: SourceConfig, tokenizer: Tokenizer, tokenizer_name: str) -> TokenStore:
    """The documents of a source, memory-mapped or tokenised now.

    Raises:
        UserError: it cannot be opened, or has no text.
    """
    if source.source == "tokens":
        return TokenStore([s for folder in source.paths for s in open_shards(folder, tokenizer, tokenizer_name)])
    records = read_pieces(list_pieces(source, piece_bytes=2**62), source.text_field)
    return in_memory(encode(records, tokenizer, source.text_field), described(source))


def described(source: SourceConfig) -> str:
    """A source in a few words."""
    if source.source == "huggingface":
        return f"the dataset {source.dataset}, split {source.split}"
    return f"{source.source} ({', '.join(source.paths)})" if source.paths else source.source
