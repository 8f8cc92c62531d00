"""Sources that are not text: a user's class, a stream, random ids."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.titanlike.data.corpora import batches, ids, run_config, write_texts
from titanlike.data import open_data
from titanlike.data.batch import IGNORE
from titanlike.errors import UserError

OWN = "tests.titanlike.data.own:"


@pytest.fixture
def lines(tmp_path: Path) -> str:
    """A folder of JSONL files, as load_dataset opens it."""
    (tmp_path / "set").mkdir()
    for shard in range(3):
        records = ({"text": f"record {shard} {i} " * (i % 5 + 1)} for i in range(200))
        (tmp_path / "set" / f"{shard}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(tmp_path / "set")


def stream_config(kind: str, lines: str, tmp_path: Path, **more: Any) -> Any:
    values: dict[str, Any] = {
        "own": {"source": OWN + "Counting"},
        "dataset": {"source": "huggingface", "dataset": lines, "streaming": True},
    }
    text = tmp_path / "text.txt"
    text.write_text("some other text " * 300)
    sources = [
        {"name": "stream", "weight": 0.75, **values[kind]},
        {"name": "text", "weight": 0.25, "source": "text", "paths": [str(text)]},
    ]
    return run_config(data__sources=sources, data__document_mask=True, **more)


@pytest.mark.parametrize("kind", ["own", "dataset"])
def test_a_stream_survives_meshes_and_resumes(kind: str, lines: str, tmp_path: Path) -> None:
    """AX #2229, LF #6352: a resume restarts the stream. TT #409: only one rank's loader state is saved."""
    one = batches(stream_config(kind, lines, tmp_path), 60)
    for dp, workers in ((4, 0), (2, 2)):
        other = batches(stream_config(kind, lines, tmp_path, data__workers=workers), 60, dp=dp)
        assert ids(other) == ids(one)
        for a, b in zip(one, other):
            for field in ("tokens", "labels", "positions", "document_ids"):
                assert torch.equal(getattr(a[0], field), torch.cat([getattr(batch, field) for batch in b]))
            assert all(batch.cursor == a[0].cursor for batch in b)
    for stop in (1, 42, 43, 59):  # a block of 256 rows ends within batch 43
        cursor = json.loads(json.dumps(one[stop - 1][0].cursor))
        rest = batches(stream_config(kind, lines, tmp_path, data__workers=1), 60 - stop, dp=2, cursor=cursor)
        assert ids(rest) == ids(one)[stop:]
        assert torch.equal(torch.cat([batch.tokens for batch in rest[0]]), one[stop][0].tokens)


