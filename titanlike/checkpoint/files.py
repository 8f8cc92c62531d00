"""Every operation on files that a save makes, in one place: named, counted, and able to be interrupted by a test.

A test sets `hook` and is called before each operation with (operation, path), so that it can kill the process, or raise, at the
k-th one. Nothing else in this package changes the file system.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

hook: Callable[[str, str], None] | None = None

WRITE_CHUNK = 16 << 20  # bytes handed to the kernel at once


def _about_to(operation: str, path: Path | str) -> None:
    if hook is not None:
        hook(operation, str(path))


def make_folder(path: Path, *, parents: bool = False) -> None:
    """Create a folder; one that is already there is fine."""
    _about_to("mkdir", path)
    path.mkdir(parents=parents, exist_ok=True)


def write_file(
    path: Path, pieces: Iterable[bytes | memoryview], on_bytes: Callable[[memoryview], None] | None = None
) -> int:
    """Write a new file from `pieces`, fsync it, and return its size in bytes. `on_bytes` sees every piece (checksums)."""
    _about_to("create", path)
    total = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        for piece in pieces:
            view = memoryview(piece).cast("B")
            for start in range(0, len(view), WRITE_CHUNK):
                chunk = view[start : start + WRITE_CHUNK]
                _about_to("write", path)
                if on_bytes is not None:
                    on_bytes(chunk)
                written = 0
                while written < len(chunk):  # a write may be short: a nearly full disk, a signal
                    written += os.write(descriptor, chunk[written:])
                total += len(chunk)
        _about_to("fsync", path)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return total


def sync_folder(path: Path) -> None:
    """fsync a folder, so that the names in it survive a power cut."""
    _about_to("fsync", path)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Rename a folder to a name that is free."""
    _about_to("rename", target)
    os.rename(source, target)


def remove_tree(path: Path) -> None:
    """Delete a folder and all in it."""
    _about_to("remove", path)
    shutil.rmtree(path)
