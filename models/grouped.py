"""Products of rows with the weights of their group, for rows that are sorted by group; and taking rows in a new order.

Each is one operation, whose shapes do not depend on the sizes of the groups: a group may be empty, and a model that
uses them can be compiled whole.
"""
# No annotations from __future__: torch reads the operations' schemas off them.

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def _fused(*tensors: Tensor) -> bool:
    """Whether torch's grouped product takes these: 16-bit, on CPU also float32, and rows of whole 16 bytes."""
    dtype, device = tensors[0].dtype, tensors[0].device
    if dtype not in (torch.bfloat16, torch.float16) and not (dtype == torch.float32 and device.type == "cpu"):
        return False
    return all(size and size * dtype.itemsize % 16 == 0 for tensor in tensors for size in tensor.shape[-2:])


@torch.library.custom_op("titanlike::grouped_product", mutates_args=())
def grouped_product(x: Tensor, weight: Tensor, ends: Tensor, partial: bool) -> Tensor:
    """x [rows, in], weight [groups, in, out], ends [groups] int32: where each group's rows end -> [rows, out].

    `partial`: there may be rows after the last group; they become 0.
    """
    if _fused(weight) and x.shape[0]:
        out = F.grouped_mm(x.contiguous(), weight, offs=ends)
        if partial:
            out.masked_fill_(torch.arange(x.shape[0], device=x.device)[:, None] >= ends[-1], 0)
        return out
    out = x.new_zeros(x.shape[0], weight.shape[2])
    begin = 0
    for group, end in enumerate(ends.tolist()):
        torch.mm(x[begin:end], weight[group], out=out[begin:end])
        begin = end
    return out


@torch.library.custom_op("titanlike::grouped_outer", mutates_args=())
def grouped_outer(y: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """y [rows, out], x [rows, in] -> [groups, out, in]: the sum of the outer products of each group's rows."""
    rows = y.new_empty(y.shape[1], x.shape[1])
    if _fused(rows) and x.shape[0]:
        return F.grouped_mm(y.contiguous().T, x.contiguous(), offs=ends)
    out = x.new_zeros(ends.shape[0], y.shape[1], x.shape[1])
    begin = 0
    for group, end in enumerate(ends.tolist()):
        torch.mm(y[begin:end].T, x[begin:end], out=out[group])
        begin = end
    return out


@grouped_product.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor, partial: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@grouped_outer.register_fake
def _(y: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], y.shape[1], x.shape[1])


def _keep(ctx: Any, inputs: Any, output: Tensor) -> None:
    x, weight, ends, ctx.partial = inputs
    ctx.save_for_backward(x, weight, ends)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
    x, weight, ends = ctx.saved_tensors
    grad_x = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_x = grouped_product(grad, weight.transpose(1, 2), ends, ctx.partial)
    if ctx.needs_input_grad[1]:
        # Laid out as a linear layer's weight, of which `weight` is the transposed view.
        grad_weight = grouped_outer(grad, x, ends).transpose(1, 2)
    return grad_x, grad_weight, None, None


grouped_product.register_autograd(_backward, setup_context=_keep)


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, partial: bool = False) -> Tensor:
    """Each row times the weight of its group, as a linear layer: x [rows, in], weight [groups, out, in] -> [rows, out].

    ends [groups] int32: where each group's rows end. With `partial` there may be rows after the last group, which
    become 0.
    """
    return grouped_product(x, weight.transpose(1, 2), ends, partial)


class _TakeRows(torch.autograd.Function):
    """The gradient is gathered too: indexing's own backward would add up rows one at a time, on a GPU in any order."""

    @staticmethod
    def forward(x: Tensor, take: Tensor, back: Tensor, each: int) -> Tensor:
        return x[take // each if each > 1 else take]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        _, _, back, ctx.each = inputs
        ctx.save_for_backward(back)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        (back,) = ctx.saved_tensors
        grad = grad[back]
        return grad.unflatten(0, (-1, ctx.each)).sum(1) if ctx.each > 1 else grad, None, None, None


def take_rows(x: Tensor, take: Tensor, back: Tensor, each: int = 1) -> Tensor:
    """Every row `each` times, in a new order: row i of the result is row take[i] // each of x [rows, ...].

    take [rows * each] is a permutation, and `back` its inverse.
    """
    out: Tensor = _TakeRows.apply(x, take, back, each)  # type: ignore[assignment]
    return out
