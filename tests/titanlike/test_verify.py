"""scripts/verify.py: a mesh that is the same run passes; a planted fault is named: which tensor, which ratio, why."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from titanlike.config import Config, load_config
from titanlike.config_combinations import limit_of_torch
from titanlike.loss import IGNORE
from titanlike.verify import verify
from titanlike.verify.report import Report, describe

ROOT = Path(__file__).resolve().parent.parent.parent

SMALL = {"model.n_layers": 2, "model.n_heads": 4, "model.n_kv_heads": 2, "model.dim": 64, "train.seq_len": 32}


def config(**overrides: object) -> Config:
    """A config with two layers. Dots in keys are written as two underscores."""
    return load_config(None, SMALL | {name.replace("__", "."): value for name, value in overrides.items()})


def first(report: Report) -> tuple[str, str, float, str]:
    """(check, tensor, ratio, reading) of the first difference."""
    assert report.first is not None, "nothing differs"
    difference = report.first.differing[0]
    return report.first.key.check, difference.name, difference.ratio, "\n".join(report.reading)


# Faults: each is put into every rank's trainer.


def norms_not_reduced_over_tp(trainer: Any) -> None:
    for bucket in trainer.zero.buckets:
        if bucket.replicated_over_tp:
            reduce = bucket.finish_reduce
            bucket.finish_reduce = lambda _tp_group, waiting, reduce=reduce: reduce(None, waiting)


def norms_reduced_twice_over_tp(trainer: Any) -> None:
    for bucket in trainer.zero.buckets:
        if bucket.replicated_over_tp:

            def twice(tp_group: Any, waiting: Any, bucket: Any = bucket, reduce: Any = bucket.finish_reduce) -> None:
                reduce(tp_group, waiting)
                dist.all_reduce(bucket.grad_shard, group=tp_group)

            bucket.finish_reduce = twice


def loss_is_a_local_mean(trainer: Any) -> None:
    for stage in trainer.built.stages:
        sum_of = stage.loss
        stage.loss = lambda head, x, labels, sum_of=sum_of: sum_of(head, x, labels) / (labels != IGNORE).sum()


def gradients_divided_by_the_local_count(trainer: Any) -> None:
    totals = trainer.global_totals

    def local(loss_sum: Any, labels: Any) -> Any:
        values = totals(loss_sum, labels)
        values[1] = (labels != IGNORE).sum()
        return values

    trainer.global_totals = local


def gradients_of_local_means(trainer: Any) -> None:
    """The loss is right, but its gradient is that of the microbatch's mean."""

    def loss(head: Any, x: Any, labels: Any, sum_of: Any) -> Any:
        value = sum_of(head, x, labels)
        mean = value / (labels != IGNORE).sum()
        return value.detach() + mean - mean.detach()

    for stage in trainer.built.stages:
        stage.loss = partial(loss, sum_of=stage.loss)


def dp_not_reduced(trainer: Any) -> None:
    for bucket in trainer.zero.buckets:

        def keep_own(bucket: Any = bucket) -> None:
            bucket.grad_shard.copy_(bucket.grads[bucket.dp_group.rank()])
            bucket.launched = True

        bucket.reduce = keep_own


def second_microbatch_is_lost(trainer: Any) -> None:
    add, calls = trainer.zero._add, dict[str, int]()

    def some(slot: Any) -> None:
        calls[slot.name] = calls.get(slot.name, 0) + 1
        if calls[slot.name] % trainer.accumulation == 2:
            slot.parameter.grad = None
        else:
            add(slot)

    trainer.zero._add = some


def stage_1_doubled(trainer: Any) -> None:
    for index, stage in zip(trainer.built.stage_indices, trainer.built.stages):
        if index == 1:
            for parameter in stage.parameters():
                parameter.register_hook(lambda gradient: gradient * 2)


def wrong_kv_head(trainer: Any) -> None:
    """Rank r takes head r % 2 of 2 where it should take r // 2 (tp 4)."""
    from parallelize.tensor import _project_one_head

    head = trainer.mesh.coordinate("tp") % 2
    for stage in trainer.built.stages:
        for layer in stage.model.layers.values():
            for module in (layer.attention.wk, layer.attention.wv):
                rows = slice(head * layer.attention.head_dim, (head + 1) * layer.attention.head_dim)
                module.forward = partial(_project_one_head, module, rows)


