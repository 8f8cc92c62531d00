"""A key or a value that does not exist is answered with the one that was meant, or with those that there are."""

import itertools
from pathlib import Path

import pytest

from tests.titanlike.test_config import mistake, toml
from titanlike import config_elsewhere
from titanlike.config import Config, ModelConfig, config_keys
from titanlike.config_errors import check_keys
from titanlike.config_keys import choices
from titanlike.errors import UserError


def _misspellings(name: str) -> set[str]:
    middle = len(name) // 2
    swapped = name[: middle - 1] + name[middle] + name[middle - 1] + name[middle + 1 :]
    return {swapped, name[:-1], name + name[-1], name[:middle] + "q" + name[middle:], name.replace("_", "-")} - {
        "",
        name,
    }


def _distance(a: str, b: str) -> int:
    """Edit distance with swaps of neighbours (optimal string alignment)."""
    rows = {(i, 0): i for i in range(len(a) + 1)} | {(0, j): j for j in range(len(b) + 1)}
    for i, j in itertools.product(range(1, len(a) + 1), range(1, len(b) + 1)):
        change = rows[i - 1, j - 1] + (a[i - 1] != b[j - 1])
        rows[i, j] = min(rows[i - 1, j] + 1, rows[i, j - 1] + 1, change)
        if i > 1 and j > 1 and a[i - 1] == b[j - 2] and a[i - 2] == b[j - 1]:
            rows[i, j] = min(rows[i, j], rows[i - 2, j - 2] + 1)
    return rows[len(a), len(b)]


def _nested(path: str) -> dict[str, object]:
    """`a.b[].c` as tables: {"a": {"b": [{"c": 1}]}}."""
    value: object = 1
    for part in reversed(path.split(".")):
        value = {part.removesuffix("[]"): [value] if part.endswith("[]") else value}
        if part == "*":
            value = {"a_name_of_ones_own": value["*"]}
    assert isinstance(value, dict)
    return value


def test_a_misspelt_key_at_any_depth_is_answered_with_the_right_one() -> None:
    """Symptom: misspelt keys are silently ignored (TT #1656, AM #2616). Every key, several misspellings of each."""
    keys = config_keys()
    tried = 0
    for path, key in keys.items():
        section, _, name = path.rpartition(".")
        if key.is_element or not section:
            continue
        siblings = [other.rpartition(".")[2] for other in keys if other.rpartition(".")[0] == section and other != path]
        for wrong in _misspellings(name):
            if wrong in siblings or any(_distance(wrong, sibling) <= _distance(wrong, name) for sibling in siblings):
                continue  # as near to another key: no answer is the right one
            with pytest.raises(UserError) as caught:
                check_keys(_nested(f"{section}.{wrong}"), keys)
            where, suggestion = str(caught.value).removeprefix("unknown key ").split(": the nearest valid key is ")
            concrete = path.replace("[]", "[0]").replace("*", "a_name_of_ones_own")
            assert where == concrete.rpartition(".")[0] + "." + wrong
            assert suggestion in (concrete, path), f"{where} was answered with {suggestion}"
            tried += 1
    assert tried > 200


def test_a_misspelt_section_is_answered_with_the_right_key() -> None:
    """Symptom: a whole misspelt table is silently ignored."""
    keys = config_keys()
    for path, key in keys.items():
        section, _, name = path.partition(".")
        if not name or key.section or "[" in path or "*" in path:
            continue
        wrong = section[:2] + section[3:]
        with pytest.raises(UserError) as caught:
            check_keys(_nested(f"{wrong}.{name}"), keys)
        assert str(caught.value) == f"unknown key {wrong}.{name}: the nearest valid key is {path}"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("steps = 3", "unknown key steps in {path}: the nearest valid key is train.steps"),
        ('"train.steps" = 3', 'unknown key "train.steps" in {path}: the nearest valid key is train.steps'),
        ('[train]\n"st\\neps" = 3', 'unknown key train."st\\neps" in {path}: the nearest valid key is train.steps'),
        ("[trian]", "unknown key trian in {path}: the nearest valid key is train"),
        ("[train]\nstpes = 3", "unknown key train.stpes in {path}: the nearest valid key is train.steps"),
        ("[model]\nsteps = 3", "unknown key model.steps in {path}: the nearest valid key is train.steps"),
        ("[train.steps]\nx = 3", 'train.steps must be an integer, got {{"x": 3}} in {path}'),
        (
            "[model.rope_scaling]\nfactr = 3",
            "unknown key model.rope_scaling.factr in {path}: the nearest valid key is model.rope_scaling.factor",
        ),
        (
            "[[optimizer.groups]]\nmatch = 'a'\nlr_scale = 2\n[[optimizer.groups]]\nmtach = 'b'",
            "unknown key optimizer.groups[1].mtach in {path}: the nearest valid key is optimizer.groups[1].match",
        ),
    ],
)
def test_an_unknown_key_in_a_file(text: str, sentence: str, tmp_path: Path) -> None:
    """Symptom: the message does not say which file, which key, or which key was meant."""
    path = toml(tmp_path, text)
    assert mistake(path) == sentence.format(path=path)


