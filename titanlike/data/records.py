"""Reading documents from where they lie: text files, JSONL, Parquet, Hugging Face datasets, the standard library.

What there is to read is first listed as pieces, each of which is read on its own, by any process: a file, or a part of
one. The list depends on the files alone. Records come with a number that `Piece.where` turns into words for an error
message, so that a good record costs nothing.
"""

from __future__ import annotations

import functools
import glob
import gzip
import io
import json
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from titanlike.data.config import SourceConfig
from titanlike.data.source_errors import SourceError
from titanlike.errors import UserError

Record = str | dict[str, Any]
NOT_LIBRARY = frozenset(("__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests", "turtledemo"))
EXAMPLES = 10_000  # of a dataset in one piece, at most


class Piece(NamedTuple):
    """A part of the input."""

    form: str
    """text, jsonl, parquet, python (a source file), or huggingface"""
    path: str
    size: int
    """about how many bytes"""
    start: int = 0
    stop: int | None = None
    """of a plain .jsonl file: the lines that start in these bytes; Parquet: these row groups; a dataset: these
    examples"""
    dataset: tuple[str, str | None, str] | None = None
    """name, subset, split"""

    def where(self, number: int) -> str:
        """A record in words, such as "data.jsonl, line 12"."""
        if self.form in ("text", "python"):
            return self.path
        if self.form == "jsonl":
            with _open(self.path) as file:
                line = 1 + file.read(number).count(b"\n")
            return f"{self.path}, line {line}"
        return f"{self.path}, {'row' if self.form == 'parquet' else 'example'} {number}"


