"""How ranks meet that torchrun has started again.

torchrun keeps one store for all starts of its ranks (`TORCHELASTIC_USE_AGENT_STORE`, torch 2.13). In it are the
addresses that the ranks of the start before have left, and a rank that reads one of those before the new one is written
waits for a process that is gone. So the ranks of a start first agree on a name that no other start has, and keep all
that they exchange under it. The number of restarts is no such name: each node counts its own.
"""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from titanlike.errors import UserError
from titanlike.hang import ranks_text

POLL_S = 0.05


def agree(store: Any, rank: int, world_size: int) -> str:
    """A name for this start, the same on all ranks, though `store` may hold what earlier starts have left.

    A rank says a word of its own, and waits for the answer to that word. Rank 0 answers the words that it finds, also
    those of ranks that are gone, until every rank has confirmed the name. Raises UserError if one does not come within
    the store's timeout.
    """
    if rank != 0:
        word = uuid.uuid4().hex
        store.set(f"start/word/{rank}", word)
        name = store.get(f"start/answer/{word}").decode()
        store.set(f"start/confirmed/{name}/{rank}", "")
        return name
    name = uuid.uuid4().hex
    deadline = time.monotonic() + store.timeout.total_seconds()
    coming = set(range(1, world_size))
    while coming := {other for other in coming if not _confirmed(store, other, name)}:
        if time.monotonic() > deadline:
            raise UserError(
                f"{ranks_text(coming)} did not come to the start within {store.timeout.total_seconds():.0f} s: see "
                "what happens there, and whether the nodes find each other (docs/multinode.md)"
            )
        time.sleep(POLL_S)  # and not store.wait, whose every timeout is a warning on stderr
    return name


def _confirmed(store: Any, other: int, name: str) -> bool:
    """Answer the word that is there, if there is one. Whether the rank has confirmed the name."""
    if store.check([f"start/word/{other}"]):
        store.set(f"start/answer/{store.get(f'start/word/{other}').decode()}", name)
    return store.check([f"start/confirmed/{name}/{other}"])


def store_of_this_start(timeout: timedelta) -> tuple[Any, int, int]:
    """(store, rank, world size) by the environment that torchrun has made."""
    store, rank, world_size = next(iter(dist.rendezvous("env://", timeout=timeout)))
    store.set_timeout(timeout)
    return dist.PrefixStore(f"start/{agree(store, rank, world_size)}", store), rank, world_size
