"""Hugging Face folders of safetensors: read by slices, written as a stream.

No rank holds more of a model than its own part while reading, and writing needs memory for one piece of one tensor. A
folder's pickle files (`pytorch_model.bin`) are never opened.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from titanlike.checkpoint import files
from titanlike.checkpoint.folder import new_folder
from titanlike.checkpoint.hf_config import form_for, hf_parts, to_hf_config
from titanlike.checkpoint.manifest import CheckpointError, to_json
from titanlike.checkpoint.reader import TensorIndex
from titanlike.checkpoint.tensorfile import BadTensorFile, Entry, TensorFile, as_bytes, make_header
from titanlike.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_FILE_BYTES = 5_000_000_000  # what the Hugging Face libraries also take
_PIECE_BYTES = 64 << 20  # of a tensor, held at once
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".distcp")

Tensors = dict[str, tuple[str, int | None, tuple[int, ...]]]
"""Their name -> (our name, the row of our tensor that it is, or None for all of it, its shape)"""


class HfFolder:
    """The tensors and the config of a Hugging Face folder. Files are opened when they are first needed."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError if the folder is not one, or its weights are only there as pickle."""
        self.folder = folder
        self.config = _read_json(folder / "config.json")
        self._open: dict[str, TensorFile] = {}
        if (folder / INDEX).is_file():
            weight_map = _read_json(folder / INDEX).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise UserError(f"{folder / INDEX} has no weight_map")
            for name in set(weight_map.values()):
                if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
                    raise UserError(f"{folder / INDEX} names {name!r}, which is not a file in that folder")
            self._file_of: dict[str, str] = weight_map
        elif (folder / SINGLE).is_file():
            self._file_of = dict.fromkeys(self._file(SINGLE).entries, SINGLE)
        else:
            pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
            if pickles:
                raise UserError(
                    f"{folder / pickles[0]} is a pickle file, which can run code when it is read, so it is not read: "
                    f"convert the folder to safetensors first"
                )
            raise UserError(f"{folder} has neither {SINGLE} nor {INDEX}")

    @property
    def names(self) -> list[str]:
        return sorted(self._file_of)

    def entry(self, name: str) -> Entry | None:
        """dtype and shape of a tensor; None if the folder doesn't have it."""
        if name not in self._file_of:
            return None
        file = self._file(self._file_of[name])
        if name not in file.entries:
            raise UserError(f"{file.path} has no tensor {name!r}, though {INDEX} says so")
        return file.entries[name]

    def read_box(self, name: str, offset: tuple[int, ...], target: torch.Tensor) -> None:
        """Fill `target` (any dtype, any device) with the box of tensor `name` at `offset`."""
        try:
            self._file(self._file_of[name]).read_box(name, offset, target)
        except (BadTensorFile, OSError) as error:
            raise UserError(f"{self.folder / self._file_of[name]} can not be read: {error}") from error

    def check_parts(self, name: str, parts: list[tuple[str, int | None]], shape: tuple[int, ...], wanted: str) -> None:
        """Raise UserError unless the tensors that make up our parameter `name` (HuggingFace.parts) are here, with the
        shapes that they need; `wanted` says who asks for a shape."""
        for key, row in parts:
            entry, theirs = self.entry(key), shape if row is None else shape[1:]
            if entry is None:
                raise UserError(f"{self.folder} has no tensor {key!r}, which {name} is read from")
            if entry.shape != theirs:
                raise UserError(f"{key} has shape {entry.shape} in {self.folder}, but {wanted.format(theirs)}")

    def read_parts(self, parts: list[tuple[str, int | None]], offset: tuple[int, ...], target: torch.Tensor) -> None:
        """Fill `target` with the box at `offset` of the parameter that the parts make up."""
        for key, row in parts:
            if row is None:
                self.read_box(key, offset, target)
            elif offset[0] <= row < offset[0] + target.shape[0]:
                self.read_box(key, offset[1:], target[row - offset[0]])

    def _file(self, name: str) -> TensorFile:
        if name not in self._open:
            try:
                self._open[name] = TensorFile(self.folder / name)
            except (BadTensorFile, OSError) as error:
                raise UserError(str(error)) from error
        return self._open[name]

    def close(self) -> None:
        while self._open:
            self._open.popitem()[1].close()

    def __enter__(self) -> HfFolder:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} can not be read: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} is not a JSON object")
    return value


