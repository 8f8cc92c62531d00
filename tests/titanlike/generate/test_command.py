"""scripts/generate.py from its command line: a run's own text comes back on every mesh; mistakes are one sentence."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import launch, run_ranks
from tests.titanlike.runs import checkpoint, run, tiny
from titanlike.errors import UserError
from titanlike.generate.command import main

TEXT = "The mesh may change at any save,\nthe run that it names stays one.\n"
SIZES = {"model.dim": 64, "model.ffn_dim": 96, "train.seq_len": len(TEXT), "train.steps": 60, "optimizer.lr": 1e-2}
TRAINING = {**SIZES, "train.global_batch_size": 1, "data.validation_fraction": 0.0, "optimizer.weight_decay": 0.0}


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of configs/debug.toml, shrunk, that has learnt a text of two lines with tp 2."""
    folder = tmp_path_factory.mktemp("learnt") / "run"
    (folder.parent / "text.txt").write_text(TEXT)
    run_ranks(2, run, tiny(folder, **{"mesh.tp": 2}, **TRAINING))
    return folder


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _printed(argv: list[str], terminal: bool = False) -> str:
    out = Terminal() if terminal else io.StringIO()
    main(argv, out)
    return out.getvalue()


def _refused(argv: list[str]) -> str:
    with pytest.raises(UserError) as caught:
        main(argv, io.StringIO())
    return str(caught.value)


def _all_printed(lines: list[list[str]]) -> list[str]:
    return [_printed(argv) for argv in lines]


def _all_refused(lines: list[list[str]]) -> list[str]:
    return [_refused(argv) for argv in lines]


def test_a_run_gives_its_text_back_on_every_mesh(learnt: Path) -> None:
    """Weights of another mesh are put together wrongly, or generation runs another model than training."""
    argv = ["--checkpoint", str(learnt), "--prompt", TEXT[:4], "--prompt", TEXT[:1]]
    (alone,) = run_ranks(1, _printed, argv)
    # By default, as many new tokens as the longest prompt leaves of the context.
    assert alone == f"--- prompt 1\n{TEXT}\n--- prompt 2\n{TEXT[:-3]}\n"
    for rank in run_ranks(2, _all_printed, [[*argv, "--mesh.tp", "2"], [*argv, "--mesh.pp", "2"], argv]):
        assert rank in ([alone] * 3, [""] * 3)  # rank 0 alone speaks


def test_the_script_speaks_json_and_draws_alike_under_torchrun(learnt: Path) -> None:
    argv = ["scripts/generate.py", "--checkpoint", checkpoint(learnt, 60), "--prompt", TEXT[:9], "--json"]
    argv += ["--temperature", "3", "--top-k", "9", "--seed", "4", "--dtype", "float64", "--max-new-tokens", "20"]
    ended = launch([*argv, "--mesh.tp", "2"], 2)
    assert ended.returncode == 0, ended.stderr
    told = json.loads(ended.stdout)
    (alone,) = run_ranks(1, _printed, list(map(str, argv[1:])))
    assert told["completions"] == json.loads(alone)["completions"]
    assert told["completions"][0]["text"] != TEXT[9:29]
    assert told["prefill"]["tokens"] == 9 and told["decode"]["tokens"] == 19
    assert told["decode"]["tokens_per_s"] > 0


def test_a_terminal_gets_the_same_text_as_a_file(learnt: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": TEXT[:9]}) + "\n" + json.dumps(TEXT[:2]) + "\n")
    argv = ["--checkpoint", str(learnt), "--prompts-file", str(tmp_path / "prompts.jsonl"), "--stop", "save,\nthe run"]
    shown, written = (run_ranks(1, _printed, argv, terminal)[0] for terminal in (True, False))
    assert shown == written
    assert written == "--- prompt 1\nThe mesh may change at any \n--- prompt 2\nThe mesh may change at any \n"


def _damage(folder: Path) -> Iterator[Path]:
    """One bit of each file of weights."""
    for path in sorted(folder.glob("*.safetensors")):
        content = bytearray(path.read_bytes())
        content[len(content) * 3 // 4] ^= 16
        path.write_bytes(content)
        yield path


def test_wrong_inputs_are_one_sentence_each(learnt: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint(learnt, 60), damaged)
    files = [path.name for path in _damage(damaged)]
    (tmp_path / "neither").mkdir()
    (tmp_path / "neither" / "model.bin").write_bytes(b"x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tokenizer.json").write_bytes(_other_tokenizer())
    good, hello = ["--checkpoint", str(learnt)], ["--prompt", "hello"]
    long = ["--prompt", "x" * len(TEXT)]
    wrong: dict[str, list[str]] = {
        f"{tmp_path / 'missing'} does not exist": ["--checkpoint", str(tmp_path / "missing"), *hello],
        f"{tmp_path / 'neither'} is neither": ["--checkpoint", str(tmp_path / "neither"), *hello],
        f"{damaged / files[0]} is damaged: its CRC-32": ["--checkpoint", str(damaged), *hello],
        f"prompt 1 has {len(TEXT)} tokens, and a text may have {len(TEXT)}, the length": [*good, *long],
        f"prompt 1 has 5 tokens, so 99 new ones go past the {len(TEXT)}": [*good, *hello, "--max-new-tokens", "99"],
        "is not the one that": [*good, *hello, "--tokenizer", str(tmp_path / "other")],
        "--tokenizer: nowhere does not exist": [*good, *hello, "--tokenizer", "nowhere"],
        "there is no prompt": good,
        "--prompts-file nowhere cannot be read": [*good, "--prompts-file", "nowhere"],
        "--train.steps has no effect here": [*good, *hello, "--train.steps", "3"],
        "--model.rope_scaling.facto has no effect": [*good, *hello, "--model.rope_scaling.facto", "3"],
        "the following arguments are required: --checkpoint": hello,
        "unrecognized arguments: --promt": [*good, *hello, "--promt", "x"],
        "mesh.tp (3)": [*good, *hello, "--mesh.tp", "3"],
        "top-k has no effect": [*good, *hello, "--top-k", "3"],
        "--batch-size must be": [*good, *hello, "--batch-size", "0"],
        "max-new-tokens must be": [*good, *hello, "--max-new-tokens", "0"],
        "rope_scaling.factor: Input should be a valid number": [*good, *hello, "--model.rope_scaling.factor", "big"],
    }
    said = run_ranks(1, _all_refused, list(wrong.values()))[0]
    for sentence, answer in zip(wrong, said, strict=True):
        assert sentence in answer and "\n" not in answer, answer
    # On two ranks both say it, and none waits for the other.
    both = run_ranks(2, _all_refused, [["--checkpoint", str(damaged), *hello], [*good, *long]])
    assert both[0] == both[1] and files[0] in both[0][0]


def _other_tokenizer() -> bytes:
    from titanlike.checkpoint.hf_tokenizer import byte_tokenizer_files

    return byte_tokenizer_files()["tokenizer.json"]


def test_a_rope_scaling_goes_past_the_trained_length(learnt: Path) -> None:
    argv = ["--checkpoint", str(learnt), "--prompt", TEXT[:9], "--json", "--max-new-tokens", "90"]
    told: dict[str, Any] = json.loads(run_ranks(1, _printed, [*argv, "--model.rope_scaling.factor", "4"])[0])
    assert told["completions"][0]["finish"] in ("length", "end")
