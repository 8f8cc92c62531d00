"""Checkpoints of weights alone, written by one process as a stream: what import and average make."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import titanlike
from titanlike.checkpoint import files, folder, manifest
from titanlike.checkpoint.digest import add, box_digest, digest_text
from titanlike.checkpoint.tensorfile import DTYPE_NAMES, as_bytes, make_header

Specs = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def write_weights_only(
    out: Path, specs: Specs, pieces: Callable[[str], Iterator[torch.Tensor]], state: dict[str, Any], step: int = 0
) -> None:
    """Write the checkpoint `out`, which must not exist: it appears under its name when it is complete.

    `specs` has dtype and shape of each tensor by its full name (`model.norm.weight`); `pieces(name)` gives its rows,
    first to last, as contiguous CPU tensors of its dtype, or the whole tensor if it has no dims. `state` is for
    state.json. Raises UserError.
    """
    with folder.new_folder(out) as temporary:
        _write_files(temporary, specs, pieces, {**state, "step": step, "weights_only": True})


def _write_files(
    temporary: Path, specs: Specs, pieces: Callable[[str], Iterator[torch.Tensor]], state: dict[str, Any]
) -> None:
    tensors: dict[str, Any] = {}
    listed: dict[str, Any] = {}
    total = 0
    for number, (name, (dtype, shape)) in enumerate(specs.items()):
        file = f"weights-{number:05d}.safetensors"
        crc, value, row = 0, 0, 0

        def content(name: str = name, dtype: torch.dtype = dtype, shape: tuple[int, ...] = shape) -> Iterator[Any]:
            nonlocal value, row
            yield make_header({name: (dtype, shape)}, {"format": "pt"})
            for piece in pieces(name):
                offset = (row,) + (0,) * (len(shape) - 1) if shape else ()
                value = add(value, int(box_digest(name, piece, shape, offset)))
                row += piece.shape[0] if shape else 0
                yield as_bytes(piece)

        def see(chunk: memoryview) -> None:
            nonlocal crc
            crc = zlib.crc32(chunk, crc)

        size = files.write_file(temporary / file, content(), see)
        listed[file] = {"bytes": size, "crc32": manifest.crc_text(crc)}
        box = {"offset": [0] * len(shape), "shape": list(shape), "file": file, "key": name}
        tensors[name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(shape),
            "digest": digest_text(value),
            "boxes": [box],
        }
        total = add(total, value)
    for file, values in ((manifest.TENSORS, tensors), (manifest.STATE, state)):
        data = manifest.to_json(values)
        files.write_file(temporary / file, [data])
        listed[file] = {"bytes": len(data), "crc32": manifest.crc_text(zlib.crc32(data))}
    manifest.write_commit(
        temporary,
        {
            "step": state["step"],
            "sequence": 0,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "titanlike": titanlike.__version__,
            "torch": torch.__version__,
            "digest": digest_text(total),
            "files": listed,
        },
    )
