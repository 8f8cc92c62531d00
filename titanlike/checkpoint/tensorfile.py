"""Files of tensors in the safetensors format: 8 bytes of header length, a JSON header, then the bytes of the tensors.

Written and read here without a copy and without pickle: a write streams from the tensors' own memory, and a read
fetches only the bytes of the box that is asked for. Any safetensors library reads the same files (and a test does).
Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}

_MAX_HEADER = 100_000_000  # bytes; the limit that the safetensors library also has
_ALIGNMENT = 64  # bytes; where the first tensor starts, so that vector loads from a mapped file are aligned

assert sys.byteorder == "little", "safetensors files are little-endian, and are written from memory as it is"


class BadTensorFile(ValueError):
    """The file is not a whole, well-formed safetensors file. The message names it."""


class Entry(NamedTuple):
    """One tensor of a file: where its bytes lie, counted from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, without a copy."""
    if tensor.numel() == 0:
        return memoryview(b"")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def make_header(specs: dict[str, tuple[torch.dtype, tuple[int, ...]]], metadata: dict[str, str]) -> bytes:
    """The first bytes of a file that holds `specs` (key -> dtype, shape) one after the other, in that order."""
    header: dict[str, object] = {"__metadata__": metadata}
    position = 0
    for key, (dtype, shape) in specs.items():
        size = math.prod(shape) * dtype.itemsize
        header[key] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def file_pieces(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> Iterator[bytes | memoryview]:
    """The bytes of a file that holds `tensors` (contiguous), piece by piece; one at a time is brought to the CPU."""
    yield make_header({key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in tensors.items()}, metadata)
    for tensor in tensors.values():
        yield as_bytes(tensor.cpu())


class TensorFile:
    """Read access to one safetensors file. The header is checked wholly before any tensor is trusted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        try:
            self.entries, self.metadata = self._read_header()
        except BadTensorFile:
            os.close(self._descriptor)
            raise

    def _read_header(self) -> tuple[dict[str, Entry], dict[str, str]]:
        file_size = os.fstat(self._descriptor).st_size
        length = int.from_bytes(os.pread(self._descriptor, 8, 0), "little")
        if file_size < 8 or length > min(_MAX_HEADER, file_size - 8):
            raise BadTensorFile(f"{self.path} is not a safetensors file (its header length does not fit the file)")
        try:
            header = json.loads(os.pread(self._descriptor, length, 8))
            metadata = header.pop("__metadata__", {})
            entries = {
                key: Entry(
                    DTYPES[spec["dtype"]],
                    tuple(map(int, spec["shape"])),
                    8 + length + int(spec["data_offsets"][0]),
                    8 + length + int(spec["data_offsets"][1]),
                )
                for key, spec in header.items()
            }
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise BadTensorFile(
                f"{self.path} is not a safetensors file (its header can not be read: {error!r})"
            ) from error
        position = 8 + length
        for key, entry in sorted(entries.items(), key=lambda item: item[1].start):
            size = math.prod(entry.shape) * entry.dtype.itemsize
            if entry.start != position or entry.end - entry.start != size or min(entry.shape, default=0) < 0:
                raise BadTensorFile(f"{self.path} is not a whole safetensors file (the bytes of {key!r} are misplaced)")
            position = entry.end
        if position != file_size:
            raise BadTensorFile(f"{self.path} has {file_size} bytes, but its header describes {position}")
        return entries, metadata

    def read_box(self, key: str, offset: tuple[int, ...], target: torch.Tensor) -> None:
        """Fill `target` (any device, any strides) with the box of tensor `key` at `offset` that has the target's shape.

        The dtype is converted if it differs. Only the bytes of the box are read, or of its rows if a later dim is cut.
        """
        entry = self.entries[key]
        if target.numel() == 0:
            return
        whole_rows = tuple(target.shape[1:]) == entry.shape[1:]
        direct = whole_rows and target.device.type == "cpu" and target.is_contiguous() and target.dtype == entry.dtype
        row_bytes = math.prod(entry.shape[1:]) * entry.dtype.itemsize
        first_row = offset[0] if offset else 0
        if direct:
            self._read_into(entry.start + first_row * row_bytes, as_bytes(target))
            return
        if not entry.shape:
            scratch = torch.empty((), dtype=entry.dtype)
            self._read_into(entry.start, as_bytes(scratch))
            target.copy_(scratch)
            return
        # Through a bounded scratch of whole rows.
        rows_at_once = max(1, (16 << 20) // max(1, row_bytes))
        inner = tuple(slice(start, start + size) for start, size in zip(offset[1:], target.shape[1:], strict=True))
        for row in range(0, target.shape[0], rows_at_once):
            rows = min(rows_at_once, target.shape[0] - row)
            scratch = torch.empty((rows, *entry.shape[1:]), dtype=entry.dtype)
            self._read_into(entry.start + (first_row + row) * row_bytes, as_bytes(scratch))
            target[row : row + rows].copy_(scratch[(slice(None), *inner)])

    def _read_into(self, position: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            count = os.preadv(self._descriptor, [view[done:]], position + done)
            if count == 0:
                raise BadTensorFile(f"{self.path} ended early: it was shortened while it was read")
            done += count

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
