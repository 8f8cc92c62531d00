"""The loss computed over a part of the positions at a time, so that logits of all of them never exist at once.

The logits are the largest activation of a model with a large vocabulary: of 16,384 tokens and 128,256 ids 8.4 GB in
float32, and as much again for their gradient. Each chunk's logits are forgotten after its loss and computed again in
the backward, which costs the output projection's forward once more. Sums of chunks add up to the same loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

Head = Callable[[Tensor], Tensor]
Loss = Callable[[Head, Tensor, Tensor], Tensor]


class ChunkedLoss:
    """A loss `inner(head, hidden, labels)` that is a sum over positions, computed `positions` of each row at a time.

    hidden [batch, seq, dim], labels [batch, seq]. Under sequence parallelism a chunk has an equal part of the positions
    of every tp rank, so that no rank has to hand on hidden states first, and one of each at least.
    """

    def __init__(self, inner: Loss, positions: int | None) -> None:
        """`positions`: of each row at a time; None: all."""
        self.inner = inner
        self.positions = positions

    def __call__(self, head: Head, hidden: Tensor, labels: Tensor) -> Tensor:
        if self.positions is None or labels.shape[1] <= self.positions:
            return self.inner(head, hidden, labels)
        chunks = -(-labels.shape[1] // self.positions)
        total: Tensor | None = None
        for some, wanted in zip(*_cut(hidden, labels, chunks)):
            loss = checkpoint(self.inner, head, some, wanted, use_reentrant=False, preserve_rng_state=False)
            total = loss if total is None else total + loss
        assert total is not None
        return total


def _cut(hidden: Tensor, labels: Tensor, chunks: int) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The chunks of both, of nearly equal size."""
    if not isinstance(hidden, DTensor):
        return list(hidden.tensor_split(chunks, dim=1)), list(labels.tensor_split(chunks, dim=1))
    mesh, placements = hidden.device_mesh, hidden.placements
    ranks = mesh.size() if placements[0] == Shard(1) else 1
    local = hidden.to_local()
    chunks = min(chunks, local.shape[1])
    by_rank = labels.unflatten(1, (ranks, labels.shape[1] // ranks)).tensor_split(chunks, dim=2)
    parts = [DTensor.from_local(part, mesh, placements, run_check=False) for part in local.tensor_split(chunks, dim=1)]
    return parts, [part.flatten(1, 2) for part in by_rank]