SCHEDULES = {
    "GPipe": "afab", "gpipe": "afab", "1F1B": "1f1b", "Interleaved1F1B": "interleaved_1f1b",
    "InterleavedZeroBubble": "interleaved_zero_bubble", "ZBVZeroBubble": "zbv", "DualPipeV": "dualpipev",
}  # fmt: skip


def test_torchs_names_of_schedules_are_answered_with_ours() -> None:
    """Symptom: gpipe was answered with dualpipev, the name that shares most letters with it."""
    for theirs, ours in SCHEDULES.items():
        assert f"(the nearest is {ours!r}), got" in mistake(pipeline__schedule=theirs, mesh__pp="2")


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("tokenizer.path", "data.tokenizer"),
        ("tokenizer.name", "data.tokenizer"),
        ("dataset.path", "data.paths"),
        ("train.learning_rate", "optimizer.lr"),
        ("train.lr", "optimizer.lr"),
        ("model.hidden_size", "model.dim"),
        ("model.name", "model.architecture"),
        ("mesh.tensor_parallel_degree", "mesh.tp"),
        ("train.warmup_steps", "schedule.warmup"),
    ],
)
def test_a_key_by_its_name_elsewhere_is_answered_with_ours(wrong: str, right: str) -> None:
    """Symptom: tokenizer.path was answered with data.paths."""
    assert mistake(**{wrong.replace(".", "__"): "1"}).endswith(f": the nearest valid key is {right}")


@pytest.mark.parametrize(
    ("wrong", "there"),
    [
        ("train.epochs", "[train] has steps, global_batch_size,"),
        ("model.interval", "[model] has architecture, preset, vocab_size, dim,"),
        ("mesh.cp", "[mesh] has pp, dp, tp, ep, sequence_parallel"),
        ("fsdp.enable", "the sections are run, model, mesh,"),
        ("logging.interval", "the sections are run, model, mesh,"),
        ("model.rope_scaling.beta_fast", "[model.rope_scaling] has factor, "),
    ],
)
def test_a_key_that_is_like_no_other_is_answered_with_what_there_is(wrong: str, there: str) -> None:
    """Symptom: train.epochs was answered with optimizer.eps, for a nearest one there always is."""
    said = mistake(**{wrong.replace(".", "__"): "1"})
    assert said.startswith(f"unknown key {wrong} on the command line: {there}")


def test_a_value_that_is_like_no_other_has_no_hint() -> None:
    """Symptom: the architecture neox was answered with moe."""
    assert mistake(model__architecture="neox").startswith(
        "model.architecture 'neox' is not known: there are llama, moe, qwen3, and a class of your own is given as"
    )
    assert "the nearest is 'moe'" in mistake(model__architecture="Mixtral")
    assert mistake(optimizer__name="muon").startswith("optimizer.name must be one of adamw, sgd, got")
    assert mistake(data__source="parquet").endswith("or package.module:Class, got 'parquet'")
    assert "(the nearest is 'bfloat16')" in mistake(train__dtype="bf16")


def test_every_name_from_elsewhere_stands_for_a_key_of_ours() -> None:
    keys = config_keys()
    assert set(config_elsewhere._KEYS) <= set(keys)
    for key, values in config_elsewhere._VALUES.items():
        if key != "model.architecture":
            assert set(values.values()) <= set(choices(keys[key].annotation))
    # A name of ours is not one of theirs as well.
    assert not set(config_elsewhere._KEY_OF) & set(keys)


def test_an_unknown_override_says_that_it_was_on_the_command_line() -> None:
    """Symptom: one searches the file for a mistake that was typed."""
    assert (
        mistake(train__stpes="3") == "unknown key train.stpes on the command line: the nearest valid key is train.steps"
    )
    assert mistake(train__stpes=None) == mistake(train__stpes="3")
    assert mistake(train__steps__foo="3") == 'train.steps must be an integer, got {"foo": 3} on the command line'


def test_a_config_made_in_python_knows_its_keys_too() -> None:
    """Symptom: only files are checked."""
    with pytest.raises(ValueError, match="rope_scalign"):
        ModelConfig.model_validate({"rope_scalign": 3})
    with pytest.raises(ValueError, match="Extra inputs"):
        Config.model_validate({"trian": {}})
