"""Activation checkpointing: forget a block's activations in forward and compute them again in backward.

`full` forgets everything but a block's input (arXiv:1604.06174). `selective` keeps the results of matrix products and
attention, which are dear to compute, and recomputes the rest (arXiv:2205.05198). Parameter names do not change.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

KEEP = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
    torch.ops._c10d_functional.all_reduce.default,
)
"""What `selective` keeps: matrix products, attention, and reductions over tp, which are slow to repeat. An architecture
with other costly operations names them in its `RECOMPUTE_KEEPS`."""


def _policy(keep: tuple[Any, ...], _context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in keep else CheckpointPolicy.PREFER_RECOMPUTE


def apply_activation_checkpoint(block: nn.Module, mode: str, keep: tuple[Any, ...] = ()) -> None:
    """Wrap the block's forward in place; `mode` is none, full or selective, which keeps the operations in `keep`
    too."""
    if mode == "none":
        return
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_policy, (*KEEP, *keep)))
    block.forward = partial(checkpoint, block.forward, **options)  # type: ignore[method-assign]
