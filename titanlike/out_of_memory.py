"""What a rank says that ran out of memory: what was configured, and the two changes that would help most.

The changes are chosen by an estimate of what each would save on a rank, from the config alone: the formulas are in
`Estimate`. Those that keep the run the same (same loss curve to rounding) come first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from titanlike.errors import UserError
from titanlike.hooks import HookError
from titanlike.metrics.tables import format_bytes

if TYPE_CHECKING:
    from titanlike.config import Config

_SAID = ("can't allocate memory", "not enough memory", "out of memory", "Cannot allocate memory", "ALLOC_FAILED")

WORTH = 0.1
"""A change that saves less than this share of the estimate is not proposed while there is a better one."""


MESH = 0.6
"""Another mesh is more of a change than another microbatch: what it saves counts so much."""


class Change(NamedTuple):
    """A change to the config, as words; the bytes that it saves on a rank; whether the run stays the same."""

    words: str
    saves: float
    same_run: bool
    weight: float = 1.0


@dataclass(frozen=True)
class Estimate:
    """Bytes on a rank: P parameters over tp * pp (experts: over ep too), b bytes of the compute dtype, m of the master
    dtype.

    weights P b; gradients P m; states 3 P m / dp (masters and two moments, experts' over all of dp too); activations of
    the layers, kept for the backward: tokens * layers * b * (10 dim + 3 ffn) / (tp pp), times the microbatches under
    way, where ffn is the width that a token goes through; of the head: tokens * vocabulary * (b + 4) / tp.
    """

    parameters: int
    weights: float
    gradients: float
    states: float
    activations: float
    inputs: float
    """of the activations, those that full checkpointing keeps"""
    head: float
    experts: float
    """of the weights and gradients, those of experts"""

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.states + self.activations + self.head


def told(error: BaseException, config: Config, world_size: int, vocab_size: int, where: str) -> UserError | None:
    """The error to show for `error`; None if it is not about memory, or a hook's own, whose message names the hook.

    `where` is what the rank was doing: "forward_backward of step 3 on rank 1".
    """
    said = _allocator_said(error)
    if said is None:
        return None
    dp = config.resolved_dp(world_size)
    return UserError(f"out of memory in {where} ({said}) with {_advice(config, dp, vocab_size)}")


def too_little(needs: float, which: str, has: float, config: Config, dp: int, vocab_size: int) -> UserError:
    """The error for a rank, `which`, that needs more bytes than a device `has`, with the same changes."""
    sizes = f"{format_bytes(needs)}, more than {format_bytes(has)}"
    return UserError(f"{which} needs {sizes}, with {_advice(config, dp, vocab_size)}")


def _advice(config: Config, dp: int, vocab_size: int) -> str:
    """What the config asks for, and the changes to it that would help most."""
    train, mesh, estimated = config.train, config.mesh, estimate(config, dp, vocab_size)
    helpful = " and ".join(change.words for change in best(changes(config, dp, estimated), estimated))
    ep = f" (ep {mesh.ep})" if mesh.ep > 1 else ""
    return (
        f"{estimated.parameters:,} parameters, train.dtype = {train.dtype}, train.microbatch_size = "
        f"{train.microbatch_size}, train.seq_len = {train.seq_len}, mesh pp {mesh.pp} x dp {dp} x tp {mesh.tp}{ep}, "
        f"activation_checkpoint.mode = {config.activation_checkpoint.mode}; what would help most: {helpful}"
    )


def _allocator_said(error: BaseException | None) -> str | None:
    """The allocator's own words, in one line, or None."""
    if isinstance(error, HookError):
        return None
    while error is not None:
        text = " ".join(str(error).split())
        if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(word in text for word in _SAID)):
            text = text.partition(" Process ")[0].partition(" Including ")[0]  # CUDA's goes on for a paragraph
            return text[max(text.find("DefaultCPUAllocator"), 0) :][:240].rstrip(". ") or "Python's allocator"
        error = error.__cause__
    return None


