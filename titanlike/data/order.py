"""The global order: which rows of which sources form each global batch, over all stages of a run.

The order is a function of the plan and of the position, which is the cursor of a checkpoint. The mesh, the number of
microbatches and the workers are not in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from titanlike.data.mixture import draw
from titanlike.data.plan import Plan, Stage
from titanlike.data.rows import Address, Position, RowOrder

Orders = Mapping[tuple[str, int], RowOrder]
"""By source and seq_len. A source that is not among them is a stream."""


class Item(NamedTuple):
    """A global batch as one dp coordinate sees it: little, for it crosses to a worker."""

    seq_len: int
    rows: list[tuple[str, Address]]
    """source and address of each row of this dp coordinate; of a stream the row's place among `streams`"""
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
            rows, streams = self._next_rows(stage)
            self._samples += len(rows)
            yield Item(stage.seq_len, rows[self._mine], streams, self._cursor(stage))

    def _next_rows(self, stage: Stage) -> tuple[list[tuple[str, Address]], dict[str, int]]:
        names, drawn = list(stage.weights), list(self._drawn.values())
        sources = draw(list(stage.weights.values()), drawn, self._global_batch_size)
        addresses: dict[str, Iterator[Address]] = {}
        streams = {}
        for name, before, after in zip(names, self._drawn.values(), drawn):
            order = self._orders.get((name, stage.seq_len))
            if after == before:
                continue
            if order is None:
                streams[name] = after - before
                addresses[name] = iter((i,) for i in range(after - before))
            else:
                position = order.begin() if name not in self._positions else order.carry(self._positions[name])
                taken, self._positions[name] = order.take(position, after - before)
                addresses[name] = iter(taken)
        self._drawn = dict(zip(names, drawn))
        return [(names[source], next(addresses[names[source]])) for source in sources], streams

    def _cursor(self, stage: Stage) -> dict[str, Any]:
        return {
            "step": self._step,
            "samples": self._samples,
            "stage": stage.start_step,
            "drawn": self._drawn,
            "sources": dict(self._positions),
            "plan": self._plan.described,
        }
