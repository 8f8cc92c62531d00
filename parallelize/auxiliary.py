"""Losses that blocks bring in besides the cross-entropy (load balancing of experts), on any mesh.

A model that has such losses, or wants sums over the global batch after a step, has
- `auxiliary_sums(context)`: what one forward adds to the sums of its global batch, float64, of one shape, zero for
  layers that it does not hold;
- `has_auxiliary_loss`, and `auxiliary_loss(context, tokens, totals)`: the share of one forward in the losses, which are
  means over the `tokens` tokens of the global batch; `totals` are the sums over all of it if `needs_totals` (and
  `needs_all_layers`, those of other pipeline stages too), else None;
- `auxiliary_values(totals, tokens)` to log, and `after_update(totals)`, called after each optimizer step.

Properties:
- The loss that a stage returns, and that is logged, stays the cross-entropy: an auxiliary loss brings in its gradient
  alone, at the stage whose layers it belongs to. So no stage sends it anywhere, whatever the schedule.
- Gradients are in units of the sum of token losses, as all others: the share, a part of a mean, is multiplied by the
  number of valid labels of the global batch, by which the trainer divides.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _Attach(torch.autograd.Function):
    """Returns `out`; the gradient of `loss` is 1, whatever that of `out` is."""

    @staticmethod
    def forward(out: Tensor, loss: Tensor) -> Tensor:
        return out.clone()  # a stage's output must not be a view

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.dtype = inputs[1].dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return grad, torch.ones((), dtype=ctx.dtype, device=grad.device)


class Auxiliary:
    """What the stages of one rank share for the auxiliary losses of a step. `shape` is that of `auxiliary_sums`."""

    def __init__(self, shape: tuple[int, ...], tokens: int, share: float, device: torch.device) -> None:
        self.tokens = tokens
        """of the global batch"""
        self.share = share
        """of a loss that this rank brings in: 1 / tp where all tp ranks compute the same one, for gradients are added
        up over tp"""
        self.sums = torch.zeros(shape, dtype=torch.float64, device=device)
        """over this rank's forwards since `begin`"""
        self.totals = torch.zeros_like(self.sums)
        """over the whole batch, where they are counted before its first forward"""
        self.labels = torch.ones((), dtype=torch.float64, device=device)
        """valid labels of the global batch"""
        self.reduce_in_forward: dist.ProcessGroup | None = None
        """the dp group, where a forward of each of its ranks is the whole batch"""

    def begin(self) -> None:
        """A new step."""
        self.sums.zero_()

    def add(self, model: Any, context: Any) -> Tensor:
        """Take what one forward adds to the sums."""
        sums = model.auxiliary_sums(context)
        self.sums += sums
        return sums

    def attach(self, out: Tensor, model: Any, context: Any) -> Tensor:
        """`out`, a stage's output, with the gradient of its layers' auxiliary losses."""
        sums = self.add(model, context)
        if not (torch.is_grad_enabled() and model.has_auxiliary_loss):
            return out
        totals = self.totals if model.needs_totals else None
        if totals is not None and self.reduce_in_forward is not None:
            totals = sums
            if self.reduce_in_forward.size() > 1:
                dist.all_reduce(totals, group=self.reduce_in_forward)  # the dp ranks: each has its rows of the batch
        loss = model.auxiliary_loss(context, self.tokens, totals)
        out: Tensor = _Attach.apply(out, loss * (self.share * self.labels).to(loss.dtype))  # type: ignore[assignment]
        return out
