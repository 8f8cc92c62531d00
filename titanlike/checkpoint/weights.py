"""Starting from the weights alone of something else: a titanlike checkpoint, or a Hugging Face folder of
safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist

from titanlike import architectures
from titanlike.checkpoint.folder import find_checkpoints
from titanlike.checkpoint.hf import HfFolder, is_hf_folder
from titanlike.checkpoint.hf_config import compare_models, from_hf_config, hf_parts, is_buffer
from titanlike.checkpoint.loading import Group, from_rank_0, load_folder, together
from titanlike.checkpoint.manifest import COMMIT, STATE, CheckpointError, read_listed_json, read_manifest
from titanlike.checkpoint.shard import Shard
from titanlike.errors import UserError


def find_folder(path: str | Path) -> Path:
    """The checkpoint that a path means: a checkpoint folder itself, or the newest good one of a run folder or of its
    `checkpoints`. Raises UserError saying what was looked for."""
    path = Path(path)
    if not path.exists():
        hub = not path.is_absolute() and len(path.parts) == 2 and not path.parent.exists()
        more = ": if it is a model's name at a hub, download it and give the folder" if hub else ""
        raise UserError(f"{path} does not exist{more}")
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


def load_weights(
    path: str, tensors: dict[str, Shard], architecture: str, model: dict[str, Any], group: Group
) -> list[str]:
    """Fill the shards called `model.*` from `path` (see `[checkpoint] init_from`), converting dtypes; leave the others.

    `model` is the config of the run's model, of `architecture`, as a dict. Every rank reads only its own slices.
    Returns lines for the user. All ranks together; raises UserError on all: no such folder, another shape of model,
    pickle.
    """
    weights = {name: shard for name, shard in tensors.items() if name.startswith("model.")}
    folder = from_rank_0(lambda: None if is_hf_folder(Path(path)) else find_folder(path), group)
    if folder is None:
        return _from_hf(Path(path), weights, architecture, model, group)
    manifest = from_rank_0(lambda: read_manifest(folder), group)
    state = together(lambda: read_listed_json(folder, manifest, STATE), group)
    notes = together(lambda: compare_models(state.get("model") or {}, model, folder), group)
    load_folder(folder, manifest, weights, group, partial=True)
    return [f"weights from {folder} (step {manifest.step}), checksums verified; fresh optimizer", *notes]


Parts = list[tuple[str, int | None]]
"""The tensors of a Hugging Face folder that make up a parameter: HuggingFace.parts"""


def _from_hf(
    folder: Path, weights: dict[str, Shard], architecture: str, model: dict[str, Any], group: Group
) -> list[str]:
    source = together(lambda: HfFolder(folder), group)
    plain = architectures.plain_model(architecture, architectures.from_json(architecture, model, "the run's model"))
    for name, _ in plain.named_buffers():
        weights.pop(f"model.{name}", None)  # a folder has none of these: they stay as they begin
    with source:
        keys, known, notes = together(lambda: _match(source, weights, architecture, model), group)
        everyone: list[Any] = [known]
        if group is not None:
            everyone = [None] * dist.get_world_size(group)
            dist.all_gather_object(everyone, known, group=group)
        left = [name for name in source.names if name not in set().union(*everyone) and not is_buffer(name)]
        if left:  # another model, or a name that we don't know: say so rather than drop it
            raise UserError(f"{folder} holds {left[0]!r}, which this run's model has no place for")

        def read() -> None:
            for name, shard in weights.items():
                source.read_parts(keys[name], shard.offset, shard.tensor)

        together(read, group)
    return [f"weights from {folder} (Hugging Face); fresh optimizer", *notes]


def _match(
    source: HfFolder, weights: dict[str, Shard], architecture: str, model: dict[str, Any]
) -> tuple[dict[str, Parts], set[str], list[str]]:
    """Our name -> the folder's tensors, for this rank's shards; the tensors that have a place here; notes for the user.
    Raises UserError."""
    found = from_hf_config(source.config, source.folder / "config.json", architecture)
    notes = compare_models(found.model, model, source.folder)
    theirs, ours = (
        architectures.plain_model(architecture, architectures.from_json(architecture, values, what)).tied_parameters
        for values, what in ((found.model, f"the model of {source.folder}"), (model, "the run's model"))
    )
    keys: dict[str, Parts] = {}
    known: set[str] = set()
    for full_name, shard in weights.items():
        name, shape = full_name.removeprefix("model."), tuple(shard.global_shape)
        parts = hf_parts(found.form, name, shape)
        if name in theirs and source.entry(parts[0][0]) is None:
            parts = hf_parts(found.form, theirs[name], shape)
            notes.append(f"{name} starts as a copy of {theirs[name]}: {source.folder} ties the two")
        source.check_parts(name, parts, shape, "{} in this run")
        keys[full_name] = parts
        known.update(key for key, _ in parts)
        for second in (second for second, first in ours.items() if first == name):
            known.update(key for key, _ in hf_parts(found.form, second, shape))
    return keys, known, notes
