"""Where the weights of a model come from: a titanlike checkpoint of any mesh, or a Hugging Face folder.

    source = open_source("runs/llama")              # or a checkpoint in it, or a Hugging Face folder
    model = load_model(source, mesh, torch.bfloat16)

A source knows the model's shape, its tokenizer, and how long the sequences were that it was trained on. Each rank reads
the parts that it holds, and what is read is checked against the checksums that were stored with it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from titanlike import architectures
from titanlike.checkpoint import CheckpointError, Shard
from titanlike.checkpoint.hf import HfFolder, is_hf_folder
from titanlike.checkpoint.hf_config import architecture_of, from_hf_config, trained_length
from titanlike.checkpoint.loading import from_rank_0, load_folder
from titanlike.checkpoint.manifest import STATE, read_listed_json, read_manifest
from titanlike.checkpoint.weights import find_folder, load_weights
from titanlike.errors import UserError
from titanlike.generate.model import InferenceModel
from titanlike.mesh import Mesh
from titanlike.tokenizer import Tokenizer, load_tokenizer

Group = dist.ProcessGroup | None


@dataclasses.dataclass(frozen=True)
class Source:
    """A model that can be loaded."""

    folder: Path
    """the checkpoint's own folder"""
    what: str
    """in a few words, for the user"""
    architecture: str
    model_config: Any
    """the architecture's config dataclass"""
    trained_length: int
    """tokens of the sequences that it was trained on"""
    tokenizer: str | None
    """as data.tokenizer: "bytes", or where a tokenizer.json lies; None: not known"""
    fingerprint: str | None
    """of the tokenizer that it was trained with; None: not known"""
    end_ids: tuple[int, ...]
    """ids that end a text, where the folder names them; else the tokenizer's own"""
    special_tokens: bool
    """whether prompts get the special tokens that the tokenizer's own template adds (a Hugging Face folder), or none,
    as in training here"""
    config: Mapping[str, Any] | None
    """the config of the run that trained it, as JSON; None: not trained here"""
    fill: Callable[[dict[str, Shard], Group], None]
    """reads weights, by their plain names, into shards; all ranks of the group together"""

    @property
    def longest(self) -> int:
        """How many tokens a text may have: the trained length, or with a RoPE scaling what the model is meant for."""
        return max(self.trained_length, self.model_config.max_seq_len) if self._scaled else self.trained_length

    @property
    def limit(self) -> str:
        """Why it is no longer, for an error."""
        if self._scaled:
            return "the model's max_seq_len"
        return "the length of the model's training (only a RoPE scaling, --model.rope_scaling.factor, goes past that)"

    @property
    def _scaled(self) -> bool:
        return getattr(self.model_config, "rope_scaling", None) is not None


def open_source(path: str | Path) -> Source:
    """What lies at `path`: a checkpoint, a run folder (its newest checkpoint), or a Hugging Face folder.

    Raises:
        UserError: nothing is there, it is neither, or it is damaged.
    """
    folder = Path(path).expanduser()
    return _open_hf(folder) if is_hf_folder(folder) else _open_checkpoint(find_folder(folder))


