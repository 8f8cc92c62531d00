"""Combinations that cannot work, and keys without effect, are found from the config and the number of ranks alone."""

import contextlib
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from titanlike import config_combinations
from titanlike.config import Config, config_keys, load_config, write_resolved
from titanlike.config_combinations import STAGES_PER_RANK, without_effect
from titanlike.errors import UserError


def config(**overrides: object) -> Config:
    """The default config with changes. Dots in keys are written as two underscores."""
    return load_config(None, {name.replace("__", "."): value for name, value in overrides.items()})


@pytest.fixture(autouse=True)
def _as_with_a_new_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules are those of the newest torch, whichever is installed."""
    monkeypatch.setattr(config_combinations, "torch_version", lambda: (2, 15))


def refusal(world_size: int, **overrides: object) -> str:
    """The sentence with which a config is refused on `world_size` ranks."""
    loaded = config(**overrides)
    with pytest.raises(UserError) as caught:
        loaded.validate_for(world_size)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# The mesh and the batch.


def test_a_wrong_world_size_names_the_degrees_their_product_and_the_ranks() -> None:
    """Symptom: a wrong world size deadlocks at start (MG #2458)."""
    assert refusal(2, mesh__tp=3) == (
        "mesh.pp (1) * mesh.dp (what is left) * mesh.tp (3) is a multiple of 3, but the number of ranks is 2: start a "
        "multiple of 3 ranks, or change the mesh"
    )
    assert refusal(6, mesh__pp=2, mesh__dp=2, mesh__tp=2) == (
        "mesh.pp (2) * mesh.dp (2) * mesh.tp (2) is 8, but the number of ranks is 6: start 8 ranks, or change the mesh"
    )
    assert "is 1, but the number of ranks is 2" in refusal(2, mesh__dp=1)


@pytest.mark.parametrize(("world_size", "pp", "tp", "dp"), [(1, 1, 1, 1), (8, 1, 1, 8), (8, 2, 2, 2), (12, 3, 2, 2)])
def test_dp_is_what_pp_and_tp_leave(world_size: int, pp: int, tp: int, dp: int) -> None:
    """Symptom: the dp degree is computed beyond its size (LG #58)."""
    assert config(mesh__pp=pp, mesh__tp=tp).resolved_dp(world_size) == dp
    assert config(mesh__pp=pp, mesh__tp=tp, mesh__dp=dp).resolved_dp(world_size) == dp


def test_the_global_batch_must_divide() -> None:
    """Symptom: the last, shorter accumulation window is mis-scaled (LF #10705)."""
    assert config(train__global_batch_size=24, train__microbatch_size=3).accumulation(4) == 2
    assert refusal(3, train__microbatch_size=2) == (
        "train.global_batch_size (8) must be a multiple of dp (3) * train.microbatch_size (2) = 6"
    )
    assert refusal(16) == "train.global_batch_size (8) must be a multiple of dp (16) * train.microbatch_size (1) = 16"


def test_float64_gradients_are_not_sent_in_bfloat16() -> None:
    """Symptom: a run in float64, which is for exact comparisons, is not exact."""
    sent = {"optimizer__grad_comm_dtype": "bfloat16"}
    assert refusal(2, train__dtype="float64", **sent).startswith(
        'optimizer.grad_comm_dtype = "bfloat16" would round the gradients of train.dtype = "float64"'
    )
    config(**sent).validate_for(2)


# The model under tp.


def test_heads_must_fit_tp() -> None:
    """Symptom: more tp ranks than kv heads dies inside a reshape (TT #2574). More are fine when they are a multiple."""
    assert refusal(3, mesh__tp=3, model__n_heads=4) == "model.n_heads (4) must be a multiple of mesh.tp (3)"
    sentence = refusal(4, mesh__tp=4, model__n_heads=12, model__n_kv_heads=6, model__dim=240)
    assert sentence == "mesh.tp (4) must divide model.n_kv_heads (6), or be a multiple of it"
    config(mesh__tp=4, model__n_heads=8, model__n_kv_heads=2).validate_for(4)
    config(mesh__tp=2, model__n_heads=8, model__n_kv_heads=4).validate_for(4)


def test_no_tp_rank_is_left_without_hidden_units() -> None:
    """Symptom: an empty part of the feed-forward fails inside a division."""
    assert (
        refusal(4, mesh__tp=4, model__ffn_dim=9)
        == "model.ffn_dim (9) leaves one of mesh.tp = 4 ranks without hidden units"
    )
    config(mesh__tp=4, model__ffn_dim=10).validate_for(4)


def test_sequence_parallel_needs_a_sequence_that_tp_divides() -> None:
    """Symptom: an uneven sequence fails inside the first forward."""
    sentence = refusal(4, mesh__tp=4, train__seq_len=250)
    assert sentence == "train.seq_len (250) must be a multiple of mesh.tp (4) with mesh.sequence_parallel"
    config(mesh__tp=4, train__seq_len=250, mesh__sequence_parallel=False).validate_for(4)


def test_a_sequence_longer_than_the_model_is_meant_for_is_refused() -> None:
    """Symptom: max_seq_len has no effect."""
    assert refusal(1, train__seq_len=64, model__max_seq_len=63) == (
        "train.seq_len (64 tokens) is longer than model.max_seq_len (63)"
    )
    config(train__seq_len=64, model__max_seq_len=64).validate_for(1)


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 5, 7, 8])
def test_no_tp_rank_is_left_without_vocabulary(tp: int) -> None:
    """Symptom: an empty vocabulary shard fails inside the embedding. Compared with how torch cuts a dimension."""
    for size in range(1, 40):
        empty = len(torch.arange(size).chunk(tp)) < tp
        loaded = config(mesh__tp=tp)
        if empty:
            with pytest.raises(
                UserError, match=rf"a vocabulary of {size} ids leaves one of mesh.tp = {tp} ranks without"
            ):
                loaded.model_config_for(size)
        else:
            assert loaded.model_config_for(size).vocab_size == size


