"""Documents in shards, views that leave some out, and rows cut from them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from titanlike.data.rows import ConcatRows
from titanlike.data.store import ArrayShard, TokenStore, View, split, whole


def store_of(lengths: list[int], shards: int = 1) -> TokenStore:
    """Documents of these lengths whose tokens are 0, 1, 2, ... over all of them."""
    parts = np.array_split(np.array(lengths), shards)
    first, made = 0, []
    for part in parts:
        starts = np.concatenate(([0], np.cumsum(part)))
        made.append(ArrayShard(np.arange(first, first + starts[-1], dtype=np.uint32), starts))
        first += int(starts[-1])
    return TokenStore(made)


LENGTHS = np.random.default_rng(0).integers(2, 40, 60).tolist()


def read(store: TokenStore | View, start: int, stop: int) -> tuple[list[int], list[int]]:
    """Tokens, and the positions at which documents start."""
    part = store.parts(np.array([start]), np.array([stop]), find_starts=True)[0]
    assert part.starts is not None and part.learnt is None
    return part.tokens.tolist(), (part.starts + start).tolist()


@pytest.mark.parametrize("shards", [1, 4])
def test_positions_and_documents_run_over_all_shards(shards: int) -> None:
    store, starts = store_of(LENGTHS, shards), np.concatenate(([0], np.cumsum(LENGTHS)))
    assert (store.n_tokens, store.n_documents) == (sum(LENGTHS), 60)
    low, high = (
        np.ravel(a) for a in np.meshgrid(np.arange(0, store.n_tokens, 7), np.arange(1, store.n_tokens + 1, 31))
    )
    low, high = low[low < high], high[low < high]
    for a, b, part in zip(low.tolist(), high.tolist(), store.parts(low, high, find_starts=True)):
        assert part.tokens.tolist() == list(range(a, b))
        assert part.starts is not None and (part.starts + a).tolist() == [s for s in starts[:-1] if a < s < b]
    chosen = np.array([59, 3, 3, 31, 0])
    low, high = store.spans(chosen)
    assert low.tolist() == starts[chosen].tolist() and high.tolist() == starts[chosen + 1].tolist()


@pytest.mark.parametrize("shards", [1, 4])
def test_a_view_is_the_documents_that_are_left(shards: int) -> None:
    store, starts = store_of(LENGTHS, shards), np.concatenate(([0], np.cumsum(LENGTHS)))
    training, held = split(store, 0.2, seed=3)
    assert held is not None

    def documents(view: View) -> list[list[int]]:
        tokens, begins = read(view, 0, view.n_tokens)
        found = [tokens[a:b] for a, b in itertools.pairwise([0, *begins, view.n_tokens])]
        low, high = view.spans(np.arange(view.n_documents))
        assert found == [tokens[a:b] for a, b in zip(low, high)]
        return found

    everything = [list(range(a, b)) for a, b in itertools.pairwise(starts)]
    assert sorted(documents(training) + documents(held)) == everything
    assert len(documents(held)) == 12
    assert documents(training) == sorted(documents(training))
    tokens, begins = read(training, 0, training.n_tokens)
    for a in range(0, training.n_tokens, 11):
        for b in range(a + 1, training.n_tokens + 1, 37):
            assert read(training, a, b) == (tokens[a:b], [s for s in begins if a < s < b])


def test_what_is_held_out_depends_on_the_seed_alone() -> None:
    held = [split(store_of(LENGTHS, shards), 0.2, seed)[1] for shards, seed in ((1, 3), (4, 3), (1, 4))]
    tokens = [read(view, 0, view.n_tokens) for view in held if view is not None]
    assert tokens[0] == tokens[1] != tokens[2]


def test_no_more_is_held_out_than_can_be_looked_up_at_once() -> None:
    """Opening a store of a billion documents takes minutes."""
    starts = np.arange(0, 5 * 10**6 + 1, 2)
    training, held = split(TokenStore([ArrayShard(np.zeros(5 * 10**6, dtype=np.uint16), starts)]), 0.01, seed=0)
    assert held is not None
    assert (held.n_documents, training.n_documents) == (10_000, 2_490_000)


def test_a_single_document_gives_up_its_end() -> None:
    """No validation at all, or no training, with one large file."""
    training, held = split(store_of([1000]), 0.05, seed=0)
    assert held is not None
    assert read(training, 0, training.n_tokens)[0] == list(range(950))
    assert read(held, 0, held.n_tokens)[0] == list(range(950, 1000))
    training, held = split(store_of([3]), 0.9, seed=0)
    assert held is None and training.n_tokens == 3
    training, held = split(store_of([5, 5]), 0.99, seed=0)
    assert held is not None and training.n_tokens == held.n_tokens == 5
    assert split(store_of([5, 5]), 0, seed=0)[1] is None
    training, held = split(store_of([5, 900, 5]), 0.1, seed=0)
    assert held is not None and training.spans(np.arange(3))[1].tolist() == [5, 814, 819]


@pytest.mark.parametrize("seq_len", [1, 7, 32, 5000])
def test_every_token_of_a_pass_is_a_label_once(seq_len: int) -> None:
    """Tokens at the borders of rows are never predicted, or twice."""
    store = store_of(LENGTHS)
    rows = ConcatRows(whole(store), seq_len, "a", seed=0, find_starts=False)
    taken, position = rows.take(rows.begin(), rows.n_rows)
    assert (position["epoch"], position["index"]) == (1, 0)
    labels = [token for row in rows.read(taken) for token in row.tokens[1:].tolist()]
    assert sorted(labels) == list(range(1, store.n_tokens))
    assert all(1 < len(row.tokens) <= seq_len + 1 for row in rows.read(taken))


def test_a_position_carried_to_another_length_is_the_same_share_of_the_pass() -> None:
    view = whole(store_of([100_001]))
    short, long = (ConcatRows(view, n, "a", 0, find_starts=False) for n in (10, 1000))
    assert (short.n_rows, long.n_rows) == (10_000, 100)
    position = short.take(short.begin(), 12_345)[1]
    assert long.carry(position) == {"epoch": 1, "index": 24, "of": 100}
    assert short.carry(position) == position
    assert long.carry({"epoch": 1, "index": 9_999, "of": 10_000}) == {"epoch": 2, "index": 0, "of": 100}
