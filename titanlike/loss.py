"""The loss: the sum of the token losses, to be divided by the number of valid labels in the *global* batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallelize.vocab_loss import vocab_parallel_cross_entropy_sum

IGNORE = -100
"""The label of a position that has no loss."""


def cross_entropy_sum(head: Callable[[Tensor], Tensor], hidden: Tensor, labels: Tensor) -> Tensor:
    """Sum of the cross-entropies in nats, a float32 (or float64) scalar.

    `head` maps hidden [batch, seq, dim] to logits [batch, seq, vocab]; labels [batch, seq] int64, IGNORE where there is
    no loss. Logits that are a DTensor split over the vocabulary are never gathered. Compiled, their loss is torch's
    `loss_parallel`, which is then needed around forward and backward, and which the compiler fuses.
    """
    logits = head(hidden).flatten(0, 1)
    if logits.dtype != torch.float64:
        logits = logits.float()
    if isinstance(logits, DTensor) and not torch.compiler.is_compiling():
        return vocab_parallel_cross_entropy_sum(logits, labels.flatten(), IGNORE)
    loss = F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORE, reduction="sum")
    return loss.to_local() if isinstance(loss, DTensor) else loss
