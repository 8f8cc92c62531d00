"""ZeRO-1 data parallelism (arXiv:1910.02054): replicated compute weights, sharded gradients, master weights and
moments.

Properties:
- Gradients of all microbatches are added up in the master dtype (float32, or float64), straight into the layout in
  which they are reduced. Per bucket and step there is one reduce-scatter and one all-gather over dp, however many
  microbatches.
- Gradients may be sent in a narrower dtype; they are added up in the master dtype all the same.
- A parameter's shard is rows of its (tensor-parallel) local tensor: an n-d box of the plain tensor. So checkpoints need
  no knowledge of buckets, and a bucket's size can change between runs.
- Everything is in units of the *sum* of token losses. The division by the number of tokens and the clipping are one
  factor, applied to the reduced shards.
- A parameter that every tp rank holds whole (norms, replicated kv heads) is reduced over tp too, so its copies cannot
  drift. The same goes for a tied weight that two pipeline stages hold.
- What dp ranks hold different parts of (experts, under ep) is reduced and sharded over those that hold the same.
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

Box = tuple[Tensor, tuple[int, ...], tuple[int, ...]]
"""(local tensor, shape of the whole tensor, offset of the local tensor in it)"""


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

    def start_gather(self) -> tuple[dist.Work | None, Tensor | None]:
        """Start collecting the new weights from all dp ranks, in the compute dtype."""
        if self.master is None:
            return None, None
        shard = self.master.to(self.compute_dtype)
        if self.dp == 1:
            return None, shard.view(1, -1)
        whole = torch.empty(self.dp, self.shard_numel, dtype=self.compute_dtype, device=shard.device)
        return all_gather(whole.view(-1), shard, self.dp_group), whole

    def finish_gather(self, work: dist.Work | None, whole: Tensor | None, waiting: Waiting) -> None:
        """Copy the collected weights into the parameters."""
        if work is not None:
            with waiting("dp"):
                work.wait()
        if whole is None:
            return
        with torch.no_grad():
            for slot in self.slots:
                for view, local in zip(slot.views(whole), slot.parts(local_part(slot.parameter)), strict=True):
                    local.copy_(view)


class Zero:
    """Gradients, master weights, optimizer state and weights of this rank's parameters.

    `make_optimizer` gets parameter groups, `[{"params": [...], "names": [...], ...}]` of master shards, and returns a
    torch optimizer over them; `group_of` gives a parameter's (lr_scale, weight_decay). Gradients are sent over dp in
    `comm_dtype`, by default the master dtype.
    """

    def __init__(
        self,
        parameters: list[NamedParameter],
        *,
        dp_group: dist.ProcessGroup,
        tp_group: dist.ProcessGroup | None,
        master_dtype: torch.dtype,
        comm_dtype: torch.dtype | None = None,
        bucket_bytes: float,
        make_optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        group_of: Callable[[str, tuple[int, ...]], tuple[float, float]],
    ) -> None:
        self.tp_group = tp_group
        self.dp_group = dp_group
        self.master_dtype = master_dtype
        self.waiting: Waiting = lambda _axis: contextlib.nullcontext()
        self.buckets = [
            Bucket(named, named[0].shared_over or dp_group, master_dtype, comm_dtype or master_dtype)
            for named in fill_buckets(parameters, bucket_bytes, master_dtype)
        ]
        self.slots = {slot.name: (bucket, slot) for bucket in self.buckets for slot in bucket.slots}
        self._last_microbatch = False
        self._next = 0
        for bucket, slot in self.slots.values():
            slot.parameter.register_post_accumulate_grad_hook(self._hook(bucket, slot))
        groups: dict[tuple[float, float], dict[str, Any]] = {}
        self.shards: dict[str, Tensor] = {}
        for bucket, slot in self.slots.values():
            scale, decay = group_of(slot.name, tuple(slot.parameter.shape))
            group = groups.setdefault(
                (scale, decay), {"params": [], "names": [], "lr_scale": scale, "weight_decay": decay}
            )
            shard = nn.Parameter(bucket.master_shard(slot))
            shard.grad = slot.own(bucket.grad_shard)
            self.shards[slot.name] = shard
            if shard.numel():
                group["params"].append(shard)
                group["names"].append(slot.name)
        self.optimizer = make_optimizer([group for group in groups.values() if group["params"]])

    # -- gradients ---------------------------------------------------------------------------------------------------

    def _hook(self, bucket: Bucket, slot: Slot) -> Callable[[Tensor], None]:
        def collect(parameter: Tensor) -> None:
            self._add(slot)
            if self._last_microbatch:
                bucket.missing -= 1
                self._launch_ready()

        return collect

    @torch.no_grad()
    def _add(self, slot: Slot) -> None:
        """Move `.grad` of a parameter into its bucket."""
        parameter, grad = slot.parameter, slot.parameter.grad
        parameter.grad = None
        if grad is None:
            return
        counts = True
        if isinstance(grad, DTensor):
            assert isinstance(parameter, DTensor)
            if slot.named.replicated_over_tp:
                if not all(p.is_partial("sum") for p in grad.placements):
                    # Every tp rank holds the whole gradient: one of them brings it to the sum over tp.
                    if grad.placements != parameter.placements:
                        grad = grad.redistribute(placements=parameter.placements)
                    counts = grad.device_mesh.get_local_rank() == 0
            elif grad.placements != parameter.placements:
                grad = grad.redistribute(placements=parameter.placements)
            grad = grad.to_local()
        for view, part in zip(slot.grad_views, slot.parts(grad), strict=True):
            if slot.received:
                if counts:
                    view.add_(part)
            elif counts:
                view.copy_(part)
            else:
                view.zero_()
        slot.received = True

    def collect(self) -> None:
        """Take gradients that no hook announced: split backwards of the zero-bubble schedules write `.grad`
        themselves."""
        for _, slot in self.slots.values():
            if slot.parameter.grad is not None:
                self._add(slot)

    def last_microbatch(self) -> None:
        """The next backward is the step's last on each parameter: start reducing a bucket as soon as it is complete."""
        self._last_microbatch = True
        self._next = 0

    def _launch_ready(self) -> None:
        # In a fixed order: the collectives of all dp ranks must match.
        while self._next < len(self.buckets) and self.buckets[self._next].missing == 0:
            self.buckets[self._next].reduce()
            self._next += 1

    def reduce_stage(self, stage: int) -> None:
        """All backwards of pipeline stage `stage` are done: start reducing what no other stage shares."""
        shared = {named for named in self.slots if self.slots[named][0].tied_across is not None}
        for bucket in self.buckets:
            if bucket.stage == stage and not bucket.launched and not any(s.name in shared for s in bucket.slots):
                bucket.reduce()

    def finish_reduction(self) -> None:
        """After the last backward: the reduced gradient sums are in the shards."""
        self._last_microbatch = False
        for bucket in self.buckets:
            if not bucket.launched:
                bucket.reduce()
        for bucket in self.buckets:
            bucket.finish_reduce(self.tp_group, self.waiting)

    def sum_of_squares(self) -> Tensor:
        """This rank's part of the squared norm of the gradient sums, a float64 scalar. Each element of the plain
        model's gradient is counted on exactly one rank, so the sum over all ranks is the square of the global norm."""
        total = torch.zeros((), dtype=torch.float64, device=self.buckets[0].grads.device)
        for bucket in self.buckets:
            if self.counts_here(bucket):
                total += sum_of_squares(bucket.grad_shard)
        return total

    def counts_here(self, bucket: Bucket) -> bool:
        """Whether this rank is the one that a shard of `bucket` is counted on, where each element of the plain model is
        to count once: others may hold copies."""
        first_tp = self.tp_group is None or self.tp_group.rank() == 0
        return bucket.counts and (first_tp or not bucket.replicated_over_tp)

    # -- update ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, grad_factor: Tensor, lr: float) -> None:
        """Multiply the gradient sums by `grad_factor` (a scalar tensor) and update the master shards; `lr` is the
        learning rate before each group's own scale."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["lr_scale"]
        for bucket in self.buckets:
            bucket.grad_shard.mul_(grad_factor.to(bucket.grad_shard.dtype))
        self.optimizer.step()

    def gather(self) -> None:
        """Bring the updated master shards of all dp ranks into the compute weights. All dp ranks take part."""
        started = [(bucket, *bucket.start_gather()) for bucket in self.buckets]
        for bucket, work, whole in started:
            bucket.finish_gather(work, whole, self.waiting)

    # -- state -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def set_master(self, name: str, local: Tensor) -> None:
        """Set this rank's rows of a master weight from the local tensor, in the master's precision or better."""
        bucket, slot = self.slots[name]
        bucket.master_shard(slot).copy_(slot.own_rows_of(local))

    def boxes(self) -> dict[str, Box]:
        """Every tensor of the state that this rank owns, by name: `model.<name>` is the master weight and
        `optimizer.<state>.<name>` the optimizer's tensors of the same shape. Views: loading into them sets the
        state."""
        boxes: dict[str, Box] = {}
        for name, (_, slot) in self.slots.items():
            shape = tuple(slot.parameter.shape) or (1,)
            offset = (slot.named.box_offset[0] + slot.own_first, *slot.named.box_offset[1:])
            if slot.own_rows == 0:
                offset = (min(offset[0], shape[0]), *offset[1:])
            shard = self.shards[name]
            boxes[f"model.{name}"] = (shard.detach(), shape, offset)
            for key, value in self.optimizer.state.get(shard, {}).items():
                if isinstance(value, Tensor) and value.shape == shard.shape and value.dim():
                    boxes[f"optimizer.{key}.{name}"] = (value, shape, offset)
        return boxes

    def set_step_count(self, count: int) -> None:
        """Set the optimizer's own count of steps, which AdamW's bias correction uses, after loading a checkpoint."""
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"].fill_(count)

    def bytes_per_rank(self) -> dict[str, int]:
        """Bytes that this rank holds: compute weights, gradients, master weights and optimizer states."""
        weights = sum(local_part(s.parameter).nbytes for _, s in self.slots.values())
        gradients = sum(b.grads.nbytes + (0 if b.dp == 1 else b.grad_shard.nbytes) for b in self.buckets)
        states = sum(
            value.nbytes
            for state in self.optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        )
        return {
            "weights": weights,
            "gradients": gradients,
            "master_weights": sum(0 if b.master is None else b.master.nbytes for b in self.buckets),
            "optimizer_states": states,
        }


def add_up(parts: Tensor, into: Tensor) -> None:
    """The sum over dim 0 of `parts` [n, numel], n at least 2, in the dtype of `into` [numel], in the order of the
    parts."""
    if parts.dtype == into.dtype:
        torch.add(parts[0], parts[1], out=into)
    else:
        into.copy_(parts[0])
        into.add_(parts[1])
    for part in parts[2:]:
        into.add_(part)


def sum_of_squares(flat: Tensor) -> Tensor:
    """The sum of the squares of a flat tensor, a float64 scalar, to float32 rounding however long the tensor is.

    In short runs, whose norms are added up in float64. One float32 norm of millions of elements is off by 1e-4 on CPU,
    and differently so when they are shared out over ranks; one float64 norm takes thirty times as long as this.
    """
    run = 4096
    whole = flat.numel() // run * run
    runs = torch.linalg.vector_norm(flat[:whole].view(-1, run), dim=1).double()
    return runs.square().sum() + torch.linalg.vector_norm(flat[whole:]).double().square()


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
