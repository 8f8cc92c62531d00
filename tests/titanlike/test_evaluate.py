"""The loss of weights on text: that of the run, the same on every mesh, in bits that a person can check."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import launch, run_ranks
from tests.titanlike.runs import columns, run, text_file, tiny
from titanlike.config import load_config
from titanlike.errors import UserError
from titanlike.evaluate import Score, byte_counter, main
from titanlike.generate.command import main as generate
from titanlike.loss import IGNORE
from titanlike.metrics import files
from titanlike.tokenizer import ByteTokenizer, FileTokenizer

TEXT = "naïve café — 日本語 ✓ 🙂 and plain words, and more of them.\n" * 3


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evaluate") / "run"
    more = {"train.dtype": "float64", "mesh.pp": 2, "data.document_mask": True}
    more |= {"train.microbatch_size": 2, "train.seq_len": 31, "validation.samples": 13}
    run_ranks(2, run, tiny(folder, **more))
    return folder


def _evaluated(lines: list[list[str]]) -> list[Any]:
    answers = []
    for argv in lines:
        out = io.StringIO()
        try:
            main([*argv, "--json"], out)
            answers.append(json.loads(out.getvalue()) if out.getvalue() else None)
        except UserError as error:
            answers.append(str(error))
    return answers


def test_the_loss_is_that_of_the_run_on_every_mesh(trained: Path, tmp_path: Path) -> None:
    """Padding rows of the last batch, or rows of other dp ranks, count; with uneven rows the mean depends on the
    mesh."""
    (tmp_path / "book.txt").write_text(TEXT)
    sets = json.dumps([{"name": "book", "source": "text", "paths": [str(tmp_path / "book.txt")]}])
    book = ["--validation.sets", sets.replace('": ', '" = ').replace('"name"', "name").replace('"source"', "source")]
    book[1] = book[1].replace('"paths"', "paths")
    alone = ["--checkpoint", str(trained)]
    one = run_ranks(1, _evaluated, [alone, [*alone, *book], [*alone, "--train.microbatch_size", "5"]])[0]
    (held_out,) = one[0]["sets"].values()
    (logged,) = columns(trained, "val_loss")[4]
    assert held_out["loss"] == pytest.approx(logged, rel=1e-12)
    assert held_out["perplexity"] == pytest.approx(math.exp(logged), rel=1e-12)
    assert set(one[1]["sets"]) == {"text", "book", "all"}
    mine = one[1]["sets"]["book"]
    assert mine["bytes"] == len(TEXT.encode()) - 1  # the first byte of the document is no label
    assert mine["bits_per_byte"] == pytest.approx(mine["loss"] * mine["tokens"] / math.log(2) / mine["bytes"])
    everything = one[1]["sets"]["all"]
    assert everything["tokens"] == mine["tokens"] + one[1]["sets"]["text"]["tokens"]
    meshes = [[*alone, *book, f"--mesh.{axis}", "2"] for axis in ("tp", "pp", "dp")]
    first, second = run_ranks(2, _evaluated, meshes)
    assert second == [None] * 3
    for answer in [*first, one[2]]:
        for name, values in answer["sets"].items():
            assert values == pytest.approx(one[1]["sets"][name], rel=1e-10)


def test_the_script_prints_a_table(trained: Path) -> None:
    argv = ["scripts/evaluate.py", "--checkpoint", trained, "--mesh.pp", "2", "--validation.samples", "3"]
    ended = launch(argv, 2)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert lines[1].split() == ["set", "loss", "perplexity", "bits/byte", "tokens"]
    assert lines[2].split()[0] == "text"


def test_mistakes_are_one_sentence(trained: Path) -> None:
    good = ["--checkpoint", str(trained)]
    wrong = {
        "does not exist": ["--checkpoint", str(trained / "nothing")],
        "--optimizer.lr has no effect here": [*good, "--optimizer.lr", "1"],
        "train.seq_len (99) is more than the 31 tokens": [*good, "--train.seq_len", "99"],
        "there is no text to evaluate on": [*good, "--data.validation_fraction", "0"],
        "--limit has no effect without --tasks": [*good, "--limit", "3"],
        "unknown key data.validation_fracton": [*good, "--data.validation_fracton", "0"],
        "mesh.tp (2)": [*good, "--mesh.tp", "2"],
    }
    said = run_ranks(1, _evaluated, list(wrong.values()))[0]
    for sentence, answer in zip(wrong, said, strict=True):
        assert isinstance(answer, str) and sentence in answer and "\n" not in answer, answer


def _own(folder: Path, shape: dict[str, Any]) -> Any:
    """A run of an architecture that has no attention, with samples during training."""
    config = load_config(
        None,
        {
            **{"run.dir": str(folder.parent), "run.name": folder.name, "run.device": "cpu", **shape},
            **{"model.architecture": "tests.titanlike.own_architecture:Own", "model.n_layers": 2},
            **{"compile.enable": False},
            **{"data.source": "text", "data.paths": [str(text_file(folder.parent))], "metrics.tensorboard": False},
            **{"train": {"steps": 2, "global_batch_size": 4, "seq_len": 32, "dtype": "float64"}},
            **{"validation.generate": {"prompts": ["12 times"], "interval": 2, "max_new_tokens": 5}},
        },
    )
    return run(config).error


def _refused(argv: list[str]) -> str:
    with pytest.raises(UserError) as caught:
        generate(argv, io.StringIO())
    return str(caught.value)


def test_an_architecture_without_a_cache_is_evaluated_and_generates_while_it_is_trained(tmp_path: Path) -> None:
    assert run_ranks(1, _own, tmp_path / "one", {}) == [None]
    assert run_ranks(2, _own, tmp_path / "two", {"mesh.tp": 2}) == [None, None]
    texts = [
        [each["texts"] for each in files.read_events(tmp_path / name) if each["event"] == "samples"]
        for name in ("one", "two")
    ]
    assert texts[0] == texts[1] and texts[0][0][0].startswith("12 times")
    (logged,) = columns(tmp_path / "one", "val_loss")[2]
    argv = ["--checkpoint", str(tmp_path / "two")]
    for answer in (run_ranks(1, _evaluated, [argv])[0], run_ranks(2, _evaluated, [[*argv, "--mesh.tp", "2"]])[0]):
        assert answer[0]["sets"]["text"]["loss"] == pytest.approx(logged, rel=1e-10)
    said = run_ranks(1, _refused, [*argv, "--prompt", "x"])[0]
    assert said.startswith("the architecture Own cannot generate: its context has no field `cache`")


def _rows(ids: list[int], length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and labels as a loader makes them."""
    rows = [ids[i : i + length + 1] for i in range(0, len(ids) - 1, length)]
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    labels = torch.full((len(rows), length), IGNORE)
    for i, row in enumerate(rows):
        tokens[i, : len(row) - 1], labels[i, : len(row) - 1] = torch.tensor(row[:-1]), torch.tensor(row[1:])
    return tokens, labels


