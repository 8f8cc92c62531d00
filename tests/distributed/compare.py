"""A mesh against the oracle: the same steps by `Trainer` on gloo ranks and by `Reference` on one, tensor by tensor.

`compare` runs a case and returns what differed; `assert_same_run` fails with the worst tensors, their ratio to the
oracle, and the rank. Properties of the comparison:

- A value that is not finite counts as an infinite error. (`max` over a NaN would say anything.)
- Every element of every tensor of the plain model is compared: the ranks' boxes must cover it, and where several ranks
  hold the same box they must hold the same bits.
- Gradients are taken as the optimizer gets them, after every reduction and before clipping.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import run_ranks
from titanlike.config import Config, load_config
from titanlike.config_combinations import cannot_compile, limit_of_torch
from titanlike.data.batch import Batch
from titanlike.loss import IGNORE
from titanlike.mesh import Mesh

TINY: dict[str, Any] = {
    "model.dim": 16,
    "model.n_layers": 2,
    "model.n_heads": 4,
    "model.n_kv_heads": 2,
    "model.ffn_dim": 24,
    "model.init_std": 0.1,  # a trained model's size of activations, so that a fault is not lost in small numbers
    "train.seq_len": 8,
    "train.global_batch_size": 8,
    "train.dtype": "float64",
    "train.max_grad_norm": 0.5,  # below the norm of these models: clipping acts
    "optimizer.lr": 0.01,
    "compile.enable": False,
}
VOCAB = 67  # odd: neither tp nor dp divides it

# Sums of some thousand float64 terms of order 1 at most, in another order: 3e-15 was the worst of all cases here. The
# smallest fault that matters, the gradient of one token of a batch lost, is above 1e-6.
TOLERANCE = 1e-13
# Adam divides by the root of the second moment: where that is not much above eps, what a gradient is off by comes to up
# to lr / eps = 1e6 times as much in a weight, so 1e-17 to 1e-11. 1e-14 was the worst seen.
WEIGHT_TOLERANCE = 1e-11


@dataclasses.dataclass(frozen=True)
class Case:
    """A mesh, config keys over `TINY`, and batches."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    vocab: int = VOCAB
    steps: int = 3
    labels: str = "uneven"
    """uneven: a different part of each row is masked, whole rows too; one: one valid label in the whole batch; none:
    no valid label in the second batch; all: no mask"""
    ep: int = 1
    documents: bool = False
    """several documents in each row, with positions that start anew and leave some out"""

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.tp

    def config(self) -> Config:
        config = self._config()
        config.validate_for(self.world_size)
        return config

    def skip_if_torch_is_too_old(self) -> None:
        """Skip the test where the installed torch cannot run the case."""
        config = self._config()
        if limit := limit_of_torch(config):
            pytest.skip(limit)
        if self.changes.get("compile.enable") and (cannot := cannot_compile(config)):
            pytest.skip(f"{cannot[0]}: {cannot[1]}")

    def _config(self) -> Config:
        mesh = {
            "mesh.pp": self.pp,
            "mesh.dp": self.dp,
            "mesh.tp": self.tp,
            "mesh.ep": self.ep,
            "train.steps": max(self.steps, 1),
        }
        return load_config(None, TINY | mesh | self.changes)


def case(pp: int = 1, dp: int = 1, tp: int = 1, ep: int = 1, **changes: Any) -> Case:
    """A case; keys of the config are written with two underscores for the dot, the case's own fields as they are."""
    own = {f.name for f in dataclasses.fields(Case)}
    fields = {name: value for name, value in changes.items() if name in own}
    keys = {name.replace("__", "."): value for name, value in changes.items() if name not in own}
    return Case(pp, dp, tp, keys, ep=ep, **fields)


@dataclasses.dataclass
class Difference:
    """How one tensor of one rank compares with the oracle."""

    what: str
    """initial, gradient, model, optimizer, loss, auxiliary, grad_norm, tokens, validation"""
    name: str
    step: int
    error: float
    """largest absolute difference; infinite where a value is not finite"""
    ratio: float
    """least-squares factor from the oracle's tensor to this one: 2.0 for what was counted twice"""
    rank: int = 0

    def __str__(self) -> str:
        return (
            f"step {self.step} {self.what} {self.name} on rank {self.rank}: error {self.error:.3g}, ratio to the "
            f"oracle {self.ratio:.6g}"
        )


