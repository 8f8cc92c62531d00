"""Cross-entropy of logits that are split over the vocabulary, without ever making whole ones (arXiv:1909.08053,
section 3), in torch's fused softmax kernels.

torch's `loss_parallel` writes the softmax out in single operations on DTensors, which for a vocabulary of thousands is
eight times the time. Numbers in docs/LOG.md.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from parallelize.buckets import all_gather


def vocab_parallel_cross_entropy_sum(logits: DTensor, labels: Tensor, ignore: int) -> Tensor:
    """Sum of the cross-entropies in nats, a local scalar, the same on all ranks.

    logits [tokens, vocab], split over the vocabulary on a one-dimensional mesh; labels [tokens] int64, `ignore` where
    there is no loss. All ranks of the mesh take part.
    """
    mesh = logits.device_mesh
    assert tuple(logits.placements) == (Shard(1),), logits.placements
    first = mesh.get_local_rank() * -(-logits.shape[1] // mesh.size())  # as torch.chunk cuts
    return _CrossEntropySum.apply(
        logits.to_local(grad_placements=list(logits.placements)), labels, first, ignore, mesh.get_group()
    )  # type: ignore[return-value]


class _CrossEntropySum(torch.autograd.Function):
    """Of the logits [tokens, ids of this rank], of which `first` is the first id."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int, ignore: int, group: dist.ProcessGroup) -> Tensor:
        counts = labels != ignore
        own = labels - first
        here = counts & (own >= 0) & (own < logits.shape[1])
        own = own.masked_fill(~here, 0)[:, None]
        # log(sum(exp(logits))) over this rank's ids: softmax subtracts it, and in one pass.
        log_sum = logits[:, 0] - logits.log_softmax(1)[:, 0]  # [tokens]
        wanted = logits.gather(1, own)[:, 0].masked_fill(~here, 0)  # the label's logit, on the rank that has it
        parts = logits.new_empty(group.size() * 2, len(labels))
        all_gather(parts, torch.stack((log_sum, wanted)), group).wait()  # the tp ranks: each has a part of the ids
        log_sums, wanteds = parts.view(group.size(), 2, -1).unbind(1)
        total = log_sums.logsumexp(0)
        ctx.save_for_backward(logits, own, here, (log_sum - total).exp().masked_fill(~counts, 0))
        return (total - wanteds.sum(0)).masked_fill(~counts, 0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # type: ignore[override]
        logits, own, here, share = ctx.saved_tensors  # share: of the probability, that of this rank's ids
        out = logits.softmax(1).mul_((share * grad)[:, None])
        return out.scatter_add_(1, own, (here * -grad).to(out.dtype)[:, None]), None, None, None, None
