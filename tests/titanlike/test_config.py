"""Loading a config: every kind of mistake is one sentence, and what is written can be fed back."""

from pathlib import Path

import pytest
import torch

from titanlike import architectures
from titanlike.config import load_config, write_resolved
from titanlike.errors import UserError

CONFIGS = sorted(Path(__file__).parents[2].joinpath("configs").glob("*.toml"))


def mistake(path: Path | None = None, /, **overrides: object) -> str:
    """The sentence for a config that is wrong. Dots in keys are written as two underscores."""
    with pytest.raises(UserError) as caught:
        load_config(path, {name.replace("__", "."): value for name, value in overrides.items()})
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


def toml(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text)
    return path


# What a good config becomes.


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_each_shipped_config_loads_and_its_model_builds(path: Path) -> None:
    """Symptom: shipped examples do not run (NT #362). The vocabulary is the byte tokenizer's or larger."""
    config = load_config(path)
    config.validate_for(1)
    model_config = config.model_config_for(getattr(config.model, "vocab_size", None) or 259)
    with torch.device("meta"):
        model = config.architecture.model_class(model_config)
    assert sum(parameter.numel() for parameter in model.parameters()) > 0


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_the_resolved_config_fed_back_is_an_equal_config(path: Path, tmp_path: Path) -> None:
    """Symptom: the config in the run folder starts another run, or none."""
    config = load_config(path)
    write_resolved(config, tmp_path / "resolved.toml")
    again = load_config(tmp_path / "resolved.toml")
    assert again == config
    again.validate_for(1)  # no key without effect has been written
    write_resolved(again, tmp_path / "twice.toml")
    assert (tmp_path / "twice.toml").read_text() == (tmp_path / "resolved.toml").read_text()


def test_a_config_with_everything_set_round_trips(tmp_path: Path) -> None:
    """Symptom: nested tables, lists of tables, optional keys, and floats without decimals are lost on the way."""
    config = load_config(
        None,
        {
            "run.name": 'quotes " and \\ and é',
            "model.preset": "1b",
            "model.rope_scaling.factor": 4,
            "mesh.pp": 2,
            "mesh.dp": 2,
            "pipeline.schedule": "interleaved_1f1b",
            "pipeline.split": [4, 4, 4, 4],
            "train.max_grad_norm": 0,
            "optimizer.lr": 1,
            "optimizer.groups": [{"match": r"\.wq\.", "lr_scale": 0.5}, {"match": "norm", "weight_decay": 0}],
            "schedule.warmup": 1.0,
            "schedule.decay_steps": 3,
            "schedule.decay": "1-sqrt",
        },
    )
    write_resolved(config, tmp_path / "resolved.toml")
    again = load_config(tmp_path / "resolved.toml")
    assert again == config
    assert isinstance(again.schedule.warmup, float)
    assert again.pipeline.split == [4, 4, 4, 4]


def test_defaults_need_no_file() -> None:
    """Symptom: a script without --config fails before it can say what is missing."""
    config = load_config()
    config.validate_for(1)
    assert config.train.steps == 100
    assert config.run_dir == Path("runs/unnamed")


def test_an_explicit_key_overrides_the_preset_and_nested_keys_are_merged() -> None:
    """Symptom: giving one key of rope_scaling throws the preset's others away."""
    model = load_config(None, {"model.preset": "8b", "model.n_layers": 2, "model.rope_scaling.factor": "16"}).model
    assert (model.n_layers, model.dim, model.ffn_dim) == (2, 4096, 14336)
    assert model.rope_scaling.factor == 16.0
    assert model.rope_scaling.original_max_position_embeddings == 8192


def test_derived_sizes_are_settled_and_the_vocabulary_is_the_tokenizers() -> None:
    """Symptom: code that reads config.model has to know what None stands for."""
    config = load_config(None, {"model.n_heads": 4})
    assert (config.model.n_kv_heads, config.model.head_dim) == (4, 64)
    assert config.model.vocab_size is None
    assert config.model_config_for(259).vocab_size == 259
    preset = load_config(None, {"model.preset": "8b"})
    assert preset.model_config_for(1000).vocab_size == 1000
    assert isinstance(preset.model_config_for(1000), architectures.resolve("llama").config_class)
    assert preset.model_config_for(1000).rope_scaling.factor == 8.0
    assert load_config(None, {"model.vocab_size": 512}).model_config_for(259).vocab_size == 512


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused() -> None:
    """Symptom: an index error inside the embedding at the first token that has no row."""
    with pytest.raises(UserError, match=r"model\.vocab_size \(100\) is smaller than the tokenizer's 259 ids"):
        load_config(None, {"model.vocab_size": 100}).model_config_for(259)


