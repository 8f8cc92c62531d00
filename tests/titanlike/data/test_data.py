"""The data of a run, from the config to batches."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch

from titanlike.config import load_config
from titanlike.data import open_data
from titanlike.data.batch import IGNORE, Batch


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("text")
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(f"document {i} " * (i + 5))
    return str(folder / "*.txt")


def batches(text: str, n: int, dp: int = 1, cursor: Any = None, **overrides: Any) -> list[list[Batch]]:
    """[global batch][dp coordinate]."""
    config = load_config(
        None,
        {
            "data.source": "text",
            "data.paths": [text],
            "train.seq_len": 32,
            "train.global_batch_size": 8,
            "model.preset": "debug",
            **{name.replace("__", "."): value for name, value in overrides.items()},
        },
    )
    per_rank = [list(islice(open_data(config, r, dp).train_batches(cursor), n)) for r in range(dp)]
    return [list(ranks) for ranks in zip(*per_rank)]


def ids(steps: list[list[Batch]]) -> list[list[str]]:
    return [[name for batch in ranks for name in batch.sample_ids] for ranks in steps]


def test_no_mesh_and_no_number_of_workers_changes_a_global_batch(text: str) -> None:
    """Two runs that differ in dp or workers train on other samples, or in another order."""
    one = batches(text, 12)
    for other in (batches(text, 12, dp=4), batches(text, 12, dp=2, data__workers=2, data__prefetch=3)):
        assert ids(other) == ids(one)
        for a, b in zip(one, other):
            assert torch.equal(a[0].tokens, torch.cat([batch.tokens for batch in b]))
            assert torch.equal(a[0].labels, torch.cat([batch.labels for batch in b]))
            assert all(batch.cursor == a[0].cursor for batch in b)


@pytest.mark.parametrize("stop", [1, 7, 11])
def test_a_resume_with_another_dp_repeats_and_skips_nothing(text: str, stop: int) -> None:
    """TT #811, MB #5637: changing dp on resume raises, or keeps one rank's cursor."""
    whole = ids(batches(text, 14))
    first = batches(text, stop, dp=2, data__workers=1)
    rest = batches(text, 14 - stop, dp=4, cursor=first[-1][0].cursor)
    assert ids(first) + ids(rest) == whole


def test_a_pass_has_every_row_once_and_the_next_pass_another_order(text: str) -> None:
    seen = [name for step in ids(batches(text, 200)) for name in step]
    passes: dict[str, list[str]] = {}
    for name in seen:
        _, epoch, number = name.split(":")
        passes.setdefault(epoch, []).append(number)
    complete = [order for epoch, order in passes.items() if str(int(epoch) + 1) in passes]
    assert len(complete) >= 2
    assert all(sorted(map(int, order)) == list(range(len(order))) for order in complete)
    assert complete[0] != complete[1]
    assert complete[0] != sorted(complete[0], key=int)


def test_every_token_of_a_pass_is_a_label_once(text: str) -> None:
    """Tokens at the borders of rows are never predicted, or twice."""
    config = load_config(None, {"data.source": "text", "data.paths": [text], "model.preset": "debug"})
    data = open_data(config, 0, 1)
    rows = data._rows
    labels = [int(t) for i in range(rows.n_rows) for t in rows.row(i)[1:]]
    assert labels == data._rows._view.read(1, data._rows._view.n_tokens).tolist()


def test_a_seed_gives_one_order_and_another_seed_another(text: str) -> None:
    """TT #128: the order is shuffled, and the shuffle is a function of the seed alone."""
    assert ids(batches(text, 3)) == ids(batches(text, 3))
    assert ids(batches(text, 3)) != ids(batches(text, 3, run__seed=1))


def test_validation_has_the_same_rows_and_the_same_number_of_batches_for_each_dp(text: str) -> None:
    overrides = {"data.source": "text", "data.paths": [text], "data.validation_fraction": 0.2, "model.preset": "debug"}
    config = load_config(None, {**overrides, "train.seq_len": 32, "train.global_batch_size": 12})
    one = list(open_data(config, 0, 1).validation["text"].batches(3))
    expected = [name for batch in one for name in batch.sample_ids]
    assert len(set(expected)) == len(expected) > 10
    for dp in (2, 3, 4):
        parts = [list(open_data(config, r, dp).validation["text"].batches(3)) for r in range(dp)]
        assert len({len(part) for part in parts}) == 1
        found = [name for step in zip(*parts) for batch in step for name in batch.sample_ids]
        assert found == expected
        assert all(batch.tokens.shape == (3, 32) for part in parts for batch in part)
        valid = sum(int((batch.labels != IGNORE).sum()) for part in parts for batch in part)
        assert valid == sum(int((batch.labels != IGNORE).sum()) for batch in one)


def test_held_out_documents_are_not_trained_on(text: str) -> None:
    config = load_config(
        None,
        {
            "data.source": "text",
            "data.paths": [text],
            "data.validation_fraction": 0.25,
            "validation.samples": 0,
            "model.preset": "debug",
        },
    )
    data = open_data(config, 0, 1)
    trained = data.tokenizer.decode(data._rows._view.read(0, data._rows._view.n_tokens).tolist())
    held = data.validation["text"]._rows
    held_text = data.tokenizer.decode(held._view.read(0, held._view.n_tokens).tolist())
    for i in range(40):
        assert (f"document {i} " in trained) != (f"document {i} " in held_text)
