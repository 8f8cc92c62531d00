"""How a Llama is cut: the tensor-parallel table, the cost of each part for pipeline stages, what recomputation keeps.

One block under tp with sequence parallelism, `s` = split over tp along the sequence, `h` = along heads or hidden units:

    x (s) -> attention_norm (s) -> all-gather -> wq wk wv (h) -> attention (h) -> wo -> reduce-scatter (s) -> + x (s)
          -> ffn_norm (s)       -> all-gather -> w1 w3 (h)    -> silu * (h)    -> w2 -> reduce-scatter (s) -> + (s)
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from models.llama import LlamaConfig
from parallelize.hf import HuggingFace, only, renamed, rope_from, rope_to
from parallelize.tensor import Replicated, ReplicatedKV, TensorPlan, VocabParallelEmbedding

FIRST_PARTS = ("tok_embeddings",)
"""what the first pipeline stage holds besides layers"""

LAST_PARTS = ("norm", "output")
"""what the last pipeline stage holds besides layers"""


def tensor_plan(config: LlamaConfig, tp: int, sequence_parallel: bool) -> TensorPlan:
    """The table. `stream` is the placement of activations [batch, seq, dim] between blocks."""
    stream: Placement = Shard(1) if sequence_parallel else Replicate()
    whole = Replicate()
    norm = Replicated(local_output=not sequence_parallel)
    kv = ColwiseParallel() if config.n_kv_heads % tp == 0 else ReplicatedKV(config.n_kv_heads)
    enter = PrepareModuleInput(input_layouts=(stream, None), desired_input_layouts=(whole, None))
    enter_ffn = PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(whole,))
    # Local tensors cost less, but where tp doesn't divide the hidden units only a DTensor knows how many there are.
    hidden = ColwiseParallel(use_local_output=config.ffn_dim % tp == 0)
    leave = RowwiseParallel(output_layouts=stream, use_local_output=False)
    return {
        "tok_embeddings": VocabParallelEmbedding(output=stream),
        "layers.*.attention_norm": norm,
        "layers.*.attention": enter,
        "layers.*.attention.wq": ColwiseParallel(),
        "layers.*.attention.wk": kv,
        "layers.*.attention.wv": kv,
        "layers.*.attention.wo": leave,
        "layers.*.ffn_norm": norm,
        "layers.*.feed_forward": enter_ffn,
        "layers.*.feed_forward.w1": hidden,
        "layers.*.feed_forward.w3": hidden,
        "layers.*.feed_forward.w2": leave,
        "norm": norm,
        "output": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False),
    }


def stage_costs(config: LlamaConfig, seq_len: int) -> tuple[float, list[float], float]:
    """Forward FLOPs per token of the embedding, of each block, and of the head with the loss: what pipeline stages are
    balanced by. The embedding is a lookup, which costs memory traffic and no FLOPs."""
    attention = 2 * config.dim * config.head_dim * (2 * config.n_heads + 2 * config.n_kv_heads)
    scores = 2 * 2 * config.n_heads * config.head_dim * seq_len / 2  # causal: half of the square
    feed_forward = 3 * 2 * config.dim * config.ffn_dim
    return 0.0, [float(attention + scores + feed_forward)] * config.n_layers, 2.0 * config.dim * config.vocab_size


HF_NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "layers.*.attention_norm": "model.layers.*.input_layernorm",
    "layers.*.attention.wq": "model.layers.*.self_attn.q_proj",
    "layers.*.attention.wk": "model.layers.*.self_attn.k_proj",
    "layers.*.attention.wv": "model.layers.*.self_attn.v_proj",
    "layers.*.attention.wo": "model.layers.*.self_attn.o_proj",
    "layers.*.ffn_norm": "model.layers.*.post_attention_layernorm",
    "layers.*.feed_forward.w1": "model.layers.*.mlp.gate_proj",
    "layers.*.feed_forward.w2": "model.layers.*.mlp.down_proj",
    "layers.*.feed_forward.w3": "model.layers.*.mlp.up_proj",
    "norm": "model.norm",
    "output": "lm_head",
}
"""Modules here -> in Hugging Face's LlamaForCausalLM; `*` is a layer's number. The tensors are equal: same shapes, and
the rotary layout is the same (models/llama.py), so nothing is permuted."""

HF_FIELDS = {
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
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}
"""Fields of the config here -> in config.json; the same for all architectures that have these parts."""


def from_hf_config(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of `LlamaConfig` out of the config.json of a LlamaForCausalLM."""
    only(config, "hidden_act", "silu")
    heads = config["num_attention_heads"]
    defaults = {
        "num_key_value_heads": heads,
        "head_dim": config["hidden_size"] // heads,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    }
    return renamed(config, HF_FIELDS | {"mlp_bias": "mlp_bias"}, defaults) | rope_from(config)


def to_hf_config(model: dict[str, Any]) -> dict[str, Any]:
    """The other way."""
    config = {theirs: model[ours] for ours, theirs in HF_FIELDS.items()} | rope_to(model)
    return config | {"mlp_bias": model["mlp_bias"], "hidden_act": "silu"}


HF = (HuggingFace("llama", "LlamaForCausalLM", HF_NAMES, from_hf_config, to_hf_config),)
