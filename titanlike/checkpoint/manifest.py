"""A checkpoint as a folder: names, manifest, commit marker; which folders count, and whether one is whole.

    <run folder>/checkpoints/step-00000010/
        rank-00000.safetensors ...   tensors, one or more files per rank that wrote
        tensors.json                 every tensor: dtype, global shape, digest, and its boxes -> (file, key)
        state.json                   what the trainer gave as `meta`
        manifest.json                step, sequence, digest of the state, bytes and CRC-32 of every file above
        COMMIT                       bytes and CRC-32 of manifest.json, written last

A checkpoint is written under a name that begins with "." and renamed when it is complete and on the disk. So a folder named
`step-XXXXXXXX` is whole unless something damaged it afterwards, and that is found by size and checksum. "Newest" means
committed last: `sequence` counts the saves of a run folder, so that a run that went back to an older step stays on its branch.
"""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlike.checkpoint import files
from titanlike.errors import UserError

FORMAT = "titanlike.checkpoint"
VERSION = 1

TENSORS = "tensors.json"
STATE = "state.json"
MANIFEST = "manifest.json"
COMMIT = "COMMIT"

TEMPORARY = ".tmp-"  # a save that has not been committed
REPLACED = ".replaced-"  # the folder that a save of the same step took the place of, until that save is in its place
TRASH = ".trash-"  # being deleted

_STEP_NAME = re.compile(r"step-(\d{8,})")
_MAX_JSON = 2 << 30  # bytes
_READ_CHUNK = 4 << 20


class CheckpointError(UserError):
    """A checkpoint can't be written, or can't be read. One sentence that names the step or the file."""


class DamagedCheckpoint(CheckpointError):
    """A committed checkpoint is not what was written. One sentence that names the file."""


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def to_json(value: Any) -> bytes:
    """JSON as it stands in our files: keys in the order given, NaN refused (it is not JSON)."""
    return json.dumps(value, indent=1, allow_nan=False).encode()


def from_json(path: Path, what: str = "JSON") -> Any:
    """Read a JSON file; anything else in it is refused by name."""
    try:
        if path.stat().st_size > _MAX_JSON:
            raise DamagedCheckpoint(f"{path} is too large to be {what}")
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{path} is missing") from error
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} is not {what}") from error
    except OSError as error:
        raise DamagedCheckpoint(f"{path} can not be read: {error.strerror}") from error


def crc_text(crc: int) -> str:
    return f"{crc:08x}"


def file_crc(path: Path) -> tuple[int, int]:
    """(bytes, CRC-32) of a file."""
    crc, size = 0, 0
    buffer = bytearray(_READ_CHUNK)
    view = memoryview(buffer)
    with open(path, "rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            crc = zlib.crc32(view[:count], crc)
            size += count
    return size, crc


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json."""

    step: int
    sequence: int
    files: dict[str, dict[str, Any]]
    digest: str | None
    created: str
    raw: dict[str, Any]

    @property
    def bytes(self) -> int:
        return sum(int(entry["bytes"]) for entry in self.files.values())


def write_commit(folder: Path, manifest: dict[str, Any]) -> None:
    """Write manifest.json, then the commit marker that vouches for it."""
    data = to_json(manifest)
    files.write_file(folder / MANIFEST, [data])
    marker = {"format": FORMAT, "version": VERSION, "bytes": len(data), "crc32": crc_text(zlib.crc32(data))}
    files.write_file(folder / COMMIT, [to_json(marker)])


def read_manifest(folder: Path) -> Manifest:
    """Check the commit marker and the manifest, and that every file is there with its size.

    Raises DamagedCheckpoint naming the first file that is not as it was written. Contents are checked by `verify_file`.
    """
    marker = from_json(folder / COMMIT, "a commit marker")
    try:
        form, version, size, crc = marker["format"], marker["version"], marker["bytes"], marker["crc32"]
    except (KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{folder / COMMIT} is not a commit marker") from error
    if form != FORMAT or version != VERSION:
        raise CheckpointError(
            f"{folder} has format {form!r} version {version!r}; this program reads {FORMAT!r} version {VERSION}"
        )
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DamagedCheckpoint(f"{path} is missing or can not be read") from error
    if (len(data), crc_text(zlib.crc32(data))) != (size, crc):
        raise DamagedCheckpoint(f"{path} is damaged: it is not what {COMMIT} vouches for")
    raw = json.loads(data)
    manifest = Manifest(raw["step"], raw["sequence"], raw["files"], raw["digest"], raw["created"], raw)
    for name, entry in manifest.files.items():
        file = folder / name
        try:
            size = file.stat().st_size
        except OSError as error:
            raise DamagedCheckpoint(f"{file} is missing") from error
        if size != entry["bytes"]:
            raise DamagedCheckpoint(f"{file} has {size} bytes instead of {entry['bytes']}")
    return manifest


def verify_file(folder: Path, manifest: Manifest, name: str) -> None:
    """Read one file wholly and compare its checksum. Raises DamagedCheckpoint naming it."""
    try:
        size, crc = file_crc(folder / name)
    except OSError as error:
        raise DamagedCheckpoint(f"{folder / name} can not be read: {error.strerror}") from error
    entry = manifest.files[name]
    if (size, crc_text(crc)) != (entry["bytes"], entry["crc32"]):
        raise DamagedCheckpoint(
            f"{folder / name} is damaged: its checksum is {crc_text(crc)} instead of {entry['crc32']}"
        )


@dataclass(frozen=True)
class Found:
    """A folder that bears a checkpoint's name. `manifest` is None if it is damaged, and `problem` says how."""

    step: int
    folder: Path
    manifest: Manifest | None
    problem: str | None


def find_checkpoints(root: Path) -> list[Found]:
    """All checkpoints of `<run folder>/checkpoints`, the newest (committed last) first; damaged ones sort by their step."""
    found = []
    names = sorted(entry.name for entry in root.iterdir()) if root.is_dir() else []
    for name in names:
        match = _STEP_NAME.fullmatch(name)
        if match is None:
            continue
        folder = root / name
        try:
            found.append(Found(int(match[1]), folder, read_manifest(folder), None))
        except CheckpointError as error:
            found.append(Found(int(match[1]), folder, None, str(error)))
    # A damaged folder has no sequence that can be trusted: it takes the place that its step has among the others.
    by_step = sorted(found, key=lambda item: item.step)
    order: dict[Path, tuple[int, int]] = {}
    last = 0
    for item in by_step:
        if item.manifest is not None:
            last = max(last, item.manifest.sequence)
            order[item.folder] = (item.manifest.sequence, item.step)
        else:
            order[item.folder] = (last, item.step)
    return sorted(found, key=lambda item: order[item.folder], reverse=True)
