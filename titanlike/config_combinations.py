"""What cannot work together in a config, and what has no effect with the rest; all before any process group exists.

What each pipeline schedule asks of the number of microbatches is what torch's schedule classes check, or fail on, when
they are built (torch/distributed/pipelining/schedules.py, 2.13.0; a test compares):

| schedule | stages per rank | microbatches |
|---|---|---|
| afab | 1 | any |
| 1f1b | 1 | at least the number of stages |
| interleaved_1f1b, interleaved_zero_bubble | 2 or more | a multiple of the rounds, max(1, microbatches // pp) |
| zbv | 2 | any |
| dualpipev | 2 | at least the number of stages, 2 * pp |
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

from titanlike.errors import UserError
from titanlike.metrics.weights_and_biases import check_installed
from titanlike.schedule import phases

if TYPE_CHECKING:
    from titanlike.config import Config

STAGES_PER_RANK: dict[str, tuple[int, int | None]] = {
    "afab": (1, 1),
    "1f1b": (1, 1),
    "interleaved_1f1b": (2, None),
    "interleaved_zero_bubble": (2, None),
    "zbv": (2, 2),
    "dualpipev": (2, 2),
}
"""Fewest (also the default) and most stages per rank of each pipeline schedule; None is no limit."""

SPLIT_BACKWARD = ("interleaved_zero_bubble", "zbv", "dualpipev")
"""Schedules that run the two halves of the backward apart, which torch cannot do with a compiled stage."""


def check(config: Config, world_size: int) -> None:
    """Raise `UserError` for the first combination that cannot work, or key without effect, on `world_size` ranks."""
    microbatches = config.accumulation(config.resolved_dp(world_size))
    _check_effect(config)
    _check_model(config)
    if config.mesh.ep > 1:
        _check_experts(config, config.resolved_dp(world_size))
    if config.train.dtype == "float64" and config.optimizer.grad_comm_dtype == "bfloat16":
        raise UserError(
            'optimizer.grad_comm_dtype = "bfloat16" would round the gradients of train.dtype = "float64": leave it '
            "out, or train in float32 or bfloat16"
        )
    if config.train.tf32 and on_cpu(config):
        raise UserError("train.tf32 = true needs CUDA, and the ranks of this run compute on CPU: take it out")
    _check_compile(config)
    if config.mesh.pp > 1:
        _check_pipeline(config, microbatches)
    _check_schedule(config)
    _check_profile(config, world_size)
    if config.metrics.wandb:
        check_installed()


def without_effect(config: Config) -> dict[str, str]:
    """The keys that have no effect in this config, given or not, each with the reason."""
    inert: dict[str, str] = {}
    if config.mesh.pp == 1:
        inert |= {f"pipeline.{name}": "mesh.pp = 1" for name in type(config.pipeline).model_fields}
    if config.mesh.tp == 1:
        inert["mesh.sequence_parallel"] = "mesh.tp = 1"
    if not hasattr(config.model, "n_experts"):
        inert["mesh.ep"] = f'model.architecture = "{config.model.architecture}", which has no experts'
    optimizer, other = config.optimizer, {"adamw": ("momentum",), "sgd": ("beta1", "beta2", "eps")}
    inert |= {f"optimizer.{name}": f'optimizer.name = "{optimizer.name}"' for name in other[optimizer.name]}
    if config.train.dtype != "float32":
        inert["train.tf32"] = f'train.dtype = "{config.train.dtype}"'
    if optimizer.weight_decay == 0:
        inert["optimizer.decay_embeddings"] = "optimizer.weight_decay = 0"
    if not config.compiles:
        reason = cannot_compile(config) if config.compile.enable else None
        others = [name for name in type(config.compile).model_fields if name != "enable"]
        inert |= {f"compile.{name}": (reason or ("compile.enable = false", ""))[0] for name in others}
    elif config.mesh.tp == 1:
        inert["compile.async_tp"] = "mesh.tp = 1"
    elif not config.mesh.sequence_parallel:
        inert["compile.async_tp"] = "mesh.sequence_parallel = false"
    if not config.metrics.wandb:
        inert |= {f"metrics.{name}": "metrics.wandb = false" for name in ("wandb_project", "wandb_offline")}
    if config.profile.steps is None:
        inert["profile.ranks"] = "profile.steps = none"
    if config.guard.spike == "off":
        inert |= {f"guard.{name}": 'guard.spike = "off"' for name in ("spike_sigma", "spike_window")}
    if config.schedule.decay == "none":
        inert |= {f"schedule.{name}": 'schedule.decay = "none"' for name in ("decay_steps", "min_lr_ratio")}
    return inert


def _check_effect(config: Config) -> None:
    for key, reason in without_effect(config).items():
        section_name, _, name = key.partition(".")
        section = getattr(config, section_name)
        # A pipeline schedule without a pipeline is a misunderstanding even when it names the default; elsewhere a value
        # that is the default says nothing, as when a config spells out everything.
        said = section_name == "pipeline" or getattr(section, name) != type(section).model_fields[name].default
        if name in section.model_fields_set and said:
            out = "--pipeline=" if section_name == "pipeline" else f"--{key}="
            raise UserError(
                f"{key} has no effect with {reason}: take it out (on the command line: {out}), or change "
                f"{reason.split(' = ')[0]}"
            )


def _check_model(config: Config) -> None:
    """What the mesh and the batch ask of the model's sizes; an architecture that has no such size is not asked."""
    model, tp = config.model, config.mesh.tp
    seq_len = config.train.seq_len
    longest = getattr(model, "max_seq_len", seq_len)
    if seq_len > longest:
        raise UserError(f"train.seq_len ({seq_len} tokens) is longer than model.max_seq_len ({longest})")
    n_heads, n_kv_heads = getattr(model, "n_heads", tp), getattr(model, "n_kv_heads", tp)
    if n_heads % tp:
        raise UserError(f"model.n_heads ({n_heads}) must be a multiple of mesh.tp ({tp})")
    if n_kv_heads % tp and tp % n_kv_heads:
        raise UserError(f"mesh.tp ({tp}) must divide model.n_kv_heads ({n_kv_heads}), or be a multiple of it")
    ffn_dim = getattr(model, "ffn_dim", tp)
    if -(-ffn_dim // tp) * (tp - 1) >= ffn_dim:  # as torch cuts: ceil(size / tp) to each rank until none is left
        raise UserError(f"model.ffn_dim ({ffn_dim}) leaves one of mesh.tp = {tp} ranks without hidden units")
    if config.mesh.sequence_parallel and seq_len % tp:
        raise UserError(f"train.seq_len ({seq_len}) must be a multiple of mesh.tp ({tp}) with mesh.sequence_parallel")


def _check_experts(config: Config, dp: int) -> None:
    ep, experts = config.mesh.ep, config.model.n_experts
    if dp % ep:
        raise UserError(f"mesh.ep ({ep}) must be a factor of mesh.dp ({dp}): dp ranks share out the experts")
    if experts % ep:
        raise UserError(f"mesh.ep ({ep}) must divide model.n_experts ({experts}): each rank holds as many")


def _check_compile(config: Config) -> None:
    if not config.compile.enable:
        return
    cannot = cannot_compile(config)
    if cannot is not None:
        if "enable" in config.compile.model_fields_set:
            raise UserError(f"{cannot[0]} cannot run with compile.enable = true, because {cannot[1]}")
        return
    compile_, mode = config.compile, config.activation_checkpoint.mode
    if compile_.memory_budget < 1 and mode != "none":
        raise UserError(
            f'compile.memory_budget = {compile_.memory_budget} and activation_checkpoint.mode = "{mode}" both decide '
            "what is recomputed: give only one of them"
        )
    if compile_.memory_budget < 1 and max(config.mesh.tp, config.mesh.ep) > 1:
        raise UserError(
            f"compile.memory_budget = {compile_.memory_budget} cannot be used with mesh.tp or mesh.ep > 1: torch "
            'cannot weigh the activations of a graph with collectives: use activation_checkpoint.mode = "selective"'
        )
    if compile_.scope == "stage" and mode == "full" and config.mesh.tp > 1:
        raise UserError(
            'activation_checkpoint.mode = "full" with mesh.tp > 1 cannot be compiled by stage (a limit of torch): use '
            'compile.scope = "block", or activation_checkpoint.mode = "selective"'
        )
    if compile_.async_tp:
        why = "the ranks of this run compute on CPU" if on_cpu(config) else missing_symmetric_memory()
        if why is not None:
            raise UserError(
                f"compile.async_tp = true needs CUDA devices that reach each other's memory, and {why}: take it out"
            )


def cannot_compile(config: Config) -> tuple[str, str] | None:
    """(the setting with which torch cannot compile, what it cannot and what would be right); None if it can."""
    schedule = config.pipeline.schedule
    if config.mesh.pp > 1 and schedule in SPLIT_BACKWARD:
        return (
            f'pipeline.schedule = "{schedule}"',
            'torch cannot split the backward of a compiled stage: use "1f1b", "interleaved_1f1b" or "afab", or do not '
            "compile",
        )
    if config.train.dtype == "float64" and torch_version() < (2, 12):
        return 'train.dtype = "float64"', "torch before 2.12 cannot compile it: do not compile, or take a newer torch"
    return None


def torch_version() -> tuple[int, int]:
    """(major, minor) of the installed torch."""
    major, minor = metadata.version("torch").split(".")[:2]
    return int(major), int(minor)


def limit_of_torch(config: Config) -> str | None:
    """What the installed torch cannot do of this config, as a sentence, or None. docs/running.md lists these limits."""
    schedule = config.pipeline.schedule
    if schedule in ("zbv", "dualpipev") and torch_version() < (2, 13) and on_cpu(config):
        return (
            f'pipeline.schedule = "{schedule}" needs torch 2.13 or newer on CPU ranks, where older ones cannot send '
            "between two stages of one rank"
        )
    # Older ones lose the nodes of autograd.Functions between the two halves of the backward, and the experts have some.
    if schedule in SPLIT_BACKWARD and config.mesh.pp > 1 and hasattr(config.model, "n_experts"):
        if torch_version() < (2, 13):
            return (
                f'pipeline.schedule = "{schedule}" with experts needs torch 2.13 or newer, as older ones cannot split '
                'the backward of their layers: use "1f1b" or "interleaved_1f1b"'
            )
    return None


def on_cpu(config: Config) -> bool:
    """Whether the ranks of the run compute on CPU."""
    if config.run.device == "auto":
        import torch

        return not torch.cuda.is_available()
    return config.run.device == "cpu"


def missing_symmetric_memory() -> str | None:
    """Why this torch cannot let a rank read the memory of another one's device; None if it can."""
    from parallelize import async_tp

    return async_tp.missing()


def _check_pipeline(config: Config, microbatches: int) -> None:
    pipeline, pp = config.pipeline, config.mesh.pp
    schedule, per_rank, n_stages = pipeline.schedule, config.stages_per_rank, config.n_stages
    fewest, most = STAGES_PER_RANK[schedule]
    if per_rank < fewest or (most is not None and per_rank > most):
        wanted = f"exactly {fewest}" if most == fewest else f"{fewest} or more"
        raise UserError(
            f'pipeline.stages_per_rank must be {wanted} with pipeline.schedule = "{schedule}", got {per_rank}'
        )
    if limit := limit_of_torch(config):
        raise UserError(limit)
    if schedule in SPLIT_BACKWARD and config.activation_checkpoint.mode == "selective":
        raise UserError(
            f'pipeline.schedule = "{schedule}" cannot run with activation_checkpoint.mode = "selective", because torch '
            'recomputes what it selects for one backward alone, and this schedule has two: use "full" or "none", or '
            'pipeline.schedule = "1f1b" or "interleaved_1f1b"'
        )
    n_layers = getattr(config.model, "n_layers", n_stages)
    stages = f"mesh.pp ({pp}) * {per_rank} stage(s) per rank = {n_stages} stages"
    if n_layers < n_stages:
        raise UserError(f"model.n_layers ({n_layers}) is too few for {stages}, each of which needs a layer")
    if pipeline.split is not None:
        if len(pipeline.split) != n_stages:
            raise UserError(f"pipeline.split {pipeline.split} has {len(pipeline.split)} entries, but {stages}")
        if min(pipeline.split) < 1:
            raise UserError(f"pipeline.split {pipeline.split} leaves a stage without a layer: each needs 1 or more")
        if sum(pipeline.split) != n_layers:
            raise UserError(
                f"pipeline.split {pipeline.split} has {sum(pipeline.split)} layers, model.n_layers is {n_layers}"
            )
    rounds = max(1, microbatches // pp)
    if schedule in ("1f1b", "dualpipev") and microbatches < n_stages:
        wanted = f"at least as many microbatches as stages ({n_stages})"
    elif schedule.startswith("interleaved") and microbatches % rounds:
        wanted = f"a number of microbatches that {rounds} rounds (microbatches // mesh.pp) divide"
    else:
        return
    raise UserError(
        f'pipeline.schedule = "{schedule}" needs {wanted}, but train.global_batch_size and train.microbatch_size give '
        f"{microbatches}"
    )


def _check_profile(config: Config, world_size: int) -> None:
    profile = config.profile
    if profile.steps is None:
        return
    if profile.steps[1] > config.train.steps:
        raise UserError(f"profile.steps {profile.steps} end after train.steps ({config.train.steps})")
    if max(profile.ranks) >= world_size:
        raise UserError(f"profile.ranks {profile.ranks}: there are {world_size} ranks, counted from 0")


def _check_schedule(config: Config) -> None:
    steps = config.train.steps
    warmup, _, decay = phases(config.schedule, steps)
    if warmup + decay > steps:
        what = f"schedule.warmup ({warmup} steps)"
        if decay:
            what += f" and schedule.decay_steps ({decay} steps) are together"
        else:
            what += " is"
        raise UserError(f"{what} more than train.steps ({steps})")