def test_none_takes_a_key_or_a_section_out(tmp_path: Path) -> None:
    """Symptom: a run's config cannot be started on another mesh without editing it."""
    path = toml(tmp_path, "[mesh]\npp = 2\ndp = 2\n[pipeline]\nschedule = 'afab'\nsplit = [2, 2]\n")
    config = load_config(path, {"mesh.pp": "1", "mesh.dp": None, "pipeline": None})
    config.validate_for(4)
    assert config.resolved_dp(4) == 4
    assert load_config(path, {"pipeline.split": None}).pipeline.schedule == "afab"
    assert load_config(None, {"model.rope_scaling.factor": None}).model.rope_scaling is None


def test_configs_are_frozen() -> None:
    """Symptom: some code changes the config that was written to the run folder."""
    with pytest.raises(ValueError, match="frozen"):
        load_config().train.steps = 3  # pyrefly: ignore


def test_a_run_without_a_name_has_that_of_its_config_file(tmp_path: Path) -> None:
    """Symptom: a start without --config, or with one that has no run.name, resumes the run of `make train`."""
    assert load_config().run.name == "unnamed"
    path = toml(tmp_path, "[train]\nsteps = 3")
    assert load_config(path).run.name == "run"
    assert (
        load_config(path, {"run.name": "mine"}).run.name == load_config(None, {"run.name": "mine"}).run.name == "mine"
    )
    assert load_config(path, {"run": None}).run.name == "run"
    assert load_config(toml(tmp_path, "[run]\nseed = 3")).run.name == "run"
    assert mistake(toml(tmp_path, "run = 3")).startswith("run must be a table, got 3")