def test_bytes_are_counted_for_every_kind_of_tokenizer(tmp_path: Path) -> None:
    """A row that begins in the middle of a character, or with a space that the decoder drops."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    counted = {}
    for name in ("bytes", "byte-level", "metaspace"):
        text = TEXT if name != "metaspace" else "some plain words, and more of them. " * 9
        tokenizer: Any = ByteTokenizer()
        if name != "bytes":
            backend = Tokenizer(models.BPE())
            level = name == "byte-level"
            backend.pre_tokenizer = pre_tokenizers.ByteLevel(False) if level else pre_tokenizers.Metaspace()
            backend.decoder = decoders.ByteLevel() if level else decoders.Metaspace()
            backend.normalizer = normalizers.NFC()
            trainer = trainers.BpeTrainer(
                vocab_size=300,
                special_tokens=["<|endoftext|>"],
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if level else [],
                show_progress=False,
            )
            backend.train_from_iterator([text], trainer)
            backend.save(str(tmp_path / "tokenizer.json"))
            tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
            assert (tokenizer.bytes_per_token is None) == (name == "metaspace")
        ids = [tokenizer.end_id, *tokenizer.encode(text), tokenizer.end_id]
        counted[name] = byte_counter(tokenizer)(*_rows(ids, 7)), len(text.encode())
    assert all(found == wanted for found, wanted in counted.values()), counted


def test_a_score_adds_up() -> None:
    total = Score(2.0, 4, 2) + Score(6.0, 4, 6)
    assert (total.loss, total.bytes) == (1.0, 8)
    assert total.bits_per_byte == pytest.approx(1 / math.log(2))
    assert Score(1.0, 1, 0).bits_per_byte is None
