"""The global order of a run, from the config to batches: what may change it, and what may not."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.titanlike.data.corpora import batches, ids, run_config, write_texts
from titanlike.config import Config
from titanlike.data import open_data
from titanlike.data.batch import IGNORE
from titanlike.errors import UserError

SWITCH = 21  # the first step of the second stage


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("texts")
    return {name: write_texts(folder, name, 60) for name in ("web", "code", "books")}


def source(texts: dict[str, str], name: str, weight: float, **more: Any) -> dict[str, Any]:
    return {"name": name, "source": "text", "paths": [texts[name]], "weight": weight, **more}


def mixed(texts: dict[str, str], **overrides: Any) -> Config:
    """Three sources, and a second stage with another mixture and another length."""
    values = {
        "data.sources": [source(texts, "web", 0.6), source(texts, "code", 0.4), source(texts, "books", 0)],
        "data.stages": [{"start_step": SWITCH, "mixture": {"code": 1, "books": 2}, "seq_len": 48}],
    }
    return run_config(**values, **overrides)


def single(texts: dict[str, str], **overrides: Any) -> Config:
    return run_config(data__source="text", data__paths=[texts["web"]], **overrides)


@pytest.mark.parametrize("make", [single, mixed])
def test_no_mesh_and_no_number_of_workers_changes_a_global_batch(texts: dict[str, str], make: Any) -> None:
    """Two runs that differ in dp or workers train on other samples, or in another order."""
    one = batches(make(texts), 50)
    for dp, workers, prefetch in ((4, 0, 2), (1, 2, 3), (4, 2, 1)):
        overrides = {"data.workers": workers, **({"data.prefetch": prefetch} if workers else {})}
        other = batches(make(texts, **overrides), 50, dp=dp)
        assert ids(other) == ids(one)
        for a, b in zip(one, other):
            assert torch.equal(a[0].tokens, torch.cat([batch.tokens for batch in b]))
            assert torch.equal(a[0].labels, torch.cat([batch.labels for batch in b]))
            assert all(batch.cursor == a[0].cursor for batch in b)


@pytest.mark.parametrize("stop", [1, 7, SWITCH - 2, SWITCH - 1, SWITCH, SWITCH + 1])
@pytest.mark.parametrize("make", [single, mixed])
def test_a_resume_with_another_dp_repeats_and_skips_nothing(texts: dict[str, str], make: Any, stop: int) -> None:
    """TT #811, MB #5637: changing dp on resume raises, or keeps one rank's cursor. NT PR #144: data stages repeated or
    omitted on resume. TT #409: only one rank's loader state saved."""
    expected = ids(batches(make(texts), 26))
    first = batches(make(texts, **{"data.workers": 1}), stop, dp=2)
    cursor = json.loads(json.dumps(first[-1][0].cursor))
    rest = batches(make(texts), 26 - stop, dp=4, cursor=cursor)
    assert ids(first) + ids(rest) == expected


def test_a_batch_size_changed_on_resume_goes_on_where_it_was(texts: dict[str, str]) -> None:
    expected = [name for step in ids(batches(mixed(texts), 12)) for name in step]
    first = batches(mixed(texts), 4)
    rest = batches(mixed(texts, train__global_batch_size=16), 4, cursor=first[-1][0].cursor)
    assert [name for step in ids(first) + ids(rest) for name in step] == expected


def test_a_pass_has_every_row_once_and_the_next_pass_another_order(texts: dict[str, str]) -> None:
    seen = [name for step in ids(batches(single(texts), 300)) for name in step]
    passes: dict[str, list[str]] = {}
    for name in seen:
        _, epoch, number = name.split(":")
        passes.setdefault(epoch, []).append(number)
    complete = [order for epoch, order in passes.items() if str(int(epoch) + 1) in passes]
    assert len(complete) >= 2
    assert all(sorted(map(int, order)) == list(range(len(order))) for order in complete)
    assert complete[0] != complete[1]
    assert complete[0] != sorted(complete[0], key=int)


def test_a_seed_gives_one_order_and_another_seed_another(texts: dict[str, str]) -> None:
    """TT #128: the order is shuffled, and the shuffle is a function of the seed alone."""
    assert ids(batches(single(texts), 3)) == ids(batches(single(texts), 3))
    assert ids(batches(single(texts), 3)) != ids(batches(single(texts, run__seed=1), 3))


def test_each_stage_has_its_mixture_and_its_length(texts: dict[str, str]) -> None:
    steps = batches(mixed(texts), 40)
    assert {tuple(step[0].tokens.shape) for step in steps[: SWITCH - 1]} == {(8, 32)}
    assert {tuple(step[0].tokens.shape) for step in steps[SWITCH - 1 :]} == {(8, 48)}
    names = [[name.split(":")[0] for name in step] for step in ids(steps)]
    for part, shares in (
        (names[: SWITCH - 1], {"web": 0.6, "code": 0.4}),
        (names[SWITCH - 1 :], {"code": 1 / 3, "books": 2 / 3}),
    ):
        counts: Counter[str] = Counter()
        for n, name in enumerate((name for step in part for name in step), start=1):
            counts[name] += 1
            assert all(abs(counts[name] - share * n) < 1 for name, share in shares.items())
        assert set(counts) == set(shares)