def clip_norm_per_stage(trainer: Any) -> None:
    def totals(loss_sum: Any, count: Any, squares: Any) -> Any:
        values = trainer_totals(loss_sum, count, squares)
        mine = squares.clone()
        for axis in ("dp", "tp"):
            dist.all_reduce(mine, group=trainer.mesh.group(axis))
        values[2] = mine
        return values

    trainer_totals, trainer._totals = trainer._totals, totals


def tied_weight_not_synchronised(trainer: Any) -> None:
    for bucket in trainer.zero.buckets:
        bucket.tied_across = None


def learning_rate_halved(trainer: Any) -> None:
    step = trainer.zero.step
    trainer.zero.step = lambda factor, lr: step(factor, lr / 2)


def not_a_number(trainer: Any) -> None:
    if trainer.mesh.rank == 1:
        step = trainer.zero.step

        def poison(factor: Any, lr: float) -> None:
            step(factor, lr)
            next(iter(trainer.zero.shards.values())).data.view(-1)[0] = math.nan

        trainer.zero.step = poison


# The same run passes.


def test_a_mesh_that_is_the_same_run_passes() -> None:
    """Symptom: a tool that cries wolf is not run. Tied weights, clipping, warm-up and decay, groups."""
    groups = [{"match": "wo", "lr_scale": 0.5}, {"match": "layers\\.77\\.", "weight_decay": 0.5}]
    schedule = {"schedule__warmup": 0.1, "schedule__decay": "cosine", "optimizer__groups": groups}
    report = verify(config(mesh__pp=2, mesh__tp=2, model__tie_embeddings=True, train__max_grad_norm=100.0, **schedule))
    assert report.same and report.reading == []
    assert len(report.notes) == 1 and "layers\\\\.77" in report.notes[0]
    # Everything has been compared, and not with nothing.
    kinds = {check.key.check for check in report.checks if check.tensors}
    assert len(kinds) == 10
    assert all(0 <= check.error <= 1e-10 for check in report.checks)
    limit = next(new for key, _, new in report.changes if key == "train.max_grad_norm")
    norms = [check.placed["grad_norm"][0].wanted for check in report.checks if check.key.check == "gradient norm"]
    assert any(norm > limit for norm in norms), "clipping is never active"
    weights = {c.key.step: c for c in report.checks if c.key.check == "master weights" or c.key.check == "weights"}
    moved = weights[3].placed["norm.weight"][0].wanted - weights[0].placed["norm.weight"][0].wanted
    assert moved.abs().max() > 1e-6, "the weights do not move"


# Each fault is named.


def found(plant: Callable[[Any], None], **overrides: object) -> tuple[str, str, float, str]:
    report = verify(config(**overrides), plant=plant)
    assert not report.same
    print("\n".join(describe(report.first, report.reading)))  # type: ignore[arg-type]
    return first(report)


def test_norm_gradients_that_are_not_reduced_over_tp_are_named() -> None:
    """Symptom: norm weights' gradients differ across tp ranks under sequence parallel (MG #1446)."""
    check, tensor, _, reading = found(norms_not_reduced_over_tp, mesh__tp=2)
    assert (check, tensor) == ("gradients", "layers.0.attention_norm.weight")
    assert "not added up over tp: the 2 tp ranks that hold this tensor have different values, which add up" in reading
    assert "it differs on all tensors that each tp rank holds whole, and on no other" in reading


def test_a_stage_whose_gradients_are_scaled_is_named() -> None:
    """Symptom: pipeline gradients scaled once per stage (TT #2972, DS #8154)."""
    check, tensor, ratio, reading = found(stage_1_doubled, mesh__pp=2)
    assert (check, tensor) == ("gradients", "layers.1.attention_norm.weight")
    assert ratio == pytest.approx(2.0)
    assert "2.0000x: counted once per pp rank (mesh.pp = 2)" in reading
    assert "it differs on all of pipeline stage 1, and on no other" in reading


