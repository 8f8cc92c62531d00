"""One training step, and validation, on any mesh.

Properties:
- The numbers of a step (loss, gradient norm, token count) are global: one small all-reduce over all ranks gives every
  rank the same ones, and what is decided from them is decided alike everywhere.
- Gradients are sums over tokens until the update, so microbatches, accumulation and dp cannot change their scale.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from parallelize.auxiliary import Auxiliary
from parallelize.pipeline import Stage, build_schedule, run_forward
from parallelize.zero import Box
from titanlike.build import build
from titanlike.config import Config
from titanlike.loss import IGNORE
from titanlike.mesh import Mesh
from titanlike.metrics.timers import Timers
from titanlike.schedule import lr_factor


@dataclasses.dataclass
class StepResult:
    """The global numbers of one optimizer step. Tensors, so that reading them (a device sync) is the caller's
    choice."""

    loss: Tensor
    """mean token loss over the global batch in nats, float64"""
    grad_norm: Tensor
    """global norm of the gradient of that mean, before clipping, float64"""
    lr: float
    """learning rate of this step, before the groups' own scale"""
    tokens: Tensor
    """valid labels in the global batch, float64"""
    auxiliary: Tensor
    """what the model's auxiliary losses and metrics are made of, see `Trainer.auxiliary_values`; empty without"""
    updated: bool = True
    """whether the weights were updated; otherwise the whole state is as before the step"""


