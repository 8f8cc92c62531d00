"""The health of the model on any mesh: what a plain model on one device says, and nothing of the run is changed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.llama import make_context, rotate
from tests.distributed.compare import Case, batches, case, rows_of, trainer_of
from tests.ranks import run_ranks
from tests.titanlike.runs import FLOAT64, columns, overrides, run, runs, tiny
from titanlike.config import load_config
from titanlike.metrics import files, names
from titanlike.metrics.health import Health, part_of

Numbers = dict[str, float]
HEALTH = names.SECTIONS["Health of the model"]


def looked(asked: Case, piece: int | None = None) -> list[Numbers]:
    """What Health says on this rank in each step of the case."""
    from titanlike.metrics import health as module

    before, module.PIECE = module.PIECE, piece or module.PIECE
    try:
        trainer = trainer_of(asked)
        health = Health(trainer)
        found = []

        def before_update(result: Any) -> bool:
            health.before_update(result)
            return True

        trainer.before_update = before_update
        *steps, _ = batches(asked, trainer.config)
        for batch in steps:
            own = rows_of(batch, trainer.mesh.dp, trainer.mesh.coordinate("dp"))
            health.forward(own)
            trainer.train_step(own)
            health.after_update()
            found.append(health.values())
        return found
    finally:
        module.PIECE = before


def plainly(asked: Case) -> Iterator[Numbers]:
    """The same by the formulas of docs/metrics.md, from a plain model, whole tensors, and no code of Health."""
    from titanlike.reference import Reference

    config = asked.config()
    oracle = Reference(config, asked.vocab)
    model = oracle.model
    *steps, _ = batches(asked, config)
    for batch in steps:
        found: Numbers = {}
        outputs: dict[str, Tensor] = {}
        inputs: dict[str, Tensor] = {}
        handles = []
        for name, block in model.layers.items():
            watched = _noting(f"layers.{name}", outputs, inputs)
            handles += [block.register_forward_hook(watched[0]), block.attention.register_forward_hook(watched[1])]
        with torch.no_grad():
            model(batch.tokens, positions=batch.positions, document_ids=batch.document_ids)
        for handle in handles:
            handle.remove()
        context = make_context(model.config, outputs["layers.0"], batch.positions, batch.document_ids)
        seq = batch.tokens.shape[1]
        allowed = torch.ones(seq, seq, dtype=torch.bool).tril() if context.mask is None else context.mask
        for layer, x in inputs.items():
            attention = model.get_submodule(layer).attention
            with torch.no_grad():
                q = rotate(attention.wq(x).unflatten(-1, (-1, attention.head_dim)), context)
                k = rotate(attention.wk(x).unflatten(-1, (-1, attention.head_dim)), context)
                k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
                logits = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(attention.head_dim)
                logits = logits.masked_fill(~allowed, -math.inf)
                p = logits.softmax(-1)
                entropy = -(p * p.clamp(min=1e-300).log()).sum(-1)
            found[f"attention_logit_max/{layer}"] = logits.max().item()
            found[f"attention_entropy/{layer}"] = entropy.mean().item()
            found |= sizes("activation", layer, [outputs[layer]])
        before = {name: p.detach().clone() for name, p in oracle.parameters.items()}
        result = oracle.step(batch.tokens, batch.labels, positions=batch.positions, document_ids=batch.document_ids)
        for part in {part_of(name) for name in before}:
            mine = [name for name in before if part_of(name) == part]
            found |= sizes("grad", part, [result.gradients[name] for name in mine])
            found |= sizes("weight", part, [before[name] for name in mine])
            moved = sizes("update", part, [oracle.parameters[name].detach() - before[name] for name in mine])
            found[f"update_ratio/{part}"] = moved[f"update_rms/{part}"] / found[f"weight_rms/{part}"]
        yield found


def _noting(layer: str, outputs: dict[str, Tensor], inputs: dict[str, Tensor]) -> tuple[Any, Any]:
    def leaving(_module: Any, _arguments: Any, out: Tensor) -> None:
        outputs[layer] = out

    def attending(_module: Any, arguments: Any, _out: Tensor) -> None:
        inputs[layer] = arguments[0]

    return leaving, attending


def sizes(kind: str, part: str, tensors: list[Tensor]) -> Numbers:
    flat = torch.cat([t.flatten() for t in tensors])
    return {f"{kind}_rms/{part}": flat.square().mean().sqrt().item(), f"{kind}_max/{part}": flat.abs().max().item()}


MESHES = {
    "one": case(steps=2),
    "dp2": case(dp=2, train__microbatch_size=2, steps=2, documents=True),
    "tp2": case(tp=2, documents=True, model__tie_embeddings=True, activation_checkpoint__mode="full", steps=2),
    "tp2 without sequence parallel": case(tp=2, mesh__sequence_parallel=False, model__n_kv_heads=1, steps=2),
    "pp2": case(pp=2, documents=True, model__tie_embeddings=True, steps=2),
    "pp2, V-shaped": case(pp=2, model__n_layers=4, pipeline__schedule="zbv", steps=1),
    "pp2 dp2 tp2": case(pp=2, dp=2, tp=2, steps=1),
}


@pytest.mark.parametrize("asked", MESHES.values(), ids=MESHES.keys())
def test_numbers_are_those_of_a_plain_model_on_one_device(asked: Case) -> None:
    """Symptom: the norm of a layer jumps when a run goes on with another tp, for a rank told of its own part alone."""
    asked.skip_if_torch_is_too_old()
    ranks = run_ranks(asked.world_size, looked, asked)
    for found in ranks:
        for mine, right in zip(found, plainly(asked), strict=True):
            assert mine.keys() == right.keys()
            assert names.unknown(mine) == []
            for name, value in right.items():
                # Adam's first update is lr * g / (|g| + eps), off by 1e-16 / eps where a gradient is about eps.
                assert mine[name] == pytest.approx(value, rel=1e-10, abs=1e-13), name


def test_experts_are_looked_at_wherever_they_lie() -> None:
    """Symptom: the RMS of the experts' weights is that of those on rank 0."""
    moe = {"model__architecture": "moe", "model__n_experts": 4, "model__top_k": 2, "model__balance_loss": 0.3}
    (one,), (cut,) = (run_ranks(each.world_size, looked, each)[0] for each in (
        case(**moe, steps=1), case(dp=2, ep=2, **moe, steps=1),
    ))  # fmt: skip
    assert cut.keys() == one.keys() and "attention_entropy/layers.1" in one
    for name, value in one.items():
        assert cut[name] == pytest.approx(value, rel=1e-10, abs=1e-13), name


