"""The storage layer under torch.distributed.checkpoint, reading: each rank fetches only the bytes that its shards
need."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from titanlike.checkpoint.manifest import TENSORS, DamagedCheckpoint, Manifest, read_listed_json
from titanlike.checkpoint.tensorfile import DTYPES, BadTensorFile, TensorFile

_MAX_OPEN = 100  # files; a checkpoint of many ranks has more of them than a process may have open


class TensorIndex:
    """tensors.json of one checkpoint, checked: what it holds, and where.

    `tensors[name]` has `dtype` (safetensors' name), `shape`, `digest` and `boxes` (`offset`, `shape`, `file`, `key`).
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.tensors = read_listed_json(folder, manifest, TENSORS)
        self._open: dict[str, TensorFile] = {}
        try:
            for entry in self.tensors.values():
                DTYPES[entry["dtype"]], int(entry["digest"], 16), tuple(entry["shape"])
                for box in entry["boxes"]:
                    tuple(box["offset"]), tuple(box["shape"]), str(box["key"]), manifest.files[box["file"]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DamagedCheckpoint(f"{folder / TENSORS} is not a tensor index ({error!r})") from error

    def open(self, file: str) -> TensorFile:
        """Open one of the checkpoint's tensor files."""
        try:
            return TensorFile(self.folder / file)
        except BadTensorFile as error:
            raise DamagedCheckpoint(str(error)) from error
        except OSError as error:
            raise DamagedCheckpoint(f"{self.folder / file} can not be read: {error.strerror}") from error

    def read(
        self, file: TensorFile, name: str, box: dict[str, Any], offset: tuple[int, ...], target: torch.Tensor
    ) -> None:
        """Fill `target` from `offset` within one stored box of tensor `name`. The file must agree with the index."""
        entry = file.entries.get(box["key"])
        if entry is None or entry.shape != tuple(box["shape"]) or entry.dtype != DTYPES[self.tensors[name]["dtype"]]:
            raise DamagedCheckpoint(f"{file.path} does not hold {box['key']!r} as {TENSORS} says")
        try:
            file.read_box(box["key"], offset, target)
        except BadTensorFile as error:
            raise DamagedCheckpoint(str(error)) from error
        except OSError as error:
            raise DamagedCheckpoint(f"{file.path} can not be read: {error.strerror}") from error

    def read_box(self, name: str, offset: tuple[int, ...], target: torch.Tensor) -> None:
        """Fill `target` (any dtype) with the box of the whole tensor `name` at `offset`, from the stored boxes."""
        for box in self.tensors[name]["boxes"]:
            # Where the two boxes overlap, dim by dim: first and last index within the whole tensor.
            dims = zip(offset, target.shape, box["offset"], box["shape"], strict=True)
            overlap = [(max(a, b), min(a + m, b + n)) for a, m, b, n in dims]
            if any(first >= last for first, last in overlap):
                continue
            here = tuple(slice(first - a, last - a) for (first, last), a in zip(overlap, offset, strict=True))
            there = tuple(first - b for (first, _), b in zip(overlap, box["offset"], strict=True))
            if box["file"] not in self._open:
                if len(self._open) >= _MAX_OPEN:
                    self.close()
                self._open[box["file"]] = self.open(box["file"])
            self.read(self._open[box["file"]], name, box, there, target[here])

    def read_tensor(self, name: str) -> torch.Tensor:
        """A whole tensor, on the CPU."""
        whole = torch.empty(self.tensors[name]["shape"], dtype=DTYPES[self.tensors[name]["dtype"]])
        self.read_box(name, (0,) * whole.dim(), whole)
        return whole

    def close(self) -> None:
        """Close what `read_box` has opened."""
        while self._open:
            self._open.popitem()[1].close()


class ShardReader(StorageReader):
    """Reads shards from one checkpoint."""

    def __init__(self, index: TensorIndex) -> None:
        self.index = index
        self._boxes = {
            (name, tuple(box["offset"])): box for name, entry in index.tensors.items() for box in entry["boxes"]
        }

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=DTYPES[entry["dtype"]]),
                    size=torch.Size(entry["shape"]),
                    chunks=[
                        ChunkStorageMetadata(offsets=torch.Size(box["offset"]), sizes=torch.Size(box["shape"]))
                        for box in entry["boxes"]
                    ],
                )
                for name, entry in self.index.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Every rank: fill its shards, file by file, in the order of the bytes in each."""
        wanted: dict[str, list[tuple[dict[str, Any], Any]]] = {}
        for item in plan.items:
            box = self._boxes[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
            wanted.setdefault(box["file"], []).append((box, item))
        for name, reads in wanted.items():
            with self.index.open(name) as file:
                reads.sort(key=lambda read: file.entries[read[0]["key"]].start if read[0]["key"] in file.entries else 0)
                for box, item in reads:
                    target = planner.resolve_tensor(item)
                    self.index.read(file, item.storage_index.fqn, box, tuple(item.storage_offsets), target)
                    planner.commit_tensor(item, target)
        future: Future = Future()
        future.set_result(None)
        return future
