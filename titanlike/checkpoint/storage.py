"""The storage layer under torch.distributed.checkpoint: safetensors and JSON on disk, no pickle.

torch's planner decides which rank writes which box (each once) and which stored boxes a shard is read from. This module turns its
plans into files and back. Saving is one transaction: every rank writes into a temporary folder; only when all have
succeeded does the coordinator write the index, the manifest and the commit marker, and rename the folder into place.
"""

from __future__ import annotations

import dataclasses
import math
import os
import secrets
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

import titanlike
from titanlike.checkpoint import files, manifest
from titanlike.checkpoint.manifest import CheckpointError
from titanlike.checkpoint.shard import Shard
from titanlike.checkpoint.tensorfile import DTYPE_NAMES, DTYPES, TensorFile, file_pieces

MAX_FILE_BYTES = 4 << 30  # a rank starts another file beyond this, so that checking can be shared out


class SavePlanner_(DefaultSavePlanner):
    """torch's planner for a flat dict of `Shard`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        shard: Shard = self.state_dict[index.fqn]
        return shard.__get_tensor_shard__(index)


class LoadPlanner_(DefaultLoadPlanner):
    """torch's planner for a flat dict of `Shard`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        shard: Shard = self.state_dict[index.fqn]
        return shard.__get_tensor_shard__(index)


def _done(value: Any) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


class Writer(StorageWriter):
    """Writes one checkpoint: `root/step-XXXXXXXX`. Made anew for every save."""

    def __init__(self, root: Path, step: int, state: dict[str, Any], rank: int) -> None:
        self.root = root
        self.step = step
        self.state = state
        self.rank = rank

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def storage_meta(self) -> StorageMeta | None:
        return None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return True

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Coordinator: make the temporary folder, whose name no other attempt has, and tell it to all."""
        folder = self.root / f"{manifest.TEMPORARY}{manifest.step_name(self.step)}-{secrets.token_hex(4)}"
        files.make_folder(self.root, parents=True)
        files.make_folder(folder)
        return [dataclasses.replace(plan, storage_data=folder.name) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Every rank: write the boxes that the plan gives it; report boxes, sizes and checksums."""
        folder = self.root / plan.storage_data
        report: dict[str, Any] = {"folder": folder.name, "files": {}, "boxes": []}
        for number, items in enumerate(_split(plan.items)):
            name = f"rank-{self.rank:05d}.safetensors" if number == 0 else f"rank-{self.rank:05d}-{number}.safetensors"
            tensors = {}
            for item in items:
                tensor = planner.resolve_data(item)
                key = _key(item)
                tensors[key] = tensor
                report["boxes"].append((item.index.fqn, list(item.index.offset), list(tensor.shape), name, key))
            crc = 0

            def add(chunk: memoryview) -> None:
                nonlocal crc
                crc = zlib.crc32(chunk, crc)

            size = files.write_file(folder / name, file_pieces(tensors, {"format": "pt"}), add)
            report["files"][name] = {"bytes": size, "crc32": manifest.crc_text(crc)}
        if report["files"]:
            files.sync_folder(folder)  # on a shared file system each client syncs the names that it made
        return _done(
            [WriteResult(MetadataIndex(""), sum(entry["bytes"] for entry in report["files"].values()), report)]
        )

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Coordinator, when every rank has written: index, state, manifest, commit marker, rename."""
        reports = [result.storage_data for rank_results in results for result in rank_results]
        folder = self.root / reports[0]["folder"]
        listed = {}
        for report in reports:
            listed.update(report["files"])
        tensors = self._tensor_index(metadata, reports)
        for name, value in ((manifest.TENSORS, tensors), (manifest.STATE, self.state)):
            data = manifest.to_json(value)
            files.write_file(folder / name, [data])
            listed[name] = {"bytes": len(data), "crc32": manifest.crc_text(zlib.crc32(data))}
        others = manifest.find_checkpoints(self.root)
        manifest.write_commit(
            folder,
            {
                "format": manifest.FORMAT,
                "version": manifest.VERSION,
                "step": self.step,
                "sequence": 1 + max((item.manifest.sequence for item in others if item.manifest), default=0),
                "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "titanlike": titanlike.__version__,
                "torch": torch.__version__,
                "digest": None,
                "files": listed,
            },
        )
        files.sync_folder(folder)
        self._put_in_place(folder)

    def _tensor_index(self, metadata: Metadata, reports: list[dict[str, Any]]) -> dict[str, Any]:
        index: dict[str, Any] = {}
        for name in sorted(metadata.state_dict_metadata):
            entry = metadata.state_dict_metadata[name]
            index[name] = {"dtype": DTYPE_NAMES[entry.properties.dtype], "shape": list(entry.size), "boxes": []}
        for report in reports:
            for name, offset, shape, file, key in report["boxes"]:
                index[name]["boxes"].append({"offset": offset, "shape": shape, "file": file, "key": key})
        for name, entry in index.items():
            entry["boxes"].sort(key=lambda box: box["offset"])
            stored = sum(math.prod(box["shape"]) for box in entry["boxes"])
            if stored != math.prod(entry["shape"]):
                raise CheckpointError(
                    f"{name} has {math.prod(entry['shape'])} elements, but the ranks hold {stored} of them"
                )
        return index

    def _put_in_place(self, folder: Path) -> None:
        final = self.root / manifest.step_name(self.step)
        replaced = None
        if final.exists():
            replaced = self.root / f"{manifest.REPLACED}{final.name}-{secrets.token_hex(4)}"
            files.rename(final, replaced)
        files.rename(folder, final)
        files.sync_folder(self.root)
        if replaced is not None:
            files.remove_tree(replaced)


def _split(items: list[WriteItem]) -> list[list[WriteItem]]:
    """The items in lists of at most MAX_FILE_BYTES each."""
    groups: list[list[WriteItem]] = []
    room = 0
    for item in items:
        size = math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
        if not groups or size > room:
            groups.append([])
            room = MAX_FILE_BYTES
        groups[-1].append(item)
        room -= size
    return groups


def _key(item: WriteItem) -> str:
    """The name of a box within its file: the tensor's own name if the box is all of it."""
    if item.tensor_data.chunk.sizes == item.tensor_data.size:
        return item.index.fqn
    return f"{item.index.fqn}@{','.join(map(str, item.index.offset))}"


class Reader(StorageReader):
    """Reads from one checkpoint folder whose manifest has been checked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.index: dict[str, Any] = manifest.from_json(folder / manifest.TENSORS)
        self._boxes = {
            (name, tuple(box["offset"])): box for name, entry in self.index.items() for box in entry["boxes"]
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
                for name, entry in self.index.items()
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
        wanted: dict[str, list[tuple[str, Any]]] = {}
        for item in plan.items:
            box = self._boxes[item.storage_index.fqn, tuple(item.storage_index.offset)]
            wanted.setdefault(box["file"], []).append((box["key"], item))
        for name, reads in wanted.items():
            with TensorFile(self.folder / name) as file:
                for key, item in sorted(reads, key=lambda read: file.entries[read[0]].start):
                    target = planner.resolve_tensor(item)
                    file.read_box(key, tuple(item.storage_offsets), target)
                    planner.commit_tensor(item, target)
        return _done(None)
