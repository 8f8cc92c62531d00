"""Tensor files are safetensors files, read by the box, and nothing malformed is believed."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from titanlike.checkpoint import files
from titanlike.checkpoint.tensorfile import DTYPE_NAMES, BadTensorFile, TensorFile, file_pieces


def write(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    files.write_file(path, file_pieces(tensors, {"format": "pt"}))


def every_dtype() -> dict[str, torch.Tensor]:
    tensors = {}
    for dtype, name in DTYPE_NAMES.items():
        values = torch.randn(3, 5) * 10
        tensors[name] = values > 0 if dtype == torch.bool else values.abs().to(dtype)
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "a/odd name…": torch.arange(3)}
    return tensors


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    bits = [t.reshape(-1).view(torch.uint8) for t in (left, right)] if left.numel() else [left, right]
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*bits)


def test_the_safetensors_library_reads_what_we_write(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = every_dtype()
    write(tmp_path / "t", tensors)
    back = load_file(tmp_path / "t")
    assert back.keys() == tensors.keys()
    assert all(same(back[name], tensors[name]) for name in tensors)


def test_we_read_what_the_safetensors_library_writes(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = every_dtype()
    save_file(tensors, tmp_path / "t", {"who": "library"})
    with TensorFile(tmp_path / "t") as file:
        assert file.metadata == {"who": "library"}
        for name, tensor in tensors.items():
            target = torch.empty_like(tensor)
            file.read_box(name, (0,) * tensor.dim(), target)
            assert same(target, tensor)


def test_boxes_are_read_from_anywhere_into_anything(tmp_path: Path) -> None:
    whole = torch.arange(4 * 5 * 6, dtype=torch.float32).view(4, 5, 6)
    write(tmp_path / "t", {"a": whole})
    with TensorFile(tmp_path / "t") as file:
        for box in (
            (slice(1, 3), slice(0, 5), slice(0, 6)),
            (slice(0, 4), slice(2, 3), slice(0, 6)),
            (slice(3, 4), slice(4, 5), slice(1, 4)),
        ):
            offset = tuple(part.start for part in box)
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                target = torch.full_like(whole[box], -1, dtype=dtype)
                file.read_box("a", offset, target)
                assert torch.equal(target, whole[box].to(dtype))
            strided = torch.full((4, 5, 12), -1.0)[box[0], box[1], ::2][..., box[2]]
            file.read_box("a", offset, strided)
            assert torch.equal(strided, whole[box])


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:5],
        lambda data: data[:-1],
        lambda data: data + b"\0",
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data[:8] + b"!" + data[9:],
        lambda data: pickle.dumps({"a": 1}),
        lambda data: data.replace(b'"F32"', b'"F3X"'),
        lambda data: data.replace(b"[2,3]", b"[2,4]"),
        lambda data: data.replace(b"[2,3]", b"[-2,-3]".ljust(5)),
        lambda data: data.replace(b'"shape"', b'"shope"'),
    ],
)
def test_malformed_files_are_refused_by_name(damage, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    write(path, {"a": torch.ones(2, 3)})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(BadTensorFile, match=r"bad\.safetensors"):
        TensorFile(path)


@pytest.mark.parametrize(
    "header",
    [
        [],
        {"a": 3},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}},
        {
            "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
            "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        },
        {"a": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 8]}},
    ],
)
def test_headers_that_lie_are_refused(header, tmp_path: Path) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "bad").write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 8)
    with pytest.raises(BadTensorFile, match="bad"):
        TensorFile(tmp_path / "bad")
