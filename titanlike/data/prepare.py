"""Tokenise a source into token files, by several processes, restartable.

Properties:
- The files are the same, byte for byte, for any number of processes and after any number of kills: the input is cut
  into shards by its own sizes alone, and each shard is made by one process.
- A shard is finished when its .json is there, which is written last. A restart makes only those that are not.
- A process that does the work ends with the one that started it, however that ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from titanlike.data.config import SourceConfig
from titanlike.data.encoding import Document, Encoder
from titanlike.data.records import Piece, list_pieces, read_pieces
from titanlike.data.token_files import (
    FORMAT,
    METADATA,
    read_metadata,
    storage_dtype,
    to_json,
    write_shard,
    write_whole,
)
from titanlike.errors import UserError
from titanlike.tokenizer import Tokenizer, load_tokenizer, token_dtype, tokenizer_file

PLAN = "plan.json"
Progress = Callable[[int, int, int], None]
"""Called with bytes of input done, bytes of input in all, tokens written."""


def prepare(
    source: SourceConfig,
    tokenizer_name: str,
    out: Path,
    *,
    workers: int,
    shard_bytes: int,
    progress: Progress = lambda done, total, tokens: None,
) -> dict[str, Any]:
    """Make the token files of a source in the folder `out`, in shards of about `shard_bytes` of input.

    Returns the metadata. A folder that is already whole is left as it is.

    Raises:
        UserError: bad input, or `out` holds something else.
    """
    tokenizer = load_tokenizer(tokenizer_name)
    Encoder(source, tokenizer)  # its errors belong before the processes
    shards = group(list_pieces(source, shard_bytes), shard_bytes)
    plan = make_plan(source, tokenizer, shards)
    digest = hashlib.sha256(to_json(plan)).hexdigest()
    out.mkdir(parents=True, exist_ok=True)
    with _alone(out):
        if (out / METADATA).exists():
            metadata = read_metadata(out)
            if metadata["plan"] != digest:
                raise UserError(f"{out} already holds the tokens of another source or tokenizer: choose another folder")
            return metadata
        _begin(out, plan)
        if tokenizer_name != "bytes":
            write_whole(out / "tokenizer.json", tokenizer_file(tokenizer_name).read_bytes())
        _make_shards(source, tokenizer_name, out, shards, workers, progress)
        made = [json.loads((out / f"{_name(i)}.json").read_bytes()) for i in range(len(shards))]
        filled = [entry for entry in made if entry["documents"]]
        if not filled:
            _clear(out, made)
            raise UserError("there is no text to tokenise: all documents are empty")
        metadata = {
            "format": FORMAT,
            "dtype": storage_dtype(tokenizer),
            "tokens": sum(entry["tokens"] for entry in filled),
            "documents": sum(entry["documents"] for entry in filled),
            "vocab_size": tokenizer.vocab_size,
            "end_id": tokenizer.end_id,
            "tokenizer": tokenizer.fingerprint,
            "learnt": source.format != "text",
            "source": source.model_dump(mode="json", exclude_defaults=True) | {"source": source.source},
            "plan": digest,
            "shards": filled,
        }
        write_whole(out / METADATA, to_json(metadata))
        _clear(out, made)
        return metadata


def group(pieces: list[Piece], shard_bytes: int) -> list[list[Piece]]:
    """Pieces in order, in runs of about `shard_bytes`."""
    shards: list[list[Piece]] = []
    size = shard_bytes
    for piece in pieces:
        if size + piece.size > shard_bytes and (not shards or size):
            shards.append([])
            size = 0
        shards[-1].append(piece)
        size += piece.size
    return shards


def make_plan(source: SourceConfig, tokenizer: Tokenizer, shards: list[list[Piece]]) -> dict[str, Any]:
    """All that the files depend on."""
    paths = dict.fromkeys(piece.path for shard in shards for piece in shard if piece.form != "huggingface")
    return {
        "format": FORMAT,
        "source": source.model_dump(mode="json"),
        "tokenizer": tokenizer.fingerprint,
        "end_id": tokenizer.end_id,
        "chat_template": tokenizer.chat_template if source.format == "chat" else None,
        "inputs": [[path, os.stat(path).st_size, os.stat(path).st_mtime_ns] for path in paths],
        "shards": [len(shard) for shard in shards],
    }


def _begin(out: Path, plan: dict[str, Any]) -> None:
    path = out / PLAN
    if path.exists():
        try:
            before = json.loads(path.read_bytes())
        except ValueError:
            before = {}
        if before != json.loads(to_json(plan)):
            changed = ", ".join(key for key in plan if before.get(key) != json.loads(to_json(plan[key])))
            raise UserError(
                f"{out} holds the beginning of other token files ({changed} changed): empty it, or choose another "
                "folder"
            )
        for leftover in out.glob("*.tmp"):
            leftover.unlink()
    elif any(path.name != ".lock" for path in out.iterdir()):
        raise UserError(f"{out} is not empty, and what it holds are not token files: choose another folder")
    else:
        write_whole(path, to_json(plan))


def _clear(out: Path, made: list[dict[str, Any]]) -> None:
    for entry in made:
        (out / f"{entry['name']}.json").unlink()
        if not entry["documents"]:
            for suffix in (".tokens", ".starts", ".learnt"):
                (out / (entry["name"] + suffix)).unlink(missing_ok=True)
    (out / PLAN).unlink()


def _name(shard: int) -> str:
    return f"shard-{shard:05d}"


@contextlib.contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Hold the folder against a second process that would write the same files."""
    with (out / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is preparing data in {out}") from None
        yield


# -- the processes -----------------------------------------------------------------------------------------------------


def _make_shards(
    source: SourceConfig, tokenizer_name: str, out: Path, shards: list[list[Piece]], workers: int, progress: Progress
) -> None:
    sizes = [sum(piece.size for piece in shard) for shard in shards]
    todo = [i for i in range(len(shards)) if not (out / f"{_name(i)}.json").exists()]
    done, total = sum(sizes) - sum(sizes[i] for i in todo), sum(sizes)
    # spawn, because a fork takes along threads and locks of libraries that are already loaded.
    context = multiprocessing.get_context("spawn")
    tokens = context.Value("Q", 0)
    pool = ProcessPoolExecutor(
        min(workers, max(len(todo), 1)), context, _start_worker, (source, tokenizer_name, str(out), tokens)
    )
    try:
        running: dict[Future[None], int] = {}
        waiting = iter(todo)
        progress(done, total, 0)
        while True:
            # A few at a time, so that an error is seen before thousands more are queued.
            while len(running) < 2 * workers and (i := next(waiting, None)) is not None:
                running[pool.submit(_make_shard, i, shards[i])] = i
            if not running:
                return
            for future in wait(running, timeout=0.25, return_when=FIRST_COMPLETED).done:
                done += sizes[running.pop(future)]
                future.result()
            progress(done, total, tokens.value)
    except BrokenProcessPool:
        raise UserError(
            "a process that tokenises was killed, perhaps for want of memory: run again, with fewer --workers if so"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _Worker:
    source: SourceConfig
    tokenizer: Tokenizer
    out: Path
    tokens: Any


def _start_worker(source: SourceConfig, tokenizer_name: str, out: str, tokens: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is a process per core already
    _Worker.source, _Worker.out, _Worker.tokens = source, Path(out), tokens
    _Worker.tokenizer = load_tokenizer(tokenizer_name)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _make_shard(shard: int, pieces: list[Piece]) -> None:
    encoder = Encoder(_Worker.source, _Worker.tokenizer)

    def counted() -> Iterator[list[Document]]:
        for batch in encoder.encode(read_pieces(pieces, _Worker.source.fields)):
            with _Worker.tokens.get_lock():
                _Worker.tokens.value += sum(len(document.ids) for document in batch)
            yield batch

    path = _Worker.out / _name(shard)
    learnt = _Worker.source.format != "text"
    entry = write_shard(path, counted(), token_dtype(_Worker.tokenizer.vocab_size), learnt)
    write_whole(path.with_name(path.name + ".json"), to_json(entry))
