"""A user's config made small, so that verifying it takes seconds, without losing what a mesh can get wrong.

Kept as they are: mesh, pipeline schedule, stages per rank, tying, biases, rotary settings, query heads per kv head,
optimizer, parameter groups, whether there is warm-up and decay, activation checkpointing, compile setting, document
masks. Kept in kind: whether tp divides the vocabulary, the hidden width, the sequence; whether kv heads are cut over tp
or repeated; whether stages have equal numbers of layers; whether there are more, as many or fewer microbatches than
stages; whether gradients are clipped. The rest gets smaller.

A model's sizes are known by the names that this code base gives them (dim, n_layers, n_heads, n_kv_heads, head_dim,
ffn_dim, vocab_size, init_std); a size of another name stays. If that is too large or does not fit, the architecture's
tables (titanlike/tables.py) can have `shrink(model: dict, tp: int) -> dict`: it gets the [model] values that were found
here, and returns those that it wants otherwise.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import torch

from titanlike.config import Config, resolved
from titanlike.config_errors import validate
from titanlike.errors import UserError
from titanlike.tables import tables_of

STEPS = 3
"""optimizer steps that are compared"""

MOST_MICROBATCHES = 4
"""per rank, unless the pipeline needs more"""


@dataclasses.dataclass
class Shrunk:
    """The small config, as plain tables (which go to other processes) and as a Config."""

    tables: dict[str, Any]
    vocab_size: int
    document_mask: bool
    """whether batches have document ids and positions, as the user's have"""
    changes: list[tuple[str, Any, Any]]
    """(key, the user's value, the value that is verified)"""
    notes: list[str]
    """what of the user's config is not covered"""

    @property
    def config(self) -> Config:
        """The small config."""
        return validate(Config, self.tables)


def shrink(config: Config, vocab_size: int) -> Shrunk:
    """Make `config` small. Its mesh is resolved (mesh.dp is a number) and it is valid; `vocab_size` is the tokenizer's.

    Raises:
        UserError: the small config is not valid, which an architecture with sizes of its own can cause.
    """
    mesh = config.mesh
    assert mesh.dp is not None
    world = mesh.pp * mesh.dp * mesh.tp
    before = resolved(config)
    tables = resolved(config)
    for section in ("data", "checkpoint", "metrics", "validation"):
        tables.pop(section, None)
    tables["run"] = {"seed": config.run.seed, "device": "cpu"}

    model = _model(config, getattr(config.model, "vocab_size", None) or vocab_size)
    override = tables_of(config.model.architecture).get("shrink")
    if override is not None:
        model |= override(dict(model), mesh.tp)
    tables["model"] = {"architecture": config.model.architecture} | model
    small_vocab = model.get("vocab_size") or vocab_size
    if config.pipeline.split is not None:
        tables["pipeline"]["split"] = _split(config.pipeline.split)

    train = tables["train"]
    train["seq_len"] = min(config.train.seq_len, _like(config.train.seq_len, mesh.tp, 8))
    train["dtype"] = "float64"
    train.pop("tf32", None)  # both for CUDA alone
    tables.get("compile", {}).pop("async_tp", None)
    train["microbatch_size"] = min(config.train.microbatch_size, 2)
    train["steps"] = STEPS + 1
    schedule = tables.setdefault("schedule", {})
    if config.schedule.warmup:
        schedule["warmup"] = 2
    if config.schedule.decay != "none":
        schedule.pop("decay_steps", None)  # all steps after the warm-up: the third is in the middle of the decay
    if config.optimizer.name == "adamw":
        # Rounding noise in a gradient that is zero in truth, divided by an eps as small as itself, is no longer noise.
        tables["optimizer"]["eps"] = max(config.optimizer.eps, 1e-8)
    _set_accumulation(config, tables, world)
    tables["optimizer"]["bucket_mb"] = _bucket_mb(tables, small_vocab)

    try:
        small = validate(Config, tables)
        small.validate_for(world)
    except UserError as error:
        tables_module = tables_of(config.model.architecture).name
        if override is None:
            how = f"by the usual rules: {error}; give {tables_module} a function shrink(model, tp) with sizes that fit"
        else:
            how = f"as {tables_module}.shrink says: {error}"
        raise UserError(f"the model cannot be made small {how}") from error
    document_mask = bool(getattr(config.data, "document_mask", False))
    changes = _changes(before, tables, small_vocab, vocab_size)
    return Shrunk(tables, small_vocab, document_mask, changes, _notes(small, small_vocab))


