"""Buckets of parameters whose gradients are reduced, and whose weights are gathered, together (zero.py).

Properties:
- A bucket's gradients are one flat tensor [dp, shard_numel] in the master dtype, in the layout in which they are
  reduced; dp rank r's shard is row r.
- A parameter's shard is rows of its (tensor-parallel) local tensor: an n-d box of the plain tensor.
- Nothing is copied more often than from `.grad` into the bucket and from the gathered weights into the parameter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

Waiting = Callable[[str], contextlib.AbstractContextManager[Any]]
"""Gets the mesh axis, and is entered for as long as ranks along it are waited for"""


@dataclasses.dataclass(frozen=True)
class NamedParameter:
    """A parameter of this rank under its name in the plain model."""

    name: str
    parameter: nn.Parameter
    stage: int
    """index of the pipeline stage that holds it"""
    box_offset: tuple[int, ...]
    """where this rank's tensor-parallel part starts in the whole tensor"""
    tied_across: dist.ProcessGroup | None = None
    """the two pipeline ranks that hold copies of this parameter, if two do"""
    counts: bool = True
    """whether this rank's copy is the one that counts in the global norm (False on the second holder of a tied
    weight)"""
    shared_over: dist.ProcessGroup | None = None
    """the ranks along dp that hold the same part, if not all do: they reduce its gradient and shard its state (experts
    under ep)"""

    @property
    def replicated_over_tp(self) -> bool:
        """Whether each tp rank holds the whole parameter."""
        return isinstance(self.parameter, DTensor) and all(isinstance(p, Replicate) for p in self.parameter.placements)


