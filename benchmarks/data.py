"""What the data costs, each number beside its yardstick from the same minute of the same machine.

    python benchmarks/data.py                 # all of it, some minutes
    python benchmarks/data.py reading memory  # some of it

tokenising  tokens/s of prepare_data, from JSONL to token files, a process per core,
            against `encode_batch` alone, a thread per core                              goal 0.9
reading     rows/s from token files in the global order, as batches,
            against numpy memmap reads at random places, with and without collation      goal 0.5
mask        rows/s with document masks and packing, against rows/s without
waiting     share of the step time of a 26m run that waits for data                      goal under 1%
memory      anonymous memory over 20,000 batches, of the rank and its worker             goal no slope
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titanlike.config import Config, load_config
from titanlike.data import open_data
from titanlike.data.config import SourceConfig
from titanlike.data.encoding import Document
from titanlike.data.prepare import prepare
from titanlike.data.records import stdlib_paths
from titanlike.data.token_files import FORMAT, to_json, write_shard

ROOT = Path(__file__).resolve().parent.parent
CORES = len(os.sched_getaffinity(0))


def train_tokenizer(path: Path, vocab_size: int = 4096) -> None:
    """A byte-level BPE, trained on a part of the standard library."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([*stdlib_paths()[:150]], trainer)
    tokenizer.save(str(path))


def tokenising(folder: Path) -> None:
    """prepare_data against encode_batch."""
    from tokenizers import Tokenizer

    train_tokenizer(folder / "tokenizer.json")
    texts = [Path(path).read_text(encoding="utf-8", errors="replace") for path in stdlib_paths()] * 2
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rates: dict[str, list[float]] = {"prepare_data": [], "encode_batch": [], "encode_batch_fast": []}
    for turn in range(3):
        for name in ("encode_batch", "encode_batch_fast"):
            start = time.perf_counter()
            tokens = sum(len(encoding) for encoding in getattr(backend, name)(texts, add_special_tokens=False))
            rates[name].append(tokens / (time.perf_counter() - start))
        start = time.perf_counter()
        source = SourceConfig(source="text", paths=[str(folder / "text.jsonl")])
        out = folder / f"tokens-{turn}"
        made = prepare(source, str(folder / "tokenizer.json"), out, workers=CORES, shard_bytes=2 * 10**6)
        rates["prepare_data"].append(made["tokens"] / (time.perf_counter() - start))
    ours = statistics.median(rates.pop("prepare_data"))
    for name, alone in rates.items():
        rate = statistics.median(alone)
        print(f"tokenising: prepare_data {ours:,.0f} tokens/s, {name} alone {rate:,.0f}: {ours / rate:.2f} (goal 0.9)")


