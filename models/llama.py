"""The Llama family (arXiv:2302.13971, arXiv:2407.21783): a pre-norm decoder with RMSNorm, RoPE, grouped-query
attention, SwiGLU.

Properties:
- Plain single-device code: no parallelism, no dtype policy, no device. What runs on many ranks is made from this module
  by `parallelize`, which relies on three parts that every model here has: `embed`, `layers`, `head`.
- Parameter names are final: checkpoints, logs and optimizer groups use them (`layers.3.attention.wq.weight`).
- Rotary layout: half-split, as in Hugging Face weights. Element i of a head is rotated with element i + head_dim / 2,
  so weights go to and from Hugging Face without a permutation. Meta's original files use the interleaved layout (i with
  i + 1) and would have to be permuted first.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1 frequency scaling, which stretches the low RoPE frequencies for long contexts (arXiv:2407.21783)."""

    factor: float
    """How much the lowest frequencies are slowed down."""
    low_freq_factor: float = 1.0
    """Wavelengths over original_max_position_embeddings / low_freq_factor are slowed by the whole factor."""
    high_freq_factor: float = 4.0
    """Wavelengths under original_max_position_embeddings / high_freq_factor are left as they are."""
    original_max_position_embeddings: int = 8192
    """The context, in tokens, of the training before the scaling."""

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"):
            if getattr(self, name) <= 0:
                raise ValueError(f"rope_scaling.{name} must be more than 0, not {getattr(self, name)}")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"rope_scaling.high_freq_factor ({self.high_freq_factor}) must be more than low_freq_factor "
                f"({self.low_freq_factor})"
            )


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The shape of a Llama. Raises ValueError for shapes that cannot be built."""

    vocab_size: int
    """Number of token ids; when not given, that of the tokenizer."""
    dim: int = 256
    """Width of the residual stream."""
    n_layers: int = 4
    """Number of blocks."""
    n_heads: int = 4
    """Number of query heads."""
    n_kv_heads: int | None = None
    """Number of key and value heads (grouped-query attention, arXiv:2305.13245); when not given, n_heads."""
    head_dim: int | None = None
    """Width of one head; when not given, dim / n_heads."""
    ffn_dim: int | None = None
    """Hidden width of the SwiGLU; when not given, 8/3 of dim rounded up to a multiple of 64."""
    max_seq_len: int = 8192
    """The longest context, in tokens, that the model is meant for."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    rope_theta: float = 10000.0
    """Base of the RoPE frequencies (arXiv:2104.09864)."""
    rope_scaling: RopeScaling | None = None
    """Llama 3.1 frequency scaling, or none."""
    attention_bias: bool = False
    """Whether wq, wk, wv and wo have biases."""
    mlp_bias: bool = False
    """Whether w1, w2 and w3 have biases."""
    tie_embeddings: bool = False
    """Whether the output projection is the token embedding's weight."""
    init_std: float = 0.02
    """Standard deviation of the initial weights; see Llama.init_parameter."""

    def __post_init__(self) -> None:
        for name, value in (
            ("n_kv_heads", self.n_heads),
            ("head_dim", self.dim // max(self.n_heads, 1)),
            ("ffn_dim", -(-8 * self.dim // (3 * 64)) * 64),
        ):
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for name in ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "max_seq_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads ({self.n_heads}) must be a multiple of n_kv_heads ({self.n_kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings, not {self.head_dim}")
        if self.rope_theta <= 0:
            raise ValueError(f"rope_theta must be more than 0, not {self.rope_theta}")
        for name in ("norm_eps", "init_std"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 or more, not {getattr(self, name)}")


class Context(NamedTuple):
    """What every block of one forward pass shares."""

    cos: Tensor
    """[batch or 1, seq, 1, head_dim] cosines of the rotary angles"""
    sin: Tensor
    """[batch or 1, seq, 1, head_dim] sines of the rotary angles"""
    mask: Tensor | None
    """[batch, 1, seq, keys] bool, True where attention is allowed; None: causal. Without a cache, keys is seq"""
    cache: Any = None
    """What a block's attention keeps of earlier tokens when text is generated, or None: `cache.attend(q, k, v, mask)`
    attends to what it has kept and to these. Differs from block to block."""


def rope_frequencies(config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The [head_dim / 2] rotary frequencies in radians per position (arXiv:2104.09864, section 3.2.2)."""
    exponent = torch.arange(0, config.head_dim, 2, device=device, dtype=dtype) / config.head_dim
    frequencies = config.rope_theta**-exponent
    if config.rope_scaling is None:
        return frequencies
    scaling = config.rope_scaling
    rotations = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)  # turns within the old context
    keep = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0, 1)  # 1: high frequency, kept; 0: low frequency, slowed; between: blended
    return frequencies * (keep + (1 - keep) / scaling.factor)


def make_context(
    config: LlamaConfig, tokens_like: Tensor, positions: Tensor | None, document_ids: Tensor | None
) -> Context:
    """The rotary tables and the attention mask of a batch.

    `tokens_like` [batch, seq, ...] gives the shape and the device; `positions` [batch, seq] default to 0, 1, 2, ...;
    with `document_ids` [batch, seq] a token attends to earlier tokens of its own document alone.
    """
    seq = tokens_like.shape[1]
    # Angles need float32 at least: bfloat16 cannot tell position 257 from 256.
    dtype = torch.float64 if tokens_like.dtype == torch.float64 else torch.float32
    if positions is None:
        positions = torch.arange(seq, device=tokens_like.device)[None]  # [1, seq]
    angles = positions[..., None].to(dtype) * rope_frequencies(config, tokens_like.device, dtype)
    angles = torch.cat((angles, angles), dim=-1)[:, :, None]  # [batch or 1, seq, 1, head_dim]
    mask = None
    if document_ids is not None:
        same = document_ids[:, :, None] == document_ids[:, None, :]
        causal = torch.ones(seq, seq, dtype=torch.bool, device=tokens_like.device).tril()
        mask = (same & causal)[:, None]
    return Context(angles.cos(), angles.sin(), mask)


def rotate(x: Tensor, context: Context) -> Tensor:
    """Apply RoPE to x [batch, seq, heads, head_dim], half-split layout, in the precision of the table."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x * context.cos + turned * context.sin).to(x.dtype)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim (arXiv:1910.07467)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention. Head counts are read off the projections, so it also runs on a part of the
    heads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        bias = config.attention_bias
        self.wq = nn.Linear(config.dim, config.n_heads * config.head_dim, bias=bias)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=bias)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=bias)
        self.wo = nn.Linear(config.n_heads * config.head_dim, config.dim, bias=bias)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [batch, seq, heads, head_dim], keys and values [batch, seq, kv_heads, head_dim], before RoPE."""
        q = self.wq(x).unflatten(-1, (-1, self.head_dim))
        k = self.wk(x).unflatten(-1, (-1, self.head_dim))
        v = self.wv(x).unflatten(-1, (-1, self.head_dim))
        return q, k, v

    def forward(self, x: Tensor, context: Context) -> Tensor:
        q, k, v = self.heads(x)  # [batch, seq, heads or kv_heads, head_dim]
        q, k = rotate(q, context), rotate(k, context)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [batch, heads, seq, head_dim]
        if context.cache is not None:
            out = context.cache.attend(q, k, v, context.mask)
        else:
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=context.mask, is_causal=context.mask is None, enable_gqa=k.shape[1] != q.shape[1]
            )
        return self.wo(out.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202): w2(silu(w1 x) * w3 x)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=config.mlp_bias)
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=config.mlp_bias)
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    attention_class: type[Attention] = Attention
    """what a family with another attention has another of"""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = self.attention_class(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        x = x + self.attention(self.attention_norm(x), context)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """tokens [batch, seq] int64 -> logits [batch, seq, vocab_size]."""

    config_class = LlamaConfig
    block_class: type[Block] = Block
    """what a family with another block has another of"""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): self.block_class(config) for i in range(config.n_layers)})
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    @property
    def tied_parameters(self) -> dict[str, str]:
        """Second name of a shared parameter -> the name that it goes by."""
        return {"output.weight": "tok_embeddings.weight"} if self.config.tie_embeddings else {}

    def context(
        self, tokens_like: Tensor, positions: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Context:
        """What the blocks share in one forward pass; see make_context."""
        return make_context(self.config, tokens_like, positions, document_ids)

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens [batch, seq] -> [batch, seq, dim]"""
        return self.tok_embeddings(tokens)

    def head(self, x: Tensor) -> Tensor:
        """[batch, seq, dim] -> logits [batch, seq, vocab_size]"""
        return self.output(self.norm(x))

    def forward(self, tokens: Tensor, positions: Tensor | None = None, document_ids: Tensor | None = None) -> Tensor:
        x = self.embed(tokens)
        context = self.context(x, positions, document_ids)
        for layer in self.layers.values():
            x = layer(x, context)
        return self.head(x)

    def init_parameter(self, name: str, value: Tensor, generator: torch.Generator) -> None:
        """Fill `value`, the whole parameter `name`, in place with its initial values.

        Weights are normal with init_std; the projections that write to the residual stream (wo, w2) are scaled down by
        sqrt(2 * n_layers), so that its variance does not grow with depth (GPT-2, section 2.3, as in Megatron-LM,
        arXiv:1909.08053). Norm weights are 1, biases 0.
        """
        if name.endswith(".bias"):
            value.zero_()
        elif name.split(".")[-2].endswith("norm"):
            value.fill_(1.0)
        else:
            std = self.config.init_std
            if name.endswith(("attention.wo.weight", "feed_forward.w2.weight")):
                std /= math.sqrt(2 * self.config.n_layers)
            value.normal_(0.0, std, generator=generator)


ARCHITECTURE = Llama

_LLAMA3_SCALING = RopeScaling(factor=8.0, original_max_position_embeddings=8192)
_LLAMA32_SCALING = RopeScaling(factor=32.0, original_max_position_embeddings=8192)

PRESETS: dict[str, LlamaConfig] = {
    # About 2M parameters with the byte vocabulary: for trying things on a laptop.
    "debug": LlamaConfig(vocab_size=512, dim=192, n_layers=4, n_heads=6, n_kv_heads=2, ffn_dim=512, max_seq_len=2048),
    "26m": LlamaConfig(vocab_size=8192, dim=512, n_layers=6, n_heads=8, n_kv_heads=4, ffn_dim=1408, max_seq_len=2048),
    # Llama 3.2 1B and 3B, Llama 3.1 8B and 70B, with the published shapes.
    "1b": LlamaConfig(
        vocab_size=128256, dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, head_dim=64, ffn_dim=8192,
        max_seq_len=131072, rope_theta=500000.0, rope_scaling=_LLAMA32_SCALING, tie_embeddings=True,
    ),
    "3b": LlamaConfig(
        vocab_size=128256, dim=3072, n_layers=28, n_heads=24, n_kv_heads=8, head_dim=128, ffn_dim=8192,
        max_seq_len=131072, rope_theta=500000.0, rope_scaling=_LLAMA32_SCALING, tie_embeddings=True,
    ),
    "8b": LlamaConfig(
        vocab_size=128256, dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, ffn_dim=14336, max_seq_len=131072,
        rope_theta=500000.0, rope_scaling=_LLAMA3_SCALING,
    ),
    "70b": LlamaConfig(
        vocab_size=128256, dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, ffn_dim=28672, max_seq_len=131072,
        rope_theta=500000.0, rope_scaling=_LLAMA3_SCALING,
    ),
}  # fmt: skip