def test_a_memory_budget_is_refused_where_torch_has_none() -> None:
    """Symptom: with tp the compiler ends with "Cannot compute the size of FakeScriptObject"; with recomputed blocks
    there is nothing left to choose from."""
    budget = {"compile__enable": True, "compile__memory_budget": 0.5}
    assert "cannot be used with mesh.tp or mesh.ep > 1" in refusal(2, mesh__tp=2, **budget)
    assert "give only one of them" in refusal(1, activation_checkpoint__mode="full", **budget)


# Keys without effect.


@pytest.mark.parametrize("key", [path for path in config_keys() if path.startswith("pipeline.")])
def test_a_pipeline_key_without_a_pipeline_is_refused(key: str) -> None:
    """Symptom: an inert key is silently ignored (TT #1656): a pipeline schedule with pp = 1, even the default one."""
    value = {"schedule": "1f1b", "split": [4], "stages_per_rank": 1}[key.removeprefix("pipeline.")]
    assert refusal(1, **{key: value}) == (
        f"{key} has no effect with mesh.pp = 1: take it out (on the command line: --pipeline=), or change mesh.pp"
    )


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"optimizer.momentum": 0.9}, 'optimizer.name = "adamw"'),
        ({"optimizer.name": "sgd", "optimizer.beta1": 0.8}, 'optimizer.name = "sgd"'),
        ({"optimizer.name": "sgd", "optimizer.beta2": 0.8}, 'optimizer.name = "sgd"'),
        ({"optimizer.name": "sgd", "optimizer.eps": 1e-6}, 'optimizer.name = "sgd"'),
        ({"optimizer.weight_decay": 0, "optimizer.decay_embeddings": False}, "optimizer.weight_decay = 0"),
        ({"mesh.sequence_parallel": False}, "mesh.tp = 1"),
        ({"compile.enable": False, "compile.memory_budget": 0.5}, "compile.enable = false"),
        ({"schedule.decay_steps": 5}, 'schedule.decay = "none"'),
        ({"schedule.min_lr_ratio": 0.1}, 'schedule.decay = "none"'),
    ],
)
def test_a_key_without_effect_is_refused(overrides: dict[str, object], reason: str) -> None:
    """Symptom: one believes that the run has momentum, or a floor, and it has not."""
    key = list(overrides)[-1]
    assert refusal(1, **overrides) == (
        f"{key} has no effect with {reason}: take it out (on the command line: --{key}=), or change "
        f"{reason.partition(' = ')[0]}"
    )


def test_a_default_that_is_spelt_out_is_no_mistake() -> None:
    """Symptom: a config that lists everything cannot be switched to another optimizer."""
    config(optimizer__momentum=0.0).validate_for(1)
    config(optimizer__name="sgd", optimizer__beta1=0.9, optimizer__momentum=0.5).validate_for(1)
    config(schedule__min_lr_ratio=0.0, mesh__sequence_parallel=True).validate_for(1)


def test_keys_without_effect_are_keys() -> None:
    """Symptom: a renamed key is no longer checked."""
    for loaded in (config(), config(optimizer__name="sgd", optimizer__weight_decay=0)):
        assert set(without_effect(loaded)) <= set(config_keys())


# The schedule of the learning rate.