@dataclasses.dataclass
class Comparison:
    """All differences of a run, on all ranks."""

    differences: list[Difference]
    replicas_differ: list[str]
    """names of tensors of which two ranks hold different bits"""
    not_covered: list[str]
    """names of tensors with elements that no rank holds"""
    bytes_per_rank: list[dict[str, int]]
    digests: list[str]
    """per rank, of all weights and optimizer tensors at the end"""

    def worst(self, what: str) -> float:
        return max((d.error for d in self.differences if d.what == what), default=0.0)

    def faults(self, tolerance: float, weight_tolerance: float) -> list[str]:
        """What does not hold, in words, in the order in which it happened."""
        limits = {"initial": 0.0, "tokens": 0.0, "model": weight_tolerance}
        order = ["initial", "loss", "auxiliary", "gradient", "grad_norm", "tokens", "optimizer", "model", "validation"]
        found = [d for d in self.differences if not d.error <= limits.get(d.what, tolerance)]
        found.sort(key=lambda d: (d.step, order.index(d.what)))
        lines = [str(d) for d in found]
        lines += [f"{name} differs between ranks that hold the same part" for name in self.replicas_differ]
        lines += [f"no rank holds all of {name}" for name in self.not_covered]
        return lines


def error_and_ratio(mine: Tensor, oracle: Tensor) -> tuple[float, float]:
    """(largest absolute difference, factor from the oracle to mine); (inf, nan) where anything is not finite."""
    if mine.numel() == 0:
        return 0.0, 1.0
    mine, oracle = mine.double().flatten(), oracle.double().flatten()
    if not (mine.isfinite().all() and oracle.isfinite().all()):
        return math.inf, math.nan
    square = torch.dot(oracle, oracle).item()
    return (mine - oracle).abs().max().item(), (torch.dot(mine, oracle).item() / square if square else math.nan)


