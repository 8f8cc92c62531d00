"""The command line: config keys, a script's own options, help, and one line for a mistake."""

import argparse
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from titanlike import cli, evaluate
from titanlike.config import config_keys
from titanlike.errors import UserError
from titanlike.generate import command as generate

ROOT = Path(__file__).parents[2]
DEBUG = str(ROOT / "configs" / "debug.toml")


def mistake(*argv: str) -> str:
    with pytest.raises(UserError) as caught:
        cli.load(argv)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_overrides_reach_every_depth_in_every_form() -> None:
    """Symptom: a key can be given in the file alone."""
    config = cli.load(
        [
            *("--config", DEBUG, "--train.steps", "20", "--train.seq_len=64", "--optimizer.lr", "1e-4"),
            *("--model.rope_scaling.factor", "8", "--pipeline.split", "[2, 2]", "--mesh.pp=2"),
            *(
                "--optimizer.groups",
                "[{match = 'norm', lr_scale = 2}]",
                "--schedule.decay",
                "cosine",
                "--compile.enable",
            ),
        ]
    )
    assert (config.train.steps, config.train.seq_len, config.optimizer.lr) == (20, 64, 1e-4)
    assert config.model.rope_scaling.factor == 8.0
    assert config.pipeline.split == [2, 2]
    assert config.optimizer.groups[0].lr_scale == 2.0
    assert config.schedule.decay == "cosine"
    assert config.compile.enable
    assert config.run.name == "debug"  # from the file


def test_a_flag_is_true_and_a_value_may_be_negative_or_hold_an_equals_sign() -> None:
    """Symptom: the next argument is eaten, or a value is cut."""
    rest, overrides = cli.split(["--a.b", "--c.d", "-1", "--e.f=x=y", "--g.h", "--config", "p.q", "--i.j", "k.l"])
    assert rest == ["--config", "p.q"]
    assert overrides == {"a.b": True, "c.d": "-1", "e.f": "x=y", "g.h": True, "i.j": "k.l"}


def test_the_last_of_several_counts_and_nothing_takes_a_key_out() -> None:
    """Symptom: a script that adds its own defaults cannot be overridden."""
    config = cli.load(["--config", DEBUG, "--train.steps", "3", "--train.steps", "4", "--train.seq_len=", "--run="])
    assert (config.train.steps, config.train.seq_len, config.run.name) == (4, 256, "debug")


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--train.stpes", "20"], "unknown key train.stpes on the command line: the nearest valid key is train.steps"),
        (["--stpes", "20"], "unknown argument --stpes: the nearest valid one is --train.steps"),
        (
            ["configs/debug.toml"],
            "unexpected argument 'configs/debug.toml': a config is given as --config configs/debug",
        ),
        (["--train.steps", "3", "my.toml"], "unexpected argument 'my.toml': a config is given as --config my.toml"),
        (["--confg", DEBUG], "unknown argument --confg: the nearest valid one is --config"),
        (["--seed=3"], "unknown argument --seed: the nearest valid one is --run.seed"),
        (["--train", "20"], "--train is a section: its keys are given as --train.key value, see --help"),
        (["train.steps=20"], "unexpected argument 'train.steps=20': a config key is given as --section.key value"),
        (["--train.steps"], "--train.steps needs a value: an integer"),
        (["--train.steps", "--mesh.tp", "2"], "--train.steps needs a value: an integer"),
        (["--train.steps", "abc"], 'train.steps must be an integer, got "abc" on the command line'),
        (["--train.steps.x", "3", "--config", DEBUG], "train.steps.x on the command line: train.steps is not a table"),
        (["--optimizer.groups[0].match", "a"], "optimizer.groups[0].match on the command line: a list is given whole"),
        (["--config"], "argument --config: expected one argument"),
        (["--epochs", "3"], "unknown argument --epochs: --help lists what there is"),
        (["--learning-rate", "3"], "unknown argument --learning-rate: the nearest valid one is --optimizer.lr"),
        (["--conf", DEBUG], "unknown argument --conf: the nearest valid one is --config"),
        (["--."], 'unknown key ""'),
        (["--train.", "3"], 'unknown key train.""'),
        (["--train..steps", "3"], 'unknown key train."".steps'),
    ],
)
def test_a_wrong_argument_is_one_sentence(argv: list[str], sentence: str) -> None:
    """Symptom: argparse's usage, or a traceback."""
    assert sentence in mistake(*argv)


