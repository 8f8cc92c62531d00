"""From a config and a mesh to what a rank trains: its pipeline stages, cut, materialised, under ZeRO-1.

The order is that of DESIGN's walk: model on meta -> pipeline stages -> tensor plan -> activation checkpointing ->
compile -> weights -> ZeRO-1. Property: the initial weights are a function of (seed, parameter name), bitwise the same
on all meshes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from parallelize import async_tp
from parallelize.activation_checkpoint import apply_activation_checkpoint
from parallelize.compile import compile_stage, keep_activations, missing_compiler, separate_cache
from parallelize.loss_chunks import ChunkedLoss
from parallelize.pipeline import SCHEDULES, Stage, cut_stage, split_layers, stages_of_rank
from parallelize.tensor import apply_tensor_plan
from parallelize.zero import NamedParameter, Zero, local_part
from titanlike.config import Config, OptimizerConfig
from titanlike.errors import UserError
from titanlike.loss import cross_entropy_sum
from titanlike.mesh import Mesh, set_tf32
from titanlike.tables import Tables, stream_width, tables_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}

LOGITS_BYTES = 512 << 20
"""What the logits of a microbatch may take on a rank, in float32, before the loss is computed in chunks."""


def master_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of master weights, gradient sums and moments for a compute dtype: float32, or float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def generator_for(seed: int, name: str, device: torch.device) -> torch.Generator:
    """A generator whose state is a function of (seed, name) alone."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(device)
    generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return generator