# Wrong types and values.


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("train.steps", "abc", 'train.steps must be an integer, got "abc"'),
        ("train.steps", "1.0", "train.steps must be an integer, got 1.0"),
        ("train.steps", "true", "train.steps must be an integer, got true"),
        ("train.steps", '"20"', 'train.steps must be an integer, got "20"'),
        ("train.steps", "0", "train.steps must be 1 or more, got 0"),
        ("train.steps", "1979-05-27", 'train.steps must be an integer, got "1979-05-27"'),
        ("train", 3, "train must be a table, got 3"),
        ("train", [{"steps": 3}], 'train must be a table, got [{"steps": 3}]'),
        ("train.max_grad_norm", "nan", "train.max_grad_norm must be a finite number, got NaN"),
        ("train.max_grad_norm", "-1", "train.max_grad_norm must be 0 or more, got -1"),
        ("train.dtype", "float16", "train.dtype must be one of float32, bfloat16, float64"),
        ("optimizer.lr", "fast", 'optimizer.lr must be a number, got "fast"'),
        ("optimizer.beta2", "1", "optimizer.beta2 must be less than 1, got 1"),
        ("optimizer.name", "adam", "(the nearest is 'adamw'), got \"adam\""),
        ("optimizer.groups", "[3]", "optimizer.groups[0] must be a table, got 3"),
        ("optimizer.groups", "{match = 'a'}", 'optimizer.groups must be a list of tables, got {"match": "a"}'),
        ("optimizer.groups", "[{lr_scale = 2}]", "optimizer.groups[0].match is missing: it must be a string"),
        (
            "optimizer.groups",
            "[{match = 'a', lr_scale = 'b'}]",
            'optimizer.groups[0].lr_scale must be a number, got "b"',
        ),
        (
            "optimizer.groups",
            "[{match = 'a('}]",
            "optimizer.groups[0].match on the command line: 'a(' is not a regular",
        ),
        ("optimizer.groups", "[{match = 'a'}]", "optimizer.groups[0] on the command line: the group changes nothing"),
        ("run.name", "..", "run.name on the command line: must be the name of a folder in run.dir, got '..'"),
        (
            "run.name",
            "a/../../b",
            "run.name on the command line: must be the name of a folder in run.dir, got 'a/../../b'",
        ),
        ("compile.enable", "yes", 'compile.enable must be true or false, got "yes"'),
        ("compile.enable", "1", "compile.enable must be true or false, got 1"),
        ("pipeline.split", "2,2", 'pipeline.split must be a list of integers, got "2,2"'),
        ("pipeline.split", "[1, 'a']", 'pipeline.split[1] must be an integer, got "a"'),
        ("pipeline.split", "[]", "pipeline.split must be a list of at least 1, got []"),
        ("schedule.warmup", "soon", 'schedule.warmup must be a number, got "soon"'),
        ("schedule.warmup", "1.5", "schedule.warmup on the command line: 1.5 has a decimal point, so it is a fraction"),
        ("schedule.warmup", "-1", "schedule.warmup on the command line: a number of steps must be 0 or more, not -1"),
        ("run.seed", "-1", "run.seed must be 0 or more, got -1"),
        ("run.name", '""', 'run.name must be a string of at least 1 character(s), got ""'),
        ("model", 3, "model must be a table, got 3"),
        ("model.dim", "abc", 'model.dim must be an integer, got "abc" on the command line'),
        ("model.dim", "0", "[model]: dim must be at least 1, not 0"),
        ("model.n_kv_heads", "0", "[model]: n_kv_heads must be at least 1, not 0"),
        ("model.rope_theta", "0", "[model]: rope_theta must be more than 0, not 0.0"),
        ("model.rope_scaling.factor", "0", "[model]: rope_scaling.factor must be more than 0, not 0.0"),
        ("model.rope_scaling", "{factor = 8, high_freq_factor = 1}", "high_freq_factor (1.0) must be more than"),
        ("model.n_kv_heads", "3", "[model]: n_heads (4) must be a multiple of n_kv_heads (3)"),
        ("model.preset", "8z", "model.preset '8z' is not a preset of llama: its presets are debug, 26m, 1b"),
        ("model.preset", ["8b"], 'model.preset must be a string, got ["8b"]'),
        ("model.architecture", "lama", "model.architecture 'lama' is not known: the nearest is 'llama'"),
        ("model.architecture", 3, "model.architecture must be a string, got 3"),
        ("model.architecture", "no.such:Model", "the module 'no.such' cannot be imported"),
        ("model.architecture", "models.llama:Lama", "the module 'models.llama' has no class 'Lama'"),
        ("model.architecture", "os:path", "its config_class must be a dataclass"),
        ("model.architecture", ".x:Y", "is not known"),
        ("model.rope_scaling", "8", "model.rope_scaling must be a table, got 8"),
        (
            "model.rope_scaling.factor",
            "big",
            'model.rope_scaling.factor must be a number, got "big" on the command line',
        ),
        ("model.rope_scaling.low_freq_factor", "2", "model.rope_scaling.factor is missing: it must be a number"),
    ],
)
def test_a_wrong_value_is_one_sentence_with_the_keys_path(key: str, value: object, sentence: str) -> None:
    """Symptom: a traceback of the validating library, or a value that is bent into the type."""
    assert sentence in mistake(**{key: value})


def test_numbers_are_taken_where_they_are_plain() -> None:
    """Symptom: strictness refuses what anybody would write."""
    config = load_config(None, {"optimizer.lr": "1", "train.max_grad_norm": ".5", "model.rope_theta": "500_000"})
    assert (config.optimizer.lr, config.train.max_grad_norm, config.model.rope_theta) == (1.0, 0.5, 500000.0)


def test_a_string_key_takes_any_text() -> None:
    """Symptom: a run called 2024, or true, is a type error."""
    for text, name in [("2024", "2024"), ("true", "true"), ('"a b"', "a b"), ("a # b", "a # b"), ("[1]", "[1]")]:
        assert load_config(None, {"run.name": text}).run.name == name


# Files.


