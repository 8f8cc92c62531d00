"""No file on any of these paths can run code: a payload in each kind of file is refused by the file's name."""

from __future__ import annotations

import dataclasses
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.titanlike.checkpoint.states import full_state, whole
from tests.titanlike.checkpoint.test_hf import meta_of, model_of, save, weights
from titanlike.checkpoint import CheckpointConfig, Checkpointer, hf, tools
from titanlike.checkpoint.hf_import import import_hf
from titanlike.errors import UserError


class Payload:
    """Unpickling it makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable, tuple]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """What exists if a payload ran. That it would run is shown first."""
    path = tmp_path / "the payload ran"
    pickle.loads(pickle.dumps(Payload(path)))
    assert path.exists()
    path.rmdir()
    return path


def payloads(mark: Path, size: int) -> list[bytes]:
    """As pickle and as torch.save writes it; padded to the size of the file that they replace."""
    torch.save(Payload(mark), mark.parent / "saved.pt")
    return [data.ljust(size, b"\0") for data in (pickle.dumps(Payload(mark)), (mark.parent / "saved.pt").read_bytes())]


FILES = ["rank-00000.safetensors", "tensors.json", "state.json", "manifest.json", "COMMIT"]


@pytest.mark.parametrize("name", FILES)
def test_a_payload_in_a_checkpoint(name: str, mark: Path, tmp_path: Path) -> None:
    checkpointer = Checkpointer(CheckpointConfig(mode="sync"), tmp_path / "run")
    model = model_of("plain")
    checkpointer.save(1, weights(model), meta_of(model))
    path = checkpointer.root / "step-00000001" / name
    for data in payloads(mark, path.stat().st_size):
        path.write_bytes(data)
        named = r"step-00000001/" + name.replace(".", r"\.")
        with pytest.raises(UserError, match=named):
            checkpointer.load(weights(model))
        with pytest.raises(UserError, match=named):
            checkpointer.load_weights(str(tmp_path / "run"), weights(model), "llama", dataclasses.asdict(model.config))
        with pytest.raises(UserError, match=named):
            tools.export(tmp_path / "run", tmp_path / "out", "float32")
        assert any(name in (problem or "") for _, problem in tools.verify(path.parent))
        assert name in str(tools.list_run(tmp_path / "run")) or path.stat().st_size == len(data)
        assert not mark.exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["config.json", hf.SINGLE, hf.INDEX])
def test_a_payload_in_a_hugging_face_folder(name: str, mark: Path, tmp_path: Path) -> None:
    model = save(tmp_path / "run", "plain")
    tools.export(tmp_path / "run", tmp_path / "out", "float32")
    path = tmp_path / "out" / name
    for data in payloads(mark, 1000):
        path.write_bytes(data)
        for action in (
            lambda: Checkpointer(CheckpointConfig(), tmp_path).load_weights(
                str(tmp_path / "out"), weights(model), "llama", dataclasses.asdict(model.config)
            ),
            lambda: import_hf(tmp_path / "out", tmp_path / "in"),
        ):
            with pytest.raises(UserError, match=name.replace(".", r"\.")):
                action()
        assert not mark.exists() and not (tmp_path / "in").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.ckpt"])
def test_pickled_weights_are_refused_by_name(name: str, mark: Path, tmp_path: Path) -> None:
    model = save(tmp_path / "run", "plain")
    tools.export(tmp_path / "run", tmp_path / "out", "float32")
    (tmp_path / "out" / hf.SINGLE).unlink()
    (tmp_path / "out" / name).write_bytes(payloads(mark, 0)[1])
    with pytest.raises(UserError, match=rf"{name} is a pickle file, which can run code"):
        Checkpointer(CheckpointConfig(), tmp_path).load_weights(
            str(tmp_path / "out"), weights(model), "llama", dataclasses.asdict(model.config)
        )
    assert not mark.exists()


def test_a_folder_of_torchs_own_checkpoint_is_refused_by_name(mark: Path, tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Payload(mark)))
    (folder / "__0_0.distcp").write_bytes(payloads(mark, 0)[1])
    for action in (
        lambda: Checkpointer(CheckpointConfig(), tmp_path).load_weights(str(folder), {}, "llama", {}),
        lambda: tools.open_checkpoint(folder),
    ):
        with pytest.raises(UserError, match=r"\.metadata is pickle, which can run code"):
            action()
    assert not mark.exists()


def test_no_pickle_is_written(tmp_path: Path) -> None:
    checkpointer = Checkpointer(CheckpointConfig(mode="sync"), tmp_path)
    checkpointer.save(1, whole(full_state()), {"text": "x"})
    for path in (checkpointer.root / "step-00000001").iterdir():
        data = path.read_bytes()
        assert path.suffix in (".json", ".safetensors", "")
        with pytest.raises((pickle.UnpicklingError, KeyError, ValueError, EOFError, IndexError, UnicodeDecodeError)):
            pickle.loads(data)
        assert not data.startswith((b"PK", b"\x80"))


def test_a_link_out_of_a_hugging_face_folder_is_not_followed_by_name(tmp_path: Path) -> None:
    """An index that names a file elsewhere."""
    save(tmp_path / "run", "plain")
    tools.export(tmp_path / "run", tmp_path / "out", "float32")
    shutil.move(tmp_path / "out" / hf.SINGLE, tmp_path / "elsewhere.safetensors")
    (tmp_path / "out" / hf.INDEX).write_text('{"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}')
    with pytest.raises(UserError, match=r"names '\.\./elsewhere\.safetensors'"):
        hf.HfFolder(tmp_path / "out")
