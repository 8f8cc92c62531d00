"""Tokens to the ranks that hold their experts, and back: the exchange of expert parallelism.

Properties:
- A rank computes an expert's rows in the order of the sending ranks, and of the tokens on each: that of one rank with
  all these tokens. So ep changes results by rounding alone.
- Any number of rows may go to an expert, none too. Every expert takes part in each backward, so that the collectives of
  all ranks match.
- In a compiled graph it is one operation with fixed shapes, whatever goes where, with a backward of its own, which
  computes the experts' hidden units anew instead of keeping them.
"""
# No annotations from __future__: torch reads the operations' schemas off them.

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from models.grouped import grouped_outer, grouped_product, take_rows
from models.routing import Order, combine, order_by_expert, swiglu


class _Exchange(torch.autograd.Function):
    """All-to-all of rows: `send[r]` rows go to rank r of the group, `receive[r]` come from it. The ranks of ep take
    part, in forward and backward alike."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes = (send, receive)
        ctx.group = group
        return _all_to_all(x, receive, send, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        receive, send = ctx.sizes
        return _all_to_all(grad, receive, send, ctx.group), None, None, None


def _all_to_all(x: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
    return out


def exchange(x: Tensor, receive: list[int], send: list[int], group: dist.ProcessGroup) -> Tensor:
    """Rows of x [sum(send), ...] to the ranks of the group, in their order, and theirs here [sum(receive), ...]."""
    out: Tensor = _Exchange.apply(x, receive, send, group)  # type: ignore[assignment]
    return out


class _Plan(NamedTuple):
    """What goes where."""

    order: Order
    """of this rank's pairs, by expert and so by rank"""
    send: list[int]
    """rows to each rank"""
    receive: list[int]
    """rows from each"""
    counts: Tensor
    """[experts here] rows of each"""
    take: Tensor
    """[rows received]: their order by expert"""
    back: Tensor
    """its inverse"""


def _plan(experts: Tensor, here: int, group: dist.ProcessGroup) -> _Plan:
    ep = group.size()
    order = order_by_expert(experts, ep * here)
    counts = order.counts.view(ep, here)  # [to rank, expert there]
    arriving = torch.empty_like(counts)  # [from rank, expert here]
    dist.all_to_all_single(arriving, counts, group=group)  # the ranks of ep: how many rows will come
    # The host waits here, once: collectives want their sizes, and tensors theirs, as numbers.
    send, receive = torch.stack((counts.sum(1), arriving.sum(1))).tolist()
    expert = torch.arange(here, device=experts.device).repeat(ep)
    expert = expert.repeat_interleave(arriving.flatten(), output_size=sum(receive))
    take = expert.argsort(stable=True)  # by expert, then as they came
    back = torch.empty_like(take).scatter_(0, take, torch.arange(take.numel(), device=take.device))
    return _Plan(order, send, receive, arriving.sum(0), take, back)


def run_spread_experts(
    x: Tensor, experts: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, group: dist.ProcessGroup
) -> Tensor:
    """As models.routing.run_experts, with the weights of this rank's experts: those of ep rank r come r-th. `experts`
    and `weights` are those of Routing. All ranks of the ep group call it together."""
    plan = _plan(experts, w1.shape[0], group)
    rows = take_rows(x, plan.order.pairs, plan.order.places, each=experts.shape[1])
    kept = sum(plan.send)
    got = exchange(rows[:kept], plan.receive, plan.send, group)
    y = swiglu(take_rows(got, plan.take, plan.back), plan.counts, w1, w2, w3)
    y = exchange(take_rows(y, plan.back, plan.take), plan.send, plan.receive, group)
    if kept < rows.shape[0]:
        y = F.pad(y, (0, 0, 0, rows.shape[0] - kept))  # what was dropped brings nothing
    return combine(y, plan.order, weights)


# -- as one operation of a graph ---------------------------------------------------------------------------------------

_GROUPS: dict[str, dist.ProcessGroup] = {}
"""by name, for a graph holds no group"""


def name_of(group: dist.ProcessGroup) -> str:
    """The name by which `spread_experts` finds a group."""
    _GROUPS[group.group_name] = group
    return group.group_name


@torch.library.custom_op("titanlike::spread_experts", mutates_args=())
def spread_experts(
    x: Tensor, experts: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, group: str
) -> Tensor:
    """`run_spread_experts` over the group of that name."""
    with torch.no_grad():
        return run_spread_experts(x, experts, weights, w1, w2, w3, _GROUPS[group])


@torch.library.custom_op("titanlike::spread_experts_backward", mutates_args=())
def spread_experts_backward(
    grad: Tensor, x: Tensor, experts: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, group_name: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weights, w1, w2, w3. Tokens and gradients travel to the experts, and gradients back."""
    with torch.no_grad():
        group, each, dim = _GROUPS[group_name], experts.shape[1], x.shape[1]
        plan = _plan(experts, w1.shape[0], group)
        pairs = plan.order.pairs[: sum(plan.send)]
        ends = plan.counts.cumsum(0).to(torch.int32)
        both = _all_to_all(torch.cat([x[pairs // each], grad[pairs // each]], 1), plan.receive, plan.send, group)
        gate = _all_to_all(weights.flatten()[pairs], plan.receive, plan.send, group)[plan.take, None]
        rows, out = both[plan.take].split(dim, 1)  # [rows received, dim]: tokens, gradient of their outputs

        before = grouped_product(rows, w1.transpose(1, 2), ends, False)
        up = grouped_product(rows, w3.transpose(1, 2), ends, False)
        hidden = F.silu(before) * up
        grad_gate = (out * grouped_product(hidden, w2.transpose(1, 2), ends, False)).sum(1, dtype=weights.dtype)
        out = (out * gate).to(out.dtype)
        grad_hidden = grouped_product(out, w2, ends, False)
        grad_up = grad_hidden * F.silu(before)
        grad_before = torch.ops.aten.silu_backward(grad_hidden * up, before)
        grad_rows = grouped_product(grad_before, w1, ends, False) + grouped_product(grad_up, w3, ends, False)

        grad_rows = _all_to_all(grad_rows[plan.back], plan.send, plan.receive, group)
        grad_gate = _all_to_all(grad_gate[plan.back], plan.send, plan.receive, group)
        dropped = plan.order.pairs.numel() - grad_gate.numel()
        return (
            F.pad(grad_rows, (0, 0, 0, dropped))[plan.order.places].unflatten(0, experts.shape).sum(1),
            F.pad(grad_gate, (0, dropped))[plan.order.places].view_as(weights),
            grouped_outer(grad_before, rows, ends),
            grouped_outer(out, hidden, ends),
            grouped_outer(grad_up, rows, ends),
        )


@spread_experts.register_fake
def _(x: Tensor, experts: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, group: str) -> Tensor:
    return torch.empty_like(x)


@spread_experts_backward.register_fake
def _(
    grad: Tensor, x: Tensor, experts: Tensor, weights: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, group_name: str
) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(each) for each in (x, weights, w1, w2, w3))


def _keep(ctx: Any, inputs: Any, output: Tensor) -> None:
    *tensors, ctx.group = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weights, w1, w2, w3 = spread_experts_backward(grad.contiguous(), *ctx.saved_tensors, ctx.group)
    return x, None, weights, w1, w2, w3, None


spread_experts.register_autograd(_backward, setup_context=_keep)
