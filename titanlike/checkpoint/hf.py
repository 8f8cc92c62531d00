"""Hugging Face folders of safetensors: read by slices, written as a stream.

No rank holds more of a model than its own part while reading, and writing needs memory for one piece of one tensor. A
folder's pickle files (`pytorch_model.bin`) are never opened.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from titanlike.checkpoint import files
from titanlike.checkpoint.hf_config import hf_name, to_hf_config
from titanlike.checkpoint.manifest import CheckpointError, to_json
from titanlike.checkpoint.reader import TensorIndex
from titanlike.checkpoint.tensorfile import BadTensorFile, Entry, TensorFile, as_bytes, make_header
from titanlike.errors import UserError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_FILE_BYTES = 5_000_000_000  # what the Hugging Face libraries also take
_PIECE_BYTES = 64 << 20  # of a tensor, held at once
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".distcp")


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
    model: dict[str, Any],
    out: Path,
    dtype: torch.dtype,
    end_id: int | None = None,
    extra_files: dict[str, bytes] | None = None,
) -> None:
    """Write the weights of a checkpoint as a Hugging Face folder `out`, which must not exist, in `dtype`.

    `model` is our model config. It appears under its name when it is complete. Raises UserError.
    """
    if out.exists():
        raise UserError(f"{out} exists already: give a new name")
    names = sorted(name for name in index.tensors if name.startswith("model."))
    if not names:
        raise CheckpointError(f"{index.folder} holds no weights")
    theirs = {name: hf_name(name.removeprefix("model.")) for name in names}
    groups: list[list[str]] = []
    room = 0
    for name in names:
        size = math.prod(index.tensors[name]["shape"]) * dtype.itemsize
        if not groups or size > room:
            groups.append([])
            room = MAX_FILE_BYTES
        groups[-1].append(name)
        room -= size
    temporary = out.parent / f".tmp-{out.name}"
    if temporary.exists():
        shutil.rmtree(temporary)
    try:
        files.make_folder(temporary)
        weight_map: dict[str, str] = {}
        for number, group in enumerate(groups, start=1):
            many = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
            file = SINGLE if len(groups) == 1 else many
            files.write_file(temporary / file, _stream(index, {name: theirs[name] for name in group}, dtype))
            weight_map |= {theirs[name]: file for name in group}
        if len(groups) > 1:
            total = sum(math.prod(index.tensors[name]["shape"]) for name in names) * dtype.itemsize
            files.write_file(
                temporary / INDEX,
                [to_json({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})],
            )
        config = to_hf_config(model, str(dtype).removeprefix("torch."), end_id)
        files.write_file(temporary / "config.json", [to_json(config)])
        for name, data in (extra_files or {}).items():
            files.write_file(temporary / name, [data])
        files.sync_folder(temporary)
        files.rename(temporary, out)
        files.sync_folder(out.parent)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"{out} could not be written: {error.strerror or error}: {error.filename}") from error


def _stream(index: TensorIndex, names: dict[str, str], dtype: torch.dtype) -> Iterator[bytes | memoryview]:
    """The bytes of one file: header, then tensor after tensor, a piece at a time."""
    yield make_header(
        {new: (dtype, tuple(index.tensors[old]["shape"])) for old, new in names.items()}, {"format": "pt"}
    )
    for old in names:
        for piece in tensor_pieces(index, old, dtype):
            yield as_bytes(piece)


def tensor_pieces(index: TensorIndex, name: str, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """A tensor of a checkpoint as rows of bounded size, first to last, converted to `dtype`."""
    shape = tuple(index.tensors[name]["shape"])
    if not shape:
        scalar = torch.empty((), dtype=dtype)
        index.read_box(name, (), scalar)
        yield scalar
        return
    row_bytes = max(1, math.prod(shape[1:]) * dtype.itemsize)
    rows = max(1, _PIECE_BYTES // row_bytes)
    for start in range(0, shape[0], rows):
        piece = torch.empty((min(rows, shape[0] - start), *shape[1:]), dtype=dtype)
        index.read_box(name, (start,) + (0,) * (len(shape) - 1), piece)
        yield piece
