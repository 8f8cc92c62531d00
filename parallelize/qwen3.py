"""How a Qwen3 is cut: as a Llama is (parallelize/llama.py), and what QK-norm adds.

The two norms of a block's attention work on the heads of their own rank, between projection and RoPE: their weights are
whole on every rank, and the gradients of them are partial sums over tp, added up once per step.
"""

from __future__ import annotations

from typing import Any

from models.qwen3 import Qwen3Config
from parallelize import llama
from parallelize.hf import HuggingFace, only, renamed, rope_from, rope_to
from parallelize.llama import FIRST_PARTS, HF_FIELDS, HF_NAMES, LAST_PARTS, stage_costs
from parallelize.tensor import ReplicatedOverHeads, TensorPlan

__all__ = ["FIRST_PARTS", "HF", "LAST_PARTS", "stage_costs", "tensor_plan"]


def tensor_plan(config: Qwen3Config, tp: int, sequence_parallel: bool) -> TensorPlan:
    """The table."""
    return llama.tensor_plan(config, tp, sequence_parallel) | {
        "layers.*.attention.q_norm": ReplicatedOverHeads(),
        "layers.*.attention.k_norm": ReplicatedOverHeads(),
    }


def from_hf_config(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of `Qwen3Config` out of the config.json of a Qwen3ForCausalLM."""
    only(config, "hidden_act", "silu")
    only(config, "use_sliding_window", False, None)
    defaults = {
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    }
    return renamed(config, HF_FIELDS, defaults) | rope_from(config)


def to_hf_config(model: dict[str, Any]) -> dict[str, Any]:
    """The other way."""
    config = {theirs: model[ours] for ours, theirs in HF_FIELDS.items()} | rope_to(model)
    return config | {"hidden_act": "silu", "use_sliding_window": False, "sliding_window": None}


HF = (
    HuggingFace(
        "qwen3",
        "Qwen3ForCausalLM",
        HF_NAMES
        | {
            "layers.*.attention.q_norm": "model.layers.*.self_attn.q_norm",
            "layers.*.attention.k_norm": "model.layers.*.self_attn.k_norm",
        },
        from_hf_config,
        to_hf_config,
    ),
)
