"""A Hugging Face folder made into a titanlike checkpoint of weights alone, tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from titanlike.checkpoint.hf import HfFolder
from titanlike.checkpoint.hf_config import from_hf_config, hf_name, is_buffer
from titanlike.checkpoint.weights_only import write_weights_only
from titanlike.errors import UserError

_PIECE_BYTES = 64 << 20  # of a tensor, held at once


def import_hf(path: str | Path, out: str | Path) -> list[str]:
    """Make a titanlike checkpoint of weights alone, for `init_from`, from a Hugging Face folder; dtypes as they are."""
    out = Path(out)
    if out.exists():
        raise UserError(f"{out} exists already: give a new name")
    with HfFolder(Path(path)) as source:
        model = from_hf_config(source.config, source.folder / "config.json")
        names = _our_names(source, model)
        entries = {f"model.{name}": source.entry(key) for name, key in names.items()}
        specs = {name: (entry.dtype, entry.shape) for name, entry in entries.items() if entry is not None}

        def pieces(name: str) -> Iterator[torch.Tensor]:
            (dtype, shape), key = specs[name], names[name.removeprefix("model.")]
            rows = max(1, _PIECE_BYTES // max(1, math.prod(shape[1:]) * dtype.itemsize))
            for start in range(0, shape[0], rows):
                piece = torch.empty((min(rows, shape[0] - start), *shape[1:]), dtype=dtype)
                source.read_box(key, (start,) + (0,) * (len(shape) - 1), piece)
                yield piece

        write_weights_only(out, specs, pieces, {"model": model})
    lines = [f"{path} -> {out}: {len(names)} tensors; start from it with --checkpoint.init_from {out}", "[model]"]
    lines += [f"{key} = {_toml(value)}" for key, value in model.items() if value is not None]
    return lines


def _our_names(source: HfFolder, model: dict[str, Any]) -> dict[str, str]:
    """Our parameter -> the folder's tensor. Every parameter of the model must be there, and nothing else."""
    from models.llama import Llama, LlamaConfig, RopeScaling

    scaling = RopeScaling(**model["rope_scaling"]) if model["rope_scaling"] else None
    try:
        fields: dict[str, Any] = model | {"rope_scaling": scaling}
        config = LlamaConfig(**fields)
    except ValueError as error:
        raise UserError(f"{source.folder / 'config.json'}: {error}") from error
    with torch.device("meta"):
        shapes = {name: tuple(value.shape) for name, value in Llama(config).named_parameters()}
    names = {}
    for name, shape in shapes.items():
        key = hf_name(name)
        entry = source.entry(key)
        if entry is None:
            raise UserError(f"{source.folder} has no tensor {key!r}, which {name} is read from")
        if entry.shape != shape:
            raise UserError(f"{key} has shape {entry.shape} in {source.folder}, but its config.json asks for {shape}")
        names[name] = key
    tied = {hf_name("output.weight")} if config.tie_embeddings else set()
    left = [key for key in source.names if key not in {*names.values(), *tied} and not is_buffer(key)]
    if left:
        raise UserError(f"{source.folder} holds {left[0]!r}, which a Llama has no place for")
    return names


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    return str(value).lower() if isinstance(value, bool) else repr(value)
