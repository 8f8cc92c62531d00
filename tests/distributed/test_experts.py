"""A mixture of experts on every mesh is the same run as on one rank: losses, auxiliary losses, loads, gradients."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.compare import assert_same_run, case

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
    "one rank, sequences": case(**MOE, model__balance_over="sequence", model__router_scores="softmax_after"),
    "dp 2": case(dp=2, **MOE),
    "dp 2, one microbatch": case(dp=2, **MOE, train__microbatch_size=4),
    "tp 2": case(tp=2, **MOE, **SHARED),
    "tp 2, all-reduce": case(
        tp=2, **MOE, **SHARED, mesh__sequence_parallel=False, model__ffn_dim=25, model__qk_norm=True
    ),
    "pp 2": case(pp=2, **MOE, model__balance_over="model"),
    "ep 2": case(dp=2, ep=2, **MOE),
    "ep 2, more experts than tokens": case(dp=2, ep=2, **MOE | {"model__n_experts": 32}),
    "ep 2, capacity": case(dp=2, ep=2, **MOE, **SHARED, model__capacity_factor=0.8),
    "ep 4": case(dp=4, ep=4, **MOE, model__tie_embeddings=True),
    "dp 4, ep 2": case(dp=4, ep=2, **MOE, **SHARED, optimizer__bucket_mb=0.002),
    "dp 2, ep 2, tp 2": case(dp=2, ep=2, tp=2, **MOE, **SHARED, activation_checkpoint__mode="full"),
    "pp 2, dp 2, ep 2": case(pp=2, dp=2, ep=2, **MOE, activation_checkpoint__mode="selective"),
    "pp 2, tp 2": case(pp=2, tp=2, **MOE, model__balance_over="sequence", model__n_shared_experts=1),
    "pp 2, ep 2, zero bubble": case(
        pp=2, dp=2, ep=2, **MOE, model__n_layers=4, pipeline__schedule="interleaved_zero_bubble"
    ),
}
SLOW = {
    "pp 2, dp 2, ep 2, tp 2": case(pp=2, dp=2, ep=2, tp=2, **MOE, **SHARED, model__balance_over="model"),
    "pp 2, dp 4, ep 2": case(pp=2, dp=4, ep=2, **MOE, model__capacity_factor=1.0),
    "ep 8": case(dp=8, ep=8, **MOE | {"model__n_experts": 8}),
    "pp 2, dp 2, ep 2, in a V": case(pp=2, dp=2, ep=2, **MOE, model__n_layers=4, pipeline__schedule="zbv"),
    "compiled": case(**MOE, compile__enable=True),
    "compiled by block, tp 2": case(tp=2, **MOE, **SHARED, compile__enable=True, compile__scope="block"),
    "compiled, dp 2, tp 2": case(dp=2, tp=2, **MOE, **SHARED, compile__enable=True),
}


@pytest.mark.parametrize("name", MESHES)
def test_same_run(name: str) -> None:
    """The loss fell, but not as on one rank: an auxiliary loss that depended on microbatches or ranks."""
    assert_same_run(MESHES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_same_run_slow(name: str) -> None:
    """As above, on more ranks, and compiled."""
    assert_same_run(SLOW[name], timeout=500.0)
