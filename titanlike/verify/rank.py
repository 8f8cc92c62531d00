"""What a rank does under verification: the trainer's own steps, with everything that can be compared noted.

Nothing of the trainer is repeated here: notes are taken by hooks on its modules and around its optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard

from parallelize.pipeline import Stage
from parallelize.zero import local_part
from titanlike.config import Config
from titanlike.config_errors import validate
from titanlike.mesh import Mesh
from titanlike.trainer import StepResult, Trainer
from titanlike.verify.batches import RandomBatch, make_batch
from titanlike.verify.pieces import (
    ACTIVATIONS,
    CLIPPED,
    COMPUTE_WEIGHTS,
    GRADIENT_NORM,
    GRADIENTS,
    LOSS,
    MICROBATCH_LOSSES,
    MOMENTS,
    VALIDATION,
    WEIGHTS,
    Key,
    Piece,
    RankRecord,
)
from titanlike.verify.shrink import STEPS

UNKNOWN = -1
"""the number of a microbatch that is none of the batch's"""


def run_rank(
    tables: dict[str, Any], vocab_size: int, document_mask: bool, plant: Callable[[Trainer], None] | None = None
) -> RankRecord:
    """Train this rank's part for a few steps. `plant` may put a fault into the trainer before the first one (tests)."""
    config = validate(Config, tables)
    degrees = config.mesh
    assert degrees.dp is not None
    mesh = Mesh(degrees.pp, degrees.dp, degrees.tp, torch.device("cpu"), degrees.ep)
    trainer = Trainer(config, mesh, vocab_size)
    if plant is not None:
        plant(trainer)
    recorder = Recorder(trainer)
    recorder.note_state(0)
    rows = config.train.global_batch_size // mesh.dp
    batch = None
    for step in range(1, STEPS + 1):
        whole = make_batch(config, vocab_size, document_mask, step)
        batch = whole.rows(mesh.coordinate("dp") * rows, rows)
        recorder.begin(step, batch)
        recorder.end(step, trainer.train_step(batch))
    recorder.stop()
    loss, _ = trainer.evaluate(iter([batch]))
    recorder.note(VALIDATION, STEPS, "loss", torch.tensor(loss, dtype=torch.float64), ())
    return recorder.record


