"""Ranks that are started again meet each other, not those of the start before."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from titanlike.errors import UserError
from titanlike.rendezvous import agree


def test_ranks_of_each_start_agree_though_the_store_is_full_of_words_of_earlier_ones() -> None:
    """Symptom: after `torchrun --max-restarts` has started the ranks again, they wait for each other for ever, now and
    then: torch 2.13 keeps the store, and one reads the address that the other's forerunner left there."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    names = []
    for world_size in (3, 3, 2, 4):
        stores = [dist.TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(world_size)]
        for store in stores:
            store.set_timeout(timedelta(seconds=60))
        with ThreadPoolExecutor(world_size) as pool:
            found = list(pool.map(agree, stores, range(world_size), [world_size] * world_size))
        assert len(set(found)) == 1
        names.append(found[0])
    assert len(set(names)) == 4


def test_a_rank_that_comes_late_is_waited_for() -> None:
    """As the first rank reads the word of the one that is gone, before the new one speaks."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set("start/word/1", "of a rank that is gone")
    first, second = (dist.TCPStore("127.0.0.1", server.port, is_master=False) for _ in range(2))
    with ThreadPoolExecutor(2) as pool:
        name = pool.submit(agree, first, 0, 2)
        server.get("start/answer/of a rank that is gone")
        assert not name.done()
        assert pool.submit(agree, second, 1, 2).result(60) == name.result(60)


@pytest.mark.parametrize("before", [False, True])
def test_a_rank_that_never_comes_is_named(before: bool) -> None:
    """Symptom: "wait timeout after 600000ms, keys: /start/word/1"."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set_timeout(timedelta(seconds=1))
    if before:
        store.set("start/word/1", "of a rank that is gone")
    with pytest.raises(UserError, match="ranks 1-2 did not come to the start within 1 s"):
        agree(store, 0, 3)
