"""Best-fit packing, and what a document mask says."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.titanlike.data.corpora import batches, ids, run_config, write_texts
from titanlike.data import open_data
from titanlike.data.batch import IGNORE, Row, collate
from titanlike.data.packing import BestFitRows, best_fit, cut
from titanlike.data.rows import ConcatRows, passes_of
from titanlike.data.store import ArrayShard, TokenStore, split, whole


def store_of(lengths: list[int]) -> TokenStore:
    starts = np.concatenate(([0], np.cumsum(lengths)))
    return TokenStore([ArrayShard(np.arange(starts[-1], dtype=np.uint32), starts)])


@pytest.mark.parametrize("capacity", [10, 64, 1000])
def test_bins_hold_every_item_once_and_are_as_full_as_best_fit_makes_them(capacity: int) -> None:
    lengths = np.random.default_rng(capacity).integers(1, capacity + 1, 500)
    bins = best_fit(lengths, capacity)
    assert sorted(item for some in bins for item in some) == list(range(500))
    assert all(sum(lengths[some]) <= capacity for some in bins)
    # Plainly: the fullest bin that takes it.
    rooms: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=lambda i: rooms[i])] -= length
        else:
            rooms.append(capacity - length)
    assert sorted(capacity - sum(lengths[some]) for some in bins) == sorted(rooms)


def test_only_a_document_that_is_too_long_is_cut() -> None:
    start, length = cut(np.array([0, 100, 200, 300]), np.array([11, 112, 221, 302]), 10)
    assert list(zip(start.tolist(), length.tolist())) == [(0, 11), (100, 11), (110, 2), (200, 11), (210, 11), (300, 2)]


LENGTHS = np.random.default_rng(1).integers(2, 90, 700).tolist()


@pytest.mark.parametrize("windows", [1, 8])
def test_a_pass_has_every_label_of_every_document_once(windows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if windows > 1:
        monkeypatch.setattr("titanlike.data.packing.WINDOW_DOCUMENTS", (64, 100))
    store = store_of(LENGTHS)
    view, _ = split(store, 0.1, seed=0)
    rows = BestFitRows(view, 40, "a", seed=0)
    assert rows.n_windows == min(windows, 7)
    position, orders = rows.begin(), []
    for epoch in range(2):
        taken = []
        while position["epoch"] == epoch:
            some, position = rows.take(position, 1)
            taken.append(some)
        read = rows.read(np.concatenate(taken))
        orders.append([row.tokens.tolist() for row in read])
        documents = [part.tokens.tolist() for part in view.parts(*view.spans(np.arange(view.n_documents)), False)]
        starts = {document[0] for document in documents}
        labels: list[int] = []
        for row in read:
            assert row.starts is not None and len(row.tokens) <= 41
            bounds = [0, *row.starts.tolist(), len(row.tokens)]
            for a, b in zip(bounds, bounds[1:]):  # noqa: RUF007
                piece = row.tokens[a:b].tolist()
                assert piece == list(range(piece[0], piece[0] + len(piece)))
                labels += piece[1:]
                whole_document = next((d for d in documents if d[0] == piece[0]), [])
                assert piece[0] not in starts or len(whole_document) > 41 or piece == whole_document
        assert sorted(labels) == sorted(token for document in documents for token in document[1:])
        assert len({row.sample_id for row in read}) == len(read)
    assert orders[0] != orders[1]
    assert rows.padding < 0.05


def test_a_window_is_reached_at_once_and_from_any_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titanlike.data.packing.WINDOW_DOCUMENTS", (64, 64))
    rows = BestFitRows(whole(store_of(LENGTHS)), 40, "a", seed=0)
    taken, position = rows.take(rows.begin(), 500)
    expected = [row.tokens.tolist() for row in rows.read(taken)]
    other = pickle.loads(pickle.dumps(BestFitRows(whole(store_of(LENGTHS)), 40, "a", seed=0)))
    assert [row.tokens.tolist() for row in other.read(taken[::-1])] == expected[::-1]
    middle = other.take(other.begin(), 123)[1]
    rest, end = other.take(json.loads(json.dumps(middle)), 377)
    assert rest.tolist() == taken[123:].tolist() and end == position


def test_a_position_is_carried_between_lengths_and_packings() -> None:
    view = whole(store_of(LENGTHS * 40))
    short, long, concat = (
        BestFitRows(view, 40, "a", 0),
        BestFitRows(view, 80, "a", 0),
        ConcatRows(view, 40, "a", 0, find_starts=True),
    )
    n = short.n_windows
    assert n > 1
    within = {"epoch": 1, "index": 0, "of": n, "row": 3, "rows": 9, "seq_len": 40}
    assert short.carry(within) == within
    assert long.carry(within) == {"epoch": 1, "index": 1, "of": n, "row": 0, "rows": 1, "seq_len": 80}
    assert long.carry({**within, "index": n - 1}) == {
        "epoch": 2,
        "index": 0,
        "of": n,
        "row": 0,
        "rows": 1,
        "seq_len": 80,
    }
    assert concat.carry(within)["index"] == -(-concat.n_rows // n)
    assert short.carry({"epoch": 0, "index": 1, "of": concat.n_rows}) == {**short.begin(), "index": 1}


def test_positions_restart_and_labels_stop_at_the_border_of_documents() -> None:
    row = Row(np.array([5, 6, 7, 8, 9, 4, 3]), np.array([2, 5]), "a")
    batch = collate([row, None, Row(np.arange(9), np.array([8]), "b")], 8, {}, document_mask=True, vocab_size=10)
    assert batch.positions is not None and batch.document_ids is not None
    assert batch.tokens[0].tolist() == [5, 6, 7, 8, 9, 4, 0, 0]
    assert batch.labels[0].tolist() == [6, IGNORE, 8, 9, IGNORE, 3, IGNORE, IGNORE]
    assert batch.positions[0].tolist() == [0, 1, 0, 1, 2, 0, 0, 1]
    ids = batch.document_ids[0].tolist()
    assert [ids.index(i) for i in ids] == [0, 0, 2, 2, 2, 5, 6, 6]
    assert (batch.labels[1] == IGNORE).all()
    assert batch.labels[2].tolist() == [1, 2, 3, 4, 5, 6, 7, IGNORE]  # the last label would start a document
    assert batch.positions[2].tolist() == list(range(8))
    plain = collate([row], 8, {}, document_mask=False, vocab_size=10)
    assert plain.positions is None and plain.labels[0].tolist() == [6, 7, 8, 9, 4, 3, IGNORE, IGNORE]


@pytest.mark.parametrize("packing", ["concat", "best_fit"])
def test_the_order_of_packed_documents_survives_meshes_stages_and_resumes(tmp_path: Path, packing: str) -> None:
    """TT #811, MB #5637, NT PR #144, with everything on."""
    sources = [
        {"name": name, "source": "text", "paths": [write_texts(tmp_path, name, 80)], "weight": weight}
        for name, weight in (("web", 0.7), ("code", 0.3))
    ]

    def config(**more: Any) -> Any:
        return run_config(
            data__sources=sources,
            data__stages=[{"start_step": 21, "mixture": {"web": 1, "code": 3}}, {"start_step": 31, "seq_len": 64}],
            data__packing=packing,
            data__document_mask=True,
            **more,
        )

    one = batches(config(), 50)
    for dp, workers in ((4, 0), (1, 2), (4, 2)):
        other = batches(config(data__workers=workers), 50, dp=dp)
        assert ids(other) == ids(one)
        for a, b in zip(one, other):
            for field in ("tokens", "labels", "positions", "document_ids"):
                assert torch.equal(getattr(a[0], field), torch.cat([getattr(batch, field) for batch in b]))
    for stop in (1, 20, 21, 30, 31, 44):
        cursor = json.loads(json.dumps(batches(config(), stop, dp=2)[-1][0].cursor))
        assert ids(batches(config(), 50 - stop, dp=4, cursor=cursor)) == ids(one)[stop:]


def test_the_padding_of_packed_documents_is_shown(tmp_path: Path) -> None:
    config = run_config(data__source="text", data__paths=[write_texts(tmp_path, "web", 80)], data__packing="best_fit")
    assert "% padding" in dict(open_data(config, 0, 1).describe())["steps 1 to 100"]


def test_passes_grow_row_by_row() -> None:
    rows = BestFitRows(whole(store_of(LENGTHS)), 40, "a", seed=0)
    assert rows.n_windows == 1
    position, n = rows.begin(), int(rows.rows_per_pass)
    for i in range(2 * n):
        assert passes_of(position) == pytest.approx(i / n)
        position = rows.take(position, 1)[1]
