"""Pipeline parallelism: cuts a plain model into stages and builds the schedule that runs them.

Properties:
- A stage is a plain model with the other stages' parts removed, so its parameters keep the names of the plain model.
- The last stage computes the loss itself, microbatch by microbatch, so logits never leave it.
- Shapes at stage borders are known when the stages are built: nothing is negotiated at run time.
- Stage borders carry local tensors: under sequence parallelism 1/tp of the activation.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from parallelize.auxiliary import Auxiliary
from parallelize.bubble import bubble_of

# schedule -> (class name in torch.distributed.pipelining.schedules, default stages per rank, V-shaped placement)
SCHEDULES = {
    "afab": ("GPipe", 1, False),
    "1f1b": ("1F1B", 1, False),
    "interleaved_1f1b": ("Interleaved1F1B", 2, False),
    "interleaved_zero_bubble": ("InterleavedZeroBubble", 2, False),
    "zbv": ("ZBVZeroBubble", 2, True),
    "dualpipev": ("DualPipeV", 2, True),
}


def _no_error(record: logging.LogRecord) -> bool:
    """When a stage raises, torch logs the whole schedule, a hundred lines on each rank, above the error itself."""
    return record.levelno != logging.ERROR


def split_layers(costs: Sequence[float], first: float, last: float, stages: int) -> list[int]:
    """How many layers each stage gets so that the costliest stage is as cheap as it can be, each with one layer at
    least.

    `costs` are those of the layers in order; `first` and `last` are added to the first and the last stage.
    """
    n = len(costs)
    assert 1 <= stages <= n
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)

    def cost(begin: int, end: int, stage: int) -> float:
        return prefix[end] - prefix[begin] + (first if stage == 0 else 0) + (last if stage == stages - 1 else 0)

    # best[s][i]: (costliest stage, sum of squares) of the best cut of the first i layers into stages 0..s; the squares
    # decide between cuts with an equal costliest stage, and so even out the others.
    best: list[list[tuple[float, float, list[int]]]] = [
        [(cost(0, i, 0), cost(0, i, 0) ** 2, [i]) if i else (float("inf"), 0.0, []) for i in range(n + 1)]
    ]
    for stage in range(1, stages):
        row: list[tuple[float, float, list[int]]] = [(float("inf"), 0.0, [])] * (n + 1)
        for i in range(stage + 1, n + 1):
            for j in range(stage, i):
                before = best[-1][j]
                own = cost(j, i, stage)
                candidate = (max(before[0], own), before[1] + own**2, [*before[2], i - j])
                if not row[i][2] or candidate[:2] < row[i][:2]:
                    row[i] = candidate
        best.append(row)
    return best[-1][n][2]


def bubble_fraction(schedule: str, pp: int, stages: int, microbatches: int) -> float:
    """The share of an optimizer step, from 0 to 1, that a pipeline rank waits, if a backward takes twice a forward,
    stages cost the same and communication nothing. Counted from the order in which torch runs the schedule, to the end
    of the step, for which all ranks wait: so the start of the pipeline is a bubble in zero-bubble schedules too."""
    return bubble_of(SCHEDULES[schedule][0], pp, stages, microbatches)


def stages_of_rank(pp_rank: int, pp: int, per_rank: int, v_shaped: bool) -> list[int]:
    """Indices of the stages that a pipeline rank holds, ascending. V-shaped: first half down the ranks, second half
    up."""
    if v_shaped:
        assert per_rank == 2
        return [pp_rank, 2 * pp - 1 - pp_rank]
    return [pp_rank + i * pp for i in range(per_rank)]


def cut_stage(
    model: nn.Module, layers_per_stage: list[int], index: int, first_parts: Sequence[str], last_parts: Sequence[str]
) -> nn.Module:
    """A copy of the plain (meta) model with the layers of stage `index` alone, `first_parts` (the embedding) on the
    first stage and `last_parts` (norm and output) on the last."""
    stage: Any = copy.deepcopy(model)
    begin = sum(layers_per_stage[:index])
    names = list(stage.layers)
    keep = set(names[begin : begin + layers_per_stage[index]])
    for name in names:
        if name not in keep:
            del stage.layers[name]
    for here, parts in ((index == 0, first_parts), (index == len(layers_per_stage) - 1, last_parts)):
        for name in parts:
            if not here:
                setattr(stage, name, None)
    return stage


class Stage(nn.Module):
    """Runs a model, or the part of it that one pipeline stage holds, from tokens or hidden states to hidden states or
    loss.

    The last stage returns the *sum* of the token losses of the microbatch, shape [1]: sums add up to the same number
    however the batch is cut.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], Tensor],
        *,
        first: bool,
        last: bool,
        tp_mesh: DeviceMesh | None,
        stream: Placement | None,
    ) -> None:
        super().__init__()
        self.model: Any = model  # with the parts of every model here: embed, context, layers, head
        self.loss = loss
        self.first = first
        self.last = last
        self.tp_mesh = tp_mesh
        self.stream = stream
        self.auxiliary: Auxiliary | None = None
        """set by the trainer of a model that has auxiliary losses"""
        self.await_weights: Callable[[str], None] | None = None
        """called before a part of the model is used: "embed", the name of a layer, "head"; its weights may still be on
        their way from other ranks. None where the whole stage is one compiled graph"""

    def forward(
        self, x: Tensor, labels: Tensor, positions: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Tensor:
        """x: tokens [batch, seq] on the first stage, else the hidden states that the stage before returned; labels
        [batch, seq] (used by the last stage; the shape of the others' batch)."""
        x, context = self._layers(x, labels, positions, document_ids)
        self._await("head")
        out = torch.stack([self.loss(self.model.head, x, labels)]) if self.last else self.border(x)
        if self.auxiliary is not None and self.training:
            out = self.auxiliary.attach(out, self.model, context)
        return out

    def hidden(
        self, x: Tensor, like: Tensor, positions: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Tensor:
        """The hidden states after this stage's layers, [batch, seq, dim]; a DTensor under tp. `like` is any [batch,
        seq] tensor."""
        return self._layers(x, like, positions, document_ids)[0]

    def count(
        self, x: Tensor, like: Tensor, positions: Tensor | None = None, document_ids: Tensor | None = None
    ) -> Tensor:
        """As `hidden`, and let `auxiliary` add up what its losses need of the whole batch."""
        assert self.auxiliary is not None
        x, context = self._layers(x, like, positions, document_ids)
        self.auxiliary.add(self.model, context)
        return x

    def _layers(
        self, x: Tensor, like: Tensor, positions: Tensor | None, document_ids: Tensor | None
    ) -> tuple[Tensor, Any]:
        model = self.model
        self._await("embed")
        if self.first:
            x = model.embed(x)
        elif self.tp_mesh is not None:
            x = DTensor.from_local(x, self.tp_mesh, [self.stream], run_check=False)  # type: ignore[list-item]
        shape_like = torch.empty(0, dtype=x.dtype, device=like.device).expand(*like.shape, 0)
        context = model.context(shape_like, positions, document_ids)
        for name, layer in model.layers.items():
            self._await(name)
            x = layer(x, context)
        return x, context

    def _await(self, part: str) -> None:
        if self.await_weights is not None:
            self.await_weights(part)

    def border(self, x: Tensor) -> Tensor:
        """What is sent to the next stage: the local tensor."""
        # A copy, for to_local() is a view, which schedules with a split backward cannot detach.
        return x.to_local().clone() if isinstance(x, DTensor) else x


def timesteps(stage_ranks: Sequence[int], microbatches: int) -> list[dict[int, tuple[int, int]]]:
    """A forward-only schedule for any placement of stages: at each time step, rank -> the (stage, microbatch) that it
    runs.

    A greedy list schedule: a rank runs the earliest ready microbatch, of its latest stage first. All ranks compute the
    same.
    """
    done: set[tuple[int, int]] = set()
    steps: list[dict[int, tuple[int, int]]] = []
    todo = {(s, m) for s in range(len(stage_ranks)) for m in range(microbatches)}
    while todo:
        now: dict[int, tuple[int, int]] = {}
        for stage, microbatch in sorted(todo, key=lambda task: (task[1], -task[0])):
            rank = stage_ranks[stage]
            if rank not in now and (stage == 0 or (stage - 1, microbatch) in done):
                now[rank] = (stage, microbatch)
        steps.append(now)
        done.update(now.values())
        todo.difference_update(now.values())
    return steps


@torch.no_grad()
def run_forward(
    run: Callable[[int, int, Tensor | None], Tensor | None],
    stage_ranks: Sequence[int],
    microbatches: int,
    group: dist.ProcessGroup,
    border: Callable[[int], Tensor],
) -> None:
    """Run all stages on all microbatches without gradients; every rank of the pp `group` calls it.

    `run(stage, microbatch, hidden)` computes one stage of this rank and returns what the next stage needs;
    `border(microbatch)` gives an empty tensor of that shape. Sends and receives of a time step are posted together, so
    no order of the ranks can lock up, on gloo or NCCL.
    """
    me = group.rank()
    last = len(stage_ranks) - 1
    arrived: dict[tuple[int, int], Tensor] = {}
    for now in timesteps(stage_ranks, microbatches):
        out: Tensor | None = None
        if me in now:
            stage, microbatch = now[me]
            out = run(stage, microbatch, arrived.pop((stage, microbatch), None))
        ops: list[dist.P2POp] = []
        for rank, (stage, microbatch) in sorted(now.items()):
            if stage == last:
                continue
            to = stage_ranks[stage + 1]
            if rank == me and to == me:
                assert out is not None
                arrived[(stage + 1, microbatch)] = out
            elif rank == me:
                assert out is not None
                ops.append(dist.P2POp(dist.isend, out.contiguous(), group=group, group_peer=to))
            elif to == me:
                arrived[(stage + 1, microbatch)] = border(microbatch)
                ops.append(dist.P2POp(dist.irecv, arrived[(stage + 1, microbatch)], group=group, group_peer=rank))
        if ops:
            for work in dist.batch_isend_irecv(ops):
                work.wait()


def build_schedule(
    name: str,
    stages: list[Stage],
    indices: list[int],
    num_stages: int,
    microbatches: int,
    group: dist.ProcessGroup,
    device: torch.device,
    border_shape: tuple[int, ...],
    batch_shape: tuple[int, int],
    dtype: torch.dtype,
    after_backward: Callable[[int, int], None],
    busy: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> Any:
    """torch's schedule object for this rank's stages.

    `border_shape` is that of a hidden state between stages (local), `batch_shape` (rows of a microbatch, seq). After
    each backward of a stage, `after_backward(stage, how many backwards of it are done in this step)` is called.
    `busy()` is entered while this rank computes, and not while it waits for its neighbours.
    """
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    logging.getLogger("torch.distributed.pipelining.schedules").addFilter(_no_error)

    class ReportingStage(PipelineStage):
        """Tells when the weight gradients of a microbatch are complete."""

        done = 0

        def _report(self) -> None:
            self.done += 1
            after_backward(self.stage_index, self.done)
            self.done %= microbatches

        def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
            with busy():
                try:
                    return super().forward_one_chunk(*args, **kwargs)
                except RuntimeError as error:
                    if error.__cause__ is None:
                        raise
                    # What a stage raises, torch says in a RuntimeError of its own, which hides whose mistake it is.
                    raise error.__cause__ from None

        def backward_one_chunk(  # type: ignore[override]
            self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, **kwargs: Any
        ) -> None:
            with busy():
                super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=full_backward, **kwargs)
                if full_backward:
                    self._report()

        def backward_weight_one_chunk(self, bwd_chunk_id: int, **kwargs: Any) -> None:  # type: ignore[override]
            with busy():
                super().backward_weight_one_chunk(bwd_chunk_id, **kwargs)
                self._report()

    def meta(shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
        # The border's gradient flag is part of what torch compares, so it has to be told.
        return torch.empty(shape, dtype=kind, device="meta", requires_grad=kind.is_floating_point)

    class_name, _, _ = SCHEDULES[name]
    loss_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    made = [
        ReportingStage(
            stage,
            index,
            num_stages,
            device,
            input_args=(meta(batch_shape, torch.int64) if stage.first else meta(border_shape, dtype),),
            output_args=(meta((1,), loss_dtype) if stage.last else meta(border_shape, dtype),),
            group=group,
        )
        for stage, index in zip(stages, indices, strict=True)
    ]
    schedule_class = get_schedule_class(class_name)
    single = SCHEDULES[name][1] == 1
    # scale_grads divides gradients again at each step; the sum of the loss needs no scaling at all.
    return schedule_class(
        made[0] if single else made,
        microbatches,
        loss_fn=lambda loss, _target: loss,
        scale_grads=False,
    )
