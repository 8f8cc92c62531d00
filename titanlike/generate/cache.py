"""What attention keeps of the tokens before, so that a new token costs one token's work.

A plain model knows only that `context.cache.attend` is attention; see models.llama.Context. Under tensor parallelism
attention sees the heads of its own rank, so the cache is split by kv head without being told.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


class AttentionCache:
    """Keys and values of one attention for the rows of one batch, [rows, kv_heads, length, head_dim]; made at the first
    use, when heads, dtype and device are seen."""

    def __init__(self, length: int) -> None:
        """Room for `length` tokens a row."""
        self.length = length
        self.filled = 0
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Keep k and v of the next tokens, and attend to all that are kept.

        q [rows, heads, seq, head_dim], k and v [rows, kv_heads, seq, head_dim], with positions applied; mask [rows, 1,
        seq or 1, kept + seq] bool, True where attention is allowed, or None: every earlier token. Several tokens at
        once after the first time need a mask. Returns [rows, heads, seq, head_dim].
        """
        rows, kv_heads, seq, head_dim = k.shape
        start, end = self.filled, self.filled + seq
        assert end <= self.length, f"{end} tokens in a cache of {self.length}"
        if self.keys is None or self.values is None:
            self.keys = k.new_empty(rows, kv_heads, self.length, head_dim)
            self.values = v.new_empty(rows, kv_heads, self.length, head_dim)
        self.keys[:, :, start:end] = k
        self.values[:, :, start:end] = v
        self.filled = end
        if start == 0:  # the prompt
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != kv_heads
            )
        assert seq == 1 or mask is not None
        keys, values = self.keys[:, :, :end], self.values[:, :, :end]
        if seq > 1:
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=q.shape[1] != kv_heads)
        # One token: the query heads that share a kv head are the rows of one small matrix, so no kv head is repeated.
        grouped = q.reshape(rows, kv_heads, -1, head_dim)
        return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(q.shape)
