"""Every pipeline schedule computes the run of one rank, with tensor parallelism in its stages too."""

from __future__ import annotations

from typing import Any

import pytest

from parallelize.pipeline import SCHEDULES
from tests.distributed.compare import assert_same_run, case

# Layers that the stages don't divide: 3 in 2 stages, 5 in 4.
LAYERS = {"afab": 3, "1f1b": 3, "interleaved_1f1b": 5, "interleaved_zero_bubble": 5, "zbv": 5, "dualpipev": 5}


def settings(schedule: str, **changes: Any) -> dict[str, Any]:
    return {"pipeline__schedule": schedule, "model__n_layers": LAYERS[schedule], "steps": 2} | changes


def test_all_schedules_are_here() -> None:
    assert set(LAYERS) == set(SCHEDULES)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_is_the_same_run(schedule: str) -> None:
    """Symptom: pipeline gradients are scaled by microbatches or once per stage (TT #2972, DS #8154)."""
    assert_same_run(case(2, **settings(schedule, documents=True)))


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_with_tensor_parallel_stages_is_the_same_run(schedule: str, tied: bool) -> None:
    """Symptom: DTensor gradients of a split backward are dropped or not reduced over tp. Untied in all-reduce mode."""
    changes = {"model__tie_embeddings": True} if tied else {"mesh__sequence_parallel": False}
    assert_same_run(case(2, 1, 2, **settings(schedule, train__global_batch_size=4, **changes)))


# (schedule, pp, microbatches): fewer than stages where the schedule allows it, equal, more, and odd numbers.
COUNTS = [
    ("afab", 2, 1),
    ("afab", 2, 3),
    ("1f1b", 2, 2),
    ("1f1b", 2, 3),
    ("interleaved_1f1b", 2, 1),
    ("interleaved_1f1b", 2, 4),
    ("interleaved_zero_bubble", 2, 1),
    ("interleaved_zero_bubble", 2, 3),
    ("zbv", 2, 1),
    ("zbv", 2, 2),
    ("zbv", 2, 7),
    ("dualpipev", 2, 4),
    ("dualpipev", 2, 7),
]


@pytest.mark.parametrize(("schedule", "pp", "microbatches"), COUNTS)
def test_any_number_of_microbatches_that_the_schedule_allows(schedule: str, pp: int, microbatches: int) -> None:
    """Symptom: with fewer microbatches than stages a schedule hangs or loses gradients."""
    assert_same_run(case(pp, **settings(schedule, train__global_batch_size=microbatches, model__tie_embeddings=True)))


@pytest.mark.parametrize(
    ("schedule", "split", "per_rank"),
    [("1f1b", [4, 1], None), ("interleaved_1f1b", [1, 2, 1, 1, 2, 1], 3), ("zbv", [1, 1, 3, 1], None)],
)
def test_a_split_of_the_users_own(schedule: str, split: list[int], per_rank: int | None) -> None:
    """Symptom: the cut is assumed to be even somewhere."""
    changes = settings(schedule, pipeline__split=split) | {"model__n_layers": sum(split)}
    if per_rank:
        changes["pipeline__stages_per_rank"] = per_rank
    assert_same_run(case(2, **changes))


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_two_lengths_of_sequence_in_one_run(schedule: str) -> None:
    """Symptom: shapes are frozen at the first batch, and another length fails or erases gradients (AM #3530). The
    trainer keeps one schedule per length."""
    from tests.ranks import run_ranks

    asked = case(2, **settings(schedule))
    asked.skip_if_torch_is_too_old()
    for errors in run_ranks(2, _two_lengths, asked):
        assert max(errors) < 1e-13, errors


def _two_lengths(asked: Any) -> list[float]:
    from tests.distributed.compare import batches, error_and_ratio, own_part, trainer_of
    from titanlike.reference import Reference

    trainer = trainer_of(asked)
    oracle = Reference(trainer.config, asked.vocab)
    errors = []
    for step, batch in enumerate(batches(asked, trainer.config)):
        if step % 2:
            batch.tokens, batch.labels = batch.tokens[:, :5], batch.labels[:, :5]
        result, right = trainer.train_step(batch), oracle.step(batch.tokens, batch.labels)
        errors.append(abs(result.loss.item() - right.loss))
        errors.append(abs(result.grad_norm.item() - right.grad_norm))
    state = oracle.state()
    for name, box in trainer.zero.boxes().items():
        errors.append(error_and_ratio(box[0], own_part(state[name], box))[0])
    return errors


# Slow: each schedule on 4 stages' ranks, and checkpointing of activations in all of them.


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_on_four_pipeline_ranks_is_the_same_run(schedule: str, tied: bool) -> None:
    """Symptom: a schedule is right with two ranks, where first and last are neighbours, alone."""
    layers = {"model__n_layers": 2 * LAYERS[schedule] - 1}
    assert_same_run(case(4, **settings(schedule, model__tie_embeddings=tied) | layers))