class Recorder:
    """Takes notes of a Trainer's steps."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        mesh, built = trainer.mesh, trainer.built
        self.record = RankRecord(
            mesh.rank, mesh.coordinate("pp"), mesh.coordinate("dp"), mesh.coordinate("tp"), [], {}, set(), {}, []
        )
        for name, (bucket, slot) in trainer.zero.slots.items():
            self.record.stage_of[name] = slot.named.stage
            if bucket.replicated_over_tp:
                self.record.replicated.add(name)
        self.step = 0
        self.microbatches: list[RandomBatch] = []
        self.first_microbatch = mesh.coordinate("dp") * trainer.accumulation  # in the global batch
        self.microbatch: int | None = None
        """the microbatch that a stage runs forward now, numbered in the global batch"""
        self.seen: set[tuple[str, int]] = set()
        self.hooks: list[Any] = []
        for index, stage in zip(built.stage_indices, built.stages, strict=True):
            self._watch(stage, index)
        self._watch_optimizer()

    def note(self, check: str, step: int, name: str, tensor: Tensor, offset: tuple[int, ...] | None) -> None:
        """Keep a copy of a tensor."""
        self.record.pieces.append(Piece(Key(check, step), name, tensor.detach().clone(), offset))

    # -- forward -----------------------------------------------------------------------------------------------------

    def _watch(self, stage: Stage, index: int) -> None:
        def before(_stage: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
            # A schedule may run microbatches in any order: the labels tell which one this is.
            labels = kwargs["labels"]
            here = [i for i, batch in enumerate(self.microbatches) if torch.equal(batch.labels, labels)]
            self.microbatch = self.first_microbatch + here[0] if here else UNKNOWN

        def after(_stage: nn.Module, _args: Any, _kwargs: dict[str, Any], output: Tensor) -> None:
            if stage.last:
                name = f"microbatch {self.microbatch}"
                if (name, self.step) in self.seen:
                    name += ", run again"
                self.seen.add((name, self.step))
                self.note(MICROBATCH_LOSSES, self.step, name, output.detach().double().sum(), ())
            self.microbatch = None

        self.hooks.append(stage.register_forward_pre_hook(before, with_kwargs=True))
        self.hooks.append(stage.register_forward_hook(after, with_kwargs=True))
        if self.trainer.config.compiles:
            return  # the modules inside are one graph
        for name, module in stage.model.named_modules():
            if name:
                self.record.module_stage[name] = index
                self.hooks.append(module.register_forward_hook(self._note_output(name)))

    def _note_output(self, name: str) -> Callable[..., None]:
        def note(_module: nn.Module, _args: Any, output: Any) -> None:
            # Activation checkpointing runs blocks again in the backward, when no stage runs.
            if self.step != 1 or self.microbatch is None or not isinstance(output, Tensor):
                return
            label = f"{name} (microbatch {self.microbatch})"
            if (label, 1) in self.seen:  # a module that is used twice: the first one
                return
            self.seen.add((label, 1))
            if not isinstance(output, DTensor):
                self.note(ACTIVATIONS, 1, label, output, None if self.trainer.mesh.tp > 1 else (0,) * output.dim())
            elif not any(isinstance(placement, Partial) for placement in output.placements):
                with torch.no_grad():
                    self.note(ACTIVATIONS, 1, label, output.to_local(), _offset(output))

        return note

    # -- a step ------------------------------------------------------------------------------------------------------

    def begin(self, step: int, batch: RandomBatch) -> None:
        """Before the forward."""
        self.step = step
        rows = self.trainer.config.train.microbatch_size
        self.microbatches = [batch.rows(i * rows, rows) for i in range(self.trainer.accumulation)]

    def _watch_optimizer(self) -> None:
        """Note the reduced gradient sums before the optimizer step scales them in place, and what it scales them by."""
        zero = self.trainer.zero
        take_step = zero.step

        def step(grad_factor: Tensor, lr: float) -> None:
            self.sums = {name: shard.grad.clone() for name, shard in zero.shards.items() if shard.grad is not None}
            self.factor = float(grad_factor)
            take_step(grad_factor, lr)

        zero.step = step  # type: ignore[method-assign]

    def end(self, step: int, result: StepResult) -> None:
        """After the optimizer step."""
        tokens = float(result.tokens)
        self.record.clip_factors.append(self.factor * tokens)
        self.note(LOSS, step, "loss", result.loss, ())
        self.note(LOSS, step, "valid labels", result.tokens, ())
        for name, value in self.trainer.auxiliary_values(result).items():
            self.note(LOSS, step, name, value, ())
        self.note(GRADIENT_NORM, step, "grad_norm", result.grad_norm, ())
        boxes = self.trainer.zero.boxes()
        for name, sums in self.sums.items():
            offset = boxes[f"model.{name}"][2]
            self.note(GRADIENTS, step, name, sums / tokens, offset)
            self.note(CLIPPED, step, name, sums * self.factor, offset)
        self.note_state(step)

    def note_state(self, step: int) -> None:
        """The master weights and moments that this rank owns, and the weights that it computes with."""
        for name, (tensor, _, offset) in self.trainer.boxes().items():
            kind, _, rest = name.partition(".")
            self.note(WEIGHTS if kind == "model" else MOMENTS, step, rest, tensor, offset)
        for name, buffer in self.trainer.built.buffers.items():
            self.note(COMPUTE_WEIGHTS, step, name, buffer, (0,) * buffer.dim())
        for name, (_, slot) in self.trainer.zero.slots.items():
            self.note(COMPUTE_WEIGHTS, step, name, local_part(slot.parameter), slot.named.box_offset)

    def stop(self) -> None:
        """Take no more notes of forwards."""
        for hook in self.hooks:
            hook.remove()


def _offset(tensor: DTensor) -> tuple[int, ...]:
    offset = [0] * tensor.dim()
    for placement in tensor.placements:
        if isinstance(placement, Shard):
            size, mesh = tensor.shape[placement.dim], tensor.device_mesh
            offset[placement.dim] = min(-(-size // mesh.size()) * mesh.get_local_rank(), size)
    return tuple(offset)
