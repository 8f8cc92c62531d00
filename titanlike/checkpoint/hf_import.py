"""A Hugging Face folder made into a titanlike checkpoint of weights alone, tensor by tensor."""

from __future__ import annotations

import math
import shutil
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import titanlike
from titanlike.checkpoint import files, folder, manifest
from titanlike.checkpoint.digest import add, box_digest, digest_text
from titanlike.checkpoint.hf import HfFolder
from titanlike.checkpoint.hf_config import from_hf_config, hf_name, is_buffer
from titanlike.checkpoint.tensorfile import DTYPE_NAMES, as_bytes, make_header
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
        temporary = out.parent / f"{folder.TEMPORARY}{out.name}"
        if temporary.exists():
            shutil.rmtree(temporary)
        try:
            files.make_folder(temporary)
            _write_weights(source, names, model, temporary)
            files.sync_folder(temporary)
            files.rename(temporary, out)
            files.sync_folder(out.parent)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise UserError(f"{out} could not be written: {error.strerror or error}: {error.filename}") from error
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


def _write_weights(source: HfFolder, names: dict[str, str], model: dict[str, Any], temporary: Path) -> None:
    """The files of a checkpoint that holds `model.*` alone, tensor by tensor."""
    tensors: dict[str, Any] = {}
    listed: dict[str, Any] = {}
    total = 0
    for number, (name, key) in enumerate(names.items()):
        ours, file = f"model.{name}", f"weights-{number:05d}.safetensors"
        entry = source.entry(key)
        assert entry is not None
        crc, value = 0, 0

        def pieces(key: str = key, ours: str = ours) -> Iterator[bytes | memoryview]:
            nonlocal value
            entry = source.entry(key)
            assert entry is not None
            yield make_header({ours: (entry.dtype, entry.shape)}, {"format": "pt"})
            rows = max(1, _PIECE_BYTES // max(1, math.prod(entry.shape[1:]) * entry.dtype.itemsize))
            for start in range(0, entry.shape[0], rows):
                piece = torch.empty((min(rows, entry.shape[0] - start), *entry.shape[1:]), dtype=entry.dtype)
                offset = (start,) + (0,) * (len(entry.shape) - 1)
                source.read_box(key, offset, piece)
                value = add(value, int(box_digest(ours, piece, entry.shape, offset)))
                yield as_bytes(piece)

        def see(chunk: memoryview) -> None:
            nonlocal crc
            crc = zlib.crc32(chunk, crc)

        size = files.write_file(temporary / file, pieces(), see)
        listed[file] = {"bytes": size, "crc32": manifest.crc_text(crc)}
        box = {"offset": [0] * len(entry.shape), "shape": list(entry.shape), "file": file, "key": ours}
        tensors[ours] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "digest": digest_text(value),
            "boxes": [box],
        }
        total = add(total, value)
    state = {"step": 0, "model": model, "weights_only": True}
    for name, content in ((manifest.TENSORS, tensors), (manifest.STATE, state)):
        data = manifest.to_json(content)
        files.write_file(temporary / name, [data])
        listed[name] = {"bytes": len(data), "crc32": manifest.crc_text(zlib.crc32(data))}
    manifest.write_commit(
        temporary,
        {
            "step": 0,
            "sequence": 0,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "titanlike": titanlike.__version__,
            "torch": torch.__version__,
            "digest": digest_text(total),
            "files": listed,
        },
    )


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + " }"
    return str(value).lower() if isinstance(value, bool) else repr(value)
