"""A checkpoint as a folder: its files, the manifest and commit marker, and whether all of it is still as it was
written.

    <run folder>/checkpoints/step-00000010/
        rank-00000.safetensors ...   tensors, one or more files per rank that wrote
        tensors.json                 every tensor: dtype, global shape, digest, and its boxes -> (file, key)
        state.json                   what the trainer gave as `meta`
        manifest.json                step, sequence, digest of the state, bytes and CRC-32 of every file above
        COMMIT                       bytes and CRC-32 of manifest.json, written last

Nothing read from these files is believed before it is checked, and nothing in them can run code. See
docs/checkpoint.md.
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

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")  # no separators, no "..": a manifest can't point elsewhere
_MAX_JSON = 2 << 30  # bytes
_READ_CHUNK = 4 << 20


class CheckpointError(UserError):
    """A checkpoint can't be written, or can't be read. One sentence that names the step or the file."""


class DamagedCheckpoint(CheckpointError):
    """A committed checkpoint is not what was written. One sentence that names the file."""


def to_json(value: Any) -> bytes:
    """JSON as it stands in our files: keys in the order given; NaN is refused, since it is not JSON."""
    return json.dumps(value, indent=1, allow_nan=False).encode()


def crc_text(crc: int) -> str:
    return f"{crc:08x}"


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > _MAX_JSON:
            raise DamagedCheckpoint(f"{path} is too large to be JSON")
        return path.read_bytes()
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{path} is missing") from error
    except OSError as error:
        raise DamagedCheckpoint(f"{path} can not be read: {error.strerror}") from error


def _parse(data: bytes, path: Path) -> dict[str, Any]:
    """A JSON object; anything else, a pickle for one, is refused by name."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"{path} is not JSON") from error
    if not isinstance(value, dict):
        raise DamagedCheckpoint(f"{path} is not a JSON object")
    return value


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json. `files` maps a name to its `bytes` and `crc32`; `digest` is 16 hex digits."""

    step: int
    sequence: int
    created: str
    digest: str
    files: dict[str, dict[str, Any]]
    raw: dict[str, Any]

    @property
    def bytes(self) -> int:
        return sum(entry["bytes"] for entry in self.files.values())


def write_commit(folder: Path, manifest: dict[str, Any]) -> None:
    """Write manifest.json, then the commit marker that vouches for it."""
    data = to_json({"format": FORMAT, "version": VERSION, **manifest})
    files.write_file(folder / MANIFEST, [data])
    marker = {"format": FORMAT, "version": VERSION, "bytes": len(data), "crc32": crc_text(zlib.crc32(data))}
    files.write_file(folder / COMMIT, [to_json(marker)])


def read_manifest(folder: Path) -> Manifest:
    """Check the commit marker and the manifest, and that every file is there with its size.

    Raises DamagedCheckpoint naming the first file that is not as it was written. Contents: `verify_file`.
    """
    data = _read(folder / COMMIT)
    marker = _parse(data, folder / COMMIT)
    if marker.get("format") != FORMAT or data != to_json(marker):  # nothing vouches for this one: every byte counts
        raise DamagedCheckpoint(f"{folder / COMMIT} is not a commit marker of {FORMAT}")
    if marker.get("version") != VERSION:
        have = marker.get("version")
        raise CheckpointError(f"{folder / COMMIT} is of format version {have!r}, and this program reads {VERSION}")
    path = folder / MANIFEST
    data = _read(path)
    if (len(data), crc_text(zlib.crc32(data))) != (marker.get("bytes"), marker.get("crc32")):
        raise DamagedCheckpoint(f"{path} is damaged: it is not what {COMMIT} vouches for")
    raw = _parse(data, path)
    try:
        manifest = Manifest(raw["step"], raw["sequence"], raw["created"], raw["digest"], raw["files"], raw)
        listed = [(name, int(entry["bytes"]), str(entry["crc32"])) for name, entry in manifest.files.items()]
        int(manifest.digest, 16), int(manifest.step), int(manifest.sequence)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedCheckpoint(f"{path} is not a manifest ({error!r})") from error
    for name in (TENSORS, STATE):
        if name not in manifest.files:
            raise DamagedCheckpoint(f"{path} does not list {name}")
    for name, wanted, _ in listed:
        if not _FILE_NAME.fullmatch(name):
            raise DamagedCheckpoint(f"{path} lists {name!r}, which is not a plain file name")
        try:
            size = (folder / name).stat().st_size
        except OSError as error:
            raise DamagedCheckpoint(f"{folder / name} is missing") from error
        if size != wanted:
            raise DamagedCheckpoint(f"{folder / name} has {size} bytes instead of {wanted}")
    return manifest


def read_listed_json(folder: Path, manifest: Manifest, name: str) -> dict[str, Any]:
    """One of the JSON files, after its checksum. Raises DamagedCheckpoint naming it."""
    data = _read(folder / name)
    _compare(folder / name, manifest, len(data), zlib.crc32(data))
    return _parse(data, folder / name)


def verify_file(folder: Path, manifest: Manifest, name: str) -> None:
    """Read one file wholly and compare its checksum. Raises DamagedCheckpoint naming it."""
    crc, size = 0, 0
    buffer = bytearray(_READ_CHUNK)
    view = memoryview(buffer)
    try:
        with open(folder / name, "rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                crc = zlib.crc32(view[:count], crc)
                size += count
    except OSError as error:
        raise DamagedCheckpoint(f"{folder / name} can not be read: {error.strerror}") from error
    _compare(folder / name, manifest, size, crc)


def _compare(path: Path, manifest: Manifest, size: int, crc: int) -> None:
    entry = manifest.files[path.name]
    if size != entry["bytes"]:
        raise DamagedCheckpoint(f"{path} has {size} bytes instead of {entry['bytes']}")
    if crc_text(crc) != entry["crc32"]:
        raise DamagedCheckpoint(f"{path} is damaged: its CRC-32 is {crc_text(crc)} instead of {entry['crc32']}")
