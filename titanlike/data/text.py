"""Documents as text: the running Python's standard library, plain text files, JSONL."""

from __future__ import annotations

import glob
import gzip
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from titanlike.data.store import TokenStore
from titanlike.errors import UserError
from titanlike.tokenizer import Tokenizer, token_dtype

NOT_LIBRARY = frozenset(
    ("__pycache__", "dist-packages", "idle_test", "idlelib_test", "site-packages", "test", "tests", "turtledemo")
)
BATCH = 256  # documents that are tokenised together


def stdlib_documents() -> Iterator[bytes]:
    """The source files of the running Python's standard library, without its tests, in the order of their paths.

    Raises:
        UserError: this Python keeps no source files.
    """
    root = sysconfig.get_paths()["stdlib"]
    paths = []
    for folder, inner, files in os.walk(root):
        inner[:] = [name for name in inner if name not in NOT_LIBRARY]
        paths += [os.path.join(folder, name) for name in files if name.endswith(".py")]
    if not paths:
        raise UserError(f'data.source = "python-stdlib" finds no source files in {root}: use data.source = "text"')
    for path in sorted(paths, key=lambda path: os.path.relpath(path, root).split(os.sep)):
        with open(path, "rb") as file:
            yield file.read()


def expand(patterns: Sequence[str]) -> list[Path]:
    """The files that paths and globs name, sorted within each glob, each file once.

    Raises:
        UserError: one of them names no file.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        files = [Path(match) for match in matches if os.path.isfile(match)]
        if not files:
            what = "is a folder: give a glob such as " + os.path.join(pattern, "*.txt") if matches else "names no file"
            raise UserError(f"data.paths: {pattern} {what}")
        found |= dict.fromkeys(files)
    return list(found)


def file_documents(path: Path, text_field: str) -> Iterator[str]:
    """The documents of a file: a line each of .jsonl, else the whole file. With .gz, the file inside.

    Raises:
        UserError: it cannot be read, or a line is not a JSON object with `text_field`; says which.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compressed = suffixes[-1:] == [".gz"]
    if compressed:
        suffixes.pop()
    try:
        with gzip.open(path, "rb") if compressed else open(path, "rb") as file:
            if suffixes[-1:] in ([".jsonl"], [".ndjson"]):
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield _field(line, text_field, f"{path}, line {number}")
            else:
                yield file.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start})") from None
    except (OSError, EOFError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def _field(line: bytes, text_field: str, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {error}") from None
    if not isinstance(record, dict) or text_field not in record:
        fields = ", ".join(record) if isinstance(record, dict) else "none, it is not an object"
        raise UserError(f"{where} has no field {text_field!r}; its fields: {fields or 'none'}")
    if not isinstance(record[text_field], str):
        raise UserError(f"{where}: the field {text_field!r} is not a string")
    return record[text_field]


def tokenise(documents: Iterable[str | bytes], tokenizer: Tokenizer, name: str) -> TokenStore:
    """A store, in memory, of the documents that are not empty, with the end token after each.

    Raises:
        UserError: there is none; `name` says of what.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.end_id], dtype=dtype)
    parts, lengths = [], [0]
    documents = iter(documents)
    while batch := list(islice(documents, BATCH)):
        for ids in tokenizer.encode_batch(batch):
            if len(ids):
                parts += [ids.astype(dtype, copy=False), end]
                lengths.append(len(ids) + 1)
    if not parts:
        raise UserError(f"{name} has no text")
    return TokenStore([(np.concatenate(parts), np.cumsum(lengths, dtype=np.int64))])
