"""Data parallelism with ZeRO-1 is the same run as one rank, whatever dp and the accumulation are."""

from __future__ import annotations

import pytest

from tests.distributed.compare import (
    TINY,
    Case,
    assert_same_run,
    batches,
    case,
    compare,
    rows_of,
    spy_on_gradients,
    trainer_of,
)
from tests.ranks import run_ranks

# 16 sequences are what 4 ranks with 4 microbatches need. Buckets of 5 kB: a tiny model has several then.
BATCH = {"train__global_batch_size": 16, "optimizer__bucket_mb": 0.005}


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("dp", [2, 4])
def test_dp_and_accumulation_are_the_same_run_for_five_steps(dp: int, accumulation: int) -> None:
    """Symptom: the last, or all but one, microbatch's gradient is lost under ZeRO-1 (DS #7985, #7967)."""
    assert_same_run(case(dp=dp, steps=5, train__microbatch_size=16 // dp // accumulation, **BATCH))


@pytest.mark.parametrize(
    "changes", [{"optimizer__name": "sgd", "optimizer__momentum": 0.9}, {"train__dtype": "float32"}]
)
def test_other_optimizers_and_dtypes_are_sharded_alike(changes: dict[str, object]) -> None:
    """Symptom: ZeRO-1 is right for AdamW in one precision alone."""
    single = changes.get("train__dtype") == "float32"
    # float32: 2^-24 relative, summed over some hundred terms; Adam's first steps are about lr whatever the gradient is.
    assert_same_run(case(dp=2, **changes), *((1e-5, 1e-3) if single else ()))


ODD = {"dim": 18, "n_heads": 3, "n_kv_heads": 1, "head_dim": 2, "ffn_dim": 23, "n_layers": 3}


@pytest.mark.parametrize("dp", [2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_sizes_that_dp_does_not_divide(dp: int, tied: bool) -> None:
    """Symptom: a weight whose rows dp does not divide loses its last rows. wk has 2 rows here: with dp 4 half of the
    ranks own nothing of it."""
    sizes = {f"model__{name}": size for name, size in ODD.items()}
    result = assert_same_run(case(dp=dp, model__tie_embeddings=tied, labels="one", **sizes))
    owned = [nbytes["optimizer_states"] for nbytes in result.bytes_per_rank]
    assert min(owned) < max(owned)


def test_the_bucket_size_does_not_matter() -> None:
    """Symptom: what crosses a bucket's end is reduced twice or not at all. Buckets hold whole parameters and are added
    up element by element, so the bits are the same too (the global norm is added up bucket by bucket, so without
    clipping)."""
    free = {"train__max_grad_norm": 0.0}
    small, large = (assert_same_run(case(dp=2, optimizer__bucket_mb=mb, **free)) for mb in (1e-5, 25.0))
    assert small.digests == large.digests


def test_a_weight_that_a_step_does_not_use_has_no_gradient_in_it() -> None:
    """Symptom: the gradient of the step before is applied again, or the ranks wait for a bucket that never fills. Layer
    1 is passed over by both ranks, then by one of them."""
    for idle, one_idle in run_ranks(2, _passed_over, case(dp=2, steps=3, train__microbatch_size=2)):
        assert idle == 0.0
        assert one_idle > 1e-6


def _passed_over(asked: Case) -> list[float]:
    """Largest reduced gradient of layer 1 on this rank when all ranks pass it over, and when rank 1 does."""
    trainer = trainer_of(asked)
    block = trainer.built.stages[0].model.layers["1"]
    rank = trainer.mesh.coordinate("dp")
    forward, seen = block.forward, {}
    spy_on_gradients(trainer, seen)
    first, *others = (rows_of(batch, 2, rank) for batch in batches(asked, trainer.config))
    trainer.train_step(first)
    assert seen["layers.1.attention.wq.weight"].abs().max() > 1e-6
    largest = []
    for passing, batch in zip(([0, 1], [1]), others):
        block.forward = (lambda x, context: x) if rank in passing else forward
        trainer.train_step(batch)
        largest.append(max(g.abs().max().item() for n, g in seen.items() if n.startswith("layers.1.")))
    return largest


def test_a_run_repeats_bit_by_bit_and_another_seed_does_not() -> None:
    """Symptom: the run depends on something else than its config."""
    first, again, other = (compare(case(dp=2, run__seed=seed)) for seed in (0, 0, 1))
    assert first.digests == again.digests
    assert first.digests[0] != other.digests[0]


def test_optimizer_state_of_two_ranks_is_half_plus_padding() -> None:
    """Symptom: ZeRO-1 saves nothing because a state is whole on each rank."""
    sizes = {f"model__{name}": size for name, size in ODD.items()}
    one, two = (compare(case(dp=dp, steps=1, **sizes)).bytes_per_rank for dp in (1, 2))
    parameters = 2 * 67 * 18 + 18 + 3 * (2 * 18 + (6 + 2 + 2) * 18 + 18 * 6 + 3 * 18 * 23)
    names = 3 + 9 * 3
    steps = 4 * names  # AdamW counts steps for each parameter, in a float32
    assert one[0]["optimizer_states"] == 2 * 8 * parameters + steps
    assert sum(held["optimizer_states"] for held in two) == 2 * 8 * parameters + 2 * steps
    row = 8 * max(18, 23)  # dp rank 0 has at most one row more of each parameter
    assert two[0]["optimizer_states"] - two[1]["optimizer_states"] <= 2 * row * names
    assert 2 * two[0]["master_weights"] <= 8 * parameters + row * names


def test_the_tiny_model_is_clipped_and_not_clipped() -> None:
    """The limit that the other tests use does act; without one the run is the same as well."""
    assert TINY["train.max_grad_norm"] == 0.5
    clipped = assert_same_run(case(dp=2, steps=2, optimizer__name="sgd"))
    free = assert_same_run(case(dp=2, steps=2, optimizer__name="sgd", train__max_grad_norm=0.0))
    assert clipped.digests != free.digests


def test_parameter_groups() -> None:
    """Symptom: a group's learning rate or decay goes to other parameters once they lie in one buffer."""
    groups = [
        {"match": "norm", "lr_scale": 0.5, "weight_decay": 0.3},
        {"match": r"layers\.1\..*w[q2]", "lr_scale": 3.0},
    ]
    for decay_embeddings in (True, False):
        assert_same_run(
            case(dp=2, optimizer__groups=groups, optimizer__decay_embeddings=decay_embeddings, schedule__warmup=2)
        )