def is_hf_folder(folder: Path) -> bool:
    """Whether it looks like one: a config.json beside weights of any kind."""
    return (folder / "config.json").is_file() and not (folder / "COMMIT").exists()


def export_hf(
    index: TensorIndex,
    architecture: str,
    model: dict[str, Any],
    out: Path,
    dtype: torch.dtype,
    end_id: int | None = None,
    extra_files: dict[str, bytes] | None = None,
) -> None:
    """Write the weights of a checkpoint as a Hugging Face folder `out`, which must not exist, in `dtype`.

    `model` is the architecture's config. It appears under its name when it is complete. Raises UserError.
    """
    if out.exists():
        raise UserError(f"{out} exists already: give a new name")
    names = sorted(name for name in index.tensors if name.startswith("model."))
    if not names:
        raise CheckpointError(f"{index.folder} holds no weights")
    form = form_for(architecture, model)
    config = to_hf_config(form, model, str(dtype).removeprefix("torch."), end_id)
    tensors: Tensors = {}
    for name in names:
        shape = tuple(index.tensors[name]["shape"])
        for key, row in hf_parts(form, name.removeprefix("model."), shape):
            tensors[key] = (name, row, shape if row is None else shape[1:])
    groups: list[Tensors] = []
    room = 0
    for key, part in tensors.items():
        size = math.prod(part[2]) * dtype.itemsize
        if not groups or size > room:
            groups.append({})
            room = MAX_FILE_BYTES
        groups[-1][key] = part
        room -= size
    with new_folder(out) as temporary:
        weight_map: dict[str, str] = {}
        for number, group in enumerate(groups, start=1):
            many = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            file = SINGLE if len(groups) == 1 else many
            files.write_file(temporary / file, _stream(index, group, dtype))
            weight_map |= dict.fromkeys(group, file)
        if len(groups) > 1:
            total = sum(math.prod(shape) for _, _, shape in tensors.values()) * dtype.itemsize
            files.write_file(
                temporary / INDEX,
                [to_json({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})],
            )
        files.write_file(temporary / "config.json", [to_json(config)])
        for name, data in (extra_files or {}).items():
            files.write_file(temporary / name, [data])


def _stream(index: TensorIndex, tensors: Tensors, dtype: torch.dtype) -> Iterator[bytes | memoryview]:
    """The bytes of one file: header, then tensor after tensor, a piece at a time."""
    yield make_header({key: (dtype, shape) for key, (_, _, shape) in tensors.items()}, {"format": "pt"})
    for name, row, _ in tensors.values():
        for piece in tensor_pieces(index, name, dtype, row):
            yield as_bytes(piece)


def tensor_pieces(index: TensorIndex, name: str, dtype: torch.dtype, row: int | None = None) -> Iterator[torch.Tensor]:
    """A tensor of a checkpoint, or one row of it, in pieces of bounded size along its first dim, first to last,
    converted to `dtype`."""
    shape = tuple(index.tensors[name]["shape"])
    before: tuple[int, ...] = ()
    if row is not None:
        before, shape = (row,), shape[1:]
    if not shape:
        scalar = torch.empty((1,) * len(before), dtype=dtype)
        index.read_box(name, before, scalar)
        yield scalar.reshape(())
        return
    row_bytes = max(1, math.prod(shape[1:]) * dtype.itemsize)
    rows = max(1, _PIECE_BYTES // row_bytes)
    for start in range(0, shape[0], rows):
        piece = torch.empty((min(rows, shape[0] - start), *shape[1:]), dtype=dtype)
        index.read_box(name, (*before, start) + (0,) * (len(shape) - 1), piece[(None,) * len(before)])
        yield piece