def test_a_stream_gives_all_of_its_text_in_each_pass(tmp_path: Path) -> None:
    config = run_config(data__source=OWN + "Counting", data__arguments={"until": 700})
    steps = batches(config, 300)
    assert steps[-1][0].cursor["sources"]["Counting"]["epoch"] > 0
    rows = {}
    for step in steps:
        for name, tokens, labels in zip(step[0].sample_ids, step[0].tokens, step[0].labels):
            _, _, block, number = re.split(r"[:.](?=\d)", name)
            rows[int(block) * 256 + int(number)] = (tokens, labels)
    text = bytes(int(t) for i in range(len(rows) // 256 * 256) for t in rows[i][0] if t < 256).decode()
    once = "".join(f"and {i} and " + "so on " * ((i + 1) % 7) for i in range(700))
    assert len(text) > 1.5 * len(once)
    assert text == (once * 9)[: len(text)]
    assert all(
        (labels[:-1] == tokens[1:]).all() and labels[-1] == rows[i + 1][0][0]
        for i, (tokens, labels) in list(rows.items())[:-1]
        if i + 1 in rows
    )


def test_a_stage_of_another_length_begins_a_new_block_of_a_stream(lines: str, tmp_path: Path) -> None:
    """NT PR #144: data stages repeated or omitted on resume."""
    stages = [{"start_step": 5, "seq_len": 64}]
    one = batches(stream_config("dataset", lines, tmp_path, data__stages=stages), 8)
    assert [step[0].tokens.shape[1] for step in one] == [32] * 4 + [64] * 4
    for stop in (3, 4, 5):
        cursor = json.loads(json.dumps(one[stop - 1][0].cursor))
        rest = batches(stream_config("dataset", lines, tmp_path, data__stages=stages), 8 - stop, cursor=cursor)
        assert ids(rest) == ids(one)[stop:]
        assert all(torch.equal(a[0].tokens, b[0].tokens) for a, b in zip(rest, one[stop:]))


def test_a_dataset_is_read_at_random_or_as_a_stream(lines: str) -> None:
    data = open_data(run_config(data__source="huggingface", data__dataset=lines), 0, 1)
    assert dict(data.describe())["source huggingface"].startswith("600 documents")
    assert list(data.validation) == ["huggingface"]
    sets = [{"name": "held", "source": "huggingface", "dataset": lines, "streaming": True}]
    config = run_config(data__source="huggingface", data__dataset=lines, data__streaming=True, validation__sets=sets)
    data = open_data(config, 0, 1)
    assert {name: held_out.n_rows for name, held_out in data.validation.items()} == {"held": 128}


def test_a_collection_of_the_users_own(tmp_path: Path) -> None:
    config = run_config(data__source=OWN + "Squares", data__arguments={"count": 60}, data__validation_fraction=0.1)
    data = open_data(config, 0, 1)
    name = "Squares"
    held = [name for batch in data.validation[name].batches(8) for name in batch.sample_ids]
    assert len(held) == 6
    steps = batches(config, 9)
    texts = [data.tokenizer.decode(row.tolist()).split(" ")[0] for step in steps for row in step[0].tokens]
    held_texts = [
        data.tokenizer.decode(row.tolist()).split(" ")[0] for b in data.validation[name].batches(6) for row in b.tokens
    ]
    assert sorted(map(int, texts[:54] + held_texts)) == list(range(60))
    assert ids(batches(config, 9, dp=4)) == ids(steps)
    cursor = json.loads(json.dumps(steps[4][0].cursor))
    assert ids(batches(config, 4, dp=2, cursor=cursor)) == ids(steps)[5:]
    changed = run_config(data__source=OWN + name, data__arguments={"count": 61}, data__validation_fraction=0.1)
    with pytest.raises(UserError, match="has other content"):
        open_data(changed, 0, 1).train_batches(cursor)


@pytest.mark.parametrize(
    ("source", "arguments", "words"),
    [
        (OWN + "Squares", {"count": 0}, "is empty"),
        (OWN + "Squares", {"cuont": 5}, "cannot be made with its arguments: .*unexpected keyword argument 'cuont'"),
        (OWN + "Neither", {}, "needs __len__ and __getitem__, or __iter__, state_dict and load_state_dict"),
        (OWN + "Nothing", {}, "has no class 'Nothing'"),
        ("nowhere.at_all:Thing", {}, "the module 'nowhere.at_all' cannot be imported .* PYTHONPATH"),
        ("a-b:c", {}, "is not an import path"),
        (OWN + "Squares", {"fault": "long"}, r"sample 7 of the source .* has 34 ids, more than seq_len \+ 1 = 33"),
        (OWN + "Squares", {"fault": "id"}, r"sample .*Squares:0:\d+ \(source:pass:row\) has the id 999, .* 257 ids"),
        (
            OWN + "Squares",
            {"fault": "type"},
            "sample 7 of the source .* is not a text or a sequence of 2 or more ids, but dict",
        ),
        (OWN + "Counting", {"until": 0}, "is empty: its stream has no document"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_mistake_in_ones_own_class_is_one_sentence(
    source: str, arguments: dict[str, Any], words: str, workers: int
) -> None:
    config = run_config(
        data__source=source, data__arguments=arguments, data__workers=workers, data__validation_fraction=0
    )
    with pytest.raises(UserError, match=words):
        batches(config, 13)


def test_mistakes_around_streams_are_one_sentence(lines: str) -> None:
    stream = {"data__source": "huggingface", "data__dataset": lines, "data__streaming": True}
    for more, words in (
        ({"data__packing": "best_fit"}, "is a stream, which data.packing"),
        ({"data__text_field": "tekst"}, "has no field 'tekst'; its fields: text"),
        ({"data__split": "test"}, "cannot be opened"),
    ):
        with pytest.raises(UserError, match=words):
            open_data(run_config(**stream, **more), 0, 1)
    sets = [{"name": "held", "source": "huggingface", "dataset": lines, "streaming": True}]
    with pytest.raises(UserError, match="the validation set held has no end: give validation.samples more than 0"):
        open_data(run_config(validation__sets=sets, validation__samples=0), 0, 1)


def test_a_dataset_that_is_not_here_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        UserError, match="^data.dataset: nobody/nothing, split 'train', cannot be opened: it is not on this machine"
    ):
        open_data(run_config(data__source="huggingface", data__dataset="nobody/nothing"), 0, 1)


def test_synthetic_rows_have_no_end_and_depend_on_their_number_alone() -> None:
    config = run_config(data__source="synthetic")
    one, two = batches(config, 20), batches(config, 20, dp=2)
    assert ids(one) == ids(two) and len({name for step in ids(one) for name in step}) == 160
    for a, b in zip(one, two):
        assert torch.equal(a[0].tokens, torch.cat([batch.tokens for batch in b]))
        assert (a[0].labels != IGNORE).all()
    tokens = torch.stack([step[0].tokens for step in one])
    assert tokens.min() == 0 and tokens.max() == 256
    assert open_data(config, 0, 1).validation == {}


def test_sources_of_all_kinds_are_mixed(lines: str, tmp_path: Path) -> None:
    sources = [
        {"name": "a", "source": "text", "paths": [write_texts(tmp_path, "a", 30)]},
        {"name": "b", "source": "huggingface", "dataset": lines},
        {"name": "c", "source": OWN + "Squares"},
        {"name": "d", "source": OWN + "Counting"},
        {"name": "e", "source": "synthetic"},
    ]
    config = run_config(data__sources=sources, train__global_batch_size=10)
    steps = batches(config, 7)
    assert [sorted(name[0] for name in step) for step in ids(steps)] == [list("aabbccddee")] * 7
    assert ids(batches(config, 4, dp=5, cursor=json.loads(json.dumps(steps[2][0].cursor)))) == ids(steps)[3:]
