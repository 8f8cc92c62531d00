"""The folder of a run: made, tried, and written to by one job at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import IO

from titanlike.errors import UserError, file_errors

LOCK = ".lock"


@contextlib.contextmanager
def run_folder(folder: Path, rank: int) -> Generator[None]:
    """Make the folder, and hold it while the block runs: all ranks enter, rank 0 holds. A start that wrote nothing
    leaves nothing: the lock goes at the end, and so does a folder that is empty then.

    Raises UserError if it cannot be made or written to, if something in it is in the way, or if another job writes
    there: its checkpoints and ours would get into each other's way.
    """
    try:
        with file_errors(f"the run folder {folder} (run.dir/run.name)"):
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                file.write(b"tried")  # a full disk still takes an empty file
        for name in ("checkpoints", "tensorboard"):
            if (folder / name).exists() and not (folder / name).is_dir():
                raise UserError(
                    f"{folder / name} must be a folder, and is a file: move it away, or choose another run.name"
                )
        with _locked(folder) if rank == 0 else contextlib.nullcontext():
            yield
    finally:
        with contextlib.suppress(OSError):  # it is not empty, or another rank was faster
            folder.rmdir()


def check_shared(folder: Path) -> None:
    """Raise UserError on all ranks if one of them sees another folder than rank 0. All ranks together, while it is
    held.

    Otherwise the first save would find out, hours later.
    """
    import torch.distributed as dist

    def holder() -> str:
        if dist.get_rank() == 0:  # which must not open the file again: to close it would give up the lock
            return _holder()
        with contextlib.suppress(OSError):
            return (folder / LOCK).read_text()
        return ""

    seen: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(seen, holder())
    others = [rank for rank, text in enumerate(seen) if text != seen[0]]
    if others:
        raise UserError(
            f"the run folder {folder} (run.dir/run.name) is not the same on all ranks: rank {others[0]} does not see "
            "what rank 0 wrote there; it must be on a file system that all nodes share"
        )


@contextlib.contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Hold a lock that ends with this process, however it ends, and that its children do not inherit. Where the file
    system has no locks, there is none. Its file is removed at the end, while the lock is held."""
    path = folder / LOCK
    while True:
        with file_errors(f"the run folder {folder} (run.dir/run.name)"):
            folder.mkdir(parents=True, exist_ok=True)  # a job that ended just now may have removed it
            file = open(path, "a+")  # noqa: SIM115 - closed below
        with file:
            held = True
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                file.seek(0)
                which = file.read().strip() or "it has not said which"
                raise UserError(
                    f"another job is writing to the run folder {folder} ({which}): wait for it, end it, or choose "
                    "another run.name"
                ) from None
            except OSError:
                held = False
            if held and not _is_at(file, path):
                continue  # a job that ended just now removed the file that was opened: the lock is of nothing
            try:
                with file_errors(f"the run folder {folder} (run.dir/run.name)"):
                    os.ftruncate(file.fileno(), 0)
                    os.write(file.fileno(), _holder().encode())  # what a buffer held would fail again at its end
                yield
            finally:
                with contextlib.suppress(OSError):
                    if held and _is_at(file, path):  # whoever deleted the folder may have another job in it
                        path.unlink()
            return


def _is_at(file: IO[str], path: Path) -> bool:
    """Whether the open file is still the one at `path`."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _holder() -> str:
    """Who holds the folder, as the lock's file says it."""
    return f"process {os.getpid()} on {socket.gethostname()}\n"
