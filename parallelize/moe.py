"""How a mixture of experts is cut: attention as a Llama's; of the feed-forward, hidden units of each expert over tp,
whole experts over ep (parallelize/experts.py).

    x (s) -> ffn_norm (s) -> all-gather -> router -> experts w1 w3 (h) -> silu * (h) -> w2 -> weighted sum
          -> reduce-scatter (s) -> + (s)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from models.moe import MoEConfig
from parallelize import llama
from parallelize.experts import HiddenOfExperts, HiddenOfShared, TokensToExperts, WholeRouter, spread_experts
from parallelize.tensor import TensorPlan

FIRST_PARTS = llama.FIRST_PARTS
LAST_PARTS = llama.LAST_PARTS

RECOMPUTE_KEEPS = (torch.ops.titanlike.grouped_product.default,)
"""products with the experts' weights are dear to compute too"""


def tensor_plan(config: MoEConfig, tp: int, sequence_parallel: bool) -> TensorPlan:
    """The table."""
    stream: Placement = Shard(1) if sequence_parallel else Replicate()
    plan = {
        name: style
        for name, style in llama.tensor_plan(config, tp, sequence_parallel).items()
        if not name.startswith("layers.*.feed_forward")
    }
    plan |= {
        "layers.*.feed_forward": TokensToExperts(stream),
        "layers.*.feed_forward.router": WholeRouter(),
        "layers.*.feed_forward.experts": HiddenOfExperts(),
    }
    if config.n_shared_experts:
        plan |= {
            "layers.*.feed_forward.shared.w1": HiddenOfShared(0),
            "layers.*.feed_forward.shared.w2": HiddenOfShared(1),
            "layers.*.feed_forward.shared.w3": HiddenOfShared(0),
        }
    return plan


def cut_experts(model: Any, expert_mesh: DeviceMesh) -> None:
    """Spread the experts of a model, or of one stage of it, over the axis ep of `expert_mesh`."""
    for layer in model.layers.values():
        spread_experts(layer.feed_forward.experts, expert_mesh)


def stage_costs(config: MoEConfig, seq_len: int) -> tuple[float, list[float], float]:
    """As a Llama's, with the experts that a token goes through."""
    first, layers, last = llama.stage_costs(config, seq_len)
    expert = 3 * 2 * config.dim * config.ffn_dim  # what llama counts once
    more = expert * (config.top_k + config.n_shared_experts - 1) + 2 * config.dim * config.n_experts
    return first, [layer + more for layer in layers], last


def flop_shape(plain: Any) -> dict[str, int]:
    """What a token is multiplied by: of the experts, top_k."""
    whole = sum(parameter.numel() for parameter in plain.parameters())
    linear = sum(module.weight.numel() for module in plain.modules() if isinstance(module, nn.Linear))
    experts = router = 0
    for layer in plain.layers.values():
        experts += sum(weight.numel() for weight in layer.feed_forward.experts.parameters())
        router += layer.feed_forward.router.weight.numel()
    active = experts * plain.config.top_k // plain.config.n_experts
    return {"matmul_parameters": linear + router + active, "active_parameters": whole - experts + active}