@pytest.mark.parametrize(
    ("schedule", "refused"),
    [
        ({"warmup": 100}, None),
        ({"warmup": 101}, "schedule.warmup (101 steps) is more than train.steps (100)"),
        ({"warmup": 1.0}, None),
        ({"warmup": 30, "decay": "linear"}, None),
        ({"warmup": 30, "decay": "cosine", "decay_steps": 70}, None),
        ({"warmup": 0.3, "decay": "cosine", "decay_steps": 0.7}, None),
        (
            {"warmup": 30, "decay": "cosine", "decay_steps": 0.71},
            "schedule.warmup (30 steps) and schedule.decay_steps (71 steps) are together more than train.steps (100)",
        ),
        ({"warmup": 120, "decay": "linear"}, "schedule.warmup (120 steps) is more than train.steps (100)"),
    ],
)
def test_warmup_and_decay_must_fit_the_run(schedule: dict[str, object], refused: str | None) -> None:
    """Symptom: the run ends before its decay, without a word."""
    overrides = {f"schedule.{name}": value for name, value in schedule.items()}
    if refused is None:
        config(**overrides).validate_for(1)
    else:
        assert refusal(1, **overrides) == refused


# The pipeline.


def test_every_stage_owns_a_layer() -> None:
    """Symptom: an empty stage fails inside the pipeline, or a layer is lost."""
    two = {"mesh__pp": 2, "model__n_layers": 4}
    assert refusal(8, mesh__pp=8, model__n_layers=4) == (
        "model.n_layers (4) is too few for mesh.pp (8) * 1 stage(s) per rank = 8 stages, each of which needs a layer"
    )
    assert refusal(2, **two, pipeline__split=[2, 1, 1]) == (
        "pipeline.split [2, 1, 1] has 3 entries, but mesh.pp (2) * 1 stage(s) per rank = 2 stages"
    )
    assert refusal(2, **two, pipeline__split=[2, 1]) == "pipeline.split [2, 1] has 3 layers, model.n_layers is 4"
    assert refusal(2, **two, pipeline__split=[4, 0]) == (
        "pipeline.split [4, 0] leaves a stage without a layer: each needs 1 or more"
    )
    config(**two, pipeline__split=[1, 3]).validate_for(2)
    config(**two, pipeline__split=[1, 1, 1, 1], pipeline__schedule="zbv").validate_for(2)


def test_stages_per_rank_must_suit_the_schedule() -> None:
    """Symptom: ValueError from inside torch, on some ranks, after the model is built."""
    for schedule, (fewest, most) in STAGES_PER_RANK.items():
        loaded = {"mesh__pp": 2, "model__n_layers": 12, "pipeline__schedule": schedule}
        assert config(**loaded).n_stages == 2 * fewest
        for per_rank in (1, 2, 3):
            if fewest <= per_rank <= (most or per_rank):
                config(**loaded, pipeline__stages_per_rank=per_rank).validate_for(2)
            else:
                wanted = f"exactly {fewest}" if most else f"{fewest} or more"
                assert refusal(2, **loaded, pipeline__stages_per_rank=per_rank) == (
                    f'pipeline.stages_per_rank must be {wanted} with pipeline.schedule = "{schedule}", got {per_rank}'
                )


@pytest.mark.parametrize("schedule", STAGES_PER_RANK)
def test_split_backward_schedules_cannot_be_compiled(schedule: str) -> None:
    """Symptom: torch refuses compiled stages with a traceback on every rank."""
    loaded = {"mesh__pp": 2, "pipeline__schedule": schedule, "compile__enable": True}
    if schedule in ("interleaved_zero_bubble", "zbv", "dualpipev"):
        assert f'pipeline.schedule = "{schedule}" cannot run with compile.enable = true' in refusal(2, **loaded)
    else:
        config(**loaded).validate_for(2)


@pytest.mark.parametrize("schedule", STAGES_PER_RANK)
def test_compiling_is_the_default_and_gives_way_where_torch_cannot(schedule: str, tmp_path: Path) -> None:
    """Symptom: a default makes a schedule an error; or the resolved config of the run is refused when it is read."""
    loaded = config(mesh__pp=2, pipeline__schedule=schedule)
    loaded.validate_for(2)
    can = schedule not in ("interleaved_zero_bubble", "zbv", "dualpipev")
    assert loaded.compiles == can
    write_resolved(loaded, tmp_path / "config.toml")
    again = load_config(tmp_path / "config.toml")
    again.validate_for(2)
    assert again == loaded and again.compiles == can
    config(mesh__pp=2, pipeline__schedule=schedule, compile__enable=False).validate_for(2)
    if not can:
        said = refusal(2, mesh__pp=2, pipeline__schedule=schedule, compile__scope="stage")
        assert said.startswith(f'compile.scope has no effect with pipeline.schedule = "{schedule}": take it out')


