"""A mixture of experts on every mesh is the same run as on one rank: losses, auxiliary losses, loads, gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.compare import assert_same_run, case
from tests.ranks import run_ranks

MOE: dict[str, Any] = {
    "model__architecture": "moe",
    "model__n_experts": 4,
    "model__top_k": 2,
    "model__balance_loss": 0.3,
    "model__z_loss": 0.02,
}
SHARED = {
    "model__n_shared_experts": 1,
    "model__router_scores": "sigmoid",
    "model__renormalize": True,
    "model__bias_rate": 0.01,
}
MESHES = {
    # Accumulation, so that the load of the whole batch is counted before the first backward.
    "one rank": case(**MOE),
    "dp 2": case(dp=2, **MOE),
    "dp 2, one microbatch": case(dp=2, **MOE, train__microbatch_size=4),
    "tp 2, all-reduce": case(
        tp=2, **MOE, **SHARED, mesh__sequence_parallel=False, model__ffn_dim=25, model__qk_norm=True
    ),
    "pp 2": case(pp=2, **MOE, model__balance_over="model"),
    "ep 2": case(dp=2, ep=2, **MOE),
    "ep 2, more experts than tokens": case(dp=2, ep=2, **MOE | {"model__n_experts": 32}),
    "ep 2, capacity": case(dp=2, ep=2, **MOE, **SHARED, model__capacity_factor=0.8),
    "ep 4": case(dp=4, ep=4, **MOE, model__tie_embeddings=True),
    "dp 2, ep 2, tp 2": case(dp=2, ep=2, tp=2, **MOE, **SHARED, activation_checkpoint__mode="full"),
    "pp 2, dp 2, ep 2": case(pp=2, dp=2, ep=2, **MOE, activation_checkpoint__mode="selective"),
    "pp 2, ep 2, zero bubble": case(
        pp=2, dp=2, ep=2, **MOE, model__n_layers=4, pipeline__schedule="interleaved_zero_bubble"
    ),
}
SLOW = {
    "dp 4, ep 2": case(dp=4, ep=2, **MOE, **SHARED, optimizer__bucket_mb=0.002),
    "pp 2, tp 2": case(pp=2, tp=2, **MOE, model__balance_over="sequence", model__n_shared_experts=1),
    "tp 2": case(tp=2, **MOE, **SHARED),
    "one rank, sequences": case(**MOE, model__balance_over="sequence", model__router_scores="softmax_after"),
    "pp 2, dp 2, ep 2, tp 2": case(pp=2, dp=2, ep=2, tp=2, **MOE, **SHARED, model__balance_over="model"),
    "pp 2, dp 4, ep 2": case(pp=2, dp=4, ep=2, **MOE, model__capacity_factor=1.0),
    "ep 8": case(dp=8, ep=8, **MOE | {"model__n_experts": 8}),
    "pp 2, dp 2, ep 2, in a V": case(pp=2, dp=2, ep=2, **MOE, model__n_layers=4, pipeline__schedule="zbv"),
    "compiled": case(**MOE, compile__enable=True, compile__scope="stage"),
    "compiled by block, tp 2": case(tp=2, **MOE, **SHARED, compile__enable=True, compile__scope="block"),
    "compiled, dp 2, tp 2": case(dp=2, tp=2, **MOE, **SHARED, compile__enable=True, compile__scope="stage"),
    "compiled, ep 2": case(dp=2, ep=2, **MOE, compile__enable=True, compile__scope="stage", model__capacity_factor=1.0),
    "compiled by block, ep 2, tp 2": case(
        dp=2, ep=2, tp=2, **MOE, compile__enable=True, compile__scope="block", activation_checkpoint__mode="full"
    ),
}


@pytest.mark.parametrize("name", MESHES)
def test_same_run(name: str) -> None:
    """The loss fell, but not as on one rank: an auxiliary loss that depended on microbatches or ranks."""
    assert_same_run(MESHES[name])


def both_ways(n_experts: int, capacity: float | None) -> list[float]:
    """On a rank: the exchange as a graph has it beside the one that autograd goes through; largest differences."""
    from models.moe import MoEConfig
    from models.routing import route
    from parallelize import exchange

    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    config = MoEConfig(vocab_size=1, dim=8, n_experts=n_experts, top_k=2, ffn_dim=12, capacity_factor=capacity)
    generator = torch.Generator().manual_seed(rank)
    results = []
    for graph in (False, True):
        generator.manual_seed(rank)
        shapes = [(2, 5 + 3 * rank, 8), *[(n_experts // 2, *size) for size in ((12, 8), (8, 12), (12, 8))]]
        leaves = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
        router = torch.linspace(-1, 2, n_experts * 8, dtype=torch.float64).sin().view(n_experts, 8)
        where = route(leaves[0], router, None, config, True)
        weights = where.weights.detach().requires_grad_()
        run = exchange.spread_experts if graph else exchange.run_spread_experts
        last: Any = exchange.name_of(group) if graph else group
        out = run(leaves[0].flatten(0, 1), where.experts, weights, *leaves[1:], last)
        factor = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        results.append([out, *torch.autograd.grad((out * factor).sum(), [*leaves, weights])])
    assert results[0][0].abs().max() > 0
    return [float((a - b).abs().max()) for a, b in zip(*results)]


@pytest.mark.parametrize(("n_experts", "capacity"), [(4, None), (4, 0.5), (64, None)])
def test_the_exchange_in_a_graph_is_the_one_without(n_experts: int, capacity: float | None) -> None:
    """Its backward is written by hand."""
    for differences in run_ranks(2, both_ways, n_experts, capacity):
        assert max(differences) < 1e-13, differences


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_same_run_slow(name: str) -> None:
    """As above, on more ranks, and compiled."""
    assert_same_run(SLOW[name], timeout=500.0)
