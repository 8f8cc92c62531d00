"""Qwen3, dense (arXiv:2505.09388): a Llama whose queries and keys are normalised before RoPE.

What differs from models/llama.py:
- RMSNorm over each query head and each key head, with one weight of head_dim for all heads (QK-norm,
  arXiv:2302.05442).
- head_dim is a size of its own: 128 in all published models, so that n_heads * head_dim is not dim in most of them.
- No biases in the feed-forward; none in attention either unless attention_bias, which no published model has (those of
  Qwen2 have some).
- The small models (0.6b, 1.7b, 4b) tie the output projection to the embedding.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from torch import Tensor

from models.llama import Attention, Block, Llama, LlamaConfig, RMSNorm


@dataclasses.dataclass(frozen=True)
class Qwen3Config(LlamaConfig):
    """The shape of a Qwen3. Raises ValueError for shapes that cannot be built."""

    max_seq_len: int = 40960
    """The longest context, in tokens, that the model is meant for."""
    norm_eps: float = 1e-6
    """Added to the mean square in RMSNorm, that of queries and keys too."""
    rope_theta: float = 1000000.0
    """Base of the RoPE frequencies (arXiv:2104.09864)."""
    mlp_bias: ClassVar[bool] = False  # type: ignore[misc]  # a key of Llama that there is none of here


class Qwen3Attention(Attention):
    """Grouped-query attention with RMSNorm over each query and key head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().heads(x)
        return self.q_norm(q), self.k_norm(k), v


class Qwen3Block(Block):
    """Llama's block with Qwen3's attention."""

    attention_class = Qwen3Attention


class Qwen3(Llama):
    """tokens [batch, seq] int64 -> logits [batch, seq, vocab_size]."""

    config_class = Qwen3Config
    block_class = Qwen3Block


ARCHITECTURE = Qwen3

PRESETS: dict[str, Qwen3Config] = {
    # About 1.4M parameters with the byte vocabulary: for trying things on a laptop. Heads are wider than dim / n_heads.
    "debug": Qwen3Config(
        vocab_size=512, dim=160, n_layers=4, n_heads=8, n_kv_heads=2, head_dim=32, ffn_dim=480, max_seq_len=2048,
        tie_embeddings=True,
    ),
    # The published models, with their shapes.
    "0.6b": Qwen3Config(
        vocab_size=151936, dim=1024, n_layers=28, n_heads=16, n_kv_heads=8, head_dim=128, ffn_dim=3072,
        tie_embeddings=True,
    ),
    "1.7b": Qwen3Config(
        vocab_size=151936, dim=2048, n_layers=28, n_heads=16, n_kv_heads=8, head_dim=128, ffn_dim=6144,
        tie_embeddings=True,
    ),
    "4b": Qwen3Config(
        vocab_size=151936, dim=2560, n_layers=36, n_heads=32, n_kv_heads=8, head_dim=128, ffn_dim=9728,
        tie_embeddings=True,
    ),
    "8b": Qwen3Config(
        vocab_size=151936, dim=4096, n_layers=36, n_heads=32, n_kv_heads=8, head_dim=128, ffn_dim=12288,
    ),
    "14b": Qwen3Config(
        vocab_size=151936, dim=5120, n_layers=40, n_heads=40, n_kv_heads=8, head_dim=128, ffn_dim=17408,
    ),
    "32b": Qwen3Config(
        vocab_size=151936, dim=5120, n_layers=64, n_heads=64, n_kv_heads=8, head_dim=128, ffn_dim=25600,
    ),
}  # fmt: skip