def _open_checkpoint(folder: Path) -> Source:
    manifest = read_manifest(folder)
    meta = read_listed_json(folder, manifest, STATE)
    try:
        shape, config = meta["model"], meta.get("config")
        # A checkpoint of weights alone, made from a Hugging Face folder, has no run behind it.
        architecture = architecture_of(meta)
        seq_len = int(shape["max_seq_len"]) if config is None else trained_length(meta)
        if seq_len is None:
            raise KeyError("train")
        tokenizer = None if config is None else str(config["data"]["tokenizer"])
        fingerprint = None if config is None else str(meta["tokenizer"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{folder / STATE} does not say how its model was trained ({error!r})") from None

    def fill(shards: dict[str, Shard], group: Group) -> None:
        load_folder(folder, manifest, {f"model.{n}": shard for n, shard in shards.items()}, group, partial=True)

    return Source(
        folder=folder,
        what=f"checkpoint {folder}, step {manifest.step}",
        architecture=architecture,
        model_config=architectures.from_json(architecture, shape),
        trained_length=seq_len,
        tokenizer=tokenizer,
        fingerprint=fingerprint,
        end_ids=(),
        special_tokens=False,
        config=config,
        fill=fill,
    )


def _open_hf(folder: Path) -> Source:
    with HfFolder(folder) as content:
        config = content.config
    found = from_hf_config(config, folder / "config.json")

    def fill(shards: dict[str, Shard], group: Group) -> None:
        weights = {f"model.{n}": shard for n, shard in shards.items()}
        load_weights(str(folder), weights, found.architecture, found.model, group)

    return Source(
        folder=folder,
        what=f"Hugging Face folder {folder}",
        architecture=found.architecture,
        model_config=architectures.from_json(found.architecture, found.model),
        trained_length=int(found.model.get("max_seq_len") or config.get("max_position_embeddings", 2048)),
        tokenizer=str(folder / "tokenizer.json") if (folder / "tokenizer.json").is_file() else None,
        fingerprint=None,
        end_ids=_end_ids(config, folder / "generation_config.json"),
        special_tokens=True,
        config=None,
        fill=fill,
    )


def _end_ids(config: dict[str, Any], generation: Path) -> tuple[int, ...]:
    """What transformers ends a text at: eos_token_id of generation_config.json if there is one, else of config.json."""
    found = config.get("eos_token_id")
    if generation.is_file():
        try:
            found = json.loads(generation.read_bytes()).get("eos_token_id", found)
        except (ValueError, AttributeError):
            raise UserError(f"{generation} is not a JSON object") from None
    ids = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(each, int) for each in ids):
        raise UserError(f"{generation.parent} has the eos_token_id {found!r}, which is not a token id")
    return tuple(ids)


def with_rope_scaling(source: Source, changes: Mapping[str, Any]) -> Source:
    """The source with its model's `rope_scaling` changed by keys of it, so that texts may be longer than trained."""
    if not changes:
        return source
    values = dataclasses.asdict(source.model_config)
    if "rope_scaling" not in values:
        raise UserError(f"the architecture {source.architecture} has no rope_scaling")
    before = values["rope_scaling"] or {"original_max_position_embeddings": source.trained_length}
    values["rope_scaling"] = before | dict(changes)
    return dataclasses.replace(
        source, model_config=architectures.from_json(source.architecture, values, "the model so changed")
    )


def load_model(source: Source, mesh: Mesh, dtype: torch.dtype) -> InferenceModel:
    """The model with its weights, on this rank's part of the mesh. All ranks call it together.

    Raises:
        UserError: the mesh does not suit the model, or the checkpoint is damaged.
    """
    model = InferenceModel(source.architecture, source.model_config, mesh, dtype, source.trained_length)
    group: Any = dist.new_group(backend="gloo")  # of all ranks: plans and errors are objects, whatever the device
    source.fill(model.shards(), group)
    return model


def agree(source: Source) -> Source:
    """The source that rank 0 has found: a run that goes on may have saved a newer checkpoint while ranks looked. All
    ranks call it."""
    chosen = from_rank_0(lambda: source.folder, dist.group.WORLD)
    return source if chosen == source.folder else open_source(chosen)


def tokenizer_for(source: Source, name: str | None = None) -> Tokenizer:
    """The tokenizer of the source, or the one that `name` (as data.tokenizer) gives.

    Raises:
        UserError: there is none, or it is not the one that the model was trained with.
    """
    given, name = name, name or source.tokenizer
    if name is None:
        raise UserError(f"{source.folder} has no tokenizer: give the one it was trained with, by --tokenizer")
    try:
        tokenizer = load_tokenizer(name)
    except UserError as error:
        if given is not None:
            raise UserError(str(error).replace("data.tokenizer", "--tokenizer", 1)) from None
        raise UserError(f"{error} ({source.folder} was trained with it; --tokenizer gives another place)") from None
    if source.fingerprint is not None and tokenizer.fingerprint != source.fingerprint:
        raise UserError(f"the tokenizer {name!r} is not the one that {source.folder} was trained with")
    vocab = source.model_config.vocab_size
    if tokenizer.vocab_size > vocab:
        raise UserError(
            f"the tokenizer {name!r} has {tokenizer.vocab_size} ids, but the model in {source.folder} has {vocab}: it "
            "is another model's"
        )
    return tokenizer


def encoder_for(source: Source, tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """What turns a prompt into tokens: as texts were in training, or as the Hugging Face tokenizer's template says. An
    empty prompt is the beginning of a text."""
    template = getattr(tokenizer, "encode_with_template", None) if source.special_tokens else None
    encode = template or tokenizer.encode
    return lambda text: encode(text) or [tokenizer.end_id]
