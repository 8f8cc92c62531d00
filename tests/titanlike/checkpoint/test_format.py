"""docs/checkpoint.md is enough: a reader written from it alone, without torch, gets every tensor and every digest."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open

from tests.ranks import ROOT, run_ranks
from tests.titanlike.checkpoint.states import full_state
from tests.titanlike.checkpoint.test_resharding import _save_and_load_pairs

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def read(folder: Path, entry: dict[str, Any]) -> np.ndarray:
    """A tensor from its boxes, by NumPy."""
    whole = np.full(entry["shape"], -1, {"F32": np.float32, "I64": np.int64}[entry["dtype"]])
    for box in entry["boxes"]:
        with safe_open(folder / box["file"], framework="numpy") as file:
            place = tuple(slice(o, o + n) for o, n in zip(box["offset"], box["shape"], strict=True))
            whole[place] = file.get_tensor(box["key"])
    return whole


def digest(name: str, entry: dict[str, Any], values: np.ndarray) -> int:
    rows = math.prod(entry["shape"][:-1])
    words = np.ascontiguousarray(values).reshape(rows, -1).view(np.int32)
    text = f"{name}\n{entry['dtype']}\n{','.join(map(str, entry['shape']))}"
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    total = 0
    for i in range(rows):
        for j in range(words.shape[1]):
            key = (mix((seed + i * GOLDEN) & MASK) | 1) * (mix((0x746974616E6C696B + j * GOLDEN) & MASK) | 1)
            total += ((int(words[i, j]) ^ key) & MASK) * key
    return total & MASK


def test_a_reader_written_from_the_document_agrees(tmp_path: Path) -> None:
    run_ranks(4, _save_and_load_pairs, [(1, 2, 2)], str(tmp_path))
    folder = tmp_path / "(1, 2, 2)" / "checkpoints" / "step-00000007"
    commit = json.loads((folder / "COMMIT").read_text())
    data = (folder / "manifest.json").read_bytes()
    assert commit == {
        "format": "titanlike.checkpoint",
        "version": 1,
        "bytes": len(data),
        "crc32": f"{zlib.crc32(data):08x}",
    }
    manifest = json.loads(data)
    others = {path.name for path in folder.iterdir()} - {"COMMIT", "manifest.json"}
    assert manifest["files"].keys() == others and manifest["step"] == 7
    for name, entry in manifest["files"].items():
        content = (folder / name).read_bytes()
        assert entry == {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    total, state = 0, full_state(3)
    for name, entry in json.loads((folder / "tensors.json").read_text()).items():
        values = read(folder, entry)
        assert torch.equal(torch.from_numpy(values), state.pop(name))
        value = digest(name, entry, values)
        assert entry["digest"] == f"{value:016x}"
        total += value
    assert not state and manifest["digest"] == f"{total & MASK:016x}"


def test_every_field_is_in_the_document(tmp_path: Path) -> None:
    run_ranks(2, _save_and_load_pairs, [(1, 2, 1)], str(tmp_path))
    folder = tmp_path / "(1, 2, 1)" / "checkpoints" / "step-00000007"
    text = (ROOT / "docs" / "checkpoint.md").read_text()
    fields = {*json.loads((folder / "COMMIT").read_text()), *json.loads((folder / "manifest.json").read_text())}
    for entry in json.loads((folder / "tensors.json").read_text()).values():
        fields |= {*entry, *entry["boxes"][0]}
    assert all(f"`{field}`" in text for field in fields), fields