def draw_parameter(model: Any, seed: int, name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """The whole initial value of a parameter, float32: drawn in full on every rank, which then keeps its part."""
    return draw_box(model, seed, name, shape, tuple(slice(0, size) for size in shape), device)


def draw_box(
    model: Any, seed: int, name: str, shape: tuple[int, ...], box: tuple[slice, ...], device: torch.device
) -> Tensor:
    """A box of the whole initial value. A parameter that stacks the weights of experts (`model.is_stacked(name)`) is
    drawn expert by expert, as `<name>.<expert>`, and only those in the box are."""

    def draw(part: str, size: tuple[int, ...]) -> Tensor:
        value = torch.empty(size, dtype=torch.float32, device=device)
        model.init_parameter(name, value, generator_for(seed, part, device))
        return value

    if not getattr(model, "is_stacked", lambda _: False)(name):
        return draw(name, shape)[box]
    first, rest = box[0], box[1:]
    return torch.stack([draw(f"{name}.{index}", shape[1:])[rest] for index in range(first.start, first.stop)])


def make_optimizer(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """The torch optimizer over parameter groups that carry `lr_scale` and `weight_decay`, its state made at once, so
    that a checkpoint of step 0 is complete and one can be loaded before the first step."""
    if config.name == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    else:
        optimizer = torch.optim.AdamW(
            groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=True
        )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if config.name == "adamw":
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
            elif config.momentum:
                optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
    return optimizer


def embeddings_of(model: nn.Module) -> set[str]:
    """The names of the parameters of a model's `nn.Embedding` modules."""
    return {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Embedding)}


def group_of(
    config: OptimizerConfig, name: str, shape: tuple[int, ...], is_embedding: bool = False
) -> tuple[float, float]:
    """(lr_scale, weight_decay) of a parameter: no decay on vectors (norms and biases), and, if asked, on embeddings."""
    decay = 0.0 if len(shape) < 2 or (is_embedding and not config.decay_embeddings) else config.weight_decay
    for group in config.groups:
        if re.search(group.match, name):
            return group.lr_scale, decay if group.weight_decay is None else group.weight_decay
    return 1.0, decay


@dataclasses.dataclass
class Built:
    """What a rank trains."""

    plain: Any
    """the whole model on meta"""
    stages: list[Stage]
    """this rank's stages, ascending"""
    stage_indices: list[int]
    stage_ranks: list[int]
    """stage index -> pp coordinate"""
    layers_per_stage: list[int]
    zero: Zero
    whole_graph: bool
    """whether a stage's forward is one compiled graph, inside which nothing can be waited for"""
    dtype: torch.dtype
    buffers: dict[str, Tensor]
    """by name: state of this rank's stages that no gradient moves"""
    width: int
    """of the residual stream"""
    uncompiled: tuple[str, str] | None
    """why nothing is compiled though the config asks for it, and what would help"""


@dataclasses.dataclass
class Cut:
    """A plain model cut for a mesh: this rank's stages, still on meta."""

    stages: list[Stage]
    """this rank's stages, ascending"""
    indices: list[int]
    stage_ranks: list[int]
    """stage index -> pp coordinate"""
    layers_per_stage: list[int]


def cut(
    plain: Any,
    tables: Tables,
    mesh: Mesh,
    *,
    seq_len: int,
    sequence_parallel: bool,
    split: list[int] | None = None,
    per_rank: int = 1,
    v_shaped: bool = False,
) -> Cut:
    """Cut `plain` (on meta) into pipeline stages, and this rank's stages by the tensor plan of `tables`.

    `split` gives the layers of each stage; without it they are balanced by FLOPs at `seq_len`.
    """
    # Pipeline stages.
    num_stages = mesh.pp * per_rank
    first_parts, last_parts = tables.parts(plain) if num_stages > 1 else ((), ())
    if split is None:
        split = [len(plain.layers)]
        if num_stages > 1:
            first_cost, layer_costs, last_cost = tables.stage_costs(plain, seq_len)
            split = split_layers(layer_costs, first_cost, last_cost, num_stages)
    indices = stages_of_rank(mesh.coordinate("pp"), mesh.pp, per_rank, v_shaped)
    stage_ranks = [0] * num_stages
    for pp_rank in range(mesh.pp):
        for index in stages_of_rank(pp_rank, mesh.pp, per_rank, v_shaped):
            stage_ranks[index] = pp_rank

    # The tensor plan.
    tp_mesh = mesh.device_mesh["tp"] if mesh.tp > 1 else None
    stream, plan = None, {}
    if tp_mesh is not None:
        stream = Shard(1) if sequence_parallel else Replicate()
        plan = tables.tensor_plan(plain, mesh.tp, sequence_parallel)
    stages = []
    for index in indices:
        model: Any = cut_stage(plain, split, index, first_parts, last_parts)
        if tp_mesh is not None:
            apply_tensor_plan(model, tp_mesh, plan)
        if mesh.expert_mesh is not None:
            tables.module.cut_experts(model, mesh.expert_mesh)
        first, last = index == 0, index == num_stages - 1
        stages.append(Stage(model, cross_entropy_sum, first=first, last=last, tp_mesh=tp_mesh, stream=stream))
    return Cut(stages, indices, stage_ranks, split)


def build(config: Config, mesh: Mesh, vocab_size: int, prepare: Callable[[Stage], None] | None = None) -> Built:
    """Build this rank's part of the run. All ranks call it together. `prepare` is applied to each stage before weights
    are made (tests plant faults with it)."""
    device = mesh.device
    set_tf32(device, config.train.tf32)
    dtype = DTYPES[config.train.dtype]
    model_config = config.model_config_for(vocab_size)
    with torch.device("meta"):
        plain = config.architecture.model_class(model_config).to(dtype)
    tables = tables_of(config.model.architecture)

    per_rank, v_shaped = (config.stages_per_rank, SCHEDULES[config.pipeline.schedule][2]) if mesh.pp > 1 else (1, False)
    parts = cut(
        plain,
        tables,
        mesh,
        seq_len=config.train.seq_len,
        sequence_parallel=config.mesh.sequence_parallel,
        split=config.pipeline.split,
        per_rank=per_rank,
        v_shaped=v_shaped,
    )
    stages, indices, stage_ranks, split = parts.stages, parts.indices, parts.stage_ranks, parts.layers_per_stage
    num_stages = len(stage_ranks)
    compiled = config.compiles
    uncompiled = missing_compiler(device.type) if compiled else None
    compiled = compiled and uncompiled is None
    if compiled:
        separate_cache(mesh.rank)
        keep_activations(config.compile.memory_budget)
        if config.compile.async_tp:
            async_tp.enable(mesh.group("tp"))
    positions = loss_positions(config, model_config.vocab_size)
    for stage in stages:
        stage.loss = ChunkedLoss(stage.loss, positions)
        if prepare is not None:
            prepare(stage)
        if compiled:
            compile_stage(
                stage, config.compile.scope, config.activation_checkpoint.mode, tables.recompute_keeps, UserError
            )
        else:
            for block in stage.model.layers.values():
                apply_activation_checkpoint(block, config.activation_checkpoint.mode, tables.recompute_keeps)

    # Weights.
    tied = plain.tied_parameters
    parameters = materialise(stages, indices, tied, device)
    if mesh.ep > 1:
        parameters = [
            dataclasses.replace(named, shared_over=mesh.same_experts) if on_expert_mesh(named.parameter) else named
            for named in parameters
        ]
    shared = set(tied.values())
    spread = stage_ranks[0] != stage_ranks[-1]
    pair = mesh.pair_group(stage_ranks[0], stage_ranks[-1]) if shared and spread else None
    for i, named in enumerate(parameters):
        if named.name in shared and num_stages > 1:
            parameters[i] = dataclasses.replace(
                named, stage=-1, tied_across=pair, counts=pair is None or mesh.coordinate("pp") == stage_ranks[0]
            )
    embeddings = embeddings_of(plain)
    zero = Zero(
        parameters,
        dp_group=mesh.group("dp"),
        tp_group=mesh.group("tp") if mesh.tp > 1 else None,
        master_dtype=master_dtype(dtype),
        comm_dtype=torch.bfloat16 if config.optimizer.grad_comm_dtype == "bfloat16" else None,
        bucket_bytes=config.optimizer.bucket_mb * 1e6,
        make_optimizer=lambda groups: make_optimizer(config.optimizer, groups),
        group_of=lambda name, shape: group_of(config.optimizer, name, shape, name in embeddings),
    )
    for named in parameters:
        shape, local_shape = tuple(named.parameter.shape), local_part(named.parameter).shape
        box = tuple(slice(o, o + n) for o, n in zip(named.box_offset, local_shape, strict=True))
        zero.set_master(named.name, draw_box(plain, config.run.seed, named.name, shape, box, device))
    zero.gather()
    whole_graph = compiled and config.compile.scope == "stage"
    if not whole_graph:
        head_parts = tables.head_parts(plain)
        for stage in stages:
            stage.await_weights = zero.gates(stage.model, head_parts)
    buffers = materialise_buffers(stages, device, master_dtype(dtype))
    return Built(
        plain, stages, indices, stage_ranks, split, zero, whole_graph, dtype, buffers, stream_width(plain), uncompiled
    )


def loss_positions(config: Config, vocab_size: int) -> int | None:
    """How many positions of each sequence have logits at a time (`train.loss_chunk`); None: all, however long the
    sequences of a data stage are."""
    chunk = config.train.loss_chunk
    if chunk is None:
        row = config.train.microbatch_size * -(-vocab_size // config.mesh.tp) * 4  # bytes in float32
        return max(1, LOGITS_BYTES // row)
    return chunk or None


def materialise(
    stages: list[Stage], indices: list[int], tied: dict[str, str], device: torch.device
) -> list[NamedParameter]:
    """Replace the meta parameters of the stages by real ones, uninitialised; names that are tied share one
    parameter."""
    made: dict[str, NamedParameter] = {}
    for stage, index in zip(stages, indices, strict=True):
        for path, parameter in list(stage.model.named_parameters(remove_duplicate=False)):
            name = tied.get(path, path)
            if name not in made:
                made[name] = NamedParameter(name, _materialised(parameter, device), index, _box_offset(parameter))
            owner, _, attribute = path.rpartition(".")
            setattr(stage.model.get_submodule(owner), attribute, made[name].parameter)
    return list(made.values())


def materialise_buffers(stages: list[Stage], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Replace the meta buffers of the stages by real ones of 0, floating-point ones in `dtype`. By name."""
    made: dict[str, Tensor] = {}
    for stage in stages:
        for path, buffer in list(stage.model.named_buffers()):
            kind = dtype if buffer.is_floating_point() else buffer.dtype
            made[path] = torch.zeros(buffer.shape, dtype=kind, device=device)
            owner, _, attribute = path.rpartition(".")
            setattr(stage.model.get_submodule(owner), attribute, made[path])
    return made


def on_expert_mesh(parameter: Tensor) -> bool:
    """Whether a parameter is cut over ep."""
    return isinstance(parameter, DTensor) and "ep" in (parameter.device_mesh.mesh_dim_names or ())


def _materialised(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    if not isinstance(parameter, DTensor):
        return nn.Parameter(torch.empty_like(parameter, device=device))
    local = torch.empty(local_part(parameter).shape, dtype=parameter.dtype, device=device)
    return nn.Parameter(
        DTensor.from_local(
            local,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    )


def _box_offset(parameter: Tensor) -> tuple[int, ...]:
    """Where this rank's part starts in the whole parameter: torch.chunk's rule, ceil(size / ranks) to each rank."""
    offset = [0] * max(parameter.dim(), 1)
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        for axis, placement in enumerate(parameter.placements):
            if isinstance(placement, Shard):
                size = parameter.shape[placement.dim]
                offset[placement.dim] = min(-(-size // mesh.size(axis)) * mesh.get_local_rank(axis), size)
    return tuple(offset)


def process_groups_in_use(mesh: Mesh) -> list[dist.ProcessGroup]:
    """The groups of this rank along each axis that has more than one rank."""
    return [mesh.group(axis) for axis in ("pp", "dp", "tp") if mesh.degree(axis) > 1]
