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
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from parallelize.buckets import Bucket, NamedParameter, Slot, Waiting, fill_buckets, local_part

Box = tuple[Tensor, tuple[int, ...], tuple[int, ...]]
"""(local tensor, shape of the whole tensor, offset of the local tensor in it)"""


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
        self.gathering: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        """entered while new weights are waited for and put in their places"""
        self.buckets = [
            Bucket(named, named[0].shared_over or dp_group, master_dtype, comm_dtype or master_dtype)
            for named in fill_buckets(parameters, bucket_bytes, master_dtype)
        ]
        self.slots = {slot.name: (bucket, slot) for bucket in self.buckets for slot in bucket.slots}
        place = {id(named.parameter): place for place, named in enumerate(parameters)}
        self.forward_order = sorted(
            self.buckets, key=lambda bucket: min(place[id(slot.parameter)] for slot in bucket.slots)
        )
        """the buckets, those first that a forward needs first"""
        self._last_microbatch = False
        self._next = 0
        self.shards: dict[str, Tensor] = {}
        for bucket in self.buckets:
            for slot in bucket.slots:
                slot.parameter.register_post_accumulate_grad_hook(self._hook(bucket, slot))
                shard = nn.Parameter(bucket.master_shard(slot))
                shard.grad = slot.own(bucket.grad_shard)
                self.shards[slot.name] = shard
            bucket.optimizer = self._make_optimizer(bucket, make_optimizer, group_of)

    def _make_optimizer(
        self,
        bucket: Bucket,
        make_optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        group_of: Callable[[str, tuple[int, ...]], tuple[float, float]],
    ) -> torch.optim.Optimizer | None:
        # One for each bucket, so that the weights of one are on their way while the next one is updated.
        groups: dict[tuple[float, float], dict[str, Any]] = {}
        for slot in bucket.slots:
            shard = self.shards[slot.name]
            if shard.numel():
                scale, decay = group_of(slot.name, tuple(slot.parameter.shape))
                new: dict[str, Any] = {"params": [], "names": [], "lr_scale": scale, "weight_decay": decay}
                group = groups.setdefault((scale, decay), new)
                group["params"].append(shard)
                group["names"].append(slot.name)
        return make_optimizer([*groups.values()]) if groups else None

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

    def step(self, grad_factor: Tensor, lr: float) -> None:
        """Update the master shards, see Bucket.update, and start bringing each bucket to all dp ranks as soon as it is
        updated. All dp ranks take part. The compute weights are the new ones after `finish_gather`."""
        for bucket in self.forward_order:
            bucket.update(grad_factor, lr)
            bucket.start_gather()

    def gather(self) -> None:
        """Bring the master shards of all dp ranks into the compute weights. All dp ranks take part."""
        self.finish_gather()
        for bucket in self.forward_order:
            bucket.start_gather()
        self.finish_gather()

    def finish_gather(self, buckets: Iterable[Bucket] | None = None) -> None:
        """Wait for the weights of these buckets, by default of all, if they are on their way."""
        for bucket in self.forward_order if buckets is None else buckets:
            if bucket.gathered is not None:
                with self.gathering():
                    bucket.finish_gather(self.waiting)

    def gates(self, model: Any, head_parts: Iterable[str]) -> Callable[[str], None]:
        """What a forward of a stage's model calls before each part of it (Stage.await_weights), so that the weights of
        the later parts can still be on their way. `head_parts` are the modules that `head` alone uses; what is neither
        in a layer nor in those is waited for before `embed`."""
        later = ("layers", *head_parts)
        parts = {name: [*layer.parameters()] for name, layer in model.layers.items()}
        parts["embed"] = [*model.parameters(recurse=False)]
        for name, module in model.named_children():
            if name not in later:
                parts["embed"] += module.parameters()
        parts["head"] = [*model.parameters()]
        buckets = {part: self.buckets_of(parameters) for part, parameters in parts.items()}
        return lambda part: self.finish_gather(buckets[part])

    def buckets_of(self, parameters: Iterable[Tensor]) -> list[Bucket]:
        """The buckets of these parameters, each once, in the order in which they are gathered."""
        wanted = {id(parameter) for parameter in parameters}
        return [bucket for bucket in self.forward_order if any(id(slot.parameter) in wanted for slot in bucket.slots)]

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
        states = dict(self._states())
        for name, (_, slot) in self.slots.items():
            shape = tuple(slot.parameter.shape) or (1,)
            offset = (slot.named.box_offset[0] + slot.own_first, *slot.named.box_offset[1:])
            if slot.own_rows == 0:
                offset = (min(offset[0], shape[0]), *offset[1:])
            shard = self.shards[name]
            boxes[f"model.{name}"] = (shard.detach(), shape, offset)
            for key, value in states.get(shard, {}).items():
                if isinstance(value, Tensor) and value.shape == shard.shape and value.dim():
                    boxes[f"optimizer.{key}.{name}"] = (value, shape, offset)
        return boxes

    def set_step_count(self, count: int) -> None:
        """Set the optimizer's own count of steps, which AdamW's bias correction uses, after loading a checkpoint."""
        for _, state in self._states():
            if "step" in state:
                state["step"].fill_(count)

    def _states(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """(master shard, the optimizer's state of it)"""
        for bucket in self.buckets:
            if bucket.optimizer is not None:
                yield from bucket.optimizer.state.items()

    def bytes_per_rank(self) -> dict[str, int]:
        """Bytes that this rank holds: compute weights, gradients, master weights and optimizer states."""
        weights = sum(local_part(s.parameter).nbytes for _, s in self.slots.values())
        gradients = sum(b.grads.nbytes + (0 if b.dp == 1 else b.grad_shard.nbytes) for b in self.buckets)
        states = sum(
            value.nbytes for _, state in self._states() for value in state.values() if isinstance(value, Tensor)
        )
        return {
            "weights": weights,
            "gradients": gradients,
            "master_weights": sum(0 if b.master is None else b.master.nbytes for b in self.buckets),
            "optimizer_states": states,
        }


def sum_of_squares(flat: Tensor) -> Tensor:
    """The sum of the squares of a flat tensor, a float64 scalar, to float32 rounding however long the tensor is.

    In short runs, whose norms are added up in float64. One float32 norm of millions of elements is off by 1e-4 on CPU,
    and differently so when they are shared out over ranks; one float64 norm takes thirty times as long as this.
    """
    run = 4096
    whole = flat.numel() // run * run
    runs = torch.linalg.vector_norm(flat[:whole].view(-1, run), dim=1).double()
    return runs.square().sum() + torch.linalg.vector_norm(flat[whole:]).double().square()