def write_tokens(folder: Path, tokens: int, mean_document: int = 700) -> None:
    """Token files of random bytes and documents of random lengths."""
    generator = np.random.default_rng(0)
    lengths = np.maximum(generator.exponential(mean_document, tokens // mean_document).astype(np.int64), 2)

    def batches() -> Iterator[list[Document]]:
        for some in np.array_split(lengths, max(1, len(lengths) // 1000)):
            yield [Document(generator.integers(256, size=n, dtype=np.uint16), None) for n in some]

    folder.mkdir()
    shard = write_shard(folder / "shard-00000", batches(), np.uint16, has_learnt=False)
    metadata = {"format": FORMAT, "dtype": "uint16", "end_id": 256, "tokenizer": "bytes", "learnt": False}
    (folder / "metadata.json").write_bytes(to_json(metadata | {"plan": "benchmark", "shards": [shard]}))


def reading_config(folder: Path, **more: Any) -> Config:
    values = {"model.preset": "debug", "data.source": "tokens", "data.paths": [str(folder / "tokens")]}
    values |= {
        "model.max_seq_len": 4096,
        "train.seq_len": 1024,
        "train.global_batch_size": 32,
        "data.validation_fraction": 0.001,
    }
    return load_config(None, values | more)


def rows_per_s(config: Config, steps: int) -> float:
    batches = open_data(config, 0, 1).train_batches()
    next(batches)
    start = time.perf_counter()
    rows = sum(len(batch.sample_ids) for batch in islice(batches, steps))
    return rows / (time.perf_counter() - start)


def reading(folder: Path) -> None:
    """The global order from token files against reads at random places, as they are and as batches of int64."""
    if not (folder / "tokens").exists():
        write_tokens(folder / "tokens", 2 * 10**8)
    memmap = np.memmap(folder / "tokens" / "shard-00000.tokens", dtype=np.uint16, mode="r")
    for seq_len in (1024, 4096):
        places = np.random.default_rng(1).integers(len(memmap) - seq_len - 1, size=(300, 32))
        ours, bare, collated = [], [], []
        for _ in range(5):
            start = time.perf_counter()
            for place in places.ravel():
                np.array(memmap[place : place + seq_len + 1])
            bare.append(places.size / (time.perf_counter() - start))
            start = time.perf_counter()
            for some in places:
                rows = np.stack([memmap[place : place + seq_len + 1] for place in some])
                torch.from_numpy(rows[:, :-1].astype(np.int64)), torch.from_numpy(rows[:, 1:].astype(np.int64))
            collated.append(places.size / (time.perf_counter() - start))
            ours.append(rows_per_s(reading_config(folder, **{"train.seq_len": seq_len}), len(places)))
        a, b, c = (statistics.median(rates) for rates in (ours, collated, bare))
        print(
            f"reading: batches of 32 x {seq_len} {a:,.0f} rows/s, memmap and collation {b:,.0f}: {a / b:.2f} (goal 0.5)"
        )
        print(f"reading: the same against bare memmap reads, {c:,.0f} rows/s: {a / c:.2f}")


def mask(folder: Path) -> None:
    """Document masks and packing against neither."""
    if not (folder / "tokens").exists():
        write_tokens(folder / "tokens", 2 * 10**8)
    plain = rows_per_s(reading_config(folder), 300)
    for packing in ("concat", "best_fit"):
        config = reading_config(folder, **{"data.document_mask": True, "data.packing": packing})
        rate = rows_per_s(config, 300)
        print(f"mask: {packing} with document_mask {rate:,.0f} rows/s, without {plain:,.0f}: {rate / plain:.2f}")


def waiting(folder: Path) -> None:
    """Time that steps of the 26m model wait for data."""
    if not (folder / "tokens").exists():
        write_tokens(folder / "tokens", 2 * 10**8)
    for workers in (0, 1):
        arguments = ["--config", "configs/26m.toml", "--train.steps", "6", "--train.global_batch_size", "4"]
        arguments += ["--run.dir", str(folder), "--run.name", f"waiting-{workers}", "--data.workers", str(workers)]
        arguments += ["--data.source", "tokens", "--data.paths", json.dumps([str(folder / "tokens")])]
        arguments += ["--validation.samples", "4", "--metrics.matmul_peak", "false"]
        command = [sys.executable, "scripts/train.py", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": str(CORES)}
        subprocess.run(command, check=True, cwd=ROOT, capture_output=True, env=environment)
        lines = (folder / f"waiting-{workers}" / "metrics.jsonl").read_text().splitlines()
        steps = [step for step in map(json.loads, lines) if "time/data_s" in step][1:]
        waited, spent = (sum(step[name] for step in steps) for name in ("time/data_s", "step_time_s"))
        print(f"waiting: 26m, {workers} workers: {100 * waited / spent:.3f}% of the step time (goal under 1%)")


def anonymous_bytes(pid: int) -> int:
    """Memory of a process that no file backs: pages of memory-mapped files come and go as the system likes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def memory(folder: Path) -> None:
    """Memory of a rank and its worker over many batches."""
    if not (folder / "tokens").exists():
        write_tokens(folder / "tokens", 2 * 10**8)
    for workers in (0, 1):
        more = {"data.workers": workers, "train.global_batch_size": 4, "data.document_mask": True}
        batches = open_data(reading_config(folder, **more), 0, 1).train_batches()
        next(batches)
        pids = [os.getpid(), *children()]
        seen = []
        for n in range(20_000):
            next(batches)
            if n % 500 == 0:
                seen.append([anonymous_bytes(pid) for pid in pids])
        late = np.array(seen[len(seen) // 4 :], dtype=np.float64)
        slopes = np.polyfit(np.arange(len(late)) * 500, late, 1)[0]
        said = ", ".join(f"{name} {slope:+.1f} bytes/batch" for name, slope in zip(("rank", "worker"), slopes))
        print(f"memory: {workers} workers, 20,000 batches: {said}; at the end {late[-1].sum() / 2**20:.0f} MiB")


def children() -> list[int]:
    """Worker processes of this one."""
    path = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    return [int(pid) for pid in path.read_text().split()]


PARTS: dict[str, Callable[[Path], None]] = {
    "tokenising": tokenising,
    "reading": reading,
    "mask": mask,
    "waiting": waiting,
    "memory": memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help=f"any of {', '.join(PARTS)} (default: all)")
    chosen = parser.parse_args().parts or list(PARTS)
    with tempfile.TemporaryDirectory(prefix="data-benchmark-") as name:
        for part in chosen:
            PARTS[part](Path(name))


if __name__ == "__main__":
    main()
