"""What went wrong on some meshes of other trainers, one test for each symptom. Each looks at the symptom itself, beside
the comparison with the oracle that it shares with the other modules."""

from __future__ import annotations

import hashlib
import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.compare import (
    TOLERANCE,
    Case,
    assert_same_run,
    batches,
    case,
    compare,
    digest,
    rows_of,
    spy_on_gradients,
    trainer_of,
)
from tests.ranks import run_ranks
from titanlike.loss import IGNORE


def losses_and_norms(asked: Case) -> list[tuple[float, float]]:
    """(loss, grad_norm) of each step, as this rank is told them."""
    trainer = trainer_of(asked)
    *steps, _ = batches(asked, trainer.config)
    out = []
    for batch in steps:
        result = trainer.train_step(rows_of(batch, asked.dp, trainer.mesh.coordinate("dp")))
        out.append((result.loss.item(), result.grad_norm.item()))
    return out


def close(a: list[tuple[float, float]], b: list[tuple[float, float]]) -> bool:
    return len(a) == len(b) and all(abs(x - y) <= TOLERANCE for p, q in zip(a, b) for x, y in zip(p, q))


def test_the_loss_does_not_depend_on_the_tp_degree() -> None:
    """Symptom: loss differs with the tp degree, same seed (TT #1750)."""
    one = run_ranks(1, losses_and_norms, case())[0]
    for tp in (2, 4):
        for told in run_ranks(tp, losses_and_norms, case(tp=tp)):
            assert close(told, one)


# -- the start -------------------------------------------------------------------------------------------------------

STARTS = {
    "dp2": case(dp=2),
    "tp2": case(tp=2, model__n_kv_heads=1),
    "dp2 tp2": case(dp=2, tp=2, mesh__sequence_parallel=False),
    **{s: case(pp=2, model__n_layers=5, pipeline__schedule=s) for s in ("1f1b", "interleaved_1f1b", "zbv")},
    "dualpipev": case(pp=2, tp=2, model__n_layers=5, pipeline__schedule="dualpipev"),
    "interleaved_zero_bubble": case(pp=2, dp=2, model__n_layers=5, pipeline__schedule="interleaved_zero_bubble"),
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("asked", STARTS.values(), ids=STARTS.keys())
def test_the_start_is_the_same_on_every_mesh_and_schedule(asked: Case, tied: bool) -> None:
    """Symptom: replicas or pipeline chunks start unsynchronised, or identical (TT #166, #514, OC #679). A digest of all
    weights, put together from all ranks, against the one-rank digest."""
    asked.skip_if_torch_is_too_old()
    changes = asked.changes | {"model.tie_embeddings": tied}
    layers = {"model.n_layers": changes.get("model.n_layers", 2), "model.tie_embeddings": tied}
    layers["model.n_kv_heads"] = changes.get("model.n_kv_heads", 2)
    one = run_ranks(1, initial_digest, Case(changes=layers))[0]
    for found in run_ranks(asked.world_size, initial_digest, Case(asked.pp, asked.dp, asked.tp, changes)):
        assert found == one, asked


def initial_digest(asked: Case) -> str:
    """Digest of the whole model's weights as they are computed with, gathered from all ranks. All layers differ."""
    from parallelize.zero import local_part

    trainer = trainer_of(asked)
    parts = [
        (name, tuple(slot.parameter.shape), slot.named.box_offset, local_part(slot.parameter).detach())
        for name, (_, slot) in trainer.zero.slots.items()
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, parts)
    whole: dict[str, Tensor] = {}
    for name, shape, offset, part in itertools.chain(*everyone):
        target = whole.setdefault(name, torch.full(shape, math.nan, dtype=part.dtype))
        view = target[tuple(slice(o, o + n) for o, n in zip(offset, part.shape))]
        assert view.isnan().all() or torch.equal(view, part), f"{name} differs between ranks"
        view.copy_(part)
    matrices = [digest(value) for value in whole.values() if value.dim() == 2]
    assert len(set(matrices)) == len(matrices), "two weights start alike"
    return hashlib.sha256(repr(sorted((name, digest(value)) for name, value in whole.items())).encode()).hexdigest()


# -- gradients and their norm ----------------------------------------------------------------------------------------


def test_the_clip_norm_is_one_for_all_pipeline_stages() -> None:
    """Symptom: the clip norm is computed per pipeline stage (TT #596). With a limit far below the norm, the step that
    SGD takes is as long as the limit, whatever the mesh."""
    changes = {"optimizer__name": "sgd", "optimizer__weight_decay": 0.0, "train__max_grad_norm": 0.01, "steps": 1}
    one = run_ranks(1, losses_and_norms, case(**changes))[0]
    for mesh in ((2, 1, 1), (2, 2, 1), (2, 1, 2)):
        asked = case(*mesh, **changes)
        told = run_ranks(asked.world_size, losses_and_norms, asked)
        assert all(close(each, one) for each in told)
        moved = run_ranks(asked.world_size, squared_move, asked)[0]
        assert math.sqrt(moved) == pytest.approx(0.01 * 0.01, rel=1e-5)  # lr times the limit; 1e-6 is added to the norm


def squared_move(asked: Case) -> float:
    """Square of how far one step moves all weights; each element counted once."""
    trainer = trainer_of(asked)
    before = {n: t.clone() for n, (t, _, _) in trainer.zero.boxes().items() if n.startswith("model.")}
    trainer.train_step(rows_of(next(batches(asked, trainer.config)), asked.dp, trainer.mesh.coordinate("dp")))
    boxes = trainer.zero.boxes()
    parts = [(n, offset, (t - before[n])) for n, (t, _, offset) in boxes.items() if n in before]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, parts)
    return sum({(n, o): d.square().sum().item() for n, o, d in itertools.chain(*everyone)}.values())