def test_passes_are_reported_for_each_source(texts: dict[str, str]) -> None:
    data = open_data(mixed(texts), 0, 1)
    before = batches(mixed(texts), SWITCH - 1)[-1][0].cursor
    after = batches(mixed(texts), SWITCH + 9)[-1][0].cursor
    assert data.passes(after)["web"] == data.passes(before)["web"] == 96 / data._orders["web", 32].rows_per_pass
    assert data.passes(after)["code"] > data.passes(before)["code"]
    assert "books" not in data.passes(before) and data.passes(after)["books"] > 0
    table = dict(data.describe())
    assert "60% web" in table["steps 1 to 20"] and "8 x 48 = 384 tokens a step" in table["steps 21 to 100"]


# -- a checkpoint of other data ------------------------------------------------------------------------------


def cursor_after(config: Config, steps: int) -> dict[str, Any]:
    return json.loads(json.dumps(batches(config, steps)[-1][0].cursor))


def changed(texts: dict[str, str], what: str, allow: bool) -> Config:
    """The mixture with one thing changed."""
    values: dict[str, Any] = {
        "data.sources": [source(texts, "web", 0.6), source(texts, "code", 0.4), source(texts, "books", 0)]
    }
    values["data.stages"] = [{"start_step": SWITCH, "mixture": {"code": 1, "books": 2}, "seq_len": 48}]
    values["data.allow_changes"] = allow
    if what == "weights":
        values["data.sources"][0]["weight"] = 0.1
    elif what == "later stage":
        values["data.stages"][0]["start_step"] = 15
    elif what == "content":
        values["data.sources"][0]["paths"] = [texts["web"].replace("*", "00*")]
    elif what == "gone":
        values["data.sources"] = values["data.sources"][1:]
    elif what == "seed":
        values["run.seed"] = 5
    return run_config(**values)


CHANGES = {
    "weights": "the mixture from step 6 on is web 0.2, code 0.8 at seq_len 32; then from step 21 on .*, was web 0.6",
    "later stage": "the mixture from step 6 on is .*then from step 15 on .*, was .*then from step 21 on",
    "content": "the source web has other content",
    "gone": "the source web is gone",
    "seed": "run.seed 5, was 0",
}


@pytest.mark.parametrize("what", CHANGES)
def test_changed_data_is_refused_unless_asked_for(texts: dict[str, str], what: str) -> None:
    """OC #617: a changed mix resumes into a crash."""
    cursor = cursor_after(mixed(texts), 5)
    data = open_data(changed(texts, what, allow=False), 0, 1)
    with pytest.raises(UserError, match=CHANGES[what]) as error:
        data.train_batches(cursor)
    assert "data.allow_changes = true" in str(error.value)
    allowed = open_data(changed(texts, what, allow=True), 0, 1)
    said = allowed.check_cursor(cursor)
    assert re.search(CHANGES[what], said[0])
    begins = {"content": "web, books", "gone": "books"}.get(what, "books")
    assert said[1].endswith(f"that begin: {begins}")
    next(allowed.train_batches(cursor))


def test_unchanged_sources_keep_their_positions(texts: dict[str, str]) -> None:
    cursor = cursor_after(mixed(texts), 5)
    uninterrupted = [name for step in ids(batches(mixed(texts), 20)) for name in step if name.startswith("code")]
    taken = [name for step in ids(batches(mixed(texts), 5)) for name in step if name.startswith("code")]
    rest = batches(changed(texts, "weights", allow=True), 5, cursor=cursor)
    names = [name for step in ids(rest) for name in step]
    assert [name for name in names if name.startswith("code")] == uninterrupted[len(taken) : len(taken) + 32]
    assert sum(name.startswith("web") for name in names) == 8  # its new share, exact from the change on


def test_what_is_past_may_be_written_anew(texts: dict[str, str]) -> None:
    """A stage that is over can't be changed any more, and a config that is cleaned up is not a change."""
    cursor = cursor_after(mixed(texts), SWITCH + 3)
    values = {
        "data.sources": [source(texts, "web", 0.6), source(texts, "code", 1), source(texts, "books", 2)],
        "data.stages": [{"start_step": 1, "mixture": {"code": 1, "books": 2}, "seq_len": 48}],
    }
    assert open_data(run_config(**values), 0, 1).check_cursor(cursor) == []


# -- validation ----------------------------------------------------------------------------------------------


def test_validation_has_the_same_rows_and_the_same_number_of_batches_for_each_dp(texts: dict[str, str]) -> None:
    """TT #1759: validation loss depends on the mesh."""
    config = single(texts, data__validation_fraction=0.2, train__global_batch_size=12)
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


