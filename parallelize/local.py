"""Tensor parallelism for inference: the shards of a plan on local tensors, with the plan's collectives written out.

A decoded token is so little work that DTensor's bookkeeping, some 0.1 ms an operation, is most of it. Without gradients
and without sequence parallelism a block needs no more than two all-reduces, so here the modules stay plain: linear
layers of a part of the rows or columns, and a sum or a gather after those that the table says so of.

Properties: the shards are those of the DTensors, in the same memory. What is computed is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from parallelize.tensor import (
    Replicated,
    ReplicatedKV,
    ReplicatedOverHeads,
    TensorPlan,
    VocabParallelEmbedding,
    covered_by,
)
from parallelize.zero import local_part

KNOWN = (
    *(ColwiseParallel, RowwiseParallel, PrepareModuleInput),
    *(Replicated, ReplicatedKV, ReplicatedOverHeads, VocabParallelEmbedding),
)


def is_known(plan: TensorPlan) -> bool:
    """Whether `make_local` knows all styles of a plan, and all that they ask for."""
    return all(type(style) in KNOWN and _is_usual(style) for style in plan.values())


def _is_usual(style: Any) -> bool:
    """Whether what goes in and out is laid out as `make_local` has it: whole into columns, parts out of them and into
    rows, whole again out of those."""
    if isinstance(style, ColwiseParallel):
        return style.input_layouts == (Replicate(),) and style.output_layouts == (Shard(-1),)
    if isinstance(style, RowwiseParallel):
        return style.input_layouts == (Shard(-1),) and style.output_layouts == (Replicate(),)
    if isinstance(style, PrepareModuleInput):
        layouts = (*(style.input_layouts or ()), *(style.desired_input_layouts or ()))
        return not style.input_kwarg_layouts and all(each in (None, Replicate()) for each in layouts)
    return True


def make_local(
    model: nn.Module, cut: nn.Module, plan: TensorPlan, group: dist.ProcessGroup, gathered: Sequence[str]
) -> None:
    """Give the plain `model` (a stage, on meta) this rank's shards of `cut`, which the plan was applied to.

    The output of the modules named in `gathered`, split over their last dim, is made whole on all ranks. The plan must
    be known (`is_known`) and one without sequence parallelism. No gradients.
    """
    shards: dict[int, nn.Parameter] = {}
    for name, theirs in cut.named_modules():
        module = model.get_submodule(name)
        for attribute, parameter in theirs.named_parameters(recurse=False):
            if id(parameter) not in shards:  # a tied weight stays one
                shards[id(parameter)] = nn.Parameter(local_part(parameter).detach(), requires_grad=False)
            setattr(module, attribute, shards[id(parameter)])
        for pattern in covered_by(plan, name):
            _write_out(module, theirs, plan[pattern], group, name in gathered)


def _write_out(module: Any, cut: Any, style: Any, group: dist.ProcessGroup, gather: bool) -> None:
    rank, size = group.rank(), group.size()
    if isinstance(style, RowwiseParallel):
        bias, module.bias = module.bias, None  # added once, after the sum
        module.register_forward_hook(partial(_sum, group, bias))
    elif isinstance(style, ColwiseParallel) and gather:
        module.register_forward_hook(partial(_gather, group, cut.weight.shape[0]))
    elif isinstance(style, ReplicatedKV):
        head_dim = cut.weight.shape[0] // style.n_kv_heads
        rows = slice(head := rank * style.n_kv_heads // size * head_dim, head + head_dim)
        module.weight = nn.Parameter(module.weight[rows], requires_grad=False)
        if module.bias is not None:
            module.bias = nn.Parameter(module.bias[rows], requires_grad=False)
    elif isinstance(style, VocabParallelEmbedding):
        first = rank * -(-cut.num_embeddings // size)
        module.forward = partial(_lookup, module, first)
        module.register_forward_hook(partial(_sum, group, None))


def _sum(group: dist.ProcessGroup, bias: Tensor | None, _module: Any, _arguments: Any, out: Tensor) -> Tensor:
    dist.all_reduce(out, group=group)  # the tp ranks: each has a part of the sum
    return out if bias is None else out + bias


def _gather(group: dist.ProcessGroup, width: int, _module: Any, _arguments: Any, out: Tensor) -> Tensor:
    each = -(-width // group.size())  # the last ranks may hold less, as torch.chunk cuts
    if out.shape[-1] < each:
        out = F.pad(out, (0, each - out.shape[-1]))
    parts = [torch.empty_like(out) for _ in range(group.size())]
    dist.all_gather(parts, out.contiguous(), group=group)  # the tp ranks: each has a part of the vocabulary
    return torch.cat(parts, dim=-1)[..., :width]


def _lookup(module: Any, first: int, tokens: Tensor) -> Tensor:
    local = tokens - first
    elsewhere = (local < 0) | (local >= module.weight.shape[0])
    return F.embedding(local.masked_fill(elsewhere, 0), module.weight).masked_fill(elsewhere[..., None], 0)
