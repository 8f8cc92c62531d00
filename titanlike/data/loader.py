"""Batches read ahead by workers, in the global order.

The order is made in the rank's own process, one small item per global batch: which rows this dp coordinate reads, and
the cursor after the batch. Workers only read rows. So neither their number nor how far they read ahead can change the
order, and the cursor that comes with a batch is the one to checkpoint once that batch has been trained on.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from torchdata.stateful_dataloader import StatefulDataLoader

from titanlike.data.batch import Batch, collate
from titanlike.data.rows import ConcatRows, Position
from titanlike.errors import UserError


class Item(NamedTuple):
    """A global batch as one dp coordinate sees it."""

    addresses: list[tuple[int, int]]
    cursor: dict[str, Any]


class GlobalOrder:
    """Iterates over the global batches from a cursor on, without end."""

    def __init__(
        self, rows: ConcatRows, name: str, *, global_batch_size: int, mine: slice, cursor: dict[str, Any] | None
    ) -> None:
        self._rows = rows
        self._name = name
        self._global_batch_size = global_batch_size
        self._mine = mine
        self._samples, self._position = 0, Position(epoch=0, index=0)
        if cursor is not None:
            self._samples = cursor["samples"]
            if name not in cursor["sources"]:
                raise UserError(
                    f"the checkpoint's data came from {', '.join(cursor['sources'])}, and data.source is now {name}"
                )
            self._position = cursor["sources"][name]

    def __iter__(self) -> Iterator[Item]:
        while True:
            addresses, self._position = self._rows.take(self._position, self._global_batch_size)
            self._samples += self._global_batch_size
            cursor = {"samples": self._samples, "sources": {self._name: copy.copy(self._position)}}
            yield Item(addresses[self._mine], cursor)


class Reader:
    """The map-style dataset that workers have: from an item of the order to a batch."""

    def __init__(self, rows: ConcatRows, seq_len: int) -> None:
        self._rows = rows
        self._seq_len = seq_len

    def __getitem__(self, item: Item) -> Batch | UserError:
        try:
            return collate([self._rows.read(address) for address in item.addresses], self._seq_len, item.cursor)
        except UserError as error:
            return error  # raised by the rank: an exception that crosses processes becomes a traceback in a string


def load(order: GlobalOrder, reader: Reader, *, workers: int, prefetch: int, pin_memory: bool) -> Iterator[Batch]:
    """The batches of the order, read by `workers` processes that are `prefetch` batches ahead each (0: by this one)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata 0.11 calls it
        loader = StatefulDataLoader(
            reader,  # type: ignore[arg-type]
            sampler=order,  # type: ignore[arg-type]
            batch_size=None,
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            pin_memory=pin_memory,
            snapshot_every_n_steps=2**62,  # the cursor is in the batch: no worker's state is needed
        )
    for batch in loader:
        if isinstance(batch, UserError):
            raise batch
        yield batch
