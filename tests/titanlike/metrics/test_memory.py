"""Memory over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from titanlike.metrics import names
from titanlike.metrics.memory import memory_bytes, memory_over_ranks


def test_cpu_memory_follows_what_is_held() -> None:
    before, _ = memory_bytes("cpu")
    block = bytearray(64 * 2**20)
    block[::4096] = b"x" * len(block[::4096])  # touch each page: untouched pages are not resident
    now, peak = memory_bytes("cpu")
    assert now - before > 32 * 2**20 and peak >= now
    del block


def of_group() -> tuple[dict[str, int], dict[str, int]]:
    device = torch.device("cpu")
    return memory_over_ranks(device, dist.group.WORLD), memory_over_ranks(device, None)


def test_all_ranks_get_the_least_and_the_most_loaded() -> None:
    """One rank alone runs out of memory: the mean, or rank 0's number, does not show it."""
    results = run_ranks(2, of_group)
    assert results[0][0] == results[1][0]
    together = results[0][0]
    assert together["memory/current_min_bytes"] <= together["memory/current_max_bytes"]
    assert together["memory/peak_min_bytes"] <= together["memory/peak_max_bytes"]
    for _, alone in results:
        assert together["memory/peak_min_bytes"] <= alone["memory/peak_min_bytes"]
    assert names.unknown(together) == []
