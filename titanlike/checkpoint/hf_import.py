"""A Hugging Face folder made into a titanlike checkpoint of weights alone, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from titanlike import architectures
from titanlike.checkpoint.hf import HfFolder
from titanlike.checkpoint.hf_config import HfModel, from_hf_config, hf_parts, is_buffer
from titanlike.checkpoint.weights_only import write_weights_only
from titanlike.errors import UserError

_PIECE_BYTES = 64 << 20  # of a tensor, held at once


def import_hf(path: str | Path, out: str | Path) -> list[str]:
    """Make a titanlike checkpoint of weights alone, for `init_from`, from a Hugging Face folder; dtypes as they are."""
    out = Path(out)
    if out.exists():
        raise UserError(f"{out} exists already: give a new name")
    with HfFolder(Path(path)) as source:
        found = from_hf_config(source.config, source.folder / "config.json")
        tensors = _tensors(source, found)
        specs = {}
        for name, (parts, shape) in tensors.items():
            entry = source.entry(parts[0][0])
            assert entry is not None  # _tensors has seen it
            specs[f"model.{name}"] = (entry.dtype, shape)

        def pieces(name: str) -> Iterator[torch.Tensor]:
            parts, shape = tensors[name.removeprefix("model.")]
            dtype = specs[name][0]
            for key, row in parts:
                if row is not None:  # of a stack: a tensor of theirs is a row of ours
                    piece = torch.empty(shape[1:], dtype=dtype)
                    source.read_box(key, (0,) * piece.dim(), piece)
                    yield piece[None]
                    continue
                rows = max(1, _PIECE_BYTES // max(1, math.prod(shape[1:]) * dtype.itemsize))
                for start in range(0, shape[0], rows):
                    piece = torch.empty((min(rows, shape[0] - start), *shape[1:]), dtype=dtype)
                    source.read_box(key, (start,) + (0,) * (len(shape) - 1), piece)
                    yield piece

        state = {"architecture": found.architecture, "model": found.model}
        write_weights_only(out, specs, pieces, state)
    lines = [f"{path} -> {out}: {len(tensors)} tensors; start from it with --checkpoint.init_from {out}", "[model]"]
    lines += [f'architecture = "{found.architecture}"']
    lines += [f"{key} = {_toml(value)}" for key, value in found.model.items() if value is not None]
    return lines


Parts = list[tuple[str, int | None]]


def _tensors(source: HfFolder, found: HfModel) -> dict[str, tuple[Parts, tuple[int, ...]]]:
    """Our parameter -> (the folder's tensors that make it up, its shape). Every parameter of the model must be there,
    and nothing else."""
    where = source.folder / "config.json"
    config = architectures.from_json(found.architecture, found.model, str(where))
    plain = architectures.plain_model(found.architecture, config)
    tensors: dict[str, tuple[Parts, tuple[int, ...]]] = {}
    for name, value in plain.named_parameters():
        shape = tuple(value.shape)
        tensors[name] = (hf_parts(found.form, name, shape), shape)
        source.check_parts(name, *tensors[name], "its config.json asks for {}")
    known = {key for parts, _ in tensors.values() for key, _ in parts}
    for tied, name in plain.tied_parameters.items():
        known.update(key for key, _ in hf_parts(found.form, tied, tensors[name][1]))
    left = [key for key in source.names if key not in known and not is_buffer(key)]
    if left:
        raise UserError(f"{source.folder} holds {left[0]!r}, which a {found.form.class_name} has no place for")
    return tensors


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    return str(value).lower() if isinstance(value, bool) else repr(value)
