"""Every operation on files that a save makes, in one place: named, counted, and able to be interrupted by a test.

A test sets `hook` and is called before each operation with (operation, path), so that it can kill the process, or
raise, at the k-th one. Nothing else in this package changes the file system.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

hook: Callable[[str, str], None] | None = None

WRITE_CHUNK = 16 << 20  # bytes handed to the kernel at once


@contextmanager
def _operation(name: str, path: Path) -> Iterator[None]:
    """Announce an operation, and let an OSError name the path that it was about."""
    try:
        if hook is not None:
            hook(name, str(path))
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def make_folder(path: Path) -> None:
    """Create a folder and its parents, and make their names durable; one that is already there is fine."""
    if path.is_dir():
        return
    make_folder(path.parent)
    with _operation("mkdir", path):
        path.mkdir(exist_ok=True)
    sync_folder(path.parent)


def write_file(
    path: Path, pieces: Iterable[bytes | memoryview], on_bytes: Callable[[memoryview], None] | None = None
) -> int:
    """Write a new file from `pieces`, fsync it, and return its size in bytes. `on_bytes` sees every piece first."""
    total = 0
    with _operation("create", path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        for piece in pieces:
            view = memoryview(piece).cast("B")
            for start in range(0, len(view), WRITE_CHUNK):
                chunk = view[start : start + WRITE_CHUNK]
                if on_bytes is not None:
                    on_bytes(chunk)
                with _operation("write", path):
                    written = 0
                    while written < len(chunk):  # a write may be short: a nearly full disk, a signal
                        written += os.write(descriptor, chunk[written:])
                    _start_writeback(descriptor, total, len(chunk))
                total += len(chunk)
        with _operation("fsync", path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return total


def _start_writeback(descriptor: int, offset: int, length: int) -> None:
    """Ask the kernel to begin writing these bytes to the disk now, so that the fsync at the end finds little to do."""
    if hasattr(os, "posix_fadvise"):  # Linux; nothing is lost without it
        os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)


def sync_folder(path: Path) -> None:
    """fsync a folder, so that the names in it survive a power cut."""
    with _operation("fsync", path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Rename a folder to a name that is free."""
    with _operation("rename", target):
        os.rename(source, target)


def remove_tree(path: Path) -> None:
    """Delete a folder and all in it."""
    with _operation("remove", path):
        shutil.rmtree(path)
