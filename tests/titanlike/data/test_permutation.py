"""The shuffle that needs no memory."""

from __future__ import annotations

import numpy as np
import pytest

from titanlike.data.permutation import key_of, permute
from titanlike.data.rows import ConcatRows
from titanlike.data.store import ArrayShard, TokenStore, whole


@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 100, 1023, 1024, 1025, 70_001])
def test_every_index_comes_once(n: int) -> None:
    assert sorted(permute(np.arange(n), n, key_of(n))) == list(range(n))


def test_any_part_can_be_computed_alone() -> None:
    whole_order = permute(np.arange(1000), 1000, key_of("a"))
    for i in (0, 1, 500, 999):
        assert permute(np.array([i]), 1000, key_of("a")).tolist() == [whole_order[i]]


def test_the_order_is_the_same_on_every_machine() -> None:
    """A change here changes the data of every run that is resumed."""
    assert permute(np.arange(8), 10, key_of("order", 0, "web", 0)).tolist() == [5, 8, 0, 3, 7, 9, 1, 2]
    assert permute(np.array([10**17]), 10**18, key_of("order", 0, "web", 0)).tolist() == [743509649239838658]


def test_it_shuffles() -> None:
    """Neighbours that stay together, or an index that favours a place, make batches of like samples."""
    for n in (6, 50):
        places = np.array([permute(np.arange(n), n, key_of("seed", seed)) for seed in range(3000)])
        for i in range(n):
            counts = np.bincount(places[:, i], minlength=n)
            chi_square = ((counts - 3000 / n) ** 2 / (3000 / n)).sum()
            assert chi_square < n + 6 * (2 * n) ** 0.5, (n, i, chi_square)
    order = permute(np.arange(100_000), 100_000, key_of("x"))
    assert abs(np.corrcoef(order, np.arange(100_000))[0, 1]) < 0.02
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02


def test_a_source_of_a_billion_samples_is_sought_in_no_time() -> None:
    """AX #2229, LF #6352: a resume replays the stream for hours, or a list of all samples fills the memory."""

    tokens = np.lib.stride_tricks.as_strided(np.zeros(1, dtype=np.uint16), (2**42,), (0,))
    store = TokenStore([ArrayShard(tokens, np.array([0, 2**42]))])
    rows = ConcatRows(whole(store), 2048, "a", 0, find_starts=True)
    taken, _ = rows.take({"epoch": 3, "index": 10**9, "of": rows.n_rows}, 1000)
    assert rows.n_rows > 2 * 10**9
    assert len({row.sample_id for row in rows.read(taken)}) == 1000
