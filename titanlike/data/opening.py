"""What a config's `[data]` and `[validation]` stand for, opened."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from titanlike.data.batch import Batch
from titanlike.data.config import ValidationSource
from titanlike.data.loader import Reader, load
from titanlike.data.order import GlobalOrder
from titanlike.data.packing import BestFitRows
from titanlike.data.plan import Plan, Stage, make_stages
from titanlike.data.rows import RowOrder, passes_of
from titanlike.data.source_errors import section_errors
from titanlike.data.sources import Opened, Opener, open_source
from titanlike.data.streams import StreamRows
from titanlike.data.validation import ListedRows, ValidationSet
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
        data, train = config.data, config.train
        self.tokenizer = load_tokenizer(data.tokenizer)
        stages = make_stages(data, train.seq_len)
        self._check_lengths(stages)
        opener = Opener(
            self.tokenizer,
            data.tokenizer,
            config.run.seed,
            train.seq_len,
            min(train.seq_len, *(stage.seq_len for stage in stages)),
            data.packing,
            data.document_mask,
        )
        self._sources: dict[str, Opened] = {}
        self._orders: dict[tuple[str, int], RowOrder] = {}
        self.validation: dict[str, ValidationSet] = {}
        """held-out sets by name: that of each source, then those of `[validation]`"""
        for i, source in enumerate(data.all_sources):
            name = source.name
            with section_errors(f"data.sources[{i}]." if data.sources else "data."):
                opened = open_source(source, name, data.validation_fraction, opener)
                self._sources[name] = opened
                for stage in stages:
                    if name in stage.weights and opened.training is not None:
                        self._orders[name, stage.seq_len] = opened.training(stage.seq_len)
            if opened.held_out is not None:
                self._add_validation(name, opened.held_out(train.seq_len))
        for i, source in enumerate(config.validation.sets):
            if source.name in self.validation:
                raise UserError(
                    f"validation.sets has the name {source.name}, which is that of the part of a source that "
                    "data.validation_fraction holds out: choose another, or set the fraction to 0"
                )
            with section_errors(f"validation.sets[{i}]."):
                rows_of = self._validation_rows(source, opener)
            self._add_validation(source.name, rows_of)
        settings = {
            "run.seed": config.run.seed,
            "data.tokenizer": self.tokenizer.fingerprint,
            "data.validation_fraction": data.validation_fraction,
            "data.packing": data.packing,
        }
        self._plan = Plan(stages, {name: source.fingerprint for name, source in self._sources.items()}, settings)

    def _validation_rows(self, source: ValidationSource, opener: Opener) -> RowOrder:
        opened = open_source(source, source.name, 0.0, opener)
        if opened.training is not None and not opened.endless:
            return opened.training(self._config.train.seq_len)
        samples = self._config.validation.samples
        if not samples:
            raise UserError(f"the validation set {source.name} has no end: give validation.samples more than 0")
        if opened.stream is None:
            assert opened.training is not None
            order = opened.training(self._config.train.seq_len)
            return ListedRows(order.read(order.take(order.begin(), samples)[0]))
        stream = StreamRows(opened.stream, source.name, self._config.run.seed, None)
        return ListedRows(stream.take(samples, self._config.train.seq_len))

    def _check_lengths(self, stages: list[Stage]) -> None:
        """What a stage's own length must be, as validate_for asks it of train.seq_len."""
        tp = self._config.mesh.tp if self._config.mesh.sequence_parallel else 1
        longest = getattr(self._config.model, "max_seq_len", None)
        for stage in stages:
            where = f"data.stages: seq_len {stage.seq_len} of the stage from step {stage.start_step} on"
            if stage.seq_len % tp:
                raise UserError(f"{where} must be a multiple of mesh.tp ({tp}) with mesh.sequence_parallel")
            if longest is not None and stage.seq_len > longest:
                raise UserError(f"{where} is longer than model.max_seq_len ({longest})")

    def _add_validation(self, name: str, rows: RowOrder) -> None:
        self.validation[name] = ValidationSet(
            rows,
            seq_len=self._config.train.seq_len,
            samples=self._config.validation.samples,
            document_mask=self._config.data.document_mask,
            vocab_size=self.tokenizer.vocab_size,
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
        positions = {} if cursor is None else self._plan.kept_positions(cursor)
        streams = {
            name: StreamRows(opened.stream, name, self._config.run.seed, positions.get(name))
            for name, opened in self._sources.items()
            if opened.stream is not None
        }
        reader = Reader(self._orders, streams, vocab_size=self.tokenizer.vocab_size, document_mask=data.document_mask)
        # A stream is read in order, by one process.
        workers = min(data.workers, 1) if streams else data.workers
        pin_memory = self._config.run.device != "cpu" and torch.accelerator.is_available()
        return load(order, reader, workers=workers, prefetch=data.prefetch, pin_memory=pin_memory)

    def passes(self, cursor: dict[str, Any]) -> dict[str, float]:
        """How often each source that has an end has been read at `cursor`, by name; 1.5 is one and a half times."""
        return {
            name: passes_of(position) for name, position in cursor["sources"].items() if not self._sources[name].endless
        }

    def describe(self) -> list[tuple[str, str]]:
        """Label and value of what a person wants to know before the run."""
        train, data = self._config.train, self._config.data
        table = [("tokenizer", f"{data.tokenizer}, {self.tokenizer.vocab_size:,} ids")]
        table += [(f"source {name}", source.size) for name, source in self._sources.items()]
        for i, stage in enumerate(self._plan.stages):
            until = self._plan.stages[i + 1].start_step - 1 if i + 1 < len(self._plan.stages) else train.steps
            total = sum(stage.weights.values())
            samples = max(0, until - stage.start_step + 1) * train.global_batch_size
            shares = []
            for name, weight in stage.weights.items():
                order = self._orders.get((name, stage.seq_len))
                share = f"{100 * weight / total:.3g}% " if len(stage.weights) > 1 else ""
                if order is not None and not self._sources[name].endless:
                    passes = samples * weight / total / order.rows_per_pass
                    padding = f", {100 * order.padding:.2g}% padding" if isinstance(order, BestFitRows) else ""
                    name = f"{name} ({passes:.3g} passes{padding})"
                shares.append(share + name)
            tokens = train.global_batch_size * stage.seq_len
            batch = f"{train.global_batch_size} x {stage.seq_len} = {tokens:,} tokens a step"
            table.append((f"steps {stage.start_step:,} to {until:,}", f"{', '.join(shares)}; {batch}"))
        for name, validation in self.validation.items():
            table.append((f"validation {name}", f"{validation.n_rows:,} sequences"))
        return table