class Trainer:
    """What a rank trains, and how it takes a step. All ranks of the mesh make one and call its methods together."""

    def __init__(
        self, config: Config, mesh: Mesh, vocab_size: int, prepare: Callable[[Stage], None] | None = None
    ) -> None:
        self.config = config
        self.mesh = mesh
        self.built = build(config, mesh, vocab_size, prepare)
        self.zero = self.built.zero
        self.accumulation = config.accumulation(mesh.dp)
        self.step_count = 0
        """steps of the run that were taken"""
        self.updates = 0
        """those of them whose update was made, which is the optimizer's own count"""
        self.before_update: Callable[[StepResult], bool] | None = None
        """called by train_step on all ranks when the gradients are reduced and nothing is touched yet; False leaves the
        update out"""
        self.timers = Timers(mesh.device.type)
        self.zero.waiting = lambda axis: self.timers.span(f"comm/{axis}")
        self.zero.gathering = lambda: self.timers.phase("param_gather")
        self.alive: Callable[[], object] = lambda: None
        """called after each microbatch, also of validation: the rank makes progress"""
        self._schedules: dict[int, Any] = {}
        self.auxiliary = self._make_auxiliary()

    # -- a step ------------------------------------------------------------------------------------------------------

    def train_step(self, batch: Any, finish: bool = True) -> StepResult:
        """Take one optimizer step on this dp coordinate's rows of a global batch (titanlike.data.Batch).

        Without `finish` the new weights may still be on their way from other dp ranks when it returns: the forward of
        the next step waits for each part's weights before it uses them, as do the methods here. What else reads
        weights (`built.stages`) calls `zero.finish_gather()` first.

        If the loss or the gradient norm is not finite, the state is not to be kept: the caller has to look. On CPU, or
        if `before_update` says so, the update is left out, and weights, moments and step_count stay as they were.
        """
        if self.built.whole_graph:
            self.zero.finish_gather()
        with self.timers.phase("forward_backward"):
            loss_sum = self.forward_backward(batch)
        with self.timers.phase("grad_reduce"):
            self.zero.finish_reduction()
        with self.timers.phase("clip"):
            totals = self.global_totals(loss_sum, batch.labels)
        step = self.step_count + 1
        lr = self.config.optimizer.lr * lr_factor(self.config.schedule, self.config.train.steps, step)
        count = totals[1].clamp(min=1)
        grad_norm = totals[2].sqrt() / count
        factor = 1 / count
        limit = self.config.train.max_grad_norm
        if limit > 0:
            factor = factor * (limit / (grad_norm + 1e-6)).clamp(max=1)
        result = StepResult(totals[0] / count, grad_norm, lr, totals[1], totals[3:])
        allowed = self.before_update is None or self.before_update(result)
        # On an accelerator the look would make the host wait for the whole backward before it can queue the update.
        if not allowed or (self.mesh.device.type == "cpu" and not totals.isfinite().all()):
            return dataclasses.replace(result, updated=False)
        with self.timers.phase("optimizer"):
            self.zero.step(factor, lr)
        with self.timers.phase("param_gather"):
            if finish:
                self.zero.finish_gather()
        if self.auxiliary is not None:
            for stage in self.built.stages:
                stage.model.after_update(totals[3:].view_as(self.auxiliary.sums))
        self.step_count = step
        self.updates += 1
        return result

    def seed_step(self, step: int) -> None:
        """Make random draws of the model (dropout) a function of (seed, step, place in the mesh), so that a resume
        needs no saved generator state. tp ranks draw alike, for they hold parts of the same activations."""
        place = self.mesh.coordinate("pp") * self.mesh.dp + self.mesh.coordinate("dp")
        digest = hashlib.sha256(f"step/{self.config.run.seed}/{step}/{place}".encode()).digest()
        torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)

    def forward_backward(self, batch: Any) -> Tensor:
        """Run all microbatches. Returns the sum of this rank's token losses, 0 on ranks without the last stage."""
        inputs = self.inputs(batch)
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        if self.auxiliary is not None:
            self._begin_auxiliary(inputs)
        with self._loss_context():
            if self.mesh.pp == 1:
                stage = self.built.stages[0]
                for i in range(self.accumulation):
                    if i == self.accumulation - 1:
                        self.zero.last_microbatch()
                    loss = stage(**self.microbatch(inputs, i))
                    loss.backward()
                    total += loss.detach().sum()
                    self.alive()
                return total
            tokens = inputs.pop("x")
            losses: list[Tensor] = []
            schedule = self._schedule(tokens.shape[1])
            arguments = (tokens,) if self.built.stages[0].first else ()
            with self.timers.span("pipeline"):
                schedule.step(*arguments, target=inputs["labels"], losses=losses, **inputs)
        for loss in losses:
            total += loss.detach().sum()
        return total

    def global_totals(self, loss_sum: Tensor, labels: Tensor) -> Tensor:
        """[loss sum, valid labels, square of the gradient sums' norm, auxiliary sums ...] over the whole global batch
        and model, float64.

        All ranks take part; each loss is counted where its last stage is, on one tp rank.
        """
        return self._totals(loss_sum, (labels != IGNORE).sum(), self.zero.sum_of_squares())

    def _totals(self, loss_sum: Tensor, count: Tensor, squares: Tensor) -> Tensor:
        own = 0 if self.auxiliary is None else self.auxiliary.sums.numel()
        values = torch.zeros(3 + own, dtype=torch.float64, device=self.mesh.device)
        if self.built.stages[-1].last and self.mesh.coordinate("tp") == 0:
            values[0] = loss_sum
            values[1].fill_(count)  # counted on the host: a copy from there would wait for the whole backward
        values[2] = squares
        if self.auxiliary is not None and self.mesh.coordinate("tp") == 0:  # all tp ranks have the same
            values[3:] = self.auxiliary.sums.flatten()
        dist.all_reduce(values)
        return values

    # -- state -------------------------------------------------------------------------------------------------------

    def boxes(self) -> dict[str, Box]:
        """Every tensor of the training state that this rank holds, by name, as views: parameters and optimizer states
        as in Zero.boxes, and the model's buffers, of which each holder has the whole."""
        self.zero.finish_gather()  # who sets the state brings the weights anew
        whole = {f"model.{n}": (b, tuple(b.shape), (0,) * b.dim()) for n, b in self.built.buffers.items()}
        return self.zero.boxes() | whole

    # -- auxiliary losses --------------------------------------------------------------------------------------------

    def _make_auxiliary(self) -> Auxiliary | None:
        plain, train = self.built.plain, self.config.train
        if not hasattr(plain, "auxiliary_sums"):
            return None
        auxiliary = Auxiliary(
            plain.auxiliary_shape, train.global_batch_size * train.seq_len, 1 / self.mesh.tp, self.mesh.device
        )
        whole_batch = self.accumulation == 1 and not self.built.whole_graph
        if whole_batch and not (plain.needs_all_layers and self.mesh.pp > 1):
            auxiliary.reduce_in_forward = self.mesh.group("dp")
        for stage in self.built.stages:
            stage.auxiliary = auxiliary
        return auxiliary

    def _begin_auxiliary(self, inputs: dict[str, Tensor]) -> None:
        """Before the first microbatch of a step: what the gradients of auxiliary losses need of the whole batch."""
        auxiliary, plain = self.auxiliary, self.built.plain
        assert auxiliary is not None
        auxiliary.begin()
        if not plain.has_auxiliary_loss:
            return
        auxiliary.labels.copy_((inputs["labels"] != IGNORE).sum())
        dist.all_reduce(auxiliary.labels, group=self.mesh.group("dp"))  # the dp ranks: each has its rows of the batch
        auxiliary.labels.clamp_(min=1)
        if not plain.needs_totals or auxiliary.reduce_in_forward is not None:
            return

        # A forward more: how much a load weighs depends on the loads of microbatches that have not run yet.
        def run(stage: Stage, microbatch: int, hidden: Tensor | None) -> Tensor | None:
            arguments = self.microbatch(inputs, microbatch)
            arguments["like"] = arguments.pop("labels")
            if hidden is not None:
                arguments["x"] = hidden
            out = stage.count(**arguments)
            return None if stage.last else stage.border(out)

        self.run_forward(run, self.accumulation, inputs["labels"].shape[1])
        auxiliary.totals.copy_(auxiliary.sums)
        if self.mesh.coordinate("tp"):
            auxiliary.totals.zero_()  # all tp ranks have the same
        dist.all_reduce(auxiliary.totals)  # all ranks: each has its rows and its layers
        auxiliary.begin()

    def auxiliary_values(self, result: StepResult) -> dict[str, Tensor]:
        """The model's auxiliary losses and its own metrics of a step, scalars by name."""
        if self.auxiliary is None:
            return {}
        return self.built.plain.auxiliary_values(result.auxiliary.view_as(self.auxiliary.sums), self.auxiliary.tokens)

    # -- validation --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self, batches: Iterator[Any]) -> tuple[float, int]:
        """(mean token loss in nats, valid labels) over batches that every dp coordinate has the same number of."""
        loss = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        count = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        with self._loss_context(), self.eval_mode():
            for batch in batches:
                loss += self._forward(batch)
                self.alive()
                count += (batch.labels != IGNORE).sum()
        totals = self._totals(loss, count, torch.zeros_like(loss)).tolist()
        return totals[0] / max(totals[1], 1.0), int(totals[1])

    @property
    def evaluation_rows(self) -> int:
        """Rows per dp coordinate of a validation batch: that of a training step, so that a pipeline is filled alike."""
        return self.config.train.microbatch_size * (self.accumulation if self.mesh.pp > 1 else 1)

    def _forward(self, batch: Any) -> Tensor:
        inputs = self.inputs(batch)
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)

        def run(stage: Stage, microbatch: int, hidden: Tensor | None) -> Tensor | None:
            arguments = self.microbatch(inputs, microbatch)
            if hidden is not None:
                arguments["x"] = hidden
            out = stage(**arguments)
            if stage.last:
                total.add_(out.sum())
                return None
            return out

        self.run_forward(run, inputs["labels"].shape[0] // self.config.train.microbatch_size, inputs["labels"].shape[1])
        return total

    @torch.no_grad()
    def next_token_logits(self, tokens: Tensor, index: int) -> Tensor:
        """Logits [rows, vocab] of the token after position `index` of tokens [rows, seq], the same on all ranks of a pp
        and tp group. Rows must be train.microbatch_size or any number without pp; seq must suit sequence
        parallelism."""
        tokens = tokens.to(self.mesh.device)
        found: list[Tensor] = []

        def run(stage: Stage, _microbatch: int, hidden: Tensor | None) -> Tensor | None:
            out = stage.hidden(tokens if hidden is None else hidden, tokens)
            if not stage.last:
                return stage.border(out)
            if isinstance(out, DTensor):  # the head takes the whole sequence split over tp, so cut after it
                out = stage.model.head(out)
                found.append(out.redistribute(placements=[Replicate()]).to_local()[:, index])
            else:
                found.append(stage.model.head(out[:, index : index + 1])[:, 0])
            return None

        with self.eval_mode(), self.eager():  # of a shape of its own: not worth a compilation
            self.run_forward(run, 1, tokens.shape[1])
        if self.mesh.pp == 1:
            return found[0]
        vocab = self.built.plain.config.vocab_size
        logits = (
            found[0] if found else torch.empty(tokens.shape[0], vocab, dtype=self.built.dtype, device=tokens.device)
        )
        dist.broadcast(logits, group=self.mesh.group("pp"), group_src=self.built.stage_ranks[-1])
        return logits

    def run_forward(
        self, run: Callable[[Stage, int, Tensor | None], Tensor | None], microbatches: int, seq_len: int
    ) -> None:
        """Run all stages on all microbatches without gradients; see parallelize.pipeline.run_forward."""
        self.zero.finish_gather()
        stages = dict(zip(self.built.stage_indices, self.built.stages, strict=True))

        def border(_microbatch: int) -> Tensor:
            return torch.empty(self._border_shape(seq_len), dtype=self.built.dtype, device=self.mesh.device)

        run_forward(
            lambda index, microbatch, hidden: run(stages[index], microbatch, hidden),
            self.built.stage_ranks,
            microbatches,
            self.mesh.group("pp"),
            border,
        )

    # -- parts -------------------------------------------------------------------------------------------------------

    def inputs(self, batch: Any) -> dict[str, Tensor]:
        """The tensors of a batch on this rank's device, named like the arguments of a stage; those that there are."""
        named = {
            "x": batch.tokens,
            "labels": batch.labels,
            "positions": batch.positions,
            "document_ids": batch.document_ids,
        }
        return {k: v.to(self.mesh.device, non_blocking=True) for k, v in named.items() if v is not None}

    def microbatch(self, inputs: dict[str, Tensor], index: int) -> dict[str, Tensor]:
        """The rows of microbatch `index`."""
        rows = self.config.train.microbatch_size
        return {k: v[index * rows : (index + 1) * rows] for k, v in inputs.items()}

    @contextlib.contextmanager
    def eval_mode(self) -> Generator[None]:
        """Without dropout and the like, then back to training."""
        for stage in self.built.stages:
            stage.eval()
        try:
            yield
        finally:
            for stage in self.built.stages:
                stage.train()

    def eager(self) -> contextlib.AbstractContextManager[Any]:
        """What is compiled runs as it is written."""
        return torch.compiler.set_stance("force_eager") if self.config.compiles else contextlib.nullcontext()

    def _loss_context(self) -> contextlib.AbstractContextManager[Any]:
        if self.mesh.tp == 1:
            return contextlib.nullcontext()
        from torch.distributed.tensor.parallel import loss_parallel

        return loss_parallel()

    def _border_shape(self, seq_len: int) -> tuple[int, int, int]:
        split = self.mesh.tp if self.config.mesh.sequence_parallel else 1
        return self.config.train.microbatch_size, seq_len // split, self.built.width

    def _schedule(self, seq_len: int) -> Any:
        """torch's pipeline schedule for batches of this length; made once per length, for shapes are fixed in it."""
        if seq_len not in self._schedules:
            self._schedules[seq_len] = build_schedule(
                self.config.pipeline.schedule,
                self.built.stages,
                self.built.stage_indices,
                len(self.built.stage_ranks),
                self.accumulation,
                self.mesh.group("pp"),
                self.mesh.device,
                self._border_shape(seq_len),
                (self.config.train.microbatch_size, seq_len),
                self.built.dtype,
                self._after_backward,
                lambda: self.timers.span("pipeline/busy"),
            )
        return self._schedules[seq_len]

    def _after_backward(self, stage: int, done: int) -> None:
        self.alive()
        self.zero.collect()
        if done == self.accumulation:
            self.zero.reduce_stage(stage)
