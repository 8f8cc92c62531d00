"""The health of the model, every `metrics.health_interval` steps: sizes of activations, gradients, weights and updates
by layer, and how sharp the attention is.

Properties:
- The numbers are those of the whole global batch and of the plain model's tensors, so they do not depend on the mesh:
  in float64 equal to those of one rank to rounding.
- Activations come from a forward of their own, without gradients, before the step: the blocks run eagerly, on the same
  rows and microbatches, with dropout off. Why not from the step's forward: a compiled one has no place to look at, a
  recomputed one runs twice, and what happens inside attention kernels is never seen. Why not from one microbatch: which
  rows it holds depends on the mesh; the global batch does not.
- Gradients are those of the mean loss, reduced and before clipping; weights are the masters before the update.
- Nothing of the run is changed. A step that is not looked at costs nothing. One that is costs about a forward, the
  attention logits once more (in pieces of `PIECE` elements), a copy of this rank's master weights until the update is
  done, and two small all-reduces.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode

from parallelize.pipeline import Stage
from parallelize.zero import sum_of_squares
from titanlike.trainer import StepResult, Trainer

PIECE = 2**24
"""Attention logits that are in memory at once, in elements."""


def part_of(name: str) -> str:
    """The part of the model that a parameter is counted with: its block, `layers.3`, or the module at the top."""
    pieces = name.split(".")
    return ".".join(pieces[:2]) if pieces[0] == "layers" else pieces[0]


class Health:
    """Looks at the steps of a run. All ranks make one and call its methods together, in this order."""

    def __init__(self, trainer: Trainer) -> None:
        plain = trainer.built.plain
        self.trainer = trainer
        self.mesh = trainer.mesh
        layers = [f"layers.{name}" for name in plain.layers]
        parts = list(dict.fromkeys(part_of(name) for name, _ in plain.named_parameters()))
        kinds = {"activation": layers, "attention": layers, "grad": parts, "weight": parts, "update": parts}
        # The same order on all ranks, whatever each of them holds: what is summed up are tables with a row each.
        self._rows = {row: n for n, row in enumerate((kind, part) for kind in kinds for part in kinds[kind])}
        self._before: dict[str, Tensor] = {}
        self._clear()

    def _clear(self) -> None:
        device = self.mesh.device
        self._sums = torch.zeros(len(self._rows), 2, dtype=torch.float64, device=device)
        """(how many, their sum)"""
        self._maxima = torch.full((len(self._rows),), -math.inf, dtype=torch.float64, device=device)
        self._before = {}

    def _note(self, kind: str, part: str, count: int | Tensor, total: Tensor, maximum: Tensor) -> None:
        row = self._rows[kind, part]
        self._sums[row, 0] += count
        self._sums[row, 1] += total
        self._maxima[row] = torch.maximum(self._maxima[row], maximum.double())

    def _note_elements(self, kind: str, part: str, tensor: Tensor) -> None:
        """The squares and the largest magnitude of a tensor's elements."""
        if tensor.numel():
            wide = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)).reshape(-1)
            self._note(kind, part, wide.numel(), sum_of_squares(wide), wide.abs().max())

    # -- activations, before the step --------------------------------------------------------------------------------

    @torch.no_grad()
    def forward(self, batch: Any) -> None:
        """Run this dp coordinate's rows of the global batch through the blocks, and look at what comes out of them."""
        self._clear()
        inputs = self.trainer.inputs(batch)
        tokens = inputs["x"]

        def run(stage: Stage, microbatch: int, hidden: Tensor | None) -> Tensor | None:
            own = self.trainer.microbatch(inputs, microbatch)
            out = stage.hidden(
                own["x"] if hidden is None else hidden, own["labels"], own.get("positions"), own.get("document_ids")
            )
            return None if stage.last else stage.border(out)

        with self.trainer.eval_mode(), self.trainer.eager(), self._watching():
            rows = self.trainer.config.train.microbatch_size
            self.trainer.run_forward(run, tokens.shape[0] // rows, tokens.shape[1])

    @contextlib.contextmanager
    def _watching(self) -> Generator[None]:
        attention = _Attention(self)
        handles = []
        for stage in self.trainer.built.stages:
            for name, block in stage.model.layers.items():
                handles.append(block.register_forward_pre_hook(attention.entering(f"layers.{name}")))
                handles.append(block.register_forward_hook(self._leaving(f"layers.{name}")))
        try:
            with attention:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _leaving(self, layer: str) -> Any:
        def hook(_block: Any, _arguments: Any, out: Tensor) -> None:
            local = self.own(out)
            if local is not None:
                self._note_elements("activation", layer, local)

        return hook

    def own(self, tensor: Tensor) -> Tensor | None:
        """What counts of a tensor on this tp rank: its part of one that is cut over tp; the whole on the first rank if
        all have it, and None on the others."""
        first = self.mesh.coordinate("tp") == 0
        if not isinstance(tensor, DTensor):
            return tensor if first else None
        if any(placement.is_partial() for placement in tensor.placements):
            tensor = tensor.redistribute(placements=[Shard(1)] * len(tensor.placements))
        if any(placement.is_shard() for placement in tensor.placements):
            return tensor.to_local()
        return tensor.to_local() if first else None

    # -- gradients and weights, around the update --------------------------------------------------------------------

    @torch.no_grad()
    def before_update(self, result: StepResult) -> None:
        """Look at the reduced gradients and the master weights, and keep the weights for comparison."""
        zero, count = self.trainer.zero, result.tokens.clamp(min=1)
        for name, (bucket, slot) in zero.slots.items():
            shard = zero.shards[name]
            self._before[name] = shard.detach().clone()
            if zero.counts_here(bucket):
                part = part_of(name)
                self._note_elements("weight", part, shard)
                self._note_elements("grad", part, slot.own(bucket.grad_shard).double() / count)

    @torch.no_grad()
    def after_update(self) -> None:
        """Look at how far the master weights moved. Not called for a step that is left out."""
        zero = self.trainer.zero
        for name, (bucket, _) in zero.slots.items():
            if zero.counts_here(bucket):
                moved = zero.shards[name].detach() - self._before[name]
                self._note_elements("update", part_of(name), moved)

    # -- the numbers -------------------------------------------------------------------------------------------------

    def values(self) -> dict[str, float]:
        """What is logged. Two small all-reduces of all ranks, for each has seen its own part of the model and batch."""
        dist.all_reduce(self._sums)
        dist.all_reduce(self._maxima, op=dist.ReduceOp.MAX)
        sums, maxima = self._sums.tolist(), self._maxima.tolist()
        self._clear()
        found: dict[str, float] = {}
        rms: dict[tuple[str, str], float] = {}
        for (kind, part), row in self._rows.items():
            count, total = sums[row]
            if not count:
                continue  # a layer without attention, or no update
            if kind == "attention":
                found[f"attention_logit_max/{part}"] = maxima[row]
                found[f"attention_entropy/{part}"] = total / count
                continue
            rms[kind, part] = math.sqrt(total / count)
            if kind == "update":
                weight = rms["weight", part]
                found[f"update_ratio/{part}"] = rms[kind, part] / weight if weight else math.inf
            else:
                found[f"{kind}_rms/{part}"] = rms[kind, part]
                found[f"{kind}_max/{part}"] = maxima[row]
        return found


class _Attention(TorchFunctionMode):
    """Sees every call of scaled_dot_product_attention with the queries and keys that it gets."""

    def __init__(self, health: Health) -> None:
        super().__init__()
        self.health = health
        self.layer = ""

    def entering(self, layer: str) -> Any:
        def hook(_block: Any, _arguments: Any) -> None:
            self.layer = layer

        return hook

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._look(*args, **kwargs)
        return func(*args, **kwargs)

    def _look(
        self,
        query: Tensor,
        key: Tensor,
        _value: Tensor | None = None,
        attn_mask: Tensor | None = None,
        _dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **_rest: Any,
    ) -> None:
        """query [batch, heads, seq, head_dim], key [batch, kv heads, keys, head_dim]. Local tensors are this rank's own
        heads; of DTensors those that are cut."""
        if isinstance(query, DTensor):
            local = self.health.own(query)
            if local is None:
                return
            query, key = local, key.to_local() if isinstance(key, DTensor) else key
        wide = torch.promote_types(query.dtype, torch.float32)
        query, key = query.to(wide), key.to(wide)
        if key.shape[1] != query.shape[1]:
            key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        factor = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
        batch, heads, length, _ = query.shape
        keys = key.shape[2]
        step = max(1, PIECE // max(1, batch * heads * keys))
        for begin in range(0, length, step):
            rows = slice(begin, min(begin + step, length))
            logits = (query[:, :, rows] @ key.transpose(-2, -1)) * factor  # [batch, heads, rows, keys]
            if is_causal:
                allowed = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril(begin)
                logits = logits.masked_fill(~allowed, -math.inf)
            if attn_mask is not None:
                mask = attn_mask if attn_mask.shape[-2] == 1 else attn_mask[..., rows, :]
                logits = logits.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else logits + mask
            seen = (logits != -math.inf).any(-1)  # a query without any key, in padding, has no distribution
            entropy = torch.special.entr(logits.softmax(-1)).sum(-1)
            entropy = torch.where(seen, entropy, 0.0)
            self.health._note("attention", self.layer, seen.sum(), entropy.double().sum(), logits.max())
