"""A damaged checkpoint is named, and never loaded; the one before it is."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.titanlike.checkpoint.states import blank, equal, full_state, shards, whole
from titanlike.checkpoint import CheckpointConfig, Checkpointer, CheckpointError, DamagedCheckpoint
from titanlike.checkpoint.manifest import to_json

FILES = ["rank-00000.safetensors", "tensors.json", "state.json", "manifest.json", "COMMIT"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder with steps 1 and 2."""
    checkpointer = Checkpointer(CheckpointConfig(mode="sync", keep_last=0), tmp_path)
    for step in (1, 2):
        checkpointer.save(step, whole(full_state(step)), {"step": step})
    return tmp_path


def newest(run: Path) -> Path:
    return run / "checkpoints" / "step-00000002"


def resume(run: Path, **config) -> tuple[int, list[str]]:
    """The step that a start resumes from, and what the user reads. The loaded state is the saved one."""
    said: list[str] = []
    held = blank(whole(full_state()))
    found = Checkpointer(CheckpointConfig(**config), run, say=said.append).load(held)
    assert found is not None and equal(held, whole(full_state(found.step))) and found.meta == {"step": found.step}
    return found.step, said


def flip(path: Path, byte: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[byte] ^= 1 << bit
    path.write_bytes(data)


def test_newest_wins(run: Path) -> None:
    assert resume(run) == (2, [])
    assert resume(run, load_step=1) == (1, [])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "longer", "folder", "pickle"])
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_used(name: str, damage: str, run: Path) -> None:
    path = newest(run) / name
    data = path.read_bytes()
    path.unlink()
    if damage == "empty":
        path.write_bytes(b"")
    elif damage == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif damage == "longer":
        path.write_bytes(data + b" ")
    elif damage == "folder":
        path.mkdir()
    elif damage == "pickle":
        path.write_bytes(pickle.dumps({"a": 1}).ljust(len(data), b"\0"))
    step, said = resume(run)
    assert step == 1
    assert len(said) == 1 and "damaged checkpoint" in said[0] and name in said[0], said