def test_validation_sets_have_names(texts: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_text("other text " * 50)
    sets = [{"name": "other", "source": "text", "paths": [str(tmp_path / "other.txt")]}]
    data = open_data(mixed(texts, validation__sets=sets, validation__samples=0), 0, 1)
    assert list(data.validation) == ["web", "code", "books", "other"]
    assert sum(int((b.labels != IGNORE).sum()) for b in data.validation["other"].batches(4)) == 550
    assert 0 < data.validation["other"].unigram_entropy() < 3
    sets[0]["name"] = "web"
    with pytest.raises(UserError, match=r"validation.sets has the name web"):
        open_data(mixed(texts, validation__sets=sets), 0, 1)


def test_unigram_entropy_is_that_of_the_labels(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("ab" * 100)
    sets = [{"name": "ab", "source": "text", "paths": [str(tmp_path / "t.txt")]}]
    data = open_data(run_config(validation__sets=sets, data__validation_fraction=0), 0, 1)
    labels = torch.cat([batch.labels for batch in data.validation["ab"].batches(1)])
    share = torch.bincount(labels[labels != IGNORE]).double()
    share = share[share > 0] / share.sum()
    assert data.validation["ab"].unigram_entropy() == pytest.approx(-(share * share.log()).sum().item(), abs=1e-12)


# -- mistakes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"data.source": "text"}, 'data.*: source = "text" needs paths'),
        ({"data.paths": ["x"]}, 'data.*: paths has no effect with source = "python-stdlib"'),
        ({"data.prefetch": 3}, "data.*: prefetch has no effect with workers = 0"),
        ({"data.sources": [{"name": "a"}, {"name": "a"}]}, "data.*: two sources have the same name"),
        ({"data.sources": [{"name": "a", "weight": 0}, {"name": "b", "weight": 0}]}, "weights of the sources sum to 0"),
        ({"data.sources": [{"name": "a/b"}]}, r"data.sources\[0\].name must be a string that matches"),
        ({"data.sources": [{"name": "a"}], "data.source": "tokens", "data.paths": ["x"]}, "beside a list of sources"),
        ({"data.sources": [{"name": "a", "wieght": 1}]}, r"nearest valid key is data.sources\[0\].weight"),
        ({"data.stages": [{"start_step": 5}]}, r"stages\[0\] changes nothing"),
        ({"data.stages": [{"start_step": 5, "mixture": {"x": 1}}]}, r"names x, and the sources are python-stdlib"),
        ({"data.stages": [{"start_step": 5, "mixture": {"python-stdlib": 0}}]}, r"stages\[0\].mixture sums to 0"),
        ({"data.stages": [{"start_step": 5, "seq_len": 9}, {"start_step": 5, "seq_len": 8}]}, "must be more than"),
        ({"validation.sets": [{"name": "a"}, {"name": "a"}]}, "two sets have the same name"),
    ],
)
def test_a_mistake_in_the_config_is_one_sentence(overrides: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        run_config(**overrides)


def test_a_mistake_in_what_the_config_names_is_one_sentence(texts: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text('{"text": ""}\n')
    for overrides, words in (
        ({"data.source": "text", "data.paths": [str(tmp_path / "empty.jsonl")]}, r"text \(.*empty.jsonl\) has no text"),
        ({"data.tokenizer": str(tmp_path)}, "tokenizer.json does not exist"),
        ({"train.global_batch_size": 7}, r"global_batch_size \(7\) must be a multiple of dp \(2\)"),
        ({"data.stages": [{"start_step": 9, "seq_len": 33}], "mesh.tp": 2}, "seq_len 33 of the stage from step 9 on"),
    ):
        with pytest.raises(UserError, match=words):
            open_data(run_config(**overrides), 0, 2)


def test_an_error_of_a_source_names_its_key_whole(texts: dict[str, str], tmp_path: Path) -> None:
    """Symptom: "paths: x names no file", and three sources and two validation sets have a paths."""
    nothing = {"source": "text", "paths": [str(tmp_path / "nothing.txt")]}
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    binary = {"source": "text", "paths": [str(tmp_path / "binary.txt")]}
    good = {"name": "good"}
    for overrides, words in (
        ({f"data.{key}": value for key, value in nothing.items()}, r"data\.paths: .*nothing.txt names no file"),
        ({f"data.{key}": value for key, value in binary.items()}, r"data: .*binary.txt is not UTF-8 text"),
        ({"data.sources": [good, {"name": "b", **nothing}]}, r"data\.sources\[1\]\.paths: .*names no file"),
        ({"data.sources": [{"name": "b", "source": "no.such:Class"}]}, r"data\.sources\[0\]\.source = 'no.such:Class'"),
        ({"validation.sets": [{"name": "b", **nothing}]}, r"validation\.sets\[0\]\.paths: .*names no file"),
        ({"data.source": "tokens", "data.paths": [str(tmp_path)]}, r"data\.paths: .* has no metadata.json"),
    ):
        with pytest.raises(UserError, match=f"^{words}"):
            open_data(run_config(**overrides), 0, 1)