@pytest.mark.parametrize("mesh", [(2, 1, 1), (2, 2, 1), (2, 1, 2)], ids=str)
def test_every_gradient_has_the_oracles_scale(mesh: tuple[int, int, int]) -> None:
    """Symptom: pipeline gradients are scaled by microbatches or once per stage (TT #2972, DS #8154)."""
    result = compare(case(*mesh, pipeline__schedule="interleaved_1f1b", model__n_layers=5, steps=2))
    ratios = [d.ratio for d in result.differences if d.what == "gradient" and not math.isnan(d.ratio)]
    assert len(ratios) >= 2 * (5 * 9 + 3)  # steps, parameters
    assert ratios == pytest.approx([1.0] * len(ratios), abs=1e-11)


def test_accumulation_does_not_change_the_gradient() -> None:
    """Symptom: the last, or all but one, microbatch's gradient is lost under ZeRO-1 (DS #7985, #7967); the last,
    shorter accumulation window is mis-scaled (LF #10705). Rows have different numbers of labels here, one row none."""
    found = {
        accumulation: run_ranks(2, gradients, case(dp=2, steps=2, train__microbatch_size=4 // accumulation))
        for accumulation in (1, 2, 4)
    }
    for rank, accumulation in itertools.product((0, 1), (2, 4)):
        for name, grad in found[accumulation][rank].items():
            assert grad.isfinite().all()
            assert (grad - found[1][rank][name]).abs().max() <= 1e-12, name  # sums over tokens, of order 1 to 10


def gradients(asked: Case) -> dict[str, Tensor]:
    """The reduced sums of gradients of the last step in this rank's shards, where there are any."""
    trainer = trainer_of(asked)
    seen: dict[str, Tensor] = {}
    spy_on_gradients(trainer, seen)
    *steps, _ = batches(asked, trainer.config)
    for batch in steps:
        trainer.train_step(rows_of(batch, asked.dp, trainer.mesh.coordinate("dp")))
    return {name: grad for name, grad in seen.items() if grad.numel()}


@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 1)], ids=str)
@pytest.mark.parametrize("microbatch_size", [1, 4])
def test_one_valid_token_in_the_whole_batch(mesh: tuple[int, int, int], microbatch_size: int) -> None:
    """Symptom: a masked loss is normalised by local counts (MG #7513), and ranks without labels give NaN."""
    assert_same_run(case(*mesh, labels="one", steps=2, train__microbatch_size=microbatch_size))


@pytest.mark.parametrize("mesh", [(1, 2, 1), (1, 1, 2), (2, 1, 1)], ids=str)
def test_a_batch_without_any_label_moves_nothing_but_the_decay(mesh: tuple[int, int, int]) -> None:
    """Symptom: 0 / 0 in the loss or in the clipping poisons all weights."""
    assert_same_run(case(*mesh, labels="none", steps=3))


def test_the_logged_loss_is_reduced_over_every_axis() -> None:
    """Symptom: the logged loss is not reduced over some axis (TT #3329). Against a plain sum over the ranks of what
    each last stage computed, divided by a plain count of the labels."""
    for mesh in ((1, 2, 1), (2, 1, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (2, 1, 2)):
        asked = case(*mesh, steps=1)
        for logged, by_hand in run_ranks(asked.world_size, logged_and_by_hand, asked):
            assert abs(logged - by_hand) <= TOLERANCE


def logged_and_by_hand(asked: Case) -> tuple[float, float]:
    trainer = trainer_of(asked)
    batch = next(batches(asked, trainer.config))
    sums: list[float] = []
    compute = trainer.forward_backward

    def forward_backward(part: Any) -> Tensor:
        sums.append(compute(part).item())
        return torch.tensor(sums[0], dtype=torch.float64)

    trainer.forward_backward = forward_backward
    logged = trainer.train_step(rows_of(batch, asked.dp, trainer.mesh.coordinate("dp"))).loss.item()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sums[0] / asked.tp)  # all tp ranks hold the same sum
    return logged, sum(everyone) / int((batch.labels != IGNORE).sum())