@pytest.mark.parametrize("name", FILES)
def test_any_flipped_bit_is_found(name: str, run: Path) -> None:
    """DCP: a flipped byte loads without a word."""
    path = newest(run) / name
    size = path.stat().st_size
    step = max(1, size // 23)
    for byte in range(0, size, step):
        flip(path, byte, byte % 8)
        found, said = resume(run)
        assert found == 1 and name in said[0], (byte, said)
        flip(path, byte, byte % 8)
    assert resume(run) == (2, [])


def test_damage_of_both_is_an_error_that_names_a_file(run: Path) -> None:
    """Never start anew over what is there."""
    for step in (1, 2):
        flip(run / "checkpoints" / f"step-0000000{step}" / "rank-00000.safetensors", -1)
    with pytest.raises(DamagedCheckpoint, match=r"no checkpoint in .* is good .*step-00000002/rank-00000\.safetensors"):
        resume(run)


def test_on_corrupt_error_stops(run: Path) -> None:
    flip(newest(run) / "rank-00000.safetensors", -1)
    with pytest.raises(DamagedCheckpoint, match=r"step-00000002/rank-00000\.safetensors is damaged"):
        resume(run, on_corrupt="error")


def test_a_step_that_was_asked_for_has_no_fallback(run: Path) -> None:
    flip(newest(run) / "rank-00000.safetensors", -1)
    with pytest.raises(DamagedCheckpoint, match="step-00000002"):
        resume(run, load_step=2)
    assert resume(run, load_step=1)[0] == 1


def test_a_step_that_does_not_exist_names_those_that_do(run: Path) -> None:
    with pytest.raises(CheckpointError, match=r"checkpoint\.load_step = 3 is not in .*, which has: 1, 2"):
        resume(run, load_step=3)
    with pytest.raises(CheckpointError, match="which has: none"):
        Checkpointer(CheckpointConfig(load_step=3), run / "elsewhere").load({})


def test_a_mixture_of_two_saves_is_found(run: Path) -> None:
    """DCP: half-new shards beside an old .metadata load without a word."""
    shutil.copy(run / "checkpoints" / "step-00000001" / "rank-00000.safetensors", newest(run))
    step, said = resume(run)
    assert step == 1 and "rank-00000.safetensors" in said[0]


def test_a_renamed_checkpoint_is_not_another_step(run: Path) -> None:
    newest(run).rename(run / "checkpoints" / "step-00000009")
    step, said = resume(run)
    assert step == 1 and "holds step 2" in said[0]


def test_what_is_not_a_checkpoint_never_counts(run: Path) -> None:
    root = run / "checkpoints"
    shutil.copytree(newest(run), root / ".tmp-step-00000003-abcd")
    (root / "step-3").mkdir()
    (root / "notes.txt").write_text("hello")
    (root / "step-00000004").write_text("a file")
    step, said = resume(run)
    assert step == 2 and len(said) == 1 and "step-00000004" in said[0]


def rewrite(folder: Path, name: str, change) -> None:
    """Change a JSON file and make every checksum fit: what only someone who means it does."""
    value = json.loads((folder / name).read_text())
    change(value)
    data = json.dumps(value).encode()
    (folder / name).write_bytes(data)
    manifest = json.loads((folder / "manifest.json").read_text())
    if name != "manifest.json":
        manifest["files"][name] = {"bytes": len(data), "crc32": f"{zlib.crc32(data):08x}"}
    text = json.dumps(manifest).encode()
    (folder / "manifest.json").write_bytes(text)
    commit = json.loads((folder / "COMMIT").read_text())
    commit |= {"bytes": len(text), "crc32": f"{zlib.crc32(text):08x}"}
    (folder / "COMMIT").write_bytes(to_json(commit))


def test_wrong_content_with_right_checksums_fails_the_digest(run: Path) -> None:
    """Two tensors exchanged in the index: sizes and checksums can not tell."""

    def swap(index: dict) -> None:
        one, other = "optimizer.exp_avg.output.weight", "optimizer.exp_avg_sq.output.weight"
        index[one]["boxes"], index[other]["boxes"] = index[other]["boxes"], index[one]["boxes"]

    rewrite(newest(run), "tensors.json", swap)
    step, said = resume(run)
    assert step == 1 and "optimizer.exp_avg.output.weight (and 1 more) is not what was saved, by its digest" in said[0]


@pytest.mark.parametrize(
    ("name", "change", "named"),
    [
        ("tensors.json", lambda index: index["model.norm.weight"].pop("boxes"), "tensors.json"),
        ("tensors.json", lambda index: index["model.norm.weight"].update(dtype="pickle"), "tensors.json"),
        (
            "tensors.json",
            lambda index: index["model.norm.weight"]["boxes"][0].update(file="../../../etc/passwd"),
            "tensors.json",
        ),
        (
            "tensors.json",
            lambda index: index["model.norm.weight"]["boxes"][0].update(key="nothing"),
            "rank-00000.safetensors",
        ),
        (
            "tensors.json",
            lambda index: index["model.norm.weight"]["boxes"][0].update(shape=[2]),
            "rank-00000.safetensors",
        ),
        ("tensors.json", lambda index: index.update(a=3), "tensors.json"),
        (
            "manifest.json",
            lambda manifest: manifest["files"].update({"../x": {"bytes": 1, "crc32": "0"}}),
            "manifest.json",
        ),
        ("manifest.json", lambda manifest: manifest.pop("files"), "manifest.json"),
        ("manifest.json", lambda manifest: manifest.update(digest=5), "manifest.json"),
        ("manifest.json", lambda manifest: manifest["files"].pop("tensors.json"), "manifest.json"),
    ],
)
def test_files_that_lie_are_refused_by_name(name: str, change, named: str, run: Path) -> None:
    rewrite(newest(run), name, change)
    step, said = resume(run)
    assert step == 1 and f"step-00000002/{named}" in said[0], said


def test_a_newer_format_is_refused_clearly(run: Path) -> None:
    path = newest(run) / "COMMIT"
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    step, said = resume(run)
    assert step == 1 and "COMMIT is of format version 2" in said[0]


def test_an_unreadable_file_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails under the read, which no checksum sees before."""
    preadv, victim = os.preadv, newest(run) / "rank-00000.safetensors"

    def fail(descriptor, buffers, offset):
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(victim):
            raise OSError(5, "Input/output error")
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", fail)
    step, said = resume(run)
    assert step == 1 and "Input/output error" in said[0] and "rank-00000.safetensors" in said[0]


def _resume_on_ranks(run: str) -> tuple[int, list[str]]:
    said: list[str] = []
    mesh = (1, 2, 1)
    held = blank(shards(full_state(), mesh, dist.get_rank()))
    found = Checkpointer(CheckpointConfig(), run, say=said.append).load(held)
    assert found is not None and equal(held, shards(full_state(found.step), mesh, dist.get_rank()))
    return found.step, said


def test_all_ranks_fall_back_together(run: Path) -> None:
    """Only one rank reads the damaged byte; the others must follow it back."""
    path = newest(run) / "rank-00000.safetensors"
    flip(path, path.stat().st_size - 1)
    (step, said), (other, quiet) = run_ranks(2, _resume_on_ranks, str(run))
    assert step == other == 1
    assert len(said) == 1 and "rank-00000.safetensors" in said[0] and quiet == []


def test_a_branch_from_an_older_step_is_the_newest(run: Path) -> None:
    """A run that went back to step 1 and saved step 2 and 3 anew, and was interrupted before it passed the old ones."""
    old = Checkpointer(CheckpointConfig(mode="sync", keep_last=0), run)
    old.save(3, whole(full_state(3)), {"step": 3})
    branch = Checkpointer(CheckpointConfig(mode="sync", keep_last=2), run)
    branch.save(2, whole(full_state(2)), {"step": 2})
    assert resume(run)[0] == 2
    # Retention goes by the same order: the two newest are 2, of this branch, and 3.
    assert sorted(p.name[-1] for p in (run / "checkpoints").iterdir()) == ["2", "3"]


def test_nothing_is_left_of_the_damaged_state(run: Path) -> None:
    """The damaged newest was partly read into the tensors before the damage showed."""
    flip(newest(run) / "rank-00000.safetensors", -1)
    held = blank(whole(full_state()))
    Checkpointer(CheckpointConfig(), run, say=lambda line: None).load(held)
    assert equal(held, whole(full_state(1)))
    assert not any(torch.equal(shard.tensor, full_state(2)[name]) for name, shard in held.items())
