"""What checkpoints cost: save and load beside raw write and read of the same bytes, the stall of a step, the digest,
memory.

    python benchmarks/checkpoint.py [--gb 1] [--repeats 5] [--folder .]
    torchrun --nproc-per-node 2 benchmarks/checkpoint.py          # each rank holds its part of the same state

The state is that of Llama blocks (dim 2048): float32 weights and two moments. Every round does all measurements one
after another, so that a disk that is slow for a while is slow for all of them; printed are medians over the rounds, and
the best. Reads are cold: the files' pages are dropped first. A raw read is one of the checkpoint's own files, in turns
before and after the load; both come after a read that does not count, because the first one after a write takes up to
three times as long as later ones here, whoever reads. "torch" is torch.distributed.checkpoint with its own file
writer and reader, which pickle their metadata and have no checksum and no fsync of the folder.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from titanlike.checkpoint import CheckpointConfig, Checkpointer, Shard
from titanlike.checkpoint.state_digest import shard_digests
from titanlike.checkpoint.tensorfile import as_bytes

CHUNK = 16 << 20
SHAPES = {
    "wq": (2048, 2048),
    "wk": (512, 2048),
    "wo": (2048, 2048),
    "w1": (8192, 2048),
    "w2": (2048, 8192),
    "norm": (2048,),
}


def make_state(gigabytes: float, rank: int, world: int) -> dict[str, Shard]:
    """About so many bytes in all, cut by rows over the ranks."""
    state: dict[str, Shard] = {}
    total, layer = 0.0, 0
    while total < gigabytes * 1e9:
        for name, shape in SHAPES.items():
            rows = shape[0] // world
            for kind in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq"):
                tensor = torch.randn(rows, *shape[1:])
                offset = (rank * rows,) + (0,) * (len(shape) - 1)
                state[f"{kind}.layers.{layer}.{name}"] = Shard(tensor, (rows * world, *shape[1:]), offset)
                total += tensor.nbytes * world
        layer += 1
    return state


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def timed(action: Callable[[], object]) -> float:
    """Seconds until the last rank has finished."""
    barrier()
    began = time.perf_counter()
    action()
    barrier()
    return time.perf_counter() - began


def forget(folder: Path) -> None:
    """Drop the pages of all files in a folder from memory, so that the next read comes from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    barrier()