def test_a_script_has_options_and_arguments_of_its_own() -> None:
    """Symptom: the value of a config key is taken for a positional argument."""

    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("prompt", nargs="*")
        parser.add_argument("--temperature", type=float, default=1.0)

    argv = ["def", "--train.steps", "3", "main", "--temperature", "0.5", "--config", DEBUG]
    config, options = cli.parse(argv, "Generate text.", add_options)
    assert config.train.steps == 3
    assert (options.prompt, options.temperature) == (["def", "main"], 0.5)
    with pytest.raises(UserError, match="nearest valid one is --temperature"):
        cli.parse(["--temprature", "3"], "Generate text.", add_options)
    with pytest.raises(UserError, match="invalid float value"):
        cli.parse(["--temperature", "hot"], "Generate text.", add_options)


def test_help_lists_every_key_with_its_type_default_and_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    """Symptom: a key without a word of help."""
    with pytest.raises(SystemExit) as caught:
        cli.load(["--help", "--train.steps", "3"])
    assert caught.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert "  train.steps = 100  (an integer)" in lines
    assert (
        '  pipeline.schedule = "1f1b"  (one of afab, 1f1b, interleaved_1f1b, interleaved_zero_bubble, zbv, dualpipev)'
        in lines
    )
    assert "  mesh.dp = not given  (an integer)" in lines
    for path, key in config_keys().items():
        if not key.is_element:
            entry = f"[{path}]" if key.section and "." not in path else f"  {path} "
            places = [index for index, line in enumerate(lines) if f"{line} ".startswith(entry)]
            assert len(places) == 1, path
            assert lines[places[0] + 1].strip(), f"{path} has no docstring"
            assert key.section or key.doc, f"{path} has no docstring"
    assert "Presets: debug, 26m, 1b, 3b, 8b, 70b." in " ".join(" ".join(lines).split())


def test_help_knows_the_architecture_that_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Symptom: the help lists the keys of another model."""
    path = tmp_path / "run.toml"
    path.write_text("[model]\narchitecture = 'models.llama:Llama'\n")
    for argv in (["--config", str(path), "-h"], ["--help", "--model.architecture", "models.llama:Llama"]):
        with pytest.raises(SystemExit):
            cli.load(argv)
        assert "  model.rope_scaling.factor  (a number)" in capsys.readouterr().out
    assert "is not known" in mistake("--help", "--model.architecture", "lama")


def test_a_mistake_leaves_a_process_with_one_line_and_exit_code_2() -> None:
    """Symptom: a traceback, or a process that waits for the others."""
    program = "import sys; from titanlike import cli, errors; errors.run_main(lambda: print(cli.load(sys.argv[1:])))"
    argv = [sys.executable, "-c", program, "--train.stpes", "20"]
    result = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr == (
        "error: unknown key train.stpes on the command line: the nearest valid key is train.steps\n"
    )


@pytest.mark.parametrize("command", [evaluate.parse, generate.parse], ids=["evaluate", "generate"])
def test_a_checkpoint_without_its_option_is_told_which(command: Callable[[list[str]], object]) -> None:
    """Symptom: `evaluate.py runs/llama` says that --checkpoint is required, and nothing of runs/llama."""
    with pytest.raises(UserError, match=r"'runs/llama': it is given as --checkpoint runs/llama$"):
        command(["runs/llama", "--json"])