def test_logits_in_pieces_are_the_same_numbers() -> None:
    """Symptom: out of memory on the first look at long sequences; or the causal mask of a later piece is off."""
    asked = case(documents=True, steps=1)
    (whole,), (pieces,) = (run_ranks(1, looked, asked, piece)[0] for piece in (None, 3 * 4 * 8))
    assert pieces == pytest.approx(whole, rel=1e-12)
    causal = case(steps=1)
    (whole,), (pieces,) = (run_ranks(1, looked, causal, piece)[0] for piece in (None, 3 * 4 * 8))
    assert pieces == pytest.approx(whole, rel=1e-12)


def test_an_architecture_without_attention_has_the_other_numbers(tmp_path: Path) -> None:
    """Symptom: a KeyError, or an entropy of nothing."""
    own = {"model.architecture": "tests.titanlike.own_architecture:Own", "model.n_layers": 2, "model.bottleneck": 24}
    found = []
    for tp in (1, 2):
        keys = overrides(tmp_path / f"tp{tp}", **FLOAT64, **{"metrics.health_interval": 1, "train.steps": 1})
        keys = {name: value for name, value in keys.items() if not name.startswith("model.")}
        (seen, *_) = run_ranks(tp, run, load_config(None, keys | own | {"mesh.tp": tp}))
        assert seen.error is None
        (row,) = files.read_metrics(tmp_path / f"tp{tp}")
        found.append({name: value for name, value in row.items() if names.find(name) in HEALTH})
    assert found[1] == pytest.approx(found[0], rel=1e-10)
    kinds = ("activation_rms", "activation_max", "grad_rms", "grad_max", "weight_rms", "weight_max", "update_ratio")
    assert {name.split("/")[0] for name in found[0]} == set(kinds)
    assert {name.split("/")[1] for name in found[0]} == {"layers.0", "layers.1", "embedding", "output"}


def test_a_step_that_is_left_out_has_no_update(tmp_path: Path) -> None:
    (seen,) = run_ranks(
        1, run, tiny(tmp_path / "run", **{"metrics.health_interval": 1, "guard.nonfinite": "skip"}), _nan
    )
    assert seen.error is None
    by_step = {row["step"]: row for row in files.read_metrics(tmp_path / "run")}
    for step, row in by_step.items():
        assert ("update_ratio/output" in row, "skipped" in row) == (step != 2, step == 2)
        assert math.isnan(row["grad_rms/output"]) == (step == 2) and row["weight_rms/output"] > 0


def _nan(trainer: Any, step: int) -> None:
    """A gradient of step 2 is not a number, after it was reduced."""
    reduce = type(trainer.zero).finish_reduction

    def finish_reduction() -> None:
        reduce(trainer.zero)
        trainer.zero.shards["output.weight"].grad[0, 0] = math.nan

    trainer.zero.finish_reduction = finish_reduction if step == 2 else lambda: reduce(trainer.zero)


@pytest.mark.slow
@pytest.mark.parametrize("scope", ["stage", "block"])
def test_compiled_blocks_are_looked_at_too(scope: str) -> None:
    asked = case(tp=2, steps=2, compile__enable=True, compile__scope=scope)
    plain = case(tp=2, steps=2)
    compiled = run_ranks(2, looked, asked, timeout=300)[0]
    for mine, right in zip(compiled, run_ranks(2, looked, plain)[0], strict=True):
        assert mine == pytest.approx(right, rel=1e-9, abs=1e-12)


def test_a_run_that_is_looked_at_is_the_same_run(tmp_path: Path) -> None:
    """Symptom: turning the diagnostics on changes the loss. And steps in between have none of the names, nor a skipped
    step an update."""
    on = {"metrics.health_interval": 2, "activation_checkpoint.mode": "selective"}
    off = {"activation_checkpoint.mode": "selective"}
    run_ranks(2, runs, [tiny(tmp_path / "on", **on), tiny(tmp_path / "off", **off)])
    assert columns(tmp_path / "on") == columns(tmp_path / "off")
    by_step = {row["step"]: row for row in files.read_metrics(tmp_path / "on")}
    for step, row in by_step.items():
        assert names.unknown(row) == []
        for name in ("activation_rms/layers.1", "attention_entropy/layers.0", "update_ratio/output", "time/health_s"):
            assert (name in row) == (step % 2 == 0), (step, name)
    assert not any("_rms/" in name for row in files.read_metrics(tmp_path / "off") for name in row)
