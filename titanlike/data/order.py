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
"""By source and seq_len."""


class Item(NamedTuple):
    """A global batch as one dp coordinate sees it: little, for it crosses to a worker."""

    seq_len: int
    rows: list[tuple[str, Address]]
    """source and address of each row of this dp coordinate"""
    cursor: dict[str, Any]


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
            rows = self._next_rows(stage)
            self._samples += len(rows)
            yield Item(stage.seq_len, rows[self._mine], self._cursor(stage))

    def _next_rows(self, stage: Stage) -> list[tuple[str, Address]]:
        names, drawn = list(stage.weights), list(self._drawn.values())
        sources = draw(list(stage.weights.values()), drawn, self._global_batch_size)
        addresses = {}
        for name, before, after in zip(names, self._drawn.values(), drawn):
            if after > before:
                order = self._orders[name, stage.seq_len]
                position = order.begin() if name not in self._positions else order.carry(self._positions[name])
                taken, self._positions[name] = order.take(position, after - before)
                addresses[name] = iter(taken)
        self._drawn = dict(zip(names, drawn))
        return [(names[source], next(addresses[names[source]])) for source in sources]

    def _cursor(self, stage: Stage) -> dict[str, Any]:
        return {
            "step": self._step,
            "samples": self._samples,
            "stage": stage.start_step,
            "drawn": self._drawn,
            "sources": dict(self._positions),
            "plan": self._plan.described,
        }