def list_pieces(source: SourceConfig, piece_bytes: int) -> list[Piece]:
    """All that a source has to read, in order, in pieces of about `piece_bytes` where files can be cut.

    Raises:
        UserError: a path that names no file, or a dataset that cannot be opened.
    """
    if source.source == "python-stdlib":
        return [Piece("python", path, os.path.getsize(path)) for path in stdlib_paths()]
    if source.source == "huggingface":
        assert source.dataset is not None
        name = (source.dataset, source.subset, source.split)
        dataset = open_dataset(*name)
        for field in source.fields:
            if field not in dataset.column_names:
                fields = ", ".join(dataset.column_names)
                raise SourceError(f"dataset: {source.dataset} has no field {field!r}; its fields: {fields}")
        n = len(dataset)
        mean = max(1, (dataset.data.nbytes if n else 0) // max(n, 1))
        step = max(1, min(EXAMPLES, piece_bytes // mean))
        return [
            Piece("huggingface", source.dataset, mean * (min(i + step, n) - i), i, min(i + step, n), name)
            for i in range(0, n, step)
        ]
    return [piece for path in expand(source.paths) for piece in _pieces_of_file(path, piece_bytes)]


def stdlib_paths() -> list[str]:
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
        raise SourceError(f'source = "python-stdlib" finds no source files in {root}: use source = "text"')
    return sorted(paths, key=lambda path: os.path.relpath(path, root).split(os.sep))


def expand(patterns: Sequence[str]) -> list[str]:
    """The files that paths and globs name, sorted within each glob, each file once.

    Raises:
        UserError: one of them names no file.
    """
    found: dict[str, None] = {}
    for pattern in patterns:
        matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        files = [match for match in matches if os.path.isfile(match)]
        if not files:
            what = f"is a folder: give a glob such as {os.path.join(pattern, '*.txt')}" if matches else "names no file"
            raise SourceError(f"paths: {pattern} {what}")
        found |= dict.fromkeys(files)
    return list(found)


def _pieces_of_file(path: str, piece_bytes: int) -> list[Piece]:
    size = os.path.getsize(path)
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    compressed = suffixes[-1:] in ([".gz"], [".zst"])
    suffix = suffixes[-2:-1] if compressed else suffixes[-1:]
    if suffix in ([".jsonl"], [".ndjson"]):
        if compressed:
            return [Piece("jsonl", path, size)]
        return [
            Piece("jsonl", path, min(piece_bytes, size - i), i, i + piece_bytes) for i in range(0, size, piece_bytes)
        ]
    if suffix == [".parquet"] and not compressed:
        groups = _parquet(path).metadata.num_row_groups
        return [Piece("parquet", path, size // groups, i, i + 1) for i in range(groups)]
    return [Piece("text", path, size)]


def read_pieces(pieces: Iterable[Piece], fields: Sequence[str]) -> Iterator[tuple[Piece, int, Record]]:
    """The records of pieces, each with its piece and its number in it.

    Raises:
        UserError: a file cannot be read, or a record is not what its form asks for; names file and record.
    """
    for piece in pieces:
        try:
            for number, record in _READERS[piece.form](piece, fields):
                yield piece, number, record
        except UnicodeDecodeError as error:
            raise UserError(f"{piece.path} is not UTF-8 text (byte {error.start})") from None
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{piece.path} cannot be read: {error}") from None
        except Exception as error:
            if type(error).__name__ == "ZstdError":  # not imported: the package may not be there
                raise UserError(f"{piece.path} cannot be read: {error}") from None
            raise


def _read_text(piece: Piece, fields: Sequence[str]) -> Iterator[tuple[int, Record]]:
    with _open(piece.path) as file:
        yield 0, file.read().decode("utf-8", errors="replace" if piece.form == "python" else "strict")


def _read_jsonl(piece: Piece, fields: Sequence[str]) -> Iterator[tuple[int, Record]]:
    with _open(piece.path) as file:
        position = piece.start
        if position:  # the line that began before the piece belongs to the one before
            file.seek(position - 1)
            position += len(file.readline()) - 1
        while piece.stop is None or position < piece.stop:
            line = file.readline()
            if not line:
                return
            if line.strip():
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError) as error:  # the latter: brackets in brackets, thousands of them
                    raise UserError(f"{piece.where(position)} is not JSON: {error}") from None
                if not isinstance(record, dict):
                    raise UserError(f"{piece.where(position)} is not a JSON object")
                yield position, record
            position += len(line)


def _read_parquet(piece: Piece, fields: Sequence[str]) -> Iterator[tuple[int, Record]]:
    file = _parquet(piece.path)
    names = file.schema_arrow.names
    columns = list(fields) if set(fields) <= set(names) else names  # all, for an error that lists them
    assert piece.stop is not None
    for group in range(piece.start, piece.stop):
        number = sum(file.metadata.row_group(before).num_rows for before in range(group))
        for batch in file.iter_batches(batch_size=256, row_groups=[group], columns=columns):
            for record in batch.to_pylist():
                yield number, record
                number += 1


def _read_dataset(piece: Piece, fields: Sequence[str]) -> Iterator[tuple[int, Record]]:
    assert piece.dataset is not None and piece.stop is not None
    dataset = open_dataset(*piece.dataset).select_columns(list(fields))
    for start in range(piece.start, piece.stop, 256):
        columns = dataset[start : min(start + 256, piece.stop)]
        names = list(columns)
        for i, values in enumerate(zip(*columns.values())):
            yield start + i, dict(zip(names, values))


_READERS = {
    "text": _read_text,
    "python": _read_text,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
    "huggingface": _read_dataset,
}


def _open(path: str) -> IO[bytes]:
    """A file for reading; what .gz or .zst hold."""
    if path.lower().endswith(".gz"):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    if path.lower().endswith(".zst"):
        try:
            import zstandard
        except ImportError:
            raise UserError(f"{path}: reading .zst needs the zstandard package: pip install zstandard") from None
        return io.BufferedReader(zstandard.open(path, "rb"), 2**20)
    return open(path, "rb")


def _parquet(path: str) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a Parquet file that can be read: {error}") from None


@functools.lru_cache(maxsize=8)
def open_dataset(name: str, subset: str | None, split: str, streaming: bool = False) -> Any:
    """A dataset of Hugging Face: a folder that `save_to_disk` wrote, or whatever `load_dataset` opens. Map-style, or
    iterable with `streaming`.

    Raises:
        UserError: there is none of that name, subset and split, or it is not here and there is no network.
    """
    import datasets

    datasets.disable_progress_bars()
    try:
        saved = _saved_dataset(name, split)
        if saved is not None:
            return saved.to_iterable_dataset() if streaming else saved
        return datasets.load_dataset(name, subset, split=split, streaming=streaming)
    except Exception as error:  # what the library raises has no common base
        first = str(error).strip().splitlines()
        what = f"{type(error).__name__}: {first[0] if first else 'no more is known'}"
        if isinstance(error, ConnectionError):
            what = f"it is not on this machine, and the Hub can't be reached ({first[0] if first else 'no network'})"
        subset = f" ({subset})" if subset else ""
        raise SourceError(f"dataset: {name}{subset}, split {split!r}, cannot be opened: {what}") from None


def _saved_dataset(name: str, split: str) -> Any:
    """What `save_to_disk` wrote into the folder `name`, or None."""
    import datasets

    if (Path(name) / "dataset_info.json").is_file() and (Path(name) / "state.json").is_file():
        return datasets.load_from_disk(name)
    if (Path(name) / "dataset_dict.json").is_file():
        return datasets.load_from_disk(name)[split]
    return None