def test_a_loss_that_is_a_local_mean_is_named() -> None:
    """Symptom: masked loss normalised by local counts (MG #7513)."""
    check, tensor, ratio, reading = found(loss_is_a_local_mean, mesh__dp=2)
    assert (check, tensor) == ("microbatch losses", "microbatch 0")
    assert round(1 / ratio, 6) == round(1 / ratio)
    assert f"{ratio:.4f}x: normalised by the local token count (a mean over {round(1 / ratio)} tokens" in reading


def test_a_wrong_kv_head_is_named() -> None:
    """Symptom: more tp ranks than kv heads: a rank attends to another's keys (TT #2574)."""
    check, tensor, _, reading = found(wrong_kv_head, mesh__tp=4)
    assert (check, tensor) == ("activations", "layers.0.attention.wk (microbatch 0)")
    assert "a wrong part: rank 1 (pp 0, dp 0, tp 1) has what belongs in [4:8] of dim 2 in the place of [0:4]" in reading


def test_a_clip_norm_per_stage_is_named() -> None:
    """Symptom: clip norm computed per pipeline stage (TT #596)."""
    check, tensor, ratio, reading = found(clip_norm_per_stage, mesh__pp=2)
    assert (check, tensor) == ("gradient norm", "grad_norm")
    assert ratio < 1
    for stage in (0, 1):
        assert f"the norm of pipeline stage {stage} alone: not added up over pp" in reading


def test_a_tied_weight_that_is_not_synchronised_is_named() -> None:
    """Symptom: tied embeddings broken with pp (TT #1524, NT #101)."""
    check, tensor, _, reading = found(tied_weight_not_synchronised, mesh__pp=2, model__tie_embeddings=True)
    assert (check, tensor) == ("gradients", "tok_embeddings.weight")
    assert "not added up over pp: the 2 pp ranks that hold this tensor have different values, which add up" in reading
    assert "it differs on the tied weight alone" in reading


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "overrides", "check", "tensor", "ratio", "sentences"),
    [
        (
            norms_reduced_twice_over_tp,
            {"mesh__tp": 2},
            "gradients",
            "layers.0.attention_norm.weight",
            2.0,
            ["2.0000x: counted once per tp rank (mesh.tp = 2)", "all tensors that each tp rank holds whole"],
        ),
        (
            norms_not_reduced_over_tp,
            {"mesh__tp": 4},
            "gradients",
            "layers.0.attention_norm.weight",
            None,
            ["not added up over tp: the 4 tp ranks"],
        ),
        (
            gradients_divided_by_the_local_count,
            {"mesh__dp": 2},
            "logged loss",
            "loss",
            None,
            ["normalised by the local token count"],
        ),
        (
            second_microbatch_is_lost,
            {"mesh__dp": 2},
            "gradients",
            "tok_embeddings.weight",
            None,
            ["only 0.75 of the microbatches: number 2 of 4 on each rank is lost", "differs on all"],
        ),
        (
            gradients_of_local_means,
            {"mesh__dp": 2},
            "gradients",
            "tok_embeddings.weight",
            None,
            ["each microbatch is normalised by its own token count, and then by the global count too"],
        ),
        (dp_not_reduced, {"mesh__dp": 2}, "gradients", "tok_embeddings.weight", None, ["not added up over dp"]),
        (
            learning_rate_halved,
            {"mesh__dp": 2},
            "weights",
            "tok_embeddings.weight",
            None,
            ["the step is 0.5000x", "it differs on all"],
        ),
        (not_a_number, {"mesh__dp": 2}, "weights", None, None, ["the rank's value is nan"]),
    ],
)
def test_more_faults_are_named(
    plant: Any, overrides: dict[str, Any], check: str, tensor: str | None, ratio: float | None, sentences: list[str]
) -> None:
    """Symptom: verify says that something differs, and one still searches for a day."""
    got = found(plant, **overrides)
    assert got[0] == check
    assert tensor is None or got[1] == tensor
    assert ratio is None or got[2] == pytest.approx(ratio)
    for sentence in sentences:
        assert sentence in got[3]


