"""What a config's `[data]` and `[validation]` stand for, opened."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from titanlike.data.batch import Batch
from titanlike.data.loader import Reader, load
from titanlike.data.order import GlobalOrder
from titanlike.data.packing import BestFitRows
from titanlike.data.plan import Plan, make_stages
from titanlike.data.rows import ConcatRows
from titanlike.data.sources import Source, open_source
from titanlike.data.store import View, split, whole
from titanlike.data.validation import ValidationSet
from titanlike.errors import UserError
from titanlike.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from titanlike.config import Config


class Data:
    """The data of a run as seen from one dp coordinate; made by `open_data`."""

    def __init__(self, config: Config, dp_coordinate: int, dp: int) -> None:
        self._config = config
        self._dp_coordinate, self._dp = dp_coordinate, dp
        global_batch_size = config.train.global_batch_size
        if global_batch_size % dp:
            raise UserError(f"train.global_batch_size ({global_batch_size}) must be a multiple of dp ({dp})")
        rows = global_batch_size // dp
        self._mine = slice(rows * dp_coordinate, rows * (dp_coordinate + 1))
        data, seed = config.data, config.run.seed
        self.tokenizer = load_tokenizer(data.tokenizer)
        stages = make_stages(data, config.train.seq_len)
        self._check_lengths(stages)
        self._sources: dict[str, Source] = {}
        self._orders: dict[tuple[str, int], ConcatRows | BestFitRows] = {}
        self.validation: dict[str, ValidationSet] = {}
        """held-out sets by name: that of each source, then those of `[validation]`"""
        for source in data.all_sources:
            name = source.name
            self._sources[name] = open_source(source, self.tokenizer, data.tokenizer)
            training, held_out = split(self._sources[name].store, data.validation_fraction, seed)
            for stage in stages:
                if name in stage.weights:
                    self._orders[name, stage.seq_len] = self._rows(training, stage.seq_len, name)
            if held_out is not None:
                self._add_validation(name, held_out)
        for source in config.validation.sets:
            if source.name in self.validation:
                raise UserError(
                    f"validation.sets has the name {source.name}, which is that of the part of a source that "
                    "data.validation_fraction holds out: choose another, or set the fraction to 0"
                )
            self._add_validation(source.name, whole(open_source(source, self.tokenizer, data.tokenizer).store))
        settings = {
            "run.seed": seed,
            "data.tokenizer": self.tokenizer.fingerprint,
            "data.validation_fraction": data.validation_fraction,
            "data.packing": data.packing,
        }
        self._plan = Plan(stages, {name: source.fingerprint for name, source in self._sources.items()}, settings)

    def _check_lengths(self, stages: list[Any]) -> None:
        """What a stage's own length must be, as validate_for asks it of train.seq_len."""
        tp = self._config.mesh.tp if self._config.mesh.sequence_parallel else 1
        longest = getattr(self._config.model, "max_seq_len", None)
        for stage in stages:
            where = f"seq_len {stage.seq_len} of the stage from step {stage.start_step} on"
            if stage.seq_len % tp:
                raise UserError(f"{where} must be a multiple of mesh.tp ({tp}) with mesh.sequence_parallel")
            if longest is not None and stage.seq_len > longest:
                raise UserError(f"{where} is longer than model.max_seq_len ({longest})")

    def _rows(self, view: View, seq_len: int, name: str) -> ConcatRows | BestFitRows:
        data, seed = self._config.data, self._config.run.seed
        if data.packing == "best_fit":
            return BestFitRows(view, seq_len, name, seed)
        return ConcatRows(view, seq_len, name, seed, find_starts=data.document_mask)

    def _add_validation(self, name: str, view: View) -> None:
        seq_len = self._config.train.seq_len
        self.validation[name] = ValidationSet(
            self._rows(view, seq_len, name),
            seq_len=seq_len,
            samples=self._config.validation.samples,
            document_mask=self._config.data.document_mask,
            dp_coordinate=self._dp_coordinate,
            dp=self._dp,
        )

    def check_cursor(self, cursor: dict[str, Any] | None) -> list[str]:
        """What has changed in the data since the checkpoint that `cursor` comes from, as sentences to be shown.

        Raises:
            UserError: something has, and data.allow_changes is not set.
        """
        return [] if cursor is None else self._plan.check(cursor, self._config.data.allow_changes)

    def train_batches(self, cursor: dict[str, Any] | None = None) -> Iterator[Batch]:
        """This dp coordinate's rows of every global batch after `cursor`, for ever: when the rows of a pass are used
        up, the next pass has another order. `cursor` is that of the last batch trained on, on any mesh.

        Raises:
            UserError: the data differs from that of the cursor, and data.allow_changes is not set.
        """
        self.check_cursor(cursor)
        order = GlobalOrder(
            self._plan,
            self._orders,
            global_batch_size=self._config.train.global_batch_size,
            mine=self._mine,
            cursor=cursor,
        )
        data = self._config.data
        pin_memory = self._config.run.device != "cpu" and torch.accelerator.is_available()
        reader = Reader(self._orders, data.document_mask)
        return load(order, reader, workers=data.workers, prefetch=data.prefetch, pin_memory=pin_memory)

    def passes(self, cursor: dict[str, Any]) -> dict[str, float]:
        """How many times each source has been read at `cursor`, by name; 1.5 is one and a half times."""
        return {
            name: position["epoch"] + position["index"] / position["of"] for name, position in cursor["sources"].items()
        }

    def describe(self) -> list[tuple[str, str]]:
        """Label and value of what a person wants to know before the run."""
        train, data = self._config.train, self._config.data
        table = [("tokenizer", f"{data.tokenizer}, {self.tokenizer.vocab_size:,} ids")]
        for name, source in self._sources.items():
            store = source.store
            table.append((f"source {name}", f"{store.n_documents:,} documents, {store.n_tokens:,} tokens"))
        for i, stage in enumerate(self._plan.stages):
            until = self._plan.stages[i + 1].start_step - 1 if i + 1 < len(self._plan.stages) else train.steps
            total = sum(stage.weights.values())
            samples = max(0, until - stage.start_step + 1) * train.global_batch_size
            shares = []
            for name, weight in stage.weights.items():
                order = self._orders[name, stage.seq_len]
                passes = samples * weight / total / order.rows_per_pass
                share = f"{100 * weight / total:.3g}% " if len(stage.weights) > 1 else ""
                padding = f", {100 * order.padding:.2g}% padding" if isinstance(order, BestFitRows) else ""
                shares.append(f"{share}{name} ({passes:.3g} passes{padding})")
            tokens = train.global_batch_size * stage.seq_len
            batch = f"{train.global_batch_size} x {stage.seq_len} = {tokens:,} tokens a step"
            table.append((f"steps {stage.start_step:,} to {until:,}", f"{', '.join(shares)}; {batch}"))
        for name, validation in self.validation.items():
            table.append((f"validation {name}", f"{validation.n_rows:,} sequences"))
        return table