@pytest.mark.parametrize("schedule", STAGES_PER_RANK)
def test_split_backward_schedules_cannot_recompute_selectively(schedule: str) -> None:
    """Symptom: torch fails in the first backward: a selected region can be gone through backward only once."""
    loaded = {"mesh__pp": 2, "pipeline__schedule": schedule}
    config(**loaded, activation_checkpoint__mode="full").validate_for(2)
    loaded["activation_checkpoint__mode"] = "selective"
    if schedule in ("interleaved_zero_bubble", "zbv", "dualpipev"):
        assert 'cannot run with activation_checkpoint.mode = "selective"' in refusal(2, **loaded)
    else:
        config(**loaded).validate_for(2)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"pipeline__schedule": "zbv"}, "needs torch 2.13 or newer on CPU ranks"),
        ({"pipeline__schedule": "dualpipev"}, "needs torch 2.13 or newer on CPU ranks"),
        (
            {"pipeline__schedule": "interleaved_zero_bubble", "model__architecture": "moe"},
            "with experts needs torch 2.13 or newer",
        ),
        ({"pipeline__schedule": "interleaved_zero_bubble"}, None),
        ({"model__architecture": "moe"}, None),
    ],
)
def test_what_an_older_torch_cannot_do_is_refused(
    changes: dict[str, str], sentence: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: on torch 2.11 the first step ends in a traceback from inside torch on every rank."""
    batch = {"mesh__pp": 2, "model__n_layers": 4, "run__device": "cpu"}
    config(**batch, **changes).validate_for(2)
    monkeypatch.setattr(config_combinations, "torch_version", lambda: (2, 11))
    if sentence is None:
        config(**batch, **changes).validate_for(2)
    else:
        assert sentence in refusal(2, **batch, **changes)


COUNTS = range(1, 12)  # microbatches


def _torch_takes() -> dict[tuple[str, int], list[int]]:
    """The numbers of microbatches that torch's schedule classes take, by schedule and pp degree."""
    from torch.distributed.pipelining import PipelineStage, schedules
    from torch.testing._internal.distributed.fake_pg import FakeStore

    single = {"afab": schedules.ScheduleGPipe, "1f1b": schedules.Schedule1F1B}
    multiple = {
        "interleaved_1f1b": schedules.ScheduleInterleaved1F1B,
        "interleaved_zero_bubble": schedules.ScheduleInterleavedZeroBubble,
        "zbv": schedules.ScheduleZBVZeroBubble,
        "dualpipev": schedules.ScheduleDualPipeV,
    }
    taken: dict[tuple[str, int], list[int]] = {(schedule, pp): [] for schedule in STAGES_PER_RANK for pp in (2, 3, 4)}
    for (schedule, pp), counts in taken.items():
        n_stages = pp * STAGES_PER_RANK[schedule][0]
        mine = [0, n_stages - 1 if schedule in ("zbv", "dualpipev") else pp][: n_stages // pp]  # of the first rank
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=pp)
        for count in COUNTS:
            stages: list[Any] = [
                PipelineStage(torch.nn.Identity(), index, n_stages, torch.device("cpu")) for index in mine
            ]
            with contextlib.suppress(ValueError):
                single[schedule](stages[0], count) if schedule in single else multiple[schedule](stages, count)
                counts.append(count)
        dist.destroy_process_group()
    return taken


@pytest.fixture(scope="module")
def torch_takes() -> dict[tuple[str, int], list[int]]:
    """From a process of its own, because it makes process groups."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as executor:
        return executor.submit(_torch_takes).result(timeout=120)


@pytest.mark.parametrize("pp", [2, 3, 4])
@pytest.mark.parametrize("schedule", STAGES_PER_RANK)
def test_microbatches_are_refused_exactly_when_torch_refuses_them(
    schedule: str, pp: int, torch_takes: dict[tuple[str, int], list[int]]
) -> None:
    """Symptom: a schedule that cannot take the number of microbatches says so only when the pipeline is built."""
    taken = []
    for count in COUNTS:
        batch = {"train__global_batch_size": 2 * count, "mesh__dp": 2}
        loaded = config(**batch, mesh__pp=pp, model__n_layers=8, pipeline__schedule=schedule)
        try:
            loaded.validate_for(2 * pp)
            taken.append(count)
        except UserError as error:
            assert f'pipeline.schedule = "{schedule}" needs' in str(error)
            assert str(error).endswith(f"but train.global_batch_size and train.microbatch_size give {count}")
    assert taken == torch_takes[schedule, pp]
