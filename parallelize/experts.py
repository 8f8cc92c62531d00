"""Experts over ranks: expert parallelism, which spreads whole experts over ep, and tensor parallelism inside each.

`ep` is a factor of dp: ep neighbouring dp coordinates hold one set of experts together. A token's pairs (token, expert)
travel to the rank that has the expert and back, by all-to-all; everything else is data parallel as ever.

Properties:
- ep changes results by rounding alone, and any number of tokens may go to an expert (parallelize/exchange.py).
- Under tp every rank sees all tokens of its dp coordinate and has a part of each expert's hidden units, as in a dense
  feed-forward: one all-gather enters, one reduce-scatter leaves. Routing is the same on all tp ranks. Gradients of the
  router are partial sums over tp, as those of everything that a partial output flows back to.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from models.routing import Routing, route, run_experts
from parallelize import exchange


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _experts(
    module: Any, tp_mesh: DeviceMesh | None, group: dist.ProcessGroup | None, name: str, x: Tensor, routing: Routing
) -> Tensor:
    weights = _local(module.w1), _local(module.w2), _local(module.w3)
    if group is None:
        out = run_experts(x, routing, *weights)
    elif torch.compiler.is_compiling():
        out = exchange.spread_experts(x, routing.experts, routing.weights, *weights, name)
    else:
        out = exchange.run_spread_experts(x, routing.experts, routing.weights, *weights, group)
    return out if tp_mesh is None else DTensor.from_local(out, tp_mesh, [Partial()], run_check=False)


def spread_experts(module: nn.Module, expert_mesh: DeviceMesh) -> None:
    """Leave of an experts module (on meta, whole or already cut over tp) the experts of this rank of the axis `ep` of
    `expert_mesh`, (ep) or (ep, tp). Their number is a multiple of ep."""
    ep = expert_mesh.size(0)
    tp_mesh = None
    for name, weight in list(module.named_parameters(recurse=False)):
        placements: list[Placement] = [Shard(0)]
        local = weight.data
        if isinstance(weight, DTensor):
            tp_mesh = weight.device_mesh
            placements += weight.placements
            local = weight.to_local().data
        local = torch.empty(local.shape[0] // ep, *local.shape[1:], dtype=local.dtype, device=local.device)
        cut = DTensor.from_local(
            local, expert_mesh, placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )
        setattr(module, name, nn.Parameter(cut))
    group = expert_mesh.get_group(0)
    module.forward = partial(_experts, module, tp_mesh, group, exchange.name_of(group))  # type: ignore[method-assign]


class TokensToExperts(ParallelStyle):
    """The feed-forward with router and experts: its input is made whole on every tp rank, its output, a partial sum,
    gets the placement `stream` again."""

    def __init__(self, stream: Placement) -> None:
        self.stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(_module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x, *others = args
            if not isinstance(x, DTensor):
                x = DTensor.from_local(x, device_mesh, [self.stream], run_check=False)
            return (x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]), *others)

        def leave(_module: nn.Module, _args: Any, out: DTensor) -> DTensor:
            return out.redistribute(placements=[self.stream])

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
        return module


class WholeRouter(ParallelStyle):
    """A router's weight is whole on every tp rank, and its gradient a partial sum."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        weight = distribute_tensor(module.weight, device_mesh, [Replicate()], src_data_rank=None)  # type: ignore[arg-type]
        module.weight = nn.Parameter(weight)
        module.forward = partial(_route, module)  # type: ignore[method-assign]
        return module


def _route(module: Any, x: Tensor) -> Routing:
    weight = module.weight.to_local(grad_placements=[Partial()])
    return route(x, weight, module.bias, module.config, module.training)


class HiddenOfExperts(ParallelStyle):
    """Hidden units of each expert are split over tp; the output is a partial sum."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, dim in (("w1", 1), ("w2", 2), ("w3", 1)):
            weight = distribute_tensor(getattr(module, name), device_mesh, [Shard(dim)], src_data_rank=None)
            setattr(module, name, nn.Parameter(weight))
        module.forward = partial(_experts, module, device_mesh, None, "")  # type: ignore[method-assign]
        return module


class HiddenOfShared(ParallelStyle):
    """A linear layer of the shared experts, on local tensors. Hidden units are split over tp: the outputs of a layer
    that makes them (`dim` 0), or the inputs of the one that takes them (`dim` 1), whose output is a partial sum."""

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        weight = distribute_tensor(module.weight, device_mesh, [Shard(self.dim)], src_data_rank=None)  # type: ignore[arg-type]
        module.weight = nn.Parameter(weight)
        module.forward = partial(_linear, module, device_mesh if self.dim == 1 else None)  # type: ignore[method-assign]
        return module


def _linear(module: Any, sum_over: DeviceMesh | None, x: Tensor) -> Tensor:
    out = F.linear(x, module.weight.to_local())
    return out if sum_over is None else DTensor.from_local(out, sum_over, [Partial()], run_check=False)