def batches(case: Case, config: Config) -> Iterator[Batch]:
    """The global batches of the case, one per step and one for validation; the same on every rank."""
    generator = torch.Generator().manual_seed(5)
    rows, seq = config.train.global_batch_size, config.train.seq_len
    for step in range(case.steps + 1):
        tokens = torch.randint(0, case.vocab, (rows, seq + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        if case.labels == "uneven":
            share = torch.rand(rows, 1, generator=generator)
            labels[torch.rand(rows, seq, generator=generator) < share] = IGNORE
            labels[step % rows] = IGNORE
            labels[(step + 1) % rows, 0] = tokens[(step + 1) % rows, 1]
        elif case.labels == "one":
            keep = labels[(3 * step + 1) % rows, 2].clone()
            labels[:] = IGNORE
            labels[(3 * step + 1) % rows, 2] = keep
        elif case.labels == "none" and step == 1:
            labels[:] = IGNORE
        positions = documents = None
        if case.documents:
            starts = torch.rand(rows, seq, generator=generator) < 0.3
            starts[:, 0] = True
            documents = starts.cumsum(1).to(torch.int32)
            # Not every position: RoPE sees differences alone, so positions that count through the row would do as well.
            place = (1 + torch.randint(0, 3, (rows, seq), generator=generator)).cumsum(1)
            positions = place - torch.where(starts, place, 0).cummax(1).values
        yield Batch(tokens[:, :-1], labels, positions, documents, [], {})


def rows_of(batch: Batch, dp: int, coordinate: int) -> Batch:
    """The part of a global batch that a dp coordinate gets."""
    n = batch.tokens.shape[0] // dp
    part = slice(coordinate * n, (coordinate + 1) * n)

    def cut(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[part]

    return Batch(batch.tokens[part], batch.labels[part], cut(batch.positions), cut(batch.document_ids), [], {})


# -- on a rank -------------------------------------------------------------------------------------------------------


def mesh_of(case: Case) -> Mesh:
    return Mesh(case.pp, case.dp, case.tp, torch.device("cpu"), case.ep)


def trainer_of(case: Case, prepare: Callable[[Any], None] | None = None) -> Any:
    """The case's Trainer. For functions that run on ranks."""
    from titanlike.trainer import Trainer

    return Trainer(case.config(), mesh_of(case), case.vocab, prepare)


def own_part(whole: Tensor, box: tuple[Tensor, tuple[int, ...], tuple[int, ...]]) -> Tensor:
    """The part of the oracle's tensor that a box of `Zero.boxes` is."""
    tensor, shape, offset = box
    return whole.reshape(shape)[tuple(slice(o, o + n) for o, n in zip(offset, tensor.shape, strict=True))]


def spy_on_gradients(trainer: Any, seen: dict[str, Tensor]) -> None:
    """Let each train_step put the gradients, reduced sums over tokens not yet scaled, into `seen` by name."""
    update = trainer.zero.step

    def step(grad_factor: Tensor, lr: float) -> None:
        seen.clear()
        seen.update({name: shard.grad.clone() for name, shard in trainer.zero.shards.items()})
        update(grad_factor, lr)

    trainer.zero.step = step


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


Piece = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], str]
"""(name, whole shape, offset, shape, digest) of a part of a tensor that a rank holds"""


def _pieces(trainer: Any) -> list[Piece]:
    from parallelize.zero import local_part

    pieces: list[Piece] = []
    for name, (tensor, shape, offset) in trainer.boxes().items():
        if tensor.numel():
            pieces.append((name, shape, offset, tuple(tensor.shape), digest(tensor)))
    for name, (_, slot) in trainer.zero.slots.items():  # the weights that are computed with
        local = local_part(slot.parameter)
        shape, offset = tuple(slot.parameter.shape) or (1,), slot.named.box_offset
        pieces.append((f"compute.{name}", shape, offset, tuple(local.shape) or (1,), digest(local)))
    return pieces


def measure(case: Case) -> tuple[list[Difference], list[Piece], dict[str, int], str]:
    """Run the case on this rank beside the oracle."""
    from titanlike.reference import Reference

    trainer = trainer_of(case)
    mesh, config = trainer.mesh, trainer.config
    oracle = Reference(config, case.vocab)
    found: list[Difference] = []

    def note(what: str, name: str, step: int, mine: Tensor | float, right: Tensor | float) -> None:
        error, ratio = error_and_ratio(*(torch.as_tensor(x, dtype=torch.float64) for x in (mine, right)))
        found.append(Difference(what, name, step, error, ratio, mesh.rank))

    def note_state(step: int) -> None:
        state = oracle.state()
        for name, box in trainer.boxes().items():
            kind, _, parameter = name.partition(".")
            whole = state[name] if step else state.get(name, torch.zeros(box[1]))  # no moments before the first step
            note("initial" if step == 0 else kind, f"{kind}.{parameter}", step, box[0], own_part(whole, box))

    note_state(0)
    gradients: dict[str, Tensor] = {}
    spy_on_gradients(trainer, gradients)
    *steps, held_out = batches(case, config)
    for step, batch in enumerate(steps, start=1):
        result = trainer.train_step(rows_of(batch, mesh.dp, mesh.coordinate("dp")))
        right = oracle.step(batch.tokens, batch.labels, positions=batch.positions, document_ids=batch.document_ids)
        count = int((batch.labels != IGNORE).sum())
        note("loss", "", step, result.loss, right.loss)
        values = trainer.auxiliary_values(result)
        assert values.keys() == right.auxiliary.keys()
        for name, value in right.auxiliary.items():
            note("auxiliary", name, step, values[name], value)
        note("grad_norm", "", step, result.grad_norm, right.grad_norm)
        note("tokens", "", step, result.tokens, float(count))
        boxes = trainer.zero.boxes()
        for name, grad in gradients.items():
            box = boxes[f"model.{name}"]
            note("gradient", name, step, grad / max(count, 1), own_part(right.gradients[name], box))
        note_state(step)
    loss, count = trainer.evaluate(iter([rows_of(held_out, mesh.dp, mesh.coordinate("dp"))]))
    oracle.model.eval()
    with torch.no_grad():
        total = oracle.loss_sum(
            held_out.tokens, held_out.labels, positions=held_out.positions, document_ids=held_out.document_ids
        )
    valid = int((held_out.labels != IGNORE).sum())
    note("tokens", "validation", case.steps, float(count), float(valid))
    note("validation", "", case.steps, loss, total / max(valid, 1))
    pieces = _pieces(trainer)
    return found, pieces, trainer.zero.bytes_per_rank(), hashlib.sha256(repr(pieces).encode()).hexdigest()


# -- in the test's process -------------------------------------------------------------------------------------------


def compare(case: Case, timeout: float = 120.0) -> Comparison:
    """Run the case on its ranks."""
    case.skip_if_torch_is_too_old()
    results = run_ranks(case.world_size, measure, case, timeout=timeout)
    digests: dict[tuple[Any, ...], set[str]] = {}
    held: dict[str, dict[tuple[Any, ...], int]] = {}
    sizes: dict[str, int] = {}
    for _, pieces, _, _ in results:
        for name, whole, offset, shape, content in pieces:
            digests.setdefault((name, offset, shape), set()).add(content)
            held.setdefault(name, {})[(offset, shape)] = math.prod(shape)
            sizes[name] = math.prod(whole)
    return Comparison(
        [difference for found, *_ in results for difference in found],
        sorted({key[0] for key, contents in digests.items() if len(contents) > 1}),
        sorted(name for name, size in sizes.items() if sum(held[name].values()) != size),
        [nbytes for _, _, nbytes, _ in results],
        [whole for *_, whole in results],
    )


def assert_same_run(
    case: Case, tolerance: float = TOLERANCE, weight_tolerance: float = WEIGHT_TOLERANCE, timeout: float = 120.0
) -> Comparison:
    """Fail, naming the first things that differ, unless the case's mesh computes what the oracle computes."""
    result = compare(case, timeout)
    faults = result.faults(tolerance, weight_tolerance)
    # The comparison itself must have happened, for each kind of thing.
    kinds = {d.what for d in result.differences}
    assert kinds >= {"initial", "loss", "gradient", "grad_norm", "model", "validation"}, kinds
    shown = "\n".join(faults[:8])
    assert not faults, f"{case}: {len(faults)} differences from one rank\n{shown}"
    return result
