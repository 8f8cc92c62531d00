"""The tables that are printed before the first step. The trainer brings the numbers; this module only lays them out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from titanlike.printable import printable

MAX_RANKS_LISTED = 8


@dataclass(frozen=True)
class ModelFacts:
    """The model as a whole, before it is cut."""

    name: str
    """Architecture and preset, as a person would call it."""
    parameters: int
    """All parameters, tied ones once."""
    embedding_parameters: int
    """Parameters of the input embedding, tied or not."""
    shape: Mapping[str, Any]
    """Sizes worth showing: {"layers": 6, "dim": 512, ...}."""
    active_parameters: int | None = None
    """Parameters that one token goes through, if not all."""


@dataclass(frozen=True)
class BatchFacts:
    """How a global batch is made. Sequences and tokens per optimizer step."""

    global_batch_size: int
    microbatch_size: int
    dp: int
    seq_len: int
    steps: int

    @property
    def accumulation(self) -> int:
        return self.global_batch_size // (self.dp * self.microbatch_size)

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.seq_len


@dataclass(frozen=True)
class MemoryFacts:
    """Bytes that one rank holds for the whole run; activations and communication buffers come on top."""

    rank: int
    weights: int
    """Weights in the compute dtype."""
    gradients: int
    """Accumulated gradients."""
    optimizer: int
    """Master weights and moments, this rank's shard."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class PipelineFacts:
    """The pipeline's schedule; `bubble` is the predicted idle share of a rank's time, 0 to 1."""

    schedule: str
    stages: int
    microbatches: int
    bubble: float


def startup_tables(
    model: ModelFacts,
    mesh: Mapping[str, int],
    batch: BatchFacts,
    memory: Sequence[MemoryFacts] = (),
    data: Sequence[tuple[str, str]] = (),
    pipeline: PipelineFacts | None = None,
    run: Sequence[tuple[str, str]] = (),
) -> list[Any]:
    """The tables, for `Metrics.tables`.

    `mesh` is axis -> degree, outermost first, and `ep`, a factor of dp, if there is one; `run` and `data` are further
    lines, (label, value).
    """
    rows: list[tuple[str, str, str]] = [("run", label, value) for label, value in run]
    rows += [
        ("model", "name", model.name),
        ("model", "parameters", f"{model.parameters:,} ({format_count(model.parameters)})"),
        ("model", "without embedding", f"{model.parameters - model.embedding_parameters:,}"),
        *(
            [
                (
                    "model",
                    "active",
                    f"{model.active_parameters:,} ({format_count(model.active_parameters)}) for each token",
                )
            ]
            if model.active_parameters is not None
            else []
        ),
        ("model", "shape", "  ".join(f"{name} {value}" for name, value in model.shape.items())),
    ]
    ranks = 1
    axes = {axis: degree for axis, degree in mesh.items() if axis != "ep"}
    for degree in axes.values():
        ranks *= degree
    product = " × ".join(f"{axis} {degree}" for axis, degree in axes.items())
    rows.append(("mesh", "ranks", f"{product} = {ranks}"))
    if "ep" in mesh:
        rows.append(("mesh", "experts", f"shared out over ep {mesh['ep']} neighbours along dp"))
    if pipeline is not None:
        rows += [
            ("pipeline", "schedule", pipeline.schedule),
            ("pipeline", "stages", f"{pipeline.stages}, {pipeline.microbatches} microbatches a step"),
            ("pipeline", "bubble", f"{pipeline.bubble:.1%} of each rank's time (predicted)"),
        ]
    rows += [
        (
            "batch",
            "sequences",
            f"{batch.global_batch_size} = dp {batch.dp} × microbatch {batch.microbatch_size} × "
            f"accumulation {batch.accumulation}",
        ),
        ("batch", "tokens a step", f"{batch.tokens_per_step:,} = {batch.global_batch_size} × {batch.seq_len}"),
        ("batch", "tokens in all", f"{batch.tokens_per_step * batch.steps:,} in {batch.steps:,} steps"),
    ]
    rows += [("data", label, value) for label, value in data]
    tables = [_facts_table(rows)]
    if memory:
        tables.append(_memory_table(memory))
    return tables


def _facts_table(rows: Sequence[tuple[str, str, str]]) -> Any:
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    previous = None
    for group, label, value in rows:
        table.add_row(group if group != previous else "", label, _plain(value))
        previous = group
    return table


def _memory_table(memory: Sequence[MemoryFacts]) -> Any:
    """A row a rank, or the least and most loaded rank when there are many."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold cyan")
    table.add_column("memory", style="dim", no_wrap=True)
    for name in ("weights", "gradients", "optimizer", "total"):
        table.add_column(name, justify="right", no_wrap=True)
    if len(memory) <= MAX_RANKS_LISTED:
        named = [(f"rank {facts.rank}", facts) for facts in memory]
    else:
        low, high = min(memory, key=lambda facts: facts.total), max(memory, key=lambda facts: facts.total)
        named = [(f"least: rank {low.rank}", low), (f"most: rank {high.rank}", high)]
    for name, facts in named:
        sizes = (facts.weights, facts.gradients, facts.optimizer, facts.total)
        table.add_row(name, *(format_bytes(size) for size in sizes))
    return table


def _plain(text: str) -> Any:
    """Text that rich shows as it is: a path may hold square brackets, which rich would take for markup."""
    from rich.text import Text

    return Text(printable(text))


def format_count(count: int) -> str:
    """1234567 -> 1.23M. Three significant digits."""
    value = float(count)
    for unit in ("", "K", "M", "B"):
        if abs(value) < 999.5:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}T" if value < 999.5 else f"{value:,.0f}T"


def format_bytes(size: float) -> str:
    """1536 -> 1.5 KiB."""
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
