"""The global order: which rows of which sources form each global batch, over all stages of a run.

The order is a function of the plan and of the position, which is the cursor of a checkpoint. The mesh, the number of
microbatches and the workers are not in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from titanlike.data.mixture import draw
from titanlike.data.plan import Plan, Stage
from titanlike.data.rows import Position, RowOrder

Orders = Mapping[tuple[str, int], RowOrder]
"""By source and seq_len. A source that is not among them is a stream."""


class Part(NamedTuple):
    """The rows of a dp coordinate's batch that one source gives."""

    source: str
    places: np.ndarray
    """which rows of the batch they are"""
    addresses: np.ndarray
    """of an order; of a stream, [rows, 1]: which of its rows in the global batch they are"""


class Item(NamedTuple):
    """A global batch as one dp coordinate sees it: little, for it crosses to a worker."""

    seq_len: int
    n_rows: int
    """of this dp coordinate"""
    parts: list[Part]
    """where they come from"""
    streams: dict[str, int]
    """how many rows of the whole global batch come from each stream"""
    cursor: dict[str, Any]
    """without the positions of streams, which are known where they are read"""


class GlobalOrder:
    """Iterates over the global batches from a cursor on, without end."""

    def __init__(
        self, plan: Plan, orders: Orders, *, global_batch_size: int, mine: slice, cursor: dict[str, Any] | None
    ) -> None:
        """`mine`: the rows of a global batch that this dp coordinate reads. `cursor`: of a batch of this plan, or
        None."""
        self._plan = plan
        self._orders = orders
        self._global_batch_size = global_batch_size
        self._mine = mine
        self._step, self._samples = 0, 0
        self._stage: Stage | None = None
        self._drawn: dict[str, int] = {}
        self._positions: dict[str, Position] = {}
        if cursor is not None:
            self._step, self._samples = cursor["step"], cursor["samples"]
            self._stage, self._drawn = plan.resumed_stage(cursor)
            self._positions = plan.kept_positions(cursor)

    def __iter__(self) -> Iterator[Item]:
        while True:
            self._step += 1
            stage = self._plan.stage_at(self._step)
            if stage is not self._stage:
                self._stage, self._drawn = stage, dict.fromkeys(stage.weights, 0)
            parts, streams = self._next_parts(stage)
            self._samples += self._global_batch_size
            n_rows = self._mine.stop - self._mine.start
            yield Item(stage.seq_len, n_rows, parts, streams, self._cursor(stage))

    def _next_parts(self, stage: Stage) -> tuple[list[Part], dict[str, int]]:
        sources = draw(list(stage.weights.values()), list(self._drawn.values()), self._global_batch_size)
        parts, streams = [], {}
        for i, name in enumerate(stage.weights):
            places = np.flatnonzero(sources == i)
            count = len(places)
            if not count:
                continue
            order = self._orders.get((name, stage.seq_len))
            if order is None:
                streams[name] = count
                addresses = np.arange(count)[:, None]
            else:
                position = order.begin() if name not in self._positions else order.carry(self._positions[name])
                addresses, self._positions[name] = order.take(position, count)
            first, last = np.searchsorted(places, (self._mine.start, self._mine.stop))
            if last > first:
                parts.append(Part(name, places[first:last] - self._mine.start, addresses[first:last]))
            self._drawn = {**self._drawn, name: self._drawn[name] + count}
        return parts, streams

    def _cursor(self, stage: Stage) -> dict[str, Any]:
        return {
            "step": self._step,
            "samples": self._samples,
            "stage": stage.start_step,
            "drawn": self._drawn,
            "sources": dict(self._positions),
            "plan": self._plan.described,
        }
