"""Compiled stages: by default, without a compiler, of models that cannot be compiled, with less memory for
activations."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from parallelize.compile import missing_compiler
from tests.distributed.compare import Case, assert_same_run, batches, case, trainer_of
from tests.ranks import run_ranks
from titanlike.errors import UserError


def test_without_a_compiler_the_model_runs_as_it_is() -> None:
    """Symptom: on a machine without g++ the first step ends with a hundred lines of the compiler's stack."""
    graphs, why = run_ranks(1, _step_without_compiler, case(steps=1, compile__enable=True))[0]
    assert graphs == 0
    assert "No working C++ compiler" in why and "/nowhere/g++" in why


def _step_without_compiler(asked: Case) -> tuple[int, str]:
    from torch._dynamo.utils import counters
    from torch._inductor import config

    graphs = counters["stats"]["unique_graphs"]
    before, config.cpp.cxx = config.cpp.cxx, (None, "/nowhere/g++")
    try:
        trainer = trainer_of(asked)
        for batch in batches(asked, trainer.config):
            trainer.train_step(batch)
        return counters["stats"]["unique_graphs"] - graphs, (missing_compiler() or ("", ""))[0]
    finally:
        config.cpp.cxx = before


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("scope", ["block", "stage"])
def test_a_model_that_cannot_be_compiled_is_one_sentence_that_names_the_place(scope: str) -> None:
    """Symptom: compiled by default, a model of one's own ends with a hundred lines of the compiler's stack."""
    (said,) = run_ranks(1, _breaks, case(steps=1, compile__enable=True, compile__scope=scope))
    what = {"block": "a Block", "stage": "the model"}[scope]
    assert said.startswith(f"{what} cannot be compiled as one graph: ")
    assert "test_compile.py" in said and "if x.sum() > 0:" in said and said.endswith("say compile.enable = false")
    assert "\n" not in said


def _breaks(asked: Case) -> str:
    def looks(stage: Any) -> None:
        for block in stage.model.layers.values():
            block.feed_forward.forward = _looks_at_its_input

    trainer = trainer_of(asked, looks)
    with pytest.raises(UserError) as caught:
        trainer.train_step(next(batches(asked, trainer.config)))
    return str(caught.value)


def _looks_at_its_input(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:
        return x
    return -x


BLOCK: dict[str, Any] = {"compile__enable": True, "compile__scope": "block"}
STAGE: dict[str, Any] = {"compile__enable": True, "compile__scope": "stage"}
COMPILED = {
    "dp 2, documents, tied": case(dp=2, steps=2, documents=True, model__tie_embeddings=True, **BLOCK),
    "dp 2, documents, tied, by stage": case(dp=2, steps=2, documents=True, model__tie_embeddings=True, **STAGE),
    "tp 2, documents, selective": case(
        tp=2, steps=2, documents=True, activation_checkpoint__mode="selective", **BLOCK
    ),
    "tp 2, sequence whole, full": case(
        tp=2, steps=2, mesh__sequence_parallel=False, activation_checkpoint__mode="full", **BLOCK
    ),
    "pp 2, tp 2, 1f1b, tied": case(2, 1, 2, steps=2, model__tie_embeddings=True, **BLOCK),
    "pp 2, interleaved": case(
        2, steps=2, model__n_layers=4, pipeline__schedule="interleaved_1f1b", activation_checkpoint__mode="full",
        **STAGE,
    ),
    "pp 2, all forwards first": case(2, steps=2, pipeline__schedule="afab", documents=True, **STAGE),
}  # fmt: skip


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
@pytest.mark.parametrize("asked", COMPILED.values(), ids=COMPILED)
def test_compiled_is_the_same_run(asked: Case) -> None:
    """Symptom: a combination that computes something else, or fails, as soon as it is compiled."""
    assert_same_run(asked)


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
@pytest.mark.parametrize("scope", ["block", "stage"])
def test_nothing_is_compiled_after_the_first_steps_and_the_first_validation(scope: str) -> None:
    """Symptom: each validation, or the return to training, compiles again."""
    asked = case(steps=2, train__microbatch_size=2, compile__enable=True, compile__scope=scope)
    first, *others = run_ranks(1, _graphs, asked)[0]
    assert first > 0 and others == [first] * len(others)


def _graphs(asked: Case) -> list[int]:
    """How many graphs there are after two steps and a validation, and after each of the next."""
    from torch._dynamo.utils import counters

    before = counters["stats"]["unique_graphs"]
    trainer = trainer_of(asked)
    one, two, held_out = batches(asked, trainer.config)
    found = []
    trainer.train_step(one)
    for _ in range(3):
        trainer.train_step(two)
        trainer.evaluate(iter([held_out]))
        found.append(counters["stats"]["unique_graphs"] - before)
    return found


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
def test_compiled_bfloat16_is_near_the_uncompiled() -> None:
    """Symptom: compiled, something is computed in another precision."""
    asked = {"steps": 3, "train__dtype": "bfloat16"}
    mine, other = (run_ranks(1, _losses, case(**asked, compile__enable=on))[0] for on in (True, False))
    assert mine == pytest.approx(other, rel=1e-3)


def _losses(asked: Case) -> list[float]:
    trainer = trainer_of(asked)
    return [trainer.train_step(batch).loss.item() for batch in batches(asked, trainer.config)]


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
def test_a_budget_for_activations_keeps_less_and_changes_nothing() -> None:
    """Symptom: the setting has no effect, or what is computed again differs."""
    asked = {"steps": 1, "compile__enable": True, "train__microbatch_size": 2}
    kept = [run_ranks(1, _kept, case(**asked, compile__memory_budget=budget))[0] for budget in (1.0, 0.2)]
    assert kept[1] < 0.7 * kept[0]
    assert_same_run(case(**asked, compile__memory_budget=0.2))


def _kept(asked: Case) -> int:
    """Bytes that the compiled graphs keep for the backward, of one microbatch."""
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    trainer = trainer_of(asked)
    batch = next(batches(asked, trainer.config))
    own = {parameter.untyped_storage().data_ptr() for parameter in trainer.built.stages[0].parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = trainer.built.stages[0](batch.tokens[:2], batch.labels[:2])
    loss.backward()
    return sum(kept.values())
