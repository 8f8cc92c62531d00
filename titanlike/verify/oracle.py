"""What one rank alone computes: the same config, weights and batches in plain PyTorch (titanlike/reference.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from titanlike.config import Config
from titanlike.loss import IGNORE
from titanlike.reference import Reference
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
)
from titanlike.verify.shrink import STEPS

Tensors = dict[str, Tensor]

FAINT = 1e-6
"""largest element of a gradient that is too small: ten thousand times the tolerance"""


class Oracle:
    """The values that a mesh has to have: `expected[key]` has tensors by name, in the order of the model's forward."""

    def __init__(self, config: Config, vocab_size: int, document_mask: bool) -> None:
        self.config = config
        self.vocab_size = vocab_size
        self.batches = [make_batch(config, vocab_size, document_mask, step) for step in range(1, STEPS + 1)]
        self.expected: dict[Key, Tensors] = {}
        self.clip_factors: list[float] = []

    @property
    def microbatches(self) -> int:
        """In the global batch."""
        return self.config.train.global_batch_size // self.config.train.microbatch_size

    def microbatch(self, step: int, index: int) -> RandomBatch:
        """A microbatch of a step's global batch."""
        rows = self.config.train.microbatch_size
        return self.batches[step - 1].rows(index * rows, rows)

    def first_norm(self) -> float:
        """The gradient norm of the first step; nothing is kept."""
        batch = self.batches[0]
        return Reference(self.config, self.vocab_size).step(batch.tokens, batch.labels, **batch.masks).grad_norm

    def run(self) -> None:
        """Take the steps and fill `expected`."""
        reference = Reference(self.config, self.vocab_size)
        self.order = _execution_order(reference, self.microbatch(1, 0))
        self._note_state(reference, 0)
        for step, batch in enumerate(self.batches, 1):
            losses: Tensors = {}
            self.expected[Key(MICROBATCH_LOSSES, step)] = losses
            for index in range(self.microbatches):
                part = self.microbatch(step, index)
                if step == 1:
                    noted, loss = _activations(reference, part)
                    named = {f"{name} (microbatch {index})": tensor for name, tensor in noted.items()}
                    self.expected.setdefault(Key(ACTIVATIONS, 1), {}).update(named)
                else:
                    with torch.no_grad():
                        loss = reference.loss_sum(part.tokens, part.labels, **part.masks)
                losses[f"microbatch {index}"] = loss
            result = reference.step(batch.tokens, batch.labels, **batch.masks)
            norm, limit = torch.tensor(result.grad_norm, dtype=torch.float64), self.config.train.max_grad_norm
            self.clip_factors.append(min(1.0, limit / (result.grad_norm + 1e-6)) if limit else 1.0)
            scalars = {"loss": result.loss, "valid labels": batch.valid, **result.auxiliary}
            self.expected[Key(LOSS, step)] = {n: torch.tensor(v, dtype=torch.float64) for n, v in scalars.items()}
            self.expected[Key(GRADIENT_NORM, step)] = {"grad_norm": norm}
            gradients = {name: result.gradients[name] for name in self.order}
            self.expected[Key(GRADIENTS, step)] = gradients
            # After the step `.grad` holds the clipped gradient.
            clipped = {name: reference.parameters[name].grad for name in self.order}
            self.expected[Key(CLIPPED, step)] = {name: g.clone() for name, g in clipped.items() if g is not None}
            self._note_state(reference, step)
        moments = self.expected.get(Key(MOMENTS, 1), {})
        self.expected[Key(MOMENTS, 0)] = {name: torch.zeros_like(moment) for name, moment in moments.items()}
        reference.model.eval()
        with torch.no_grad():
            last = self.batches[-1]
            loss = reference.loss_sum(last.tokens, last.labels, **last.masks) / last.valid
        self.expected[Key(VALIDATION, STEPS)] = {"loss": loss}

    def _note_state(self, reference: Reference, step: int) -> None:
        state = {name: tensor.clone() for name, tensor in reference.state().items()}
        buffers = [name for name, _ in reference.model.named_buffers()]
        weights = {name: state[f"model.{name}"] for name in [*self.order, *buffers]}
        self.expected[Key(WEIGHTS, step)] = self.expected[Key(COMPUTE_WEIGHTS, step)] = weights
        kinds = {key.split(".")[1] for key in state if key.startswith("optimizer.")}
        moments = {f"{kind}.{name}": state[f"optimizer.{kind}.{name}"] for kind in sorted(kinds) for name in self.order}
        if step:  # torch makes them at the first step; until then they are zero
            self.expected[Key(MOMENTS, step)] = moments

    def faint_gradients(self) -> list[str]:
        """Parameters whose first gradient is so small that a fault in it could be under the tolerance."""
        gradients = self.expected[Key(GRADIENTS, 1)]
        return [name for name, gradient in gradients.items() if gradient.abs().max() < FAINT]

    def microbatch_gradients(self, step: int) -> list[Tensors]:
        """The gradient of each microbatch's loss sum at the weights before `step`, divided by the global batch's number
        of valid labels: what adds up to the gradient. Made on demand, to explain one that is wrong."""
        reference = Reference(self.config, self.vocab_size)
        with torch.no_grad():
            for name, weight in self.expected[Key(WEIGHTS, step - 1)].items():
                reference.parameters[name].copy_(weight)
        count = self.batches[step - 1].valid
        gradients: list[Tensors] = []
        for index in range(self.microbatches):
            part = self.microbatch(step, index)
            for parameter in reference.parameters.values():
                parameter.grad = None
            (reference.loss_sum(part.tokens, part.labels, **part.masks) / count).backward()
            gradients.append(
                {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in reference.parameters.items()}
            )
        return gradients

    def valid_labels(self, step: int) -> list[int]:
        """Of each microbatch."""
        return [int((self.microbatch(step, i).labels != IGNORE).sum()) for i in range(self.microbatches)]


def _watch(model: nn.Module, hook: Callable[[str, nn.Module, Any], None], before: bool) -> list[Any]:
    handles = []
    for name, module in model.named_modules():
        if name and before:
            handles.append(module.register_forward_pre_hook(lambda m, args, n=name: hook(n, m, None)))
        elif name:
            handles.append(module.register_forward_hook(lambda m, args, out, n=name: hook(n, m, out)))
    return handles


def _execution_order(reference: Reference, batch: RandomBatch) -> list[str]:
    """Names of the parameters in the order in which their modules run."""
    names = {id(parameter): name for name, parameter in reference.parameters.items()}
    order: dict[str, None] = {}

    def visit(_name: str, module: nn.Module, _output: Any) -> None:
        order.update({names[id(p)]: None for p in module.parameters(recurse=False)})

    handles = _watch(reference.model, visit, before=True)
    with torch.no_grad():
        reference.loss_sum(batch.tokens, batch.labels, **batch.masks)
    for handle in handles:
        handle.remove()
    return [*order, *(name for name in reference.parameters if name not in order)]


def _activations(reference: Reference, batch: RandomBatch) -> tuple[Tensors, Tensor]:
    """The first output of each module, in the order in which they end, and the loss sum."""
    noted: Tensors = {}

    def note(name: str, _module: nn.Module, output: Any) -> None:
        if isinstance(output, Tensor):
            noted.setdefault(name, output.detach().clone())

    handles = _watch(reference.model, note, before=False)
    with torch.no_grad():
        loss = reference.loss_sum(batch.tokens, batch.labels, **batch.masks)
    for handle in handles:
        handle.remove()
    return noted, loss