def _like(size: int, tp: int, about: int) -> int:
    """A size of `about` or more that leaves the same rest when it is divided by tp, and gives each tp rank a part."""
    return tp * max(-(-about // tp), tp if size % tp else 1) + size % tp


def _model(config: Config, vocab_size: int) -> dict[str, Any]:
    """The [model] values, made small; `vocab_size` is the size in the user's run."""
    tp = config.mesh.tp
    model = {name: value for name, value in resolved(config)["model"].items() if name not in ("architecture", "preset")}
    big = dict(model)
    heads, kv_heads = model.get("n_heads"), model.get("n_kv_heads")
    head_dim = 4
    if heads is not None:
        kv = kv_heads or heads
        # Cut over tp: one kv head a rank stays one, more become two. Fewer than tp ranks: repeated, so they stay.
        small_kv = kv if kv < tp else tp * min(kv // tp, 2)
        model["n_heads"] = small_kv * (heads // kv)
        if kv_heads is not None:
            model["n_kv_heads"] = small_kv
    if "head_dim" in model:
        head_dim = model["head_dim"] = min(big["head_dim"], 4 if big["head_dim"] % 2 == 0 else 3)
    if "dim" in model:
        width = model.get("n_heads", tp * 4) * head_dim
        apart = heads is not None and "head_dim" in big and big["dim"] != heads * big["head_dim"]
        model["dim"] = min(big["dim"], width + 4 * tp if apart else width)
    if "ffn_dim" in model:
        model["ffn_dim"] = min(big["ffn_dim"], _like(big["ffn_dim"], tp, 24))
    if "n_layers" in model:
        model["n_layers"] = _layers(config, big["n_layers"])
    if "vocab_size" in config.architecture.section.model_fields:
        model["vocab_size"] = min(vocab_size, _like(vocab_size, tp, 48))
    if "init_std" in model and "dim" in model:
        # So that activations, and gradients, have the size that they have in the wide model.
        model["init_std"] = big["init_std"] * math.sqrt(big["dim"] / model["dim"])
    return model


def _layers(config: Config, layers: int) -> int:
    """Layers enough for each stage to have one, and some two if the stages are not alike; two stages have two each."""
    if config.pipeline.split is not None and config.mesh.pp > 1:
        return sum(_split(config.pipeline.split))
    stages = config.n_stages
    if layers % stages:
        return stages + 1
    return min(layers, 2 * stages if stages <= 2 else stages)


def _split(split: list[int]) -> list[int]:
    """As uneven as the user's: the stages with the fewest layers have one, the others two."""
    return [1 if layers == min(split) else 2 for layers in split]


def _set_accumulation(config: Config, tables: dict[str, Any], world: int) -> None:
    """Set the global batch so that there are few microbatches, but as many as the pipeline's schedule takes, and more
    than, as many as, or fewer than stages, as in the user's run."""
    assert config.mesh.dp is not None
    train, dp, stages = tables["train"], config.mesh.dp, config.n_stages
    own = config.accumulation(dp)
    counts = [own]
    if own > max(MOST_MICROBATCHES, stages):
        counts = list(range(max(3, stages + 1), own + 1))  # 3: no other number of a usual mesh, so that it can be told
    for count in counts:
        train["global_batch_size"] = count * dp * train["microbatch_size"]
        try:
            validate(Config, tables).validate_for(world)
            return
        except UserError:
            pass  # the last one is the user's own, or fails for another reason, which the caller reports


def _bucket_mb(tables: dict[str, Any], vocab_size: int) -> float:
    """Megabytes that make a few buckets of a rank's gradients."""
    config = validate(Config, tables)
    with torch.device("meta"):
        model = config.architecture.model_class(config.model_config_for(vocab_size))
    values = sum(parameter.numel() for parameter in model.parameters())
    return values * 8 / 1e6 / (config.mesh.tp * config.mesh.pp) / 3


def _changes(
    before: dict[str, Any], after: dict[str, Any], vocab_size: int, own_vocab: int
) -> list[tuple[str, Any, Any]]:
    """The keys of model and train whose values differ."""
    changes = []
    for section in ("model", "train", "pipeline", "schedule", "optimizer"):
        for name, value in after.get(section, {}).items():
            old = before.get(section, {}).get(name)
            if (section, name) == ("model", "vocab_size"):
                old, value = old or own_vocab, vocab_size
            if old != value:
                changes.append((f"{section}.{name}", old, value))
    return changes


def _notes(config: Config, vocab_size: int) -> list[str]:
    """What the small config does not reach."""
    with torch.device("meta"):
        model: Any = config.architecture.model_class(config.model_config_for(vocab_size))
    names = [name for name, _ in model.named_parameters()]
    return [
        f"optimizer.groups: no parameter of the small model matches {group.match!r}, so this group is not verified"
        for group in config.optimizer.groups
        if not any(re.search(group.match, name) for name in names)
    ]


def with_clipping(shrunk: Shrunk, first_norm: float) -> None:
    """Make sure that gradients are clipped if the user's are: the first step's norm is `first_norm`."""
    limit = shrunk.config.train.max_grad_norm
    if 0 < first_norm <= limit:
        shrunk.tables["train"]["max_grad_norm"] = first_norm / 2
        shrunk.changes.append(("train.max_grad_norm", limit, first_norm / 2))
