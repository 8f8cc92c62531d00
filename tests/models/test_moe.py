"""The mixture of experts on one device: routing, experts, and the auxiliary losses."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models import moe
from models.moe import Context, MoE, MoEConfig
from models.routing import Routing, loop_over_experts, route, run_experts

BASE = MoEConfig(vocab_size=31, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=24, n_experts=6, top_k=2)


def routing(config: MoEConfig, x: Tensor, weight: Tensor, bias: Tensor | None = None, training: bool = True) -> Routing:
    return route(x, weight, bias, config, training)


def draws(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def made(config: MoEConfig, dtype: torch.dtype = torch.float64) -> MoE:
    model = MoE(config).to(dtype)
    with torch.no_grad():
        for number, (name, value) in enumerate(model.named_parameters()):
            value.copy_(draws(*value.shape, seed=number) * 0.2 + ("norm" in name))
    return model


def noted(model: MoE, tokens: Tensor) -> tuple[Tensor, Context]:
    like = torch.empty(0, dtype=next(model.parameters()).dtype).expand(*tokens.shape, 0)
    context = model.context(like)
    return model(tokens, context=context), context


TOKENS = torch.randint(0, 31, (4, 10), generator=torch.Generator().manual_seed(3))


# -- experts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("capacity", [None, 0.5])
@pytest.mark.parametrize("experts", [6, 40], ids=["all busy", "some empty"])
def test_grouped_products_are_the_loop(dtype: torch.dtype, capacity: float | None, experts: int) -> None:
    """Rows in the wrong order, an empty expert that shifts the others, dropped rows that still count."""
    config = dataclasses.replace(BASE, n_experts=experts, capacity_factor=capacity)
    results = []
    for run in (run_experts, loop_over_experts):
        x = draws(3, 7, 16, dtype=dtype).requires_grad_()
        weights = [
            draws(experts, *size, seed=n, dtype=dtype) * 0.3 for n, size in enumerate([(24, 16), (16, 24), (24, 16)])
        ]
        router, (w1, w2, w3) = draws(experts, 16, seed=9, dtype=dtype), (w.requires_grad_() for w in weights)
        out = run(x.flatten(0, 1), routing(config, x, router.requires_grad_()), w1, w2, w3)
        (out.float() * draws(*out.shape, seed=5).float()).sum().backward()
        results.append([out, x.grad, router.grad, w1.grad, w2.grad, w3.grad])
    limit = {torch.float64: 1e-13, torch.float32: 2e-5, torch.bfloat16: 0.3}[dtype]
    for mine, plain in zip(*results):
        assert (mine - plain).abs().max() <= limit


def test_a_batch_without_tokens_for_any_expert() -> None:
    """An empty product fails, or leaves what was in memory."""
    config = dataclasses.replace(BASE, capacity_factor=1e-9)
    x = draws(1, 5, 16)
    where = routing(config, x, draws(6, 16))._replace(experts=torch.full((5, 2), 6))
    out = run_experts(x[0], where, draws(6, 24, 16), draws(6, 16, 24), draws(6, 24, 16))
    assert torch.equal(out, torch.zeros(5, 16, dtype=torch.float64))


# -- routing -----------------------------------------------------------------------------------------------------------


def test_weights_are_what_the_options_say() -> None:
    x, weight = draws(1, 9, 16), draws(6, 16, seed=1)
    logits = x[0] @ weight.T

    def weights(**options: Any) -> Tensor:
        return routing(dataclasses.replace(BASE, **options), x, weight).weights

    best = logits.topk(2).indices
    soft = logits.softmax(-1).gather(-1, best)
    sigmoid = logits.sigmoid().gather(-1, best)
    torch.testing.assert_close(weights(), soft)
    torch.testing.assert_close(weights(renormalize=True), soft / soft.sum(-1, keepdim=True))
    torch.testing.assert_close(weights(router_scores="softmax_after"), logits.topk(2).values.softmax(-1))
    torch.testing.assert_close(weights(router_scores="sigmoid"), sigmoid)
    torch.testing.assert_close(
        weights(router_scores="sigmoid", renormalize=True), sigmoid / sigmoid.sum(-1, keepdim=True)
    )


def test_routing_is_in_float32_for_16_bit_models() -> None:
    """Symptom: equal bfloat16 logits, and the experts of lower number get all the tokens."""
    x, weight = draws(1, 200, 16, dtype=torch.bfloat16), draws(6, 16, seed=1, dtype=torch.bfloat16)
    where = routing(BASE, x, weight)
    assert where.logits.dtype == where.weights.dtype == torch.float32
    torch.testing.assert_close(where.logits[0], x[0].float() @ weight.float().T)


def test_a_bias_changes_the_choice_and_not_the_weights() -> None:
    """arXiv:2408.15664, section 3.1: otherwise balancing changes what the model computes."""
    x, weight = draws(1, 50, 16), draws(6, 16, seed=1)
    bias = torch.zeros(6, dtype=torch.float64)
    bias[4] = 2.0  # more than any score
    where = routing(BASE, x, weight, bias)
    assert (where.chosen == 4).any(-1).all()
    torch.testing.assert_close(where.weights, (x[0] @ weight.T).softmax(-1).gather(-1, where.experts))


def test_capacity_takes_the_first_tokens_of_each_sequence() -> None:
    """What becomes of a token must not depend on later tokens, nor on other sequences of the microbatch."""
    config = dataclasses.replace(BASE, capacity_factor=0.6)
    x, weight = draws(3, 20, 16), draws(6, 16, seed=1)
    whole = routing(config, x, weight)
    assert config.capacity(20) == 4
    counts = F.one_hot(whole.experts.view(3, 40), 7).sum(1)
    assert (counts[:, :6] <= 4).all() and (counts[:, 6] > 0).all()
    assert (whole.weights[whole.experts == 6] == 0).all() and (whole.weights[whole.experts < 6] > 0).all()
    alone = routing(config, x[1:2], weight)
    assert torch.equal(alone.experts, whole.experts.view(3, 20, 2)[1])
    changed = torch.cat([x[:, :12], draws(3, 8, 16, seed=8)], 1)
    assert torch.equal(
        routing(config, changed, weight).experts.view(3, 20, 2)[:, :12], whole.experts.view(3, 20, 2)[:, :12]
    )
    assert (routing(config, x, weight, training=False).experts < 6).all(), "generated text drops tokens"


# -- auxiliary losses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("over", ["batch", "model", "sequence"])
def test_shares_of_parts_add_up_to_the_loss_of_the_whole(over: str) -> None:
    """Symptom (Megatron #1005 and others): a balance loss that is averaged over microbatches depends on their size."""
    config = dataclasses.replace(BASE, balance_loss=0.7, z_loss=0.05, balance_over=over)  # type: ignore[arg-type]
    model = made(config)
    _, context = noted(model, TOKENS)
    whole = model.auxiliary_loss(context, TOKENS.numel(), model.auxiliary_sums(context))
    parts = [noted(model, TOKENS[rows : rows + 1])[1] for rows in range(4)]
    totals = torch.stack([model.auxiliary_sums(part) for part in parts]).sum(0)
    shares = torch.stack([model.auxiliary_loss(part, TOKENS.numel(), totals) for part in parts]).sum()
    torch.testing.assert_close(shares, whole, rtol=1e-13, atol=0)
    wanted = torch.autograd.grad(whole, model.layers["0"].feed_forward.router.weight)[0]
    torch.testing.assert_close(torch.autograd.grad(shares, model.layers["0"].feed_forward.router.weight)[0], wanted)
    logged = model.auxiliary_values(totals, TOKENS.numel())["moe/auxiliary_loss"]
    torch.testing.assert_close(logged, whole.detach(), rtol=1e-12, atol=0)


def test_balance_loss_is_the_formula() -> None:
    """experts * sum of (share of choices * mean score), top_k when balanced (arXiv:2101.03961, equation 4)."""
    model = made(dataclasses.replace(BASE, balance_loss=1.0))
    _, context = noted(model, TOKENS)
    assert context.routing is not None
    terms = []
    for where in context.routing.values():
        share = torch.stack([(where.chosen == e).double().sum() for e in range(6)]) / TOKENS.numel()
        terms.append(6 * (share * where.logits.softmax(-1).mean((0, 1))).sum())
    loss = model.auxiliary_loss(context, TOKENS.numel(), model.auxiliary_sums(context))
    torch.testing.assert_close(loss, torch.stack(terms).mean(), rtol=1e-12, atol=0)
    even = torch.tensor([[10.0] * 6 + [5.0] * 6 + [0.0] * 4] * 2, dtype=torch.float64)  # 30 tokens
    values = model.auxiliary_values(even, 30)
    assert values["moe/balance_loss"] == 2 and values["moe/load_cv"] == 0 and values["moe/load_max"] == 1


def test_bias_moves_against_the_load() -> None:
    model = made(dataclasses.replace(BASE, bias_rate=0.25))
    totals = torch.zeros(2, 16, dtype=torch.float64)
    totals[0, :6] = torch.tensor([4.0, 0, 2, 2, 2, 2])
    model.after_update(totals)
    bias: Any = model.layers["0"].feed_forward.router.bias  # type: ignore[union-attr]
    assert bias.tolist() == [-0.25, 0.25, 0, 0, 0, 0]


# -- the model ---------------------------------------------------------------------------------------------------------


def test_one_expert_for_all_is_a_llama() -> None:
    """Each token through all of one expert, with weight 1, is a dense feed-forward."""
    from models.llama import Llama

    model = made(dataclasses.replace(BASE, n_experts=1, top_k=1))
    dense = Llama(dataclasses.replace(BASE, n_experts=1, top_k=1)).double()  # type: ignore[arg-type]
    state = model.state_dict()
    for layer in range(2):
        for name in ("w1", "w2", "w3"):
            state[f"layers.{layer}.feed_forward.{name}.weight"] = state.pop(
                f"layers.{layer}.feed_forward.experts.{name}"
            )[0]
        state.pop(f"layers.{layer}.feed_forward.router.weight")
    dense.load_state_dict(state)
    torch.testing.assert_close(model(TOKENS), dense(TOKENS), rtol=1e-12, atol=1e-12)


def test_each_expert_is_drawn_by_its_own_name() -> None:
    """So that a rank draws its own experts alone, and those of other ranks do not move them."""
    from titanlike.build import draw_box, draw_parameter

    model, name, cpu = MoE(BASE), "layers.1.feed_forward.experts.w2", torch.device("cpu")
    whole = draw_parameter(model, 3, name, (6, 16, 24), cpu)
    part = draw_box(model, 3, name, (6, 16, 24), (slice(2, 5), slice(0, 16), slice(12, 24)), cpu)
    assert torch.equal(part, whole[2:5, :, 12:])
    assert whole.unique().numel() == whole.numel()
    assert whole.std() == pytest.approx(0.02 / math.sqrt(4), rel=0.05)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"top_k": 7}, "top_k"),
        ({"capacity_factor": 0.0}, "capacity_factor"),
        ({"router_scores": "softmax_after", "renormalize": True}, "renormalize"),
        ({"balance_loss": -1.0}, "balance_loss"),
    ],
)
def test_impossible_shapes_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        dataclasses.replace(BASE, **options)


def test_presets_can_be_built() -> None:
    with torch.device("meta"):
        sizes = {name: sum(p.numel() for p in MoE(config).parameters()) for name, config in moe.PRESETS.items()}
    assert sizes["mixtral-8x7b"] == 46_702_792_704 and sizes["qwen3-30b-a3b"] == 30_532_122_624
