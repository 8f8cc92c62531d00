"""Which experts a token goes to, and what they make of it: the functions that models/moe.py and its parallel forms are
made of.

Properties:
- Routing is computed in float32 (float64 when the model is), and depends on a token alone, or with a capacity on the
  earlier tokens of its sequence. So it is the same however a batch is cut.
- Pairs (token, expert) are sorted by expert, and each expert's rows are one product (models/grouped.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models.grouped import grouped_linear, take_rows

if TYPE_CHECKING:
    from models.moe import MoEConfig


class Routing(NamedTuple):
    """Where the tokens of one layer go. Tokens of a batch [batch, seq] are in a row, as [batch * seq]."""

    logits: Tensor
    """[batch, seq, experts], float32 or float64"""
    scores: Tensor
    """[batch, seq, experts], adding up to 1 for each token"""
    experts: Tensor
    """[batch * seq, top_k] int64; `experts` (none) where the expert's capacity was used up"""
    weights: Tensor
    """[batch * seq, top_k], 0 where a token was dropped"""
    chosen: Tensor
    """[batch, seq, top_k] int64, before any was dropped"""
    limited: bool
    """whether tokens may have been dropped"""


def route(x: Tensor, weight: Tensor, bias: Tensor | None, config: MoEConfig, training: bool) -> Routing:
    """Choose the experts of x [batch, seq, dim]. weight [experts, dim]; bias [experts], added to the scores for the
    choice alone."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    with torch.autocast(x.device.type, enabled=False):
        logits = F.linear(x.to(dtype), weight.to(dtype))  # [batch, seq, experts]
    own = logits.sigmoid() if config.router_scores == "sigmoid" else logits.softmax(-1)
    scores = own / own.sum(-1, keepdim=True) if config.router_scores == "sigmoid" else own
    order = own.detach() if bias is None else own.detach() + bias.to(dtype)
    chosen = order.topk(config.top_k, dim=-1).indices  # [batch, seq, top_k]
    if config.router_scores == "softmax_after":
        weights = logits.gather(-1, chosen).softmax(-1)
    else:
        weights = own.gather(-1, chosen)
        if config.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
    experts = chosen
    capacity = config.capacity(x.shape[1]) if training else None
    if capacity is not None:
        # Earlier tokens first, then the higher score: what becomes of a token does not depend on later ones.
        asked = F.one_hot(chosen.flatten(1), config.n_experts)  # [batch, seq * top_k, experts]
        place = (asked.cumsum(1) * asked).sum(-1).view_as(chosen)  # 1 for the first that asks for the expert
        dropped = place > capacity
        experts = chosen.masked_fill(dropped, config.n_experts)
        weights = weights.masked_fill(dropped, 0)
    return Routing(logits, scores, experts.flatten(0, 1), weights.flatten(0, 1), chosen, capacity is not None)


class Order(NamedTuple):
    """The pairs (token, one of its experts), numbered token * top_k + choice, sorted by expert, dropped ones last."""

    pairs: Tensor
    """[tokens * top_k] int64: pair numbers in their new order"""
    places: Tensor
    """[tokens * top_k] int64: where each pair went, the inverse"""
    counts: Tensor
    """[experts] int64: pairs of each expert"""


def order_by_expert(experts: Tensor, n_experts: int) -> Order:
    """Sort the pairs of `experts` [tokens, top_k]. Pairs of one expert stay in the order of their tokens."""
    flat = experts.flatten()
    pairs = flat.argsort(stable=True)
    places = torch.empty_like(pairs).scatter_(0, pairs, torch.arange(flat.numel(), device=flat.device))
    counts = torch.zeros(n_experts + 1, dtype=torch.int64, device=flat.device)
    counts = counts.scatter_add(0, flat, torch.ones_like(flat))[:n_experts]
    return Order(pairs, places, counts)


def swiglu(x: Tensor, counts: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, partial: bool = False) -> Tensor:
    """w2(silu(w1 x) * w3 x) with the weights of each row's expert.

    x [rows, dim], sorted by expert, `counts` [experts] rows each; w1, w3 [experts, hidden, dim], w2 [experts, dim,
    hidden]. With `partial` there may be rows over the sum of the counts, which become 0.
    """
    ends = counts.cumsum(0).to(torch.int32)
    gate, up = grouped_linear(x, w1, ends, partial), grouped_linear(x, w3, ends, partial)
    return grouped_linear(F.silu(gate) * up, w2, ends, partial)


def combine(y: Tensor, order: Order, weights: Tensor) -> Tensor:
    """Sum over each token's experts: y [tokens * top_k, dim], sorted by expert; weights [tokens, top_k]."""
    y = take_rows(y, order.places, order.pairs).unflatten(0, weights.shape)  # [tokens, top_k, dim]
    return (y * weights[..., None]).sum(1).to(y.dtype)


def run_experts(x: Tensor, routing: Routing, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """The weighted sum of each token's experts. x [tokens, dim]; weights as for `swiglu`."""
    order = order_by_expert(routing.experts, w1.shape[0])
    rows = take_rows(x, order.pairs, order.places, each=routing.experts.shape[1])
    return combine(swiglu(rows, order.counts, w1, w2, w3, routing.limited), order, routing.weights)


def loop_over_experts(x: Tensor, routing: Routing, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """What `run_experts` computes, as one would write it down."""
    out = torch.zeros_like(x)
    for expert in range(w1.shape[0]):
        tokens, choice = torch.where(routing.experts == expert)
        hidden = F.silu(F.linear(x[tokens], w1[expert])) * F.linear(x[tokens], w3[expert])
        weighted = F.linear(hidden, w2[expert]) * routing.weights[tokens, choice, None]
        out = out.index_add(0, tokens, weighted.to(out.dtype))
    return out
