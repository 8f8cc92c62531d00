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
from parallelize.hf import HuggingFace, only, renamed, rope_from, rope_to
from parallelize.tensor import ReplicatedOverHeads, TensorPlan

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
    if config.qk_norm:
        norm = ReplicatedOverHeads()
        plan |= {"layers.*.attention.q_norm": norm, "layers.*.attention.k_norm": norm}
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
    assert config.ffn_dim is not None
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


_FIELDS = {ours: theirs for ours, theirs in llama.HF_FIELDS.items() if ours not in ("ffn_dim", "attention_bias")}
_ATTENTION = {ours: theirs for ours, theirs in llama.HF_NAMES.items() if "feed_forward" not in ours}
_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "router_aux_loss_coef": 0.001,
}


def _from_mixtral(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of `MoEConfig` out of the config.json of a MixtralForCausalLM."""
    only(config, "hidden_act", "silu")
    only(config, "sliding_window", None)
    heads = config["num_attention_heads"]
    defaults = _DEFAULTS | {
        **{"num_key_value_heads": 8, "head_dim": config["hidden_size"] // heads, "max_position_embeddings": 131072},
        **{"num_local_experts": 8, "num_experts_per_tok": 2},
    }
    names = {"ffn_dim": "intermediate_size", "n_experts": "num_local_experts", "top_k": "num_experts_per_tok"}
    return _with_loss(config, renamed(config, _FIELDS | names, defaults) | rope_from(config)) | {"renormalize": True}


def _to_mixtral(model: dict[str, Any]) -> dict[str, Any]:
    """The other way."""
    _plain_routing(model)
    if model["qk_norm"]:
        raise ValueError("has no QK-norm")
    if model["attention_bias"]:
        raise ValueError("has no biases in attention")
    if not model["renormalize"] and model["router_scores"] == "softmax":
        raise ValueError("always divides a token's weights by their sum")
    config = {theirs: model[ours] for ours, theirs in _FIELDS.items()} | rope_to(model)
    config |= {"intermediate_size": model["ffn_dim"], "num_local_experts": model["n_experts"]}
    return config | _common(model) | {"sliding_window": None}


def _from_qwen3(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of `MoEConfig` out of the config.json of a Qwen3MoeForCausalLM."""
    only(config, "hidden_act", "silu")
    only(config, "use_sliding_window", False, None)
    only(config, "decoder_sparse_step", 1)
    only(config, "mlp_only_layers", [], None)
    heads = config["num_attention_heads"]
    defaults = _DEFAULTS | {
        **{"num_key_value_heads": 4, "head_dim": config["hidden_size"] // heads, "max_position_embeddings": 32768},
        **{"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": False, "attention_bias": False},
    }
    # The published models have num_experts; transformers 5 writes num_local_experts.
    config = {"num_experts": config.get("num_local_experts")} | config
    names = {
        **{"ffn_dim": "moe_intermediate_size", "n_experts": "num_experts", "top_k": "num_experts_per_tok"},
        **{"renormalize": "norm_topk_prob", "attention_bias": "attention_bias"},
    }
    return _with_loss(config, renamed(config, _FIELDS | names, defaults) | rope_from(config)) | {"qk_norm": True}


def _to_qwen3(model: dict[str, Any]) -> dict[str, Any]:
    """The other way."""
    _plain_routing(model)
    if not model["qk_norm"]:
        raise ValueError("has QK-norm")
    config = {theirs: model[ours] for ours, theirs in _FIELDS.items()} | rope_to(model)
    config |= {
        **{"moe_intermediate_size": model["ffn_dim"], "num_experts": model["n_experts"]},
        **{"norm_topk_prob": model["renormalize"] or model["router_scores"] == "softmax_after"},
        **{"attention_bias": model["attention_bias"], "decoder_sparse_step": 1, "mlp_only_layers": []},
        **{"use_sliding_window": False, "sliding_window": None, "intermediate_size": model["ffn_dim"]},
    }
    return config | _common(model)


def _with_loss(config: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """With the balance loss that a config.json asks for."""
    weight = float((_DEFAULTS | config)["router_aux_loss_coef"] or 0.0)
    return model | {"balance_loss": weight, "balance_over": "model"}


def _common(model: dict[str, Any]) -> dict[str, Any]:
    return {
        **{"num_experts_per_tok": model["top_k"], "router_aux_loss_coef": model["balance_loss"]},
        **{"output_router_logits": False, "hidden_act": "silu"},
    }


def _plain_routing(model: dict[str, Any]) -> None:
    if model["n_shared_experts"]:
        raise ValueError("has no shared experts")
    if model["router_scores"] == "sigmoid":
        raise ValueError("weights experts by softmax, not sigmoid")
    if model["bias_rate"]:
        raise ValueError("has no biases that balance experts")


def _experts(block: str, names: tuple[str, str, str]) -> dict[str, str]:
    """Our stacks of experts' weights -> their modules, one for each expert."""
    stacks = {
        f"layers.*.feed_forward.experts.{ours}": f"model.layers.*.{block}.experts.{{}}.{theirs}.weight"
        for ours, theirs in zip(("w1", "w2", "w3"), names)
    }
    return stacks | {"layers.*.feed_forward.router": f"model.layers.*.{block}.gate"}


HF = (
    HuggingFace(
        "mixtral",
        "MixtralForCausalLM",
        _ATTENTION | _experts("block_sparse_moe", ("w1", "w2", "w3")),
        _from_mixtral,
        _to_mixtral,
    ),
    HuggingFace(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        _ATTENTION
        | _experts("mlp", ("gate_proj", "down_proj", "up_proj"))
        | {
            "layers.*.attention.q_norm": "model.layers.*.self_attn.q_norm",
            "layers.*.attention.k_norm": "model.layers.*.self_attn.k_norm",
        },
        _from_qwen3,
        _to_qwen3,
    ),
)
"""Theirs are one tensor for each expert. A folder does not say whether its model was trained with a balance loss; what
config.json has for it is what transformers would train it with."""