def local_part(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor, sharing its memory; a plain tensor itself."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# torch 2.13 renamed these two; 2.11 and 2.12 have the old names alone.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def reduce_scatter(output: Tensor, whole: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start adding up the flat tensor `whole` over the group; rank r's `output` is the r-th part of the sum."""
    return _reduce_scatter(output, whole, group=group, async_op=True)


def exchange(received: Tensor, whole: Tensor, group: dist.ProcessGroup) -> dist.Work | None:
    """Start sending the r-th part of the flat tensor `whole` to rank r; `received` gets one part from each rank, in
    the order of the ranks. Adding them up makes it a reduce-scatter."""
    return dist.all_to_all_single(received, whole, group=group, async_op=True)


def all_gather(whole: Tensor, part: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Start collecting the flat parts of all ranks of the group into `whole`."""
    return _all_gather(whole, part, group=group, async_op=True)


class Slot:
    """One parameter's place in its bucket. dp rank r holds rows [r * rows, (r + 1) * rows) of the local tensor."""

    def __init__(self, named: NamedParameter, start: int, dp: int, dp_rank: int) -> None:
        self.named = named
        self.name = named.name
        self.parameter = named.parameter
        self.local_shape = tuple(local_part(named.parameter).shape) or (1,)
        self.row_numel = math.prod(self.local_shape[1:])
        self.rows = -(-self.local_shape[0] // dp)
        self.numel = self.rows * self.row_numel  # with padding
        self.start = start  # first element in the shard
        self.own_first = min(dp_rank * self.rows, self.local_shape[0])
        self.own_rows = min(self.rows, self.local_shape[0] - self.own_first)
        self.received = False  # whether a gradient came since the last reduction
        self.grad_views: tuple[Tensor, ...] = ()  # of the bucket's gradients

    def views(self, bucket: Tensor) -> tuple[Tensor, ...]:
        """The views of `bucket` [dp, shard_numel] that hold the parameter: one, or two when dp does not divide the
        rows."""
        whole, rest = divmod(self.local_shape[0], self.rows)
        numel = rest * self.row_numel
        views = (bucket[:whole, self.start : self.start + self.numel],) if whole else ()
        return (*views, bucket[whole, self.start : self.start + numel]) if rest else views

    def parts(self, local: Tensor) -> tuple[Tensor, ...]:
        """The parts of the local tensor that belong into `views`, of equal shapes."""
        whole, rest = divmod(self.local_shape[0], self.rows)
        if not rest:  # called for each parameter and microbatch: one operation, not three
            return (local.reshape(whole, self.numel),)
        rows, cut = local.reshape(self.local_shape), whole * self.rows
        parts = (rows[:cut].reshape(whole, self.numel),) if whole else ()
        return (*parts, rows[cut:].reshape(rest * self.row_numel))

    def own(self, shard: Tensor) -> Tensor:
        """The view of this rank's rows in `shard` [shard_numel], shaped like rows of the parameter."""
        return shard[self.start : self.start + self.own_rows * self.row_numel].view(
            self.own_rows, *self.local_shape[1:]
        )

    def own_rows_of(self, local: Tensor) -> Tensor:
        """This rank's rows of the whole local tensor."""
        return local.reshape(self.local_shape)[self.own_first : self.own_first + self.own_rows]


class Bucket:
    """Parameters that are reduced and gathered together."""

    def __init__(
        self, named: list[NamedParameter], dp_group: dist.ProcessGroup, dtype: torch.dtype, comm_dtype: torch.dtype
    ) -> None:
        self.dp_group = dp_group
        self.dp = dp_group.size()
        self.stage = named[0].stage
        self.tied_across = named[0].tied_across
        self.replicated_over_tp = named[0].replicated_over_tp
        self.counts = named[0].counts
        self.slots: list[Slot] = []
        numel = 0
        for each in named:
            self.slots.append(Slot(each, numel, self.dp, dp_group.rank()))
            numel += self.slots[-1].numel
        self.shard_numel = numel
        first = local_part(named[0].parameter)
        self.compute_dtype = first.dtype
        # Padding is never written, so it stays zero and adds nothing to sums and norms.
        self.grads = torch.zeros(self.dp, numel, dtype=dtype, device=first.device)
        for slot in self.slots:
            slot.grad_views = slot.views(self.grads)
        self.grad_shard = self.grads[0] if self.dp == 1 else torch.zeros(numel, dtype=dtype, device=first.device)
        # On one dp rank that computes in the master dtype, the compute weights are the master weights.
        self.aliased = self.dp == 1 and self.compute_dtype == dtype
        self.master = None if self.aliased else torch.zeros(numel, dtype=dtype, device=first.device)
        self.missing = len(self.slots)
        self.launched = False
        self.work: dist.Work | None = None
        self.comm_dtype = comm_dtype
        # An exchange of parts, added up here, sends as many bytes as a reduce-scatter. It is taken where the sum must
        # not be made in the dtype that is sent, and for CPU tensors, for gloo's own reduce-scatter is an all-reduce:
        # twice the bytes.
        self.exchanges = comm_dtype != dtype or first.device.type == "cpu"
        self.received: Tensor | None = None  # [dp, shard_numel] in the dtype that is sent, while it is under way
        self.gathered: Tensor | None = None  # [dp, shard_numel] in the compute dtype, while it is under way
        self.optimizer: torch.optim.Optimizer | None = None
        """over this rank's master weights, if it has rows of any parameter"""

    def reduce(self) -> None:
        """Start the sum over dp. All dp ranks take part: each gets the sum of its own rows."""
        assert not self.launched
        for slot in self.slots:
            if not slot.received:  # unused in this step: what is left of the last one must not count
                for view in slot.grad_views:
                    view.zero_()
            slot.received = False
        if self.dp > 1 and self.exchanges:
            sent = self.grads.to(self.comm_dtype)  # kept by the work until it is done
            self.received = torch.empty_like(sent)
            self.work = exchange(self.received.view(-1), sent.view(-1), self.dp_group)
        elif self.dp > 1:
            self.work = reduce_scatter(self.grad_shard, self.grads.view(-1), self.dp_group)
        self.launched = True
        self.missing = len(self.slots)

    def finish_reduce(self, tp_group: dist.ProcessGroup | None, waiting: Waiting) -> None:
        """Wait for the sum over dp, then add up the parts of tp ranks and of tied copies."""
        if self.work is not None:
            with waiting("dp"):
                self.work.wait()
            self.work = None
        if self.received is not None:
            add_up(self.received, self.grad_shard)
            self.received = None
        self.launched = False
        if self.replicated_over_tp and tp_group is not None:
            # Each tp rank saw its own part of the tokens (sequence parallel) or of the heads.
            with waiting("tp"):
                dist.all_reduce(self.grad_shard, group=tp_group)
        if self.tied_across is not None:
            # The first and the last stage each hold a copy of the tied weight and its gradient from one use.
            with waiting("pp"):
                dist.all_reduce(self.grad_shard, group=self.tied_across)

    def master_shard(self, slot: Slot) -> Tensor:
        """This rank's rows of a master weight, as a view."""
        if self.master is None:
            return local_part(slot.parameter).detach().view(slot.local_shape)
        return slot.own(self.master)

    @torch.no_grad()
    def update(self, grad_factor: Tensor, lr: float) -> None:
        """Multiply the gradient sums by `grad_factor` (a scalar tensor) and update this rank's master weights; `lr` is
        the learning rate before each group's own scale."""
        if self.optimizer is None:
            return
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        self.grad_shard.mul_(grad_factor.to(self.grad_shard.dtype))
        self.optimizer.step()

    def start_gather(self) -> None:
        """Start collecting the new weights from all dp ranks, in the compute dtype."""
        assert self.gathered is None
        if self.master is None:
            return
        shard = self.master.to(self.compute_dtype)
        if self.dp == 1:
            self.gathered = shard.view(1, -1)
            return
        self.gathered = torch.empty(self.dp, self.shard_numel, dtype=self.compute_dtype, device=shard.device)
        self.work = all_gather(self.gathered.view(-1), shard, self.dp_group)

    def finish_gather(self, waiting: Waiting) -> None:
        """Copy the collected weights into the parameters."""
        assert self.gathered is not None
        if self.work is not None:
            with waiting("dp"):
                self.work.wait()
            self.work = None
        with torch.no_grad():
            for slot in self.slots:
                for view, local in zip(slot.views(self.gathered), slot.parts(local_part(slot.parameter)), strict=True):
                    local.copy_(view)
        self.gathered = None


def add_up(parts: Tensor, into: Tensor) -> None:
    """The sum over dim 0 of `parts` [n, ...], n at least 2, in the dtype of `into` [...], in the order of the parts."""
    if parts.dtype == into.dtype:
        torch.add(parts[0], parts[1], out=into)
    else:
        into.copy_(parts[0])
        into.add_(parts[1])
    for part in parts[2:]:
        into.add_(part)


def fill_buckets(
    parameters: list[NamedParameter], bucket_bytes: float, dtype: torch.dtype
) -> list[list[NamedParameter]]:
    """Group parameters that are reduced alike into buckets of about `bucket_bytes` bytes, the last parameters of the
    model first: backward completes them first."""
    buckets: list[list[NamedParameter]] = []
    open_buckets: dict[tuple[Any, ...], int] = {}
    filled: dict[int, float] = {}
    for named in reversed(parameters):
        key = (
            named.stage,
            named.replicated_over_tp,
            named.tied_across is not None,
            named.counts,
            named.shared_over is not None,
        )
        nbytes = local_part(named.parameter).numel() * dtype.itemsize
        index = open_buckets.get(key)
        if index is None or filled[index] + nbytes > bucket_bytes:
            buckets.append([])
            index = open_buckets[key] = len(buckets) - 1
            filled[index] = 0.0
        buckets[index].append(named)
        filled[index] += nbytes
    return buckets