def estimate(config: Config, dp: int, vocab_size: int) -> Estimate:
    """The bytes of a rank of this config, roughly."""
    import torch

    model = config.model_config_for(vocab_size)
    with torch.device("meta"):
        plain = config.architecture.model_class(model)
    parameters, n_experts = sum(p.numel() for p in plain.parameters()), getattr(model, "n_experts", 0)
    experts = sum(p.numel() for p in plain.parameters() if n_experts and p.dim() == 3 and p.shape[0] == n_experts)
    train, tp, pp = config.train, config.mesh.tp, config.mesh.pp
    item = {"float32": 4, "bfloat16": 2, "float64": 8}[train.dtype]
    master = max(item, 4)
    of_experts = experts / (tp * pp * config.mesh.ep)
    own = (parameters - experts) / (tp * pp) + of_experts
    dim, ffn, layers = (getattr(model, name, 0) or 0 for name in ("dim", "ffn_dim", "n_layers"))
    ffn *= getattr(model, "top_k", 1) + getattr(model, "n_shared_experts", 0)
    microbatches = config.accumulation(dp)
    under_way = 1 if pp == 1 else microbatches if config.pipeline.schedule == "afab" else min(microbatches, pp)
    tokens = train.microbatch_size * train.seq_len
    each = tokens * layers * item * under_way / (tp * pp)
    kept = {"none": 10 * dim + 3 * ffn, "selective": 6 * dim + ffn, "full": dim}
    return Estimate(
        parameters=parameters,
        weights=own * item if master != item or dp > 1 else 0.0,  # else weights and masters are one
        gradients=own * master,
        states=3 * parameters / (tp * pp) * master / dp,
        activations=each * kept[config.activation_checkpoint.mode],
        inputs=each * kept["full"],
        head=tokens * vocab_size * (item + 4) / tp,
        experts=of_experts * (item + master),
    )


def changes(config: Config, dp: int, now: Estimate) -> list[Change]:
    """What this config leaves to change."""
    train, mesh, model = config.train, config.mesh, config.model
    batch = now.activations + now.head
    found: list[Change] = []
    if train.microbatch_size > 1:
        less = max(n for n in range(1, train.microbatch_size) if train.microbatch_size % n == 0)
        saves = batch * (1 - less / train.microbatch_size)
        found.append(Change(f"train.microbatch_size = {less}", saves, True))
    mode = config.activation_checkpoint.mode
    full_compiles = not (config.compiles and config.compile.scope == "stage" and mesh.tp > 1)
    if mode != "full" and full_compiles:
        found.append(Change('activation_checkpoint.mode = "full"', now.activations - now.inputs, True))
    elif mode == "none":
        found.append(Change('activation_checkpoint.mode = "selective"', now.activations / 2, True))
    ranks = f"on the same ranks, dp {dp // 2}" if dp % 2 == 0 else "on twice as many ranks"
    tp, heads = 2 * mesh.tp, getattr(model, "n_heads", 0)
    if heads and heads % tp == 0 and train.seq_len % tp == 0:
        saves = (now.weights + now.gradients + batch) / 2 + (0 if dp % 2 == 0 else now.states / 2)
        found.append(Change(f"mesh.tp = {tp} ({ranks})", saves, True, MESH))
    elif 2 * config.n_stages <= (getattr(model, "n_layers", 0) or 0):
        saves = (now.weights + now.gradients) / 2 + (0 if dp % 2 == 0 else now.states / 2)
        found.append(Change(f"mesh.pp = {2 * mesh.pp} ({ranks})", saves, True, MESH))
    ep = 2 * mesh.ep
    if now.experts and model.n_experts % ep == 0 and dp % ep == 0:
        found.append(Change(f"mesh.ep = {ep}", now.experts / 2, True))
    if train.global_batch_size % (2 * dp * train.microbatch_size) == 0:
        found.append(Change(f"twice as many ranks for dp ({2 * dp})", now.states / 2, True, MESH))
    smaller = {"float64": "float32", "float32": "bfloat16"}.get(train.dtype)
    if smaller is not None:
        saves = (now.weights + batch) / 2 + (0 if smaller == "bfloat16" else (now.gradients + now.states) / 2)
        found.append(Change(f'train.dtype = "{smaller}" (other rounding)', saves, False))
    if train.seq_len > 1:
        found.append(Change(f"train.seq_len = {math.ceil(train.seq_len / 2)} (another run)", batch / 2, False))
    return found


def best(found: list[Change], now: Estimate) -> list[Change]:
    """The two changes to name, the more useful one first."""

    def order(change: Change) -> tuple[bool, bool, float]:
        return change.saves < WORTH * now.total, not change.same_run, -change.saves * change.weight

    return sorted(found, key=order)[:2]
