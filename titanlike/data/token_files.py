"""Token files: a folder of shards that are memory-mapped at training, and a metadata.json that says what they are.

    metadata.json           format, dtype, counts, tokenizer, source, the shards
    shard-00000.tokens      token ids, little-endian uint16 or uint32, documents one after the other, end token included
    shard-00000.starts      where each document starts within the shard, and the number of tokens: int64 [documents + 1]
    shard-00000.learnt      which tokens are labels, a byte each, 0 or 1; only of completions and chats
    tokenizer.json          a copy of the tokenizer, unless it is "bytes"

The bytes of all files are a function of the input, the tokenizer and the size of the shards.
"""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
import resource
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from titanlike.data.encoding import Document
from titanlike.data.source_errors import SourceError
from titanlike.errors import UserError
from titanlike.tokenizer import Tokenizer, token_dtype

FORMAT = "titanlike-tokens-1"
METADATA = "metadata.json"
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


class FileShard:
    """A shard on disk. It is mapped when it is first read, and crosses to another process as its path."""

    def __init__(self, path: str, dtype: str, n_tokens: int, n_documents: int, has_learnt: bool) -> None:
        self.path = path
        """without the suffix"""
        self.dtype = dtype
        self.n_tokens = n_tokens
        self.n_documents = n_documents
        self._has_learnt = has_learnt

    @functools.cached_property
    def tokens(self) -> np.ndarray:
        return _map(self.path + ".tokens", DTYPES[self.dtype])

    @functools.cached_property
    def starts(self) -> np.ndarray:
        return _map(self.path + ".starts", np.dtype("<i8"))

    @functools.cached_property
    def learnt(self) -> np.ndarray | None:
        return _map(self.path + ".learnt", np.dtype(bool)) if self._has_learnt else None

    def __reduce__(self) -> tuple[Any, ...]:
        return FileShard, (self.path, self.dtype, self.n_tokens, self.n_documents, self._has_learnt)


def _map(path: str, dtype: np.dtype[Any]) -> np.ndarray:
    # Not numpy.memmap: its slices are slower than a plain array's by more than a short read costs.
    with open(path, "rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=dtype)


def write_shard(
    path: Path, batches: Iterable[list[Document]], dtype: type[np.unsignedinteger[Any]], has_learnt: bool
) -> dict[str, Any]:
    """Write the documents to `path` + .tokens, .starts and, with `has_learnt`, .learnt; they appear when they are
    whole.

    Returns what metadata.json says of a shard: name, tokens, documents, largest id.
    """
    lengths = [np.zeros(1, dtype=np.int64)]
    largest = -1
    with contextlib.ExitStack() as stack:
        suffixes = (".tokens", ".learnt") if has_learnt else (".tokens",)
        files = [stack.enter_context(path.with_name(f"{path.name}{s}.tmp").open("wb")) for s in suffixes]
        for batch in batches:
            if not batch:
                continue
            ids = np.concatenate([document.ids for document in batch])
            largest = max(largest, int(ids.max()))
            files[0].write(ids.astype(np.dtype(dtype).newbyteorder("<"), copy=False).tobytes())
            if has_learnt:
                files[1].write(np.concatenate([document.all_learnt() for document in batch]).tobytes())
            lengths.append(np.array([len(document.ids) for document in batch], dtype=np.int64))
    starts = np.cumsum(np.concatenate(lengths))
    write_whole(path.with_name(path.name + ".starts"), starts.astype("<i8").tobytes())
    for suffix in suffixes:
        path.with_name(f"{path.name}{suffix}.tmp").replace(path.with_name(path.name + suffix))
    return {"name": path.name, "tokens": int(starts[-1]), "documents": len(starts) - 1, "largest_id": largest}


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there whole, or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content)
    temporary.replace(path)


def to_json(value: Any) -> bytes:
    """JSON that is equal for equal values."""
    return (json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()


def open_shards(folder: str, tokenizer: Tokenizer, tokenizer_name: str) -> list[FileShard]:
    """The shards of a folder that scripts/prepare_data.py made, checked.

    Raises:
        UserError: it is not such a folder, was not finished, has a shard that is not as long as it should be, or was
            made with another tokenizer.
    """
    metadata = read_metadata(folder)
    if (metadata["tokenizer"], metadata["end_id"]) != (tokenizer.fingerprint, tokenizer.end_id):
        copy = Path(folder) / "tokenizer.json"
        right = str(copy) if copy.is_file() else "bytes"
        raise UserError(
            f"the tokens in {folder} were made with another tokenizer than data.tokenizer = {tokenizer_name!r}: use "
            f"{right!r}, or prepare the data again"
        )
    dtype = metadata["dtype"]
    if dtype not in DTYPES:
        raise UserError(f"{folder}/{METADATA}: dtype must be uint16 or uint32, got {dtype!r}")
    shards = []
    for entry in metadata["shards"]:
        path = str(Path(folder) / entry["name"])
        _check_size(f"{path}.tokens", entry["tokens"], DTYPES[dtype].itemsize, f"tokens of {dtype}")
        _check_size(f"{path}.starts", entry["documents"] + 1, 8, "int64 starts of documents")
        if metadata["learnt"]:
            _check_size(f"{path}.learnt", entry["tokens"], 1, "bytes")
        if entry["largest_id"] >= tokenizer.vocab_size:
            raise UserError(
                f"{path}.tokens has the id {entry['largest_id']}, and the vocabulary has {tokenizer.vocab_size} ids"
            )
        shards.append(FileShard(path, dtype, entry["tokens"], entry["documents"], metadata["learnt"]))
    _allow_open_files(3 * len(shards))
    for shard in shards:
        if int(shard.starts[-1]) != shard.n_tokens:
            raise UserError(f"{shard.path}.starts does not belong to {shard.path}.tokens: prepare the data again")
    return shards


def _allow_open_files(more: int) -> None:
    """Raise the process's own limit of open files, of which a mapped file is one, by so many, as far as the system lets
    it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = soft + more if more > 256 else soft
    if soft != resource.RLIM_INFINITY and wanted > soft:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
        )


def read_metadata(folder: str | Path) -> dict[str, Any]:
    """metadata.json of a folder of token files.

    Raises:
        UserError: the folder has none that can be read.
    """
    folder = Path(folder)
    path = folder / METADATA
    try:
        metadata = json.loads(path.read_bytes())
    except FileNotFoundError:
        if (folder / "plan.json").is_file():
            what = "is not finished: run scripts/prepare_data.py again, it goes on where it was"
        elif folder.is_dir():
            what = f"has no {METADATA}: it is not a folder that scripts/prepare_data.py made"
        else:
            what = "does not exist" if not folder.exists() else "is a file, not a folder of token files"
        raise SourceError(f"paths: {folder} {what}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    if not isinstance(metadata, dict) or metadata.get("format") != FORMAT:
        raise UserError(f"{path} is not of the format {FORMAT}: prepare the data again")
    return metadata


def _check_size(path: str, count: int, itemsize: int, what: str) -> None:
    try:
        size = Path(path).stat().st_size
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if size != count * itemsize:
        how = "truncated" if size < count * itemsize else "too long, or of another dtype"
        raise UserError(f"{path} is {how}: {size} bytes, where {count} {what} are {count * itemsize}")


def storage_dtype(tokenizer: Tokenizer) -> str:
    """The name of the dtype that the ids of a tokenizer are stored as."""
    return np.dtype(token_dtype(tokenizer.vocab_size)).name
