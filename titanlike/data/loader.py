"""Batches read ahead by workers, in the global order.

The order is made in the rank's own process, one small item per global batch: which rows this dp coordinate reads, and
the cursor after the batch. Workers only read rows. So neither their number nor how far they read ahead can change the
order, and the cursor that comes with a batch is the one to checkpoint once that batch has been trained on.
"""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterator, Mapping

from torchdata.stateful_dataloader import StatefulDataLoader

from titanlike.data.batch import Batch, Row, collate
from titanlike.data.order import GlobalOrder, Item, Orders
from titanlike.data.streams import StreamRows
from titanlike.errors import UserError


class Reader:
    """The map-style dataset that workers have: from an item of the order to a batch. With streams, one process must
    have it and ask for the items in order."""

    def __init__(
        self, orders: Orders, streams: Mapping[str, StreamRows], *, vocab_size: int, document_mask: bool
    ) -> None:
        self._orders = orders
        self._streams = streams
        self._vocab_size = vocab_size
        self._document_mask = document_mask

    def __getitem__(self, item: Item) -> Batch | UserError:
        try:
            rows = self._rows(item)
            positions = {name: self._streams[name].position for name in item.streams}
            cursor = {**item.cursor, "sources": {**item.cursor["sources"], **positions}}
            return collate(rows, item.seq_len, cursor, document_mask=self._document_mask, vocab_size=self._vocab_size)
        except UserError as error:
            return error  # raised by the rank: an exception that crosses processes becomes a traceback in a string

    def _rows(self, item: Item) -> list[Row]:
        # Streams are read by all dp coordinates alike, whether or not they keep a row.
        streamed = {name: self._streams[name].take(count, item.seq_len) for name, count in item.streams.items()}
        rows: list[Row | None] = [None] * item.n_rows
        for part in item.parts:
            if part.source in streamed:
                read = [streamed[part.source][i] for i in part.addresses[:, 0]]
            else:
                read = self._orders[part.source, item.seq_len].read(part.addresses)
            for place, row in zip(part.places.tolist(), read):
                rows[place] = row
        return [row for row in rows if row is not None]


def _leave_signals_to_the_rank(worker: int) -> None:
    """A launcher signals the whole process group. The rank then wants to finish its step, and needs its workers for
    that; they end with it."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def load(order: GlobalOrder, reader: Reader, *, workers: int, prefetch: int, pin_memory: bool) -> Iterator[Batch]:
    """The batches of the order, read by `workers` processes that are `prefetch` batches ahead each (0: by this one)."""
    batches = _read_ahead(order, reader, workers, prefetch, pin_memory) if workers else map(reader.__getitem__, order)
    try:
        for batch in batches:
            if isinstance(batch, UserError):
                raise batch
            yield batch.pin_memory() if pin_memory and not workers else batch
    finally:
        # Workers end with their iterator. An error's traceback would keep it until the garbage collector breaks the
        # cycle, and then they no longer hear that they shall end, and hold up the rank for five seconds.
        del batches


def _read_ahead(
    order: GlobalOrder, reader: Reader, workers: int, prefetch: int, pin_memory: bool
) -> Iterator[Batch | UserError]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")  # torchdata 0.11 calls it
        loader = StatefulDataLoader(
            reader,  # type: ignore[arg-type]
            sampler=order,  # type: ignore[arg-type]
            batch_size=None,
            num_workers=workers,
            prefetch_factor=prefetch,
            worker_init_fn=_leave_signals_to_the_rank,
            pin_memory=pin_memory,
            snapshot_every_n_steps=2**62,  # the cursor is in the batch: no worker's state is needed
        )
        return iter(loader)
