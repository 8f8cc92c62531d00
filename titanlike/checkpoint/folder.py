"""The checkpoints of a run folder: which ones there are, which is the newest, which to delete.

A checkpoint is written under a name that begins with "." and renamed when it is complete and on the disk. So a folder
named `step-XXXXXXXX` is whole unless something damaged it afterwards, and that is found by size and checksum.

"Newest" means committed last: `sequence` counts the saves of a run folder, so a run that went back to an older step
stays on its branch when it is restarted, and its new checkpoints are not the ones that retention deletes.
"""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from titanlike.checkpoint import files
from titanlike.checkpoint.manifest import CheckpointError, Manifest, read_manifest
from titanlike.errors import UserError

TEMPORARY = ".tmp-"  # a save that has not been committed
REPLACED = ".replaced-"  # a checkpoint that a save of the same step takes the place of, until that save is in its place
TRASH = ".trash-"  # being deleted

_STEP = re.compile(r"step-(\d{8,})")
_REPLACED = re.compile(re.escape(REPLACED) + r"(step-\d{8,})-[0-9a-f]+")


@contextmanager
def new_folder(out: Path) -> Generator[Path]:
    """A temporary sibling to write into, which gets the name `out` when the block is left: the folder appears whole or
    not at all. Raises UserError if `out` exists or cannot be written."""
    if out.exists():
        raise UserError(f"{out} exists already: give a new name")
    temporary = out.parent / f"{TEMPORARY}{out.name}"
    if temporary.exists():
        shutil.rmtree(temporary)
    try:
        files.make_folder(temporary)
        yield temporary
        files.sync_folder(temporary)
        files.rename(temporary, out)
        files.sync_folder(out.parent)
    except OSError as error:
        raise UserError(f"{out} could not be written: {error.strerror or error}: {error.filename}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # still there after an error alone


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def hidden_name(prefix: str, name: str) -> str:
    """A name that no other attempt has."""
    return f"{prefix}{name}-{secrets.token_hex(4)}"


@dataclass(frozen=True)
class Found:
    """A folder that bears a checkpoint's name. `manifest` is None if it is damaged, and `problem` says how."""

    step: int
    folder: Path
    manifest: Manifest | None
    problem: str | None


def look_at(folder: Path, step: int | None = None) -> Found:
    """One checkpoint folder; `step` is what its name says, or None for one whose name says nothing."""
    match = _STEP.fullmatch(folder.name)
    step = int(match[1]) if step is None and match else step
    try:
        manifest = read_manifest(folder)
        if step is None:
            return Found(manifest.step, folder, manifest, None)
        if manifest.step != step:
            raise CheckpointError(f"{folder} holds step {manifest.step}: it was renamed")
        return Found(step, folder, manifest, None)
    except CheckpointError as error:
        return Found(step or 0, folder, None, str(error))


def find_checkpoints(root: Path) -> list[Found]:
    """All checkpoints under `root` (`<run folder>/checkpoints`), the newest first. A missing folder has none.

    Checks manifests and sizes, not contents. Changes nothing, so it is safe beside a running job.
    """
    try:
        names = sorted(entry.name for entry in root.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{root} can not be read: {error.strerror}") from error
    found = [look_at(root / name) for name in names if _STEP.fullmatch(name)]
    # A save of the same step was interrupted between its two renames: what it was to replace still counts.
    for name in names:
        if (match := _REPLACED.fullmatch(name)) and match[1] not in names:
            found.append(look_at(root / name, int(match[1].removeprefix("step-"))))
    # A damaged folder has no sequence that can be trusted: it takes the place that its step has among the others.
    order: dict[Path, tuple[int, int]] = {}
    last = 0
    for item in sorted(found, key=lambda item: item.step):
        if item.manifest is not None:
            last = max(last, item.manifest.sequence)
        order[item.folder] = (item.manifest.sequence if item.manifest else last, item.step)
    return sorted(found, key=lambda item: order[item.folder], reverse=True)


def put_in_place(root: Path, temporary: Path, step: int) -> Path:
    """Commit: give a complete temporary folder its name. A checkpoint of the same step makes room first."""
    final = root / step_name(step)
    replaced = None
    if final.exists():
        replaced = root / hidden_name(REPLACED, final.name)
        files.rename(final, replaced)
    files.rename(temporary, final)
    files.sync_folder(root)
    if replaced is not None:
        files.remove_tree(replaced)
    return final


def clean(root: Path) -> None:
    """Remove what interrupted saves and deletions left. Only for the job that writes here, before it writes."""
    if not root.is_dir():
        return
    names = sorted(entry.name for entry in root.iterdir())
    for name in names:
        match = _REPLACED.fullmatch(name)
        if match and match[1] not in names:
            files.rename(root / name, root / match[1])
            names.append(match[1])  # a second one of the same step is then rubbish
        elif match or name.startswith((TEMPORARY, TRASH)):
            files.remove_tree(root / name)


def delete(folder: Path) -> None:
    """Delete a checkpoint: hidden by one rename first, so that it never is there in part."""
    trash = folder.parent / hidden_name(TRASH, folder.name)
    files.rename(folder, trash)
    files.remove_tree(trash)


def to_delete(found: list[Found], keep_last: int, keep_every: int) -> list[Found]:
    """Which checkpoints retention deletes, out of all (newest first).

    Kept: the `keep_last` newest good ones (0: all), those whose step is a multiple of `keep_every` (0: none), and
    anything newer than the oldest of the newest, damaged or not. So the newest good one is always kept.
    """
    if keep_last == 0:
        return []
    doomed, good = [], 0
    for item in found:
        past = good >= keep_last
        good += item.manifest is not None
        if past and not (keep_every and item.step % keep_every == 0):
            doomed.append(item)
    return doomed