def test_a_missing_file_is_named_with_what_is_there(tmp_path: Path) -> None:
    """Symptom: FileNotFoundError with a traceback on every rank."""
    toml(tmp_path, "")
    assert (
        mistake(tmp_path / "ran.toml")
        == f"the config file {tmp_path}/ran.toml does not exist ({tmp_path} has run.toml)"
    )
    assert "is a folder" in mistake(tmp_path)
    assert "does not exist" in mistake(tmp_path / "no" / "such.toml")


def test_a_syntax_error_names_the_file_and_the_line(tmp_path: Path) -> None:
    """Symptom: the line of the mistake has to be searched."""
    path = toml(tmp_path, "[train]\nsteps = 3\nsteps = = 4\n")
    assert f"{path} is not valid TOML" in mistake(path)
    assert "line 3" in mistake(path)
    path.write_bytes(b"\xff\xfe\x00")
    assert mistake(path) == f"the config file {path} is not UTF-8 text, so not TOML"
    assert "Cannot overwrite a value" in mistake(toml(tmp_path, "[train]\nsteps = 1\nsteps = 2\n"))


def test_files_from_windows_editors_are_read(tmp_path: Path) -> None:
    """Symptom: a byte order mark is a syntax error at line 1."""
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf[train]\r\nsteps = 3\r\n")
    assert load_config(path).train.steps == 3


# Architectures of one's own.

MODULE = '''
import dataclasses
import torch

@dataclasses.dataclass(frozen=True)
class Expert:
    width: int
    """Width of one expert."""
    kind: str = "mlp"

@dataclasses.dataclass(frozen=True)
class MineConfig:
    vocab_size: int
    width: int
    """Width of everything."""
    experts: list[Expert] = dataclasses.field(default_factory=list)
    sizes: tuple[int, ...] = (1, 2)
    expert: Expert | None = None

class Mine(torch.nn.Module):
    config_class = MineConfig

    def __init__(self, config):
        super().__init__()
        self.embedding = torch.nn.Embedding(config.vocab_size, config.width)

PRESETS = {"tiny": MineConfig(vocab_size=5, width=4, expert=Expert(3))}
'''


@pytest.fixture(params=["", "from __future__ import annotations\n"], ids=["types", "texts"])
def mine(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"mine_{'texts' if request.param else 'types'}"
    tmp_path.joinpath(f"{name}.py").write_text(request.param + MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return f"{name}:Mine"


def test_an_architecture_of_ones_own_is_configured_like_a_built_in_one(mine: str, tmp_path: Path) -> None:
    """Symptom: a new model needs changes in the config's code."""
    text = "width = 8\nsizes = [3]\nexperts = [{width = 1}, {width = 2, kind = 'moe'}]\n"
    config = load_config(toml(tmp_path, f"[model]\narchitecture = '{mine}'\n{text}"))
    built = config.model_config_for(7)
    assert (built.vocab_size, built.width, built.sizes) == (7, 8, (3,))
    assert [type(expert).__name__ for expert in built.experts] == ["Expert", "Expert"]
    assert built.experts[1].kind == "moe"
    assert config.architecture.model_class(built).embedding.weight.shape == (7, 8)
    write_resolved(config, tmp_path / "resolved.toml")
    assert load_config(tmp_path / "resolved.toml") == config
    config.validate_for(4)


def test_an_architecture_of_ones_own_has_the_same_errors(mine: str) -> None:
    """Symptom: keys of a custom model are not checked."""
    own = {"model.architecture": mine}
    assert mistake(**own) == "model.width is missing: give it, or choose a model.preset (tiny)"
    assert mistake(**own, model__wdth="3") == (
        "unknown key model.wdth on the command line: the nearest valid key is model.width"
    )
    assert "model.experts[0].widht" in mistake(**own, model__width="3", model__experts="[{widht = 3}]")
    assert 'model.expert.width must be an integer, got "a"' in mistake(
        **own, model__width="3", model__expert__width="a"
    )
    assert "model.dim" in mistake(**own, model__dim="3")  # llama's keys are not this model's
    preset = load_config(None, {**own, "model.preset": "tiny", "model.expert.kind": "moe"})
    assert (preset.model.expert.width, preset.model.expert.kind) == (3, "moe")
