"""The collectives of activations between CPU ranks give what gloo's own give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from parallelize.gloo import exchange_parts
from tests.ranks import run_ranks

OPERATIONS = torch.ops._c10d_functional


def both(x: Tensor, name: str, *arguments: Any) -> tuple[Tensor, Tensor]:
    """The result of an operation with torch's kernel, from gloo's own collective, and with ours."""
    group, ranks = dist.group.WORLD, dist.get_world_size()
    assert group is not None
    exchange_parts()
    mine = OPERATIONS.wait_tensor(getattr(OPERATIONS, name)(x, *arguments, ranks, group.group_name))
    if name == "all_gather_into_tensor":
        parts = [torch.empty_like(x) for _ in range(ranks)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts), mine
    whole = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(whole, op=getattr(dist.ReduceOp, arguments[0].upper()))
    return whole.chunk(ranks)[dist.get_rank()], mine


def compare(shape: tuple[int, ...], dtype: torch.dtype, transposed: bool) -> list[tuple[Tensor, Tensor]]:
    """Of both collectives and, for the reductions that are not exchanged, of one more."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    ranks = dist.get_world_size()
    x = torch.randn(ranks * shape[0], *shape[1:], generator=generator, dtype=torch.float64).mul(100).to(dtype)
    if transposed:
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    return [
        both(x, "reduce_scatter_tensor", "sum"),
        both(x, "reduce_scatter_tensor", "max"),
        both(x, "all_gather_into_tensor"),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64])
@pytest.mark.parametrize(("shape", "transposed"), [((3, 4, 5), False), ((2, 3), True), ((0, 4), False), ((1,), False)])
def test_exchanged_collectives_of_two_ranks_are_those_of_gloo(
    dtype: torch.dtype, shape: tuple[int, ...], transposed: bool
) -> None:
    """Symptom: a quicker collective that another order of addition, a layout or an empty part makes a wrong one."""
    for pairs in run_ranks(2, compare, shape, dtype, transposed):
        for theirs, ours in pairs:
            assert ours.is_contiguous()
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_exchanged_collectives_of_three_ranks_add_in_the_order_of_the_ranks() -> None:
    for pairs in run_ranks(3, compare, (2, 3), torch.float64, False):
        for theirs, ours in pairs:
            torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-12)


def gradients() -> Tensor:
    """Of an all-gather along another dim, through autograd and torch's own functions."""
    exchange_parts()
    group = dist.group.WORLD
    assert group is not None
    x = torch.arange(6.0, dtype=torch.float64).view(2, 3).requires_grad_()
    gather = getattr(functional, "all_gather_single_autograd", None) or functional.all_gather_tensor_autograd
    whole = gather(x, 1, group)
    (
        whole * torch.arange(whole.numel(), dtype=torch.float64).view(whole.shape) * (dist.get_rank() + 1)
    ).sum().backward()
    assert x.grad is not None
    return x.grad


def test_the_gradient_of_an_exchanged_gather_is_the_scattered_sum() -> None:
    weights = torch.arange(12.0, dtype=torch.float64).view(2, 6) * 3  # 1 of rank 0 and 2 of rank 1
    for rank, grad in enumerate(run_ranks(2, gradients)):
        torch.testing.assert_close(grad, weights[:, 3 * rank : 3 * rank + 3], rtol=0, atol=0)
