"""The storage layer under torch.distributed.checkpoint, writing: safetensors and JSON, no pickle, one transaction.

Every rank writes its boxes into a temporary folder. Only when all have succeeded does the coordinator write the index,
the manifest and the commit marker, and rename the folder into place; if one has failed, torch's driver never calls
`finish`.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import math
import os
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

import titanlike
from titanlike.checkpoint import files, folder, manifest
from titanlike.checkpoint.digest import add, digest_text
from titanlike.checkpoint.manifest import CheckpointError
from titanlike.checkpoint.planners import shard_digest
from titanlike.checkpoint.shard import Shard
from titanlike.checkpoint.tensorfile import DTYPE_NAMES, file_pieces

MAX_FILE_BYTES = 4 << 30  # a rank starts another file beyond this, so that checking can be shared out


class ShardWriter(StorageWriter):
    """Writes one checkpoint, `root/step-XXXXXXXX`. Made anew for every save.

    `state` is the JSON of state.json; only the coordinator's is written. `temporary` is the folder being written, on
    the coordinator, for whoever has to remove it after a failure.
    """

    def __init__(self, root: Path, step: int, state: bytes, rank: int, shards: dict[str, Shard]) -> None:
        self.root = root
        self.step = step
        self.state = state
        self.rank = rank
        self.shards = shards
        self.temporary: Path | None = None

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
        """Coordinator: make the temporary folder, and tell its name to all."""
        files.make_folder(self.root)
        self.temporary = temporary = self.root / folder.hidden_name(folder.TEMPORARY, folder.step_name(self.step))
        files.make_folder(temporary)
        return [dataclasses.replace(plan, storage_data=temporary.name) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Every rank: write the boxes that the plan gives it. The digests of all its boxes are computed beside that,
        also of the replicas that another rank writes, so that the coordinator can compare them."""
        temporary = self.root / plan.storage_data
        written: dict[str, dict[str, Any]] = {}
        boxes: list[tuple[Any, ...]] = []
        with ThreadPoolExecutor(1, thread_name_prefix="digest") as digester:
            digests = {
                name: digester.submit(shard_digest, name, shard)
                for name, shard in self.shards.items()
                if shard.tensor.numel()
            }
            try:
                for number, items in enumerate(_split(plan.items)):
                    more = f"-{number}" if number else ""
                    file = f"rank-{self.rank:05d}{more}.safetensors"
                    tensors = {_key(item): cast(torch.Tensor, planner.resolve_data(item)) for item in items}
                    for (key, tensor), item in zip(tensors.items(), items, strict=True):
                        boxes.append((item.index.fqn, tuple(item.index.offset or ()), tuple(tensor.shape), file, key))
                    written[file] = _write_checked(temporary / file, tensors)
                if written:
                    files.sync_folder(temporary)  # on a shared file system each client syncs the names that it made
                mine = {name for name, *_ in boxes}
                report = {
                    "folder": temporary.name,
                    "files": written,
                    "boxes": [(*box, digests[box[0]].result()) for box in boxes],
                    "copies": [
                        (name, tuple(self.shards[name].offset), future.result())
                        for name, future in digests.items()
                        if name not in mine
                    ],
                }
            except BaseException:
                digester.shutdown(cancel_futures=True)
                raise
        total = sum(entry["bytes"] for entry in written.values())
        future: Future = Future()
        future.set_result([WriteResult(MetadataIndex(""), total, report)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Coordinator, when every rank has written: index, state, manifest, commit marker, rename."""
        reports = [result.storage_data for rank_results in results for result in rank_results]
        temporary = self.root / reports[0]["folder"]
        listed: dict[str, dict[str, Any]] = {}
        for report in reports:
            listed.update(report["files"])
        index, digest = _index(metadata, reports)
        for name, data in ((manifest.TENSORS, _index_json(index)), (manifest.STATE, self.state)):
            files.write_file(temporary / name, [data])
            listed[name] = {"bytes": len(data), "crc32": manifest.crc_text(zlib.crc32(data))}
        others = folder.find_checkpoints(self.root)
        manifest.write_commit(
            temporary,
            {
                "step": self.step,
                "sequence": 1 + max((item.manifest.sequence for item in others if item.manifest), default=0),
                "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "titanlike": titanlike.__version__,
                "torch": torch.__version__,
                "digest": digest,
                "files": listed,
            },
        )
        files.sync_folder(temporary)
        folder.put_in_place(self.root, temporary, self.step)


def _index_json(index: dict[str, Any]) -> bytes:
    """One line per tensor: fast to write for many thousands of boxes, and still to be read by people."""
    lines = (f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in index.items())
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _write_checked(path: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Write a file, its checksum computed beside the writing: one chunk behind at most, so that no copies pile up."""
    crc: int = 0
    running: concurrent.futures.Future[int] | None = None

    def see(chunk: memoryview) -> None:
        nonlocal crc, running
        if running is not None:
            crc = running.result()
        running = checker.submit(zlib.crc32, chunk, crc)

    with ThreadPoolExecutor(1, thread_name_prefix="checksum") as checker:
        size = files.write_file(path, file_pieces(tensors, {"format": "pt"}), see)
        crc = running.result() if running is not None else crc
    return {"bytes": size, "crc32": manifest.crc_text(crc)}


def _split(items: list[WriteItem]) -> list[list[WriteItem]]:
    """The items in lists of at most MAX_FILE_BYTES each."""
    groups: list[list[WriteItem]] = []
    room = 0
    for item in items:
        assert item.tensor_data is not None
        size = math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
        if not groups or size > room:
            groups.append([])
            room = MAX_FILE_BYTES
        groups[-1].append(item)
        room -= size
    return groups


def _key(item: WriteItem) -> str:
    """The name of a box within its file: the tensor's own name if the box is all of it."""
    assert item.tensor_data is not None and item.index.offset is not None
    if item.tensor_data.chunk.sizes == item.tensor_data.size:
        return item.index.fqn
    return f"{item.index.fqn}@{','.join(map(str, item.index.offset))}"


def _index(metadata: Metadata, reports: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """tensors.json and the digest of the whole state, out of what every rank reports.

    Raises CheckpointError if the copies of a box differ, or if the boxes do not make up a tensor.
    """
    index: dict[str, Any] = {}
    for name in sorted(metadata.state_dict_metadata):
        entry = metadata.state_dict_metadata[name]
        assert isinstance(entry, TensorStorageMetadata)
        dtype = DTYPE_NAMES[entry.properties.dtype]
        index[name] = {"dtype": dtype, "shape": list(entry.size), "digest": "", "boxes": []}
    stored: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}  # box -> the rank that wrote it, its digest
    sums = dict.fromkeys(index, 0)
    for rank, report in enumerate(reports):
        for name, offset, shape, file, key, value in report["boxes"]:
            stored[name, offset] = rank, value
            sums[name] = add(sums[name], value)
            index[name]["boxes"].append({"offset": offset, "shape": shape, "file": file, "key": key})
    for rank, report in enumerate(reports):
        for name, offset, value in report["copies"]:
            writer, written = stored[name, offset]
            if value != written:
                one, other = sorted((rank, writer))
                raise CheckpointError(
                    f"the copies of {name} on ranks {one} and {other} differ, though they should be equal: "
                    "the state of the run is wrong, and was not saved"
                )
    for name, entry in index.items():
        entry["boxes"].sort(key=lambda box: box["offset"])
        entry["digest"] = digest_text(sums[name])
        held, whole = sum(math.prod(box["shape"]) for box in entry["boxes"]), math.prod(entry["shape"])
        if held != whole:
            raise CheckpointError(f"{name} has {whole} elements, but the ranks hold {held} of them")
    return index, digest_text(add(*sums.values()))