def test_a_not_a_number_is_an_infinite_error() -> None:
    """Symptom: max() with a NaN first says that all is well."""
    from titanlike.verify.compare import errors, worst

    nan, inf = math.nan, math.inf
    one = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert worst(errors(one, one)) == 0
    for wrong in ([nan, 2.0], [1.0, nan], [inf, 2.0], [1.0, -inf]):
        assert worst(errors(torch.tensor(wrong, dtype=torch.float64), one)) == inf
        assert worst(errors(one, torch.tensor(wrong, dtype=torch.float64))) == inf
    assert worst(errors(torch.tensor([nan]), torch.tensor([nan]))) == inf
    assert worst(errors(torch.tensor([inf]), torch.tensor([inf]))) == 0
    assert worst(errors(torch.empty(0), torch.empty(0))) == 0


OWN = "tests.titanlike.own_architecture:Own"


@pytest.mark.slow
def test_an_architecture_of_ones_own_is_verified() -> None:
    """Symptom: verify knows Llama alone."""
    own = {"model.architecture": OWN, "mesh.pp": 2, "mesh.dp": 1, "mesh.tp": 2, "train.seq_len": 64}
    report = verify(load_config(None, own))
    assert report.same, describe(report.first, report.reading)  # type: ignore[arg-type]
    changes = {key: new for key, _, new in report.changes}
    assert (changes["model.bottleneck"], changes["model.dim"]) == (20, 32)
    report = verify(load_config(None, own), plant=stage_1_doubled)
    assert first(report)[:2] == ("gradients", "layers.2.scale.weight")


# Many meshes.

CUBE = {"mesh__pp": 2, "mesh__dp": 2, "mesh__tp": 2, "model__n_layers": 5}


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        {**CUBE, "pipeline__schedule": "afab", "activation_checkpoint__mode": "full"},
        {**CUBE, "pipeline__schedule": "1f1b", "model__tie_embeddings": True, "pipeline__split": [2, 3]},
        {**CUBE, "pipeline__schedule": "interleaved_1f1b", "activation_checkpoint__mode": "selective"},
        {**CUBE, "pipeline__schedule": "interleaved_zero_bubble", "train__microbatch_size": 2},
        {**CUBE, "pipeline__schedule": "zbv", "model__tie_embeddings": True},
        {**CUBE, "pipeline__schedule": "dualpipev"},
        {"mesh__tp": 4, "model__attention_bias": True, "model__mlp_bias": True, "data__document_mask": True},
        {"mesh__tp": 2, "mesh__dp": 2, "mesh__sequence_parallel": False, "optimizer__name": "sgd"},
        {"mesh__dp": 4, "optimizer__name": "sgd", "optimizer__momentum": 0.9, "train__max_grad_norm": 0.0},
        {"mesh__pp": 4, "model__n_layers": 9, "train__global_batch_size": 12, "data__document_mask": True},
        {**CUBE, "mesh__dp": 1, "pipeline__schedule": "zbv", "train__global_batch_size": 2},
        {"mesh__dp": 1},
    ],
    ids=lambda overrides: "-".join(str(value) for value in overrides.values()),
)
def test_meshes_are_the_same_run(overrides: dict[str, Any]) -> None:
    """Symptom: the loss depends on the mesh (TT #1750)."""
    if limit := limit_of_torch(config(**overrides)):
        pytest.skip(limit)
    report = verify(config(**overrides))
    assert report.same, describe(report.first, report.reading)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_configs_are_the_same_run_on_a_cube(path: Path) -> None:
    """Symptom: an example of ours does not run on a mesh that the documentation recommends."""
    report = verify(load_config(path, {"mesh.pp": 2, "mesh.dp": 2, "mesh.tp": 2}))
    assert report.same, describe(report.first, report.reading)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_compiled_mesh_is_the_same_run() -> None:
    """Symptom: the compiled graph is another function than the eager one."""
    report = verify(config(mesh__tp=2, compile__enable=True, model__n_layers=2))
    assert report.same, describe(report.first, report.reading)  # type: ignore[arg-type]
    assert not any(check.key.check == "activations" for check in report.checks)
