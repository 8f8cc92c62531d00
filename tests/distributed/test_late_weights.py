"""Weights that are still on their way from other dp ranks when a step ends, and that the next forward waits for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallelize.zero import local_part
from tests.distributed.compare import Case, batches, case, rows_of, trainer_of
from tests.ranks import run_ranks

SMALL_BUCKETS = {"optimizer__bucket_mb": 0.004, "model__n_layers": 4}
MESHES = {
    "dp 2": case(1, 2, 1, **SMALL_BUCKETS),
    "dp 2, bfloat16": case(1, 2, 1, **SMALL_BUCKETS, train__dtype="bfloat16"),
    "dp 2, tp 2, tied": case(1, 2, 2, **SMALL_BUCKETS, model__tie_embeddings=True),
    "dp 2, pp 2, two stages a rank": case(
        2, 2, 1, **SMALL_BUCKETS, pipeline__schedule="zbv", model__tie_embeddings=True
    ),
    "dp 2, rows that it does not divide": case(1, 2, 1, **SMALL_BUCKETS, model__dim=20, model__head_dim=6),
    "dp 2, recomputed": case(1, 2, 1, **SMALL_BUCKETS, activation_checkpoint__mode="full"),
    "ep 2": case(
        1, 2, 1, ep=2, **SMALL_BUCKETS, model__architecture="moe", model__n_experts=4, model__top_k=2,
        train__microbatch_size=2,
    ),
}  # fmt: skip


def steps_of(asked: Case, finish: bool) -> dict[str, Any]:
    """What three steps and a validation come to on this rank, tensor by tensor."""
    trainer = trainer_of(asked)
    coordinate = trainer.mesh.coordinate("dp")
    *steps, last = (rows_of(batch, asked.dp, coordinate) for batch in batches(asked, trainer.config))
    results = [trainer.train_step(batch, finish=finish) for batch in steps]
    found: dict[str, Any] = {"pending": sum(bucket.gathered is not None for bucket in trainer.zero.buckets)}
    found["validation"] = trainer.evaluate(iter([last]))
    found["losses"] = [(result.loss.item(), result.grad_norm.item()) for result in results]
    found |= {name: box[0].clone() for name, box in trainer.boxes().items()}
    found |= {f"compute {n}": local_part(s.parameter).clone() for n, (_, s) in trainer.zero.slots.items()}
    return found


@pytest.mark.parametrize("asked", MESHES.values(), ids=MESHES)
def test_weights_that_come_late_are_the_same_run_bitwise(asked: Case) -> None:
    """Symptom: a forward computes with weights of the step before, on the rank whose neighbour was slow."""
    asked.skip_if_torch_is_too_old()
    assert_bitwise(asked)


def assert_bitwise(asked: Case) -> None:
    """Late and prompt weights give the same bits on every rank."""
    late, prompt = (run_ranks(asked.world_size, steps_of, asked, finish) for finish in (False, True))
    for mine, other in zip(late, prompt, strict=True):
        assert mine.pop("pending") > 1  # or this compared nothing
        assert other.pop("pending") == 0
        assert mine.keys() == other.keys()
        for name, value in mine.items():
            same = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
            assert same, name


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("schedule", ["none", "1f1b"])
def test_each_part_of_the_forward_waits_for_its_own_weights_alone(schedule: str, mode: str) -> None:
    """Symptom: the whole gather is waited for before the first layer, and nothing overlaps; or a layer runs early."""
    pp = 1 if schedule == "none" else 2
    asked = case(
        pp, 2, 1, steps=2, optimizer__bucket_mb=0.004, model__n_layers=6, activation_checkpoint__mode=mode,
        **({"pipeline__schedule": schedule} if pp > 1 else {}),
    )  # fmt: skip
    for events in run_ranks(2 * pp, _events, asked):
        first_layer = next(i for i, (kind, _) in enumerate(events) if kind == "layer")
        assert any(kind == "arrived" for kind, _ in events[first_layer:]), "nothing was on its way"
        arrived: set[str] = set()
        for kind, names in events:
            if kind == "arrived":
                arrived |= names
            else:
                assert names <= arrived, f"{kind} ran before {names - arrived} had come"


def _events(asked: Case) -> list[tuple[str, set[str]]]:
    """What arrives and what runs in the forward of a second step, in order, with the names of the parameters."""
    trainer = trainer_of(asked)
    coordinate = trainer.mesh.coordinate("dp")
    first, second, _ = (rows_of(batch, asked.dp, coordinate) for batch in batches(asked, trainer.config))
    trainer.train_step(first, finish=False)
    events: list[tuple[str, set[str]]] = []
    names = {id(slot.parameter): name for name, (_, slot) in trainer.zero.slots.items()}
    for bucket in trainer.zero.buckets:

        def finish(waiting: Any, bucket: Any = bucket, inner: Any = bucket.finish_gather) -> None:
            if bucket.gathered is not None:
                events.append(("arrived", {slot.name for slot in bucket.slots}))
            inner(waiting)

        bucket.finish_gather = finish
    for stage in trainer.built.stages:
        for layer in stage.model.layers.values():
            held = {names[id(parameter)] for parameter in layer.parameters()}
            layer.register_forward_pre_hook(lambda _m, _a, held=held: events.append(("layer", held)))
        for part in ("tok_embeddings", "norm", "output"):
            module = getattr(stage.model, part)
            if module is not None:
                held = {names[id(parameter)] for parameter in module.parameters()}
                module.register_forward_pre_hook(lambda _m, _a, held=held: events.append(("part", held)))
    trainer.train_step(second, finish=False)
    return events


@pytest.mark.parametrize("said", [("nrom",), ("norm", "output", "tok_embeddings"), ("tok_embeddings",)])
def test_a_wrong_table_of_parts_lets_no_forward_run_early(said: tuple[str, ...]) -> None:
    """Symptom: LAST_PARTS, which a run without pipeline never looked at, names what embed uses, and the embedding is
    looked up before its new rows have come; or it names nothing, and the run ends in a traceback."""
    (late, _), (right, _) = (run_ranks(2, _with_parts, parts) for parts in (said, None))
    assert late == right


def _with_parts(said: tuple[str, ...] | None) -> list[tuple[float, float]]:
    from parallelize import llama

    before = llama.LAST_PARTS
    llama.LAST_PARTS = before if said is None else said
    try:
        return steps_of(case(1, 2, 1, **SMALL_BUCKETS), finish=False)["losses"]
    finally:
        llama.LAST_PARTS = before


def test_what_reads_the_state_gets_the_new_weights() -> None:
    """Symptom: a checkpoint is loaded, or text generated, while the weights of the step before are still coming in, and
    what was loaded is written over."""
    assert all(run_ranks(2, _readers, case(1, 2, 1, **SMALL_BUCKETS)))


def _readers(asked: Case) -> bool:
    trainer = trainer_of(asked)
    coordinate = trainer.mesh.coordinate("dp")
    batch, *_ = (rows_of(batch, asked.dp, coordinate) for batch in batches(asked, trainer.config))
    pending = []
    for read in (
        lambda: trainer.boxes(),
        lambda: trainer.evaluate(iter([batch])),
        lambda: trainer.next_token_logits(batch.tokens[:1], 0),
        lambda: trainer.zero.gather(),
    ):
        trainer.train_step(batch, finish=False)
        pending.append(any(bucket.gathered is not None for bucket in trainer.zero.buckets))
        read()
        pending.append(not any(bucket.gathered is not None for bucket in trainer.zero.buckets))
    return all(pending)


@pytest.mark.usefixtures("compiler")
@pytest.mark.slow
@pytest.mark.parametrize("scope", ["block", "stage"])
def test_late_weights_of_compiled_stages_are_the_same_run_bitwise(scope: str) -> None:
    """As above, compiled: one graph for the whole stage has no place to wait at, so all is waited for before it."""
    assert_bitwise(case(1, 2, 1, **SMALL_BUCKETS, compile__enable=True, compile__scope=scope))
