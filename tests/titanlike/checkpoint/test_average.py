"""Averages of weights: of checkpoints of any mesh, as a checkpoint that everything here reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import checkpoint as script
from tests.titanlike.checkpoint.test_hf import meta_of, model_of, save, weights
from titanlike.checkpoint import CheckpointConfig, Checkpointer, Shard, hf, tools
from titanlike.checkpoint.average import average, shares
from titanlike.errors import UserError


def _saved(folder: Path, factor: float, kind: str = "tied") -> dict[str, torch.Tensor]:
    """A checkpoint of a model with all weights times `factor`; its weights."""
    model = model_of(kind)
    with torch.no_grad():
        for value in model.parameters():
            value.mul_(factor)
    checkpointer = Checkpointer(CheckpointConfig(mode="sync"), folder)
    checkpointer.save(int(factor * 10), weights(model), meta_of(model))
    return {f"model.{name}": value.detach() for name, value in model.named_parameters()}


def _read(path: Path) -> dict[str, torch.Tensor]:
    index = tools.open_checkpoint(path)[2]
    found = {name: index.read_tensor(name) for name in index.tensors}
    index.close()
    return found


def test_the_average_is_exact_but_for_rounding_and_has_nothing_but_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(hf, "_PIECE_BYTES", 1000)  # many pieces
    held = [_saved(tmp_path / str(n), factor) for n, factor in enumerate((1.0, 1.5, 4.0))]
    runs = [str(tmp_path / str(n)) for n in range(3)]
    assert script.main(["average", *runs, str(tmp_path / "mean"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["out"] == str(tmp_path / "mean")
    found = _read(tmp_path / "mean")
    assert set(found) == set(held[0])
    for name, value in found.items():
        wanted = sum(each[name].double() for each in held) / 3
        torch.testing.assert_close(value, wanted.float(), rtol=1e-7, atol=0)
    assert script.main(["average", *runs, str(tmp_path / "ema"), "--ema", "0.75"]) == 0
    for name, value in _read(tmp_path / "ema").items():
        wanted = held[0][name].double()
        for each in held[1:]:
            wanted = 0.75 * wanted + 0.25 * each[name].double()
        torch.testing.assert_close(value, wanted.float(), rtol=1e-7, atol=0)
    state = tools.open_checkpoint(tmp_path / "ema")[3]
    assert [each["step"] for each in state["averaged"]] == [10, 15, 40]
    assert state["step"] == 40 and state["weights_only"] and state["tokenizer"] == "bytes"
    assert all(problem is None for _, problem in tools.verify(tmp_path / "mean"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "ema", "mean"]


def test_checkpoints_of_different_meshes_are_averaged(tmp_path: Path) -> None:
    model = save(tmp_path / "three", "gqa", ranks=3)
    save(tmp_path / "one", "gqa")
    average([tmp_path / "three", tmp_path / "one"], tmp_path / "out")
    for name, value in _read(tmp_path / "out").items():
        assert torch.equal(value, dict(model.named_parameters())[name.removeprefix("model.")]), name


def test_shares_add_up() -> None:
    assert shares(4, None) == [0.25] * 4
    assert shares(3, 0.5) == [0.25, 0.25, 0.5]
    assert sum(shares(7, 0.9)) == pytest.approx(1.0)


def _damage(folder: Path) -> None:
    path = next((folder / "checkpoints").glob("*/*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_what_can_not_be_averaged_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    for name, kind in (("a", "tied"), ("b", "tied"), ("other", "gqa"), ("damaged", "tied")):
        _saved(tmp_path / name, 1.0, kind)
    _damage(tmp_path / "damaged")
    a, b, out = tmp_path / "a", tmp_path / "b", tmp_path / "out"
    wrong: list[tuple[list[Any], dict[str, Any], str]] = [
        ([a], {}, "two checkpoints or more"),
        ([a, tmp_path / "missing"], {}, "missing does not exist"),
        ([a, tmp_path / "other"], {}, "model.n_kv_heads is 2 in"),
        ([a, tmp_path / "damaged"], {}, "is damaged: its CRC-32"),
        ([a, b], {"ema": 1.0}, "--ema must be 0 or more and less than 1"),
    ]
    for paths, options, said in wrong:
        with pytest.raises(UserError, match=said):
            average(paths, out, **options)
    assert not out.exists() and not list(tmp_path.glob(".*"))
    out.mkdir()
    with pytest.raises(UserError, match="out exists already"):
        average([a, b], out)


def test_an_average_can_be_started_from(tmp_path: Path) -> None:
    """As checkpoint.init_from, and as what generation and evaluation read."""
    from titanlike.checkpoint.weights import load_weights

    held = _saved(tmp_path / "a", 1.0)
    _saved(tmp_path / "b", 3.0)
    average([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    into = {name: Shard.whole(torch.empty_like(value)) for name, value in held.items()}
    load_weights(str(tmp_path / "out"), into, "llama", meta_of(model_of("tied"))["model"], None)
    for name, shard in into.items():
        torch.testing.assert_close(shard.tensor, held[name] * 2)
