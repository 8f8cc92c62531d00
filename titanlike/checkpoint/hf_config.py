"""Hugging Face's names and config of a Llama, to and from ours. What can't be said in the other one is refused by
name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from titanlike.errors import UserError

# Our config field -> theirs. rope_* and the fields that have no counterpart here are treated below.
_FIELDS = {
    "vocab_size": "vocab_size",
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_dim": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "attention_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}
_LLAMA3_ROPE = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def hf_name(name: str) -> str:
    """The Hugging Face name of one of our parameters: `layers.3.attention.wq.weight` -> `model.layers.3.self_attn...`.

    Raises UserError for a parameter that a Llama doesn't have.
    """
    from parallelize.llama import HF_NAMES

    module, _, kind = name.rpartition(".")
    number = re.search(r"\.(\d+)\.", module)
    pattern = module.replace(f".{number[1]}.", ".*.", 1) if number else module
    if pattern not in HF_NAMES:
        raise UserError(f"{name} is not a parameter of a Llama: only Llama models have a Hugging Face form")
    theirs = HF_NAMES[pattern].replace("*", number[1] if number else "")
    return f"{theirs}.{kind}"


def is_buffer(name: str) -> bool:
    """Whether a tensor of a Hugging Face folder is no weight: old ones hold the rotary frequencies too."""
    return name.endswith(".rotary_emb.inv_freq")


def to_hf_config(model: dict[str, Any], dtype: str, end_id: int | None) -> dict[str, Any]:
    """The config.json of `LlamaForCausalLM` for our model config. `end_id`: the token that ends a text."""
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    config |= {theirs: model[ours] for ours, theirs in _FIELDS.items()}
    config["rope_theta"] = model["rope_theta"]
    scaling = model["rope_scaling"]
    config["rope_scaling"] = None if scaling is None else {"rope_type": "llama3", **scaling}
    # We begin a text where the one before it ended, so the same token does both.
    config |= {"bos_token_id": end_id, "eos_token_id": end_id, "torch_dtype": dtype, "use_cache": True}
    return config


def from_hf_config(config: dict[str, Any], source: Path) -> dict[str, Any]:
    """Our model config for a Hugging Face config.json, as the fields of `LlamaConfig`. `source` is for messages.

    Raises UserError for a model that is not a Llama as we build it.
    """
    kind = config.get("model_type")
    if kind != "llama":
        raise UserError(f"{source} describes a {kind!r} model; only 'llama' can be read")
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"{source} has hidden_act = {config['hidden_act']!r}; only 'silu' can be read")
    try:
        heads, width = config["num_attention_heads"], config["hidden_size"]
        defaults = {
            "num_key_value_heads": heads,
            "head_dim": width // heads,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
        }
        given = defaults | {key: value for key, value in config.items() if value is not None}
        model = {ours: given[theirs] for ours, theirs in _FIELDS.items()}
        # One table since transformers 5, two keys before.
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        model["rope_theta"] = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
        rope_type = rope.get("rope_type") or rope.get("type") or "default"
        if rope_type not in ("default", "llama3"):
            raise UserError(
                f"{source} has rotary embeddings of type {rope_type!r}; only 'default' and 'llama3' can be read"
            )
        model["rope_scaling"] = {key: rope[key] for key in _LLAMA3_ROPE} if rope_type == "llama3" else None
    except (KeyError, TypeError, ZeroDivisionError) as error:
        raise UserError(f"{source} lacks what a Llama needs: {error!r}") from error
    return model


def compare_models(have: dict[str, Any], wanted: dict[str, Any], source: Any) -> list[str]:
    """What differs between the model of `source` and the run's. Returns sentences about differences that weights
    survive.

    Raises UserError, naming the key, for one that they don't: the shape of the model.
    """
    for key in (
        "vocab_size",
        "dim",
        "n_layers",
        "n_heads",
        "n_kv_heads",
        "head_dim",
        "ffn_dim",
        "attention_bias",
        "mlp_bias",
    ):
        if key in have and have[key] != wanted[key]:
            raise UserError(f"model.{key} is {wanted[key]} in this run, but {source} has {have[key]}")
    if wanted["tie_embeddings"] and not have.get("tie_embeddings", True):
        raise UserError(f"model.tie_embeddings is true in this run, but {source} has an output projection of its own")
    notes = []
    for key in ("norm_eps", "rope_theta", "rope_scaling"):
        if key in have and have[key] != wanted[key]:
            notes.append(f"model.{key} is {wanted[key]} in this run, and was {have[key]} in {source}")
    return notes