def raw_write(path: Path, state: dict[str, Shard]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for shard in state.values():
        view = as_bytes(shard.tensor)
        for start in range(0, len(view), CHUNK):
            os.write(descriptor, view[start : start + CHUNK])
    os.fsync(descriptor)
    os.close(descriptor)


def raw_read(path: Path, state: dict[str, Shard]) -> None:
    """Into the tensors, as a load does."""
    descriptor = os.open(path, os.O_RDONLY)
    for shard in state.values():
        view = as_bytes(shard.tensor)
        for start in range(0, len(view), CHUNK):
            os.readv(descriptor, [view[start : start + CHUNK]])
    os.close(descriptor)


def compute(seconds: float) -> float:
    """Steps of a stand-in for training (matrix products) per second, for so long."""
    a = torch.randn(512, 512)
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for _ in range(10):
            torch.mm(a, a)
        steps += 1
    return steps / (time.perf_counter() - began)


def peak_memory() -> int:
    """The most resident memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Bench:
    def __init__(self, state: dict[str, Shard], folder: Path) -> None:
        self.state = state
        self.folder = folder
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.seconds: dict[str, list[float]] = {}
        self.writer = self.checkpointer("sync")
        self.background = self.checkpointer("async")

    def checkpointer(self, mode: Literal["sync", "async"]) -> Checkpointer:
        return Checkpointer(CheckpointConfig(mode=mode, keep_last=0), self.folder / mode, say=lambda line: None)

    def note(self, name: str, action: Callable[[], object]) -> float:
        seconds = timed(action)
        self.seconds.setdefault(name, []).append(seconds)
        return seconds

    def clear(self) -> None:
        barrier()
        if self.rank == 0:
            for path in self.folder.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
            os.sync()
        barrier()

    def round(self) -> None:
        """Every measurement once."""
        raw = self.folder / f"raw-{self.rank}"
        self.clear()
        self.note("raw write", lambda: raw_write(raw, self.state))

        self.clear()
        self.note("save", lambda: self.writer.save(1, self.state, {}))
        mine = next(self.folder.rglob(f"rank-{self.rank:05d}.safetensors"))
        reads: list[tuple[str, Callable[[], object]]] = [
            ("raw read", lambda: raw_read(mine, self.state)),
            ("load", lambda: self.writer.load(self.state)),
        ]
        forget(self.folder)
        timed(reads[0][1])
        for name, read in reads if len(self.seconds["save"]) % 2 else reversed(reads):
            forget(self.folder)
            self.note(name, read)

        tensors = {f"{name}@{shard.offset}": shard.tensor for name, shard in self.state.items()}
        self.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            storage = dcp.FileSystemWriter(self.folder / "torch", thread_count=1)
            self.note("torch save", lambda: dcp.save(dict(tensors), storage_writer=storage))
            reader = dcp.FileSystemReader(self.folder / "torch")
            forget(self.folder)
            dcp.load(dict(tensors), storage_reader=reader)
            forget(self.folder)
            self.note("torch load", lambda: dcp.load(dict(tensors), storage_reader=reader))

        self.note("digest", lambda: shard_digests(self.state))
        self.clear()
        alone = compute(1.0)
        self.note("stall", lambda: self.background.save(2, self.state, {}))
        began = time.perf_counter()
        beside = compute(1.0)
        self.background.wait()
        self.seconds.setdefault("background write", []).append(time.perf_counter() - began)
        self.seconds.setdefault("slowdown", []).append(alone / beside)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the whole state in GB (default: 1)")
    parser.add_argument("--repeats", type=int, default=5, help="rounds (default: 5)")
    parser.add_argument("--folder", default=".", help="on the disk to measure (default: here)")
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))

    state = make_state(args.gb, rank, world)
    mine = sum(shard.tensor.nbytes for shard in state.values())
    name = [tempfile.mkdtemp(prefix=".bench-checkpoint-", dir=args.folder) if rank == 0 else ""]
    if dist.is_initialized():
        dist.broadcast_object_list(name)
    folder = Path(name[0])
    try:
        bench = Bench(state, folder)
        before = peak_memory()
        bench.writer.save(1, state, {})
        bench.writer.load(state)
        sync_memory = peak_memory() - before
        cold = timed(lambda: bench.background.save(1, state, {}))  # allocates the buffers on the way
        bench.background.wait()
        async_memory = peak_memory() - before - sync_memory
        for _ in range(args.repeats):
            bench.round()
        bench.background.close()
    finally:
        barrier()
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if rank == 0:
        report(bench.seconds, mine * world / 1e9, world, cold, sync_memory / mine, async_memory / mine)
    if dist.is_initialized():
        dist.destroy_process_group()


def report(
    seconds: dict[str, list[float]], gigabytes: float, world: int, cold: float, sync_memory: float, async_memory: float
) -> None:
    print(f"{gigabytes:.2f} GB on {world} rank(s), {torch.get_num_threads()} thread(s) each; GB/s, median (best)")
    for name in ("raw write", "save", "torch save", "raw read", "load", "torch load"):
        raw = "raw write" if "write" in name or "save" in name else "raw read"
        middle = [gigabytes / second for second in seconds[name]]
        ratio = statistics.median(a / b for a, b in zip(seconds[raw], seconds[name], strict=True))
        print(f"  {name:11} {statistics.median(middle):5.2f} ({max(middle):5.2f})   {ratio:4.2f} of raw")
    digest = statistics.median(seconds["digest"])
    print(f"  digest      {gigabytes / digest:5.2f}, {gigabytes / digest / world:.2f} per core: it works on one")
    stall = statistics.median(seconds["stall"])
    print(
        f"stall of an asynchronous save: {stall / gigabytes:.3f} s per GB; a first, unprepared: {cold / gigabytes:.3f}"
    )
    print(
        f"the write in the background took {statistics.median(seconds['background write']):.2f} s; computation beside "
        f"it ran {statistics.median(seconds['slowdown']):.2f} times slower than alone"
    )
    print(f"memory beyond the state, as a share of it: sync save and load {sync_memory:.2f}, async {async_memory:.2f}")


if __name__ == "__main__":
    main()
