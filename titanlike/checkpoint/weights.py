"""Starting from the weights alone of something else: a titanlike checkpoint, or a Hugging Face folder of
safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from titanlike.checkpoint.folder import find_checkpoints
from titanlike.checkpoint.hf import HfFolder, is_hf_folder
from titanlike.checkpoint.hf_config import compare_models, from_hf_config, hf_name, is_buffer
from titanlike.checkpoint.loading import Group, from_rank_0, load_folder, together
from titanlike.checkpoint.manifest import COMMIT, STATE, CheckpointError, read_listed_json, read_manifest
from titanlike.checkpoint.shard import Shard
from titanlike.errors import UserError


def find_folder(path: str | Path) -> Path:
    """The checkpoint that a path means: a checkpoint folder itself, or the newest good one of a run folder or of its
    `checkpoints`. Raises UserError saying what was looked for."""
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path} does not exist")
    if not path.is_dir():
        raise UserError(f"{path} is a file: give a checkpoint folder, a run folder, or a Hugging Face folder")
    if (path / COMMIT).exists():
        return path
    for root in (path / "checkpoints", path):
        found = find_checkpoints(root)
        good = [item for item in found if item.manifest is not None]
        if good:
            return good[0].folder
        if found:
            raise CheckpointError(f"no checkpoint in {root} is good ({found[0].problem})")
    pickles = sorted(entry.name for entry in path.iterdir() if entry.name == ".metadata" or entry.suffix == ".distcp")
    if pickles:
        raise UserError(f"{path / pickles[0]} is pickle, which can run code when it is read, so it is not read")
    raise UserError(
        f"{path} is neither a checkpoint folder (with {COMMIT}), nor a run folder, nor a Hugging Face folder"
    )


def load_weights(path: str, tensors: dict[str, Shard], model: dict[str, Any], group: Group) -> list[str]:
    """Fill the shards called `model.*` from `path` (see `[checkpoint] init_from`), converting dtypes; leave the others.

    `model` is the run's model config as a dict. Every rank reads only its own slices. Returns lines for the user. All
    ranks together; raises UserError on all: no such folder, another shape of model, pickle.
    """
    weights = {name: shard for name, shard in tensors.items() if name.startswith("model.")}
    folder = from_rank_0(lambda: None if is_hf_folder(Path(path)) else find_folder(path), group)
    if folder is None:
        return _from_hf(Path(path), weights, model, group)
    manifest = from_rank_0(lambda: read_manifest(folder), group)
    state = together(lambda: read_listed_json(folder, manifest, STATE), group)
    notes = together(lambda: compare_models(state.get("model") or {}, model, folder), group)
    load_folder(folder, manifest, weights, group, partial=True)
    return [f"weights from {folder} (step {manifest.step}), checksums verified; fresh optimizer", *notes]


def _from_hf(folder: Path, weights: dict[str, Shard], model: dict[str, Any], group: Group) -> list[str]:
    source = together(lambda: HfFolder(folder), group)
    with source:
        keys, notes = together(lambda: _match(source, weights, model), group)
        everyone: list[Any] = [set(keys.values())]
        if group is not None:
            everyone = [None] * dist.get_world_size(group)
            dist.all_gather_object(everyone, set(keys.values()), group=group)
        known = set().union(*everyone) | ({"lm_head.weight"} if model["tie_embeddings"] else set())
        left = [name for name in source.names if name not in known and not is_buffer(name)]
        if left:  # another model, or a name that we don't know: say so rather than drop it
            raise UserError(f"{folder} holds {left[0]!r}, which this run's model has no place for")

        def read() -> None:
            for name, shard in weights.items():
                source.read_box(keys[name], shard.offset, shard.tensor)

        together(read, group)
    return [f"weights from {folder} (Hugging Face); fresh optimizer", *notes]


def _match(source: HfFolder, weights: dict[str, Shard], model: dict[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Our name -> the folder's tensor, for this rank's shards, and notes for the user. Raises UserError."""
    theirs = from_hf_config(source.config, source.folder / "config.json")
    notes = compare_models(theirs, model, source.folder)
    keys: dict[str, str] = {}
    for name, shard in weights.items():
        key = hf_name(name.removeprefix("model."))
        if key == "lm_head.weight" and source.entry(key) is None and theirs["tie_embeddings"]:
            key = hf_name("tok_embeddings.weight")
            notes.append(f"output.weight starts as a copy of the embedding: {source.folder} ties the two")
        entry = source.entry(key)
        if entry is None:
            raise UserError(f"{source.folder} has no tensor {key!r}, which {name.removeprefix('model.')} is read from")
        if entry.shape != tuple(shard.global_shape):
            raise UserError(f"{key} has shape {entry.shape} in {source.folder}, but {shard.global_shape} in this run")
        keys[name] = key
    return keys, notes