# -- replicas --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_replicated_weights_have_the_same_gradient_on_all_tp_ranks(sequence_parallel: bool) -> None:
    """Symptom: norm weights' gradients differ across tp ranks under sequence parallel (MG #1446)."""
    asked = case(1, 1, 2, model__n_kv_heads=1, model__attention_bias=True, mesh__sequence_parallel=sequence_parallel)
    first, second = run_ranks(2, gradients, asked)
    replicated = [n for n in first if "norm" in n or ".wk." in n or ".wv." in n or n.endswith("wo.bias")]
    assert len(replicated) == 5 + 2 * 4 + 2
    for name in replicated:
        assert first[name].abs().max() > 1e-6
        assert torch.equal(first[name], second[name]), name


def test_dp_with_tp_moves_all_weights_alike() -> None:
    """Symptom: dp with tp gives no gradients (TT #577)."""
    result = assert_same_run(case(1, 2, 2, labels="all", steps=2, model__attention_bias=True))
    assert not result.replicas_differ
    seen = {d.name for d in result.differences if d.what == "gradient"}
    for rank_gradients in run_ranks(4, gradients, case(1, 2, 2, labels="all", model__attention_bias=True)):
        assert rank_gradients.keys() <= seen
        for name, grad in rank_gradients.items():
            if name != "tok_embeddings.weight":  # whose rows are those of the tokens in the batch
                assert grad.abs().max() > 1e-6, name


@pytest.mark.parametrize(
    ("mesh", "schedule"),
    [((2, 1, 1), "1f1b"), ((2, 2, 1), "interleaved_1f1b"), ((2, 1, 2), "zbv"), ((2, 1, 2), "afab")],
    ids=str,
)
def test_tied_embeddings_under_pp_are_one_weight(mesh: tuple[int, int, int], schedule: str) -> None:
    """Symptom: tied embeddings are refused or broken with pp (TT #1524, NT #101). The copies of the first and of the
    last stage must hold the same bits, and the gradient be the sum of both uses, counted once in the norm."""
    asked = case(*mesh, steps=5, model__tie_embeddings=True, pipeline__schedule=schedule, model__n_layers=4)
    result = assert_same_run(asked)
    holders = {d.rank for d in result.differences if d.name == "tok_embeddings.weight"}
    per_stage = asked.world_size // 2
    assert len(holders) == (per_stage if schedule == "zbv" else 2 * per_stage)  # zbv: both stages on one rank
    assert not any("output.weight" in d.name for d in result.differences)


# -- all ranks act together ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble"])
def test_pp_dp_and_accumulation_do_not_hang(schedule: str) -> None:
    """Symptom: pp + dp + accumulation hangs (NT #209): dp ranks wait for each other in buckets of another order."""
    settings = {"pipeline__schedule": schedule, "model__n_layers": 5, "optimizer__bucket_mb": 0.001}
    assert_same_run(case(2, 2, 1, model__tie_embeddings=True, steps=2, **settings), timeout=60)


@pytest.mark.parametrize("mesh", [(1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2)], ids=str)
def test_a_spike_on_one_rank_is_the_same_decision_on_all(mesh: tuple[int, int, int]) -> None:
    """Symptom: step skipping is decided per rank under tp (OC #352), an infinite norm becomes NaN in clipping and
    poisons the weights (DS #7171). The last rank alone meets the infinity; nobody makes the update, nothing changes,
    and the next step is taken by all."""
    asked = case(*mesh, steps=3, model__n_layers=4)
    for skipped, unchanged, finite, moved in run_ranks(asked.world_size, spike, asked):
        assert skipped and unchanged and finite and moved


def spike(asked: Case) -> tuple[bool, bool, bool, bool]:
    """Whether the update of a step with a gradient that is infinite on the last rank was left out, with all state as it
    was; and whether the next step was finite and taken."""
    trainer = trainer_of(asked)
    first, second, third, _ = (
        rows_of(batch, asked.dp, trainer.mesh.coordinate("dp")) for batch in batches(asked, trainer.config)
    )
    trainer.train_step(first)

    def state() -> dict[str, str]:
        return {name: digest(tensor) for name, (tensor, _, _) in trainer.zero.boxes().items()}

    before = state()
    last = dist.get_rank() == dist.get_world_size() - 1
    add = trainer.zero._add

    def poisoned(slot: Any) -> None:
        add(slot)
        if slot.name.endswith("feed_forward.w2.weight"):
            trainer.zero.slots[slot.name][0].grads[0, slot.start] = math.inf

    if last:
        trainer.zero._add = poisoned
    result = trainer.train_step(second)
    trainer.zero._add = add
    skipped = not result.updated and not math.isfinite(result.grad_norm.item())
    unchanged = state() == before
    result = trainer.train_step(third)
    finite = result.updated and math.isfinite(result.grad_norm.item()) and math.isfinite(result.loss.item())
    moved = all(before[n] != d for n, d in state().items() if n.endswith("w2.weight"))
    return skipped, unchanged, finite, moved
