"""What scripts/checkpoint.py does, as functions: look at checkpoints, prove them, delete them, export them.

All of it runs in one process, on the CPU, with memory for a piece of a tensor at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from titanlike.checkpoint import folder, manifest
from titanlike.checkpoint.digest import add, box_digest, digest_text
from titanlike.checkpoint.hf import export_hf, tensor_pieces
from titanlike.checkpoint.hf_config import architecture_of, trained_length
from titanlike.checkpoint.hf_tokenizer import tokenizer_files
from titanlike.checkpoint.manifest import CheckpointError, Manifest
from titanlike.checkpoint.reader import TensorIndex
from titanlike.checkpoint.tensorfile import DTYPES
from titanlike.checkpoint.weights import find_folder
from titanlike.errors import UserError

EXPORT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def root_of(path: str | Path) -> Path:
    """The folder of checkpoints that a run folder, or that folder itself, means. Raises UserError for what is neither
    and has no checkpoints."""
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"{path} is not a folder")
    root = path / "checkpoints"
    if root.is_dir():
        return root
    if (path / manifest.COMMIT).exists():
        raise UserError(f"{path} is a checkpoint: give its run folder, or the folder of its checkpoints")
    if path.name == "checkpoints" or folder.find_checkpoints(path) or (path / "config.toml").exists():
        return path
    runs = sorted(inner.name for inner in path.iterdir() if (inner / "checkpoints").is_dir())
    hint = f"it holds the runs {', '.join(runs)}: give one of them" if runs else "give a run folder, such as runs/llama"
    raise UserError(f"{path} has no checkpoints: {hint}")


def list_run(path: str | Path) -> list[dict[str, Any]]:
    """A row for each checkpoint of a run, newest first, or for the one that `path` is. `problem` is None, or why it
    can't be used (sizes only). Raises UserError for another folder."""
    path = Path(path)
    alone = not (path / "checkpoints").is_dir() and (path / manifest.COMMIT).exists()
    rows = []
    newest = not alone
    for item in [folder.look_at(path)] if alone else folder.find_checkpoints(root_of(path)):
        row: dict[str, Any] = {"step": item.step, "folder": str(item.folder), "problem": item.problem}
        if item.manifest is not None:
            row |= {"created": item.manifest.created, "bytes": item.manifest.bytes, "digest": item.manifest.digest}
            row |= {"files": len(item.manifest.files), "newest": newest}
            newest = False
        rows.append(row)
    return rows


def open_checkpoint(path: str | Path) -> tuple[Path, Manifest, TensorIndex, dict[str, Any]]:
    """(folder, manifest, tensors.json, state.json) of a checkpoint, or of the newest good one of a run."""
    where = find_folder(path)
    found = manifest.read_manifest(where)
    return where, found, TensorIndex(where, found), manifest.read_listed_json(where, found, manifest.STATE)


def tensor_digest(index: TensorIndex, name: str) -> int:
    """The digest of one stored tensor, read again from the files."""
    entry = index.tensors[name]
    dtype, shape = DTYPES[entry["dtype"]], tuple(entry["shape"])
    total, row = 0, 0
    for piece in tensor_pieces(index, name, dtype):
        offset = (row,) + (0,) * (len(shape) - 1) if shape else ()
        total = add(total, int(box_digest(name, piece, shape, offset)))
        row += piece.shape[0] if shape else 0
    return total


def compute_digests(index: TensorIndex) -> dict[str, int]:
    """name -> digest of every tensor, from the files."""
    return {name: tensor_digest(index, name) for name in index.tensors}


def verify(path: str | Path) -> Iterator[tuple[str, str | None]]:
    """Check everything of a checkpoint; yields (what, None or the problem): each file, then each tensor, then the
    state."""
    where = find_folder(path)
    try:
        found = manifest.read_manifest(where)
    except CheckpointError as error:
        yield manifest.MANIFEST, str(error)
        return
    yield manifest.MANIFEST, None
    whole = True
    for name in found.files:
        try:
            manifest.verify_file(where, found, name)
            yield name, None
        except CheckpointError as error:
            whole = False
            yield name, str(error)
    if not whole:
        return
    index = TensorIndex(where, found)
    total = 0
    for name, entry in index.tensors.items():
        try:
            value = tensor_digest(index, name)
        except CheckpointError as error:
            yield name, str(error)
            continue
        total = add(total, value)
        same = digest_text(value) == entry["digest"]
        yield name, None if same else f"{name} has digest {digest_text(value)} instead of {entry['digest']}"
    same = digest_text(total) == found.digest
    yield (
        "digest of the state",
        None if same else f"the state has digest {digest_text(total)} instead of {found.digest}",
    )


def remove(path: str | Path, steps: list[int], force: bool) -> list[Path]:
    """Delete checkpoints of a run by step. The newest good one only with `force`."""
    root = root_of(path)
    found = {item.step: item for item in folder.find_checkpoints(root)}
    missing = [step for step in steps if step not in found]
    if missing:
        raise UserError(f"{root} has no step {missing[0]}; it has: {', '.join(map(str, sorted(found))) or 'none'}")
    newest = next((item.step for item in folder.find_checkpoints(root) if item.manifest is not None), None)
    if newest in steps and not force:
        raise UserError(f"step {newest} is the newest good checkpoint of {root}; --force deletes it all the same")
    try:
        for step in steps:
            folder.delete(found[step].folder)
    except OSError as error:
        raise UserError(f"could not delete {error.filename}: {error.strerror}") from error
    return [found[step].folder for step in steps]


def export(path: str | Path, out: str | Path, dtype: str) -> list[str]:
    """Write the weights of a checkpoint, saved by any mesh, as a Hugging Face folder. Returns lines for the user."""
    where, found, index, state = open_checkpoint(path)
    model = state.get("model")
    if not isinstance(model, dict):
        raise UserError(f"{where / manifest.STATE} does not describe the model")
    trained, longest = trained_length(state), model.get("max_seq_len")
    lines = []
    if trained is not None and longest is not None and trained < longest and model.get("rope_scaling") is None:
        # What reads the folder takes this for the length that the model is good for.
        model = {**model, "max_seq_len": trained}
        lines.append(
            f"max_position_embeddings is {trained}, the length of the training (model.max_seq_len is {longest}, which "
            "no text of the run reached)"
        )
    data = (state.get("config") or {}).get("data") or {}
    extra, end_id, said = tokenizer_files(str(state.get("tokenizer")), str(data.get("tokenizer")))
    for name in found.files:
        manifest.verify_file(where, found, name)
    try:
        export_hf(index, architecture_of(state), model, Path(out), EXPORT_DTYPES[dtype], end_id, extra)
    finally:
        index.close()
    return [f"{where} (step {found.step}), checksums verified -> {out}, {dtype}", said, *lines]
