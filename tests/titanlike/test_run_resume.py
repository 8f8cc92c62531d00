"""A run that was interrupted is the run that was not: bitwise on the same mesh, to rounding on another."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import launch, run_ranks
from tests.titanlike.runs import (
    FLOAT64,
    Seen,
    arguments,
    checkpoint,
    checkpoints,
    columns,
    digest,
    meta,
    run_on,
    runs,
    tiny,
    with_checkpoint,
)
from titanlike.metrics import files

EVERY = {"checkpoint.interval": 1, "checkpoint.keep_last": 0, "checkpoint.save_initial": True}
DROPOUT = {"model.preset": None, "model.architecture": "tests.unusual_models:LlamaWithDropout"}


# --- the same mesh ---


@pytest.mark.parametrize(
    ("mesh", "model"),
    [({}, {}), ({"mesh.pp": 2}, DROPOUT)],
    ids=["dp2", "pp2 with dropout"],
)
def test_every_step_can_be_resumed_from_bitwise(tmp_path: Path, mesh: dict[str, Any], model: dict[str, Any]) -> None:
    """Symptom (NT #221, #243, MG #1570, TT #848, #1194): a resumed run differs: with pp, with dropout, at step 0."""
    every = {**EVERY, **mesh, **model, "train.steps": 4, "schedule.warmup": 2, "schedule.decay": "cosine"}
    whole = run_on(2, tmp_path / "whole", **every)
    assert [meta(tmp_path / "whole", step)["step"] for step in range(5)] == [0, 1, 2, 3, 4]
    parts = [with_checkpoint(tmp_path / "whole", step, tmp_path / f"from{step}") for step in range(5)]
    resumed = run_ranks(2, runs, [tiny(part, **every) for part in parts])
    for step, part in enumerate(parts):
        assert columns(part) == {n: values for n, values in columns(tmp_path / "whole").items() if n > step}
        for later in range(step, 5):
            assert digest(part, later) == digest(tmp_path / "whole", later), f"from {step}: weights or moments differ"
            assert meta(part, later)["data"] == meta(tmp_path / "whole", later)["data"]
        for rank in (0, 1):
            assert resumed[rank][step].error is None
            assert resumed[rank][step].samples == whole[rank].samples[step:], f"from {step}: other samples"
    assert any("nothing to do: the run is at step 4" in line for line in resumed[0][4].said)


def test_dropout_draws_new_numbers_at_each_step_and_dp_rank_and_none_in_validation(tmp_path: Path) -> None:
    """Symptom (TT #1194, AM #3437): every rank, or every step, drops the same elements; validation is noisy."""
    drawn = run_ranks(2, _masks, tiny(tmp_path / "run", **DROPOUT))
    by_rank = [tuple(masks) for masks, _ in drawn]
    assert len({mask for masks in by_rank for mask in masks}) == 6, "equal masks"
    assert all(first == second for _, (first, second) in drawn), "validation draws random numbers"


def _masks(config: Any) -> tuple[list[int], tuple[float, float]]:
    """Of each of three steps, a number drawn as dropout would; and the validation loss, twice."""
    import torch

    import titanlike.run as subject

    masks: list[int] = []
    losses: list[float] = []

    def watched(run: Any) -> None:
        start(run)
        for step in (1, 2, 3):
            run.trainer.seed_step(step)
            masks.append(int(torch.randint(2**62, ())))
        losses.extend(run.validate()["val_loss"] for _ in range(2))
        run.trainer.step_count = run.config.train.steps  # no steps

    start, subject.start = subject.start, watched
    try:
        subject.train(config)
    finally:
        subject.start = start
    return masks, (losses[0], losses[1])


@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_any_seed_that_the_config_allows_starts_a_run(tmp_path: Path, seed: int) -> None:
    """Symptom: run.seed = 10000000 overflowed in the seed of a step, while smaller ones worked."""
    (seen,) = run_on(1, tmp_path / "run", **{"run.seed": seed, "train.steps": 1})
    assert seen.error is None


# --- another mesh ---


def test_a_resume_on_other_meshes_trains_on_the_same_samples_to_rounding(tmp_path: Path) -> None:
    """Symptom (TT #811, #409, NT PR #263, DS #7599): samples repeat or are skipped, moments are lost, at another dp."""
    steps = {**FLOAT64, "model.n_layers": 4, "train.steps": 6}
    (whole,) = run_on(1, tmp_path / "whole", **steps)
    seen: list[list[Seen]] = []
    for ranks, last, mesh in ((2, 2, {"mesh.tp": 2}), (4, 4, {"mesh.pp": 2}), (1, 6, {})):
        seen.append(run_on(ranks, tmp_path / "run", **{**steps, "train.steps": last}, **mesh))
    ours, reference = columns(tmp_path / "run"), columns(tmp_path / "whole")
    assert list(ours) == [1, 2, 3, 4, 5, 6]
    for step in ours:
        assert ours[step] == pytest.approx(reference[step], rel=1e-10, abs=0)
    pp2dp2 = [[*seen[1][0].samples[step], *seen[1][1].samples[step]] for step in range(2)]  # ranks 0, 1: dp 0 and 1
    assert [*seen[0][0].samples, *pp2dp2, *seen[2][0].samples] == whole.samples
    said = "\n".join(seen[1][0].said)
    assert (
        f"resumed from {checkpoint(tmp_path / 'run', 2)}: step 2, digest {digest(tmp_path / 'run', 2)} verified" in said
    )
    assert "mesh pp 1 x dp 1 x tp 2 -> pp 2 x dp 2 x tp 1" in said and "train.steps 2 -> 4" in said
    resumes = [event for event in files.read_events(tmp_path / "run") if event["event"] == "resume"]
    assert [(event["step"], event["world_size"]) for event in resumes] == [(2, 4), (4, 1)]
    assert [entry["mesh"] for entry in (meta(tmp_path / "run", step) for step in (2, 4, 6))] == [
        {"pp": 1, "dp": 1, "tp": 2}, {"pp": 2, "dp": 2, "tp": 1}, {"pp": 1, "dp": 1, "tp": 1},
    ]  # fmt: skip


@pytest.mark.slow
def test_torchrun_resumes_on_another_mesh(tmp_path: Path) -> None:
    """The commands of the issue: 2 ranks with tp 2 for 10 steps, 4 ranks with pp 2 to step 20."""
    for ranks, steps, mesh in ((1, 20, {}), (2, 10, {"mesh.tp": 2}), (4, 20, {"mesh.pp": 2})):
        name = "whole" if ranks == 1 else "run"
        done = launch(arguments(tmp_path / name, **FLOAT64, **{"train.steps": steps}, **mesh), ranks)
        assert done.returncode == 0, done.stderr
    assert "step 11/20" in done.stdout and "step 10, digest" in done.stdout and "verified" in done.stdout
    ours, reference = columns(tmp_path / "run"), columns(tmp_path / "whole")
    assert list(ours) == list(range(1, 21))
    for step in ours:
        assert ours[step] == pytest.approx(reference[step], rel=1e-10, abs=0)
    assert meta(tmp_path / "run", 20)["data"] == meta(tmp_path / "whole", 20)["data"]


# --- what a checkpoint says, and what a resume says ---


def test_a_checkpoint_tells_what_it_is_of(tmp_path: Path) -> None:
    run_on(2, tmp_path / "run", **{"train.steps": 2, "checkpoint.interval": 2})
    told = meta(tmp_path / "run", 2)
    assert told["step"] == 2 and told["tokens"] == 2 * 8 * 32 and told["data"]["samples"] == 16
    assert told["tokenizer"] == "bytes" and told["mesh"] == {"pp": 1, "dp": 2, "tp": 1}
    assert told["model"]["vocab_size"] == 257 and told["model"]["dim"] == 32
    assert told["config"]["train"]["seq_len"] == 32 and told["config"]["model"]["n_layers"] == 2
    assert {"titanlike", "torch", "best_val_loss"} <= told.keys()
    saves = [event for event in files.read_events(tmp_path / "run") if event["event"] == "checkpoint"]
    assert [event["step"] for event in saves] == [2] and saves[0]["checkpoint_stall_s"] >= 0


def test_the_digest_of_the_state_is_logged_when_asked_and_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    seen = run_on(2, tmp_path / "run", **EVERY, **{"checkpoint.digest_interval": 2})
    told = {event["step"]: event["digest"] for event in files.read_events(tmp_path / "run") if "digest" in event}
    assert told == {step: digest(tmp_path / "run", step) for step in (2, 4)}
    assert f"digest of the state after step 2: {told[2]}" in seen[0].said


def test_what_changed_since_the_checkpoint_is_said(tmp_path: Path) -> None:
    """Symptom: a run is resumed with another learning rate, and nothing says so."""
    run_on(2, tmp_path / "run", **{"train.steps": 2})
    seen = run_on(2, tmp_path / "run", **{"train.steps": 3, "optimizer.lr": 1e-3, "model.norm_eps": 1e-6})
    changes = "model.norm_eps 1e-05 -> 1e-06, train.steps 2 -> 3, optimizer.lr 0.0003 -> 0.001"
    assert f"changed since that checkpoint: {changes}" in seen[0].said
    assert [e for e in files.read_events(tmp_path / "run") if "changes" in e][-1]["changes"] == changes.split(", ")
    assert columns(tmp_path / "run", "lr") == {1: (3e-4,), 2: (3e-4,), 3: (1e-3,)}


def test_fewer_steps_than_were_taken_is_nothing_to_do(tmp_path: Path) -> None:
    run_on(1, tmp_path / "run", **{"train.steps": 3})
    before = (tmp_path / "run" / "metrics.jsonl").read_text(), checkpoints(tmp_path / "run")
    (seen,) = run_on(1, tmp_path / "run", **{"train.steps": 2})
    assert seen.error is None and seen.samples == []
    assert seen.said[-1].startswith("nothing to do: the run is at step 3 and train.steps is 2")
    assert ((tmp_path / "run" / "metrics.jsonl").read_text(), checkpoints(tmp_path / "run")) == before


def test_a_step_that_does_not_exist_is_answered_with_those_that_do(tmp_path: Path) -> None:
    run_on(2, tmp_path / "run", **{"train.steps": 2, "checkpoint.interval": 1})
    for seen in run_on(2, tmp_path / "run", **{"checkpoint.load_step": 7}):
        assert seen.error == (
            "CheckpointError",
            f"checkpoint.load_step = 7 is not in {tmp_path / 'run' / 'checkpoints'}, which has: 1, 2",
        )


def test_a_run_goes_back_to_an_older_step_and_stays_on_that_branch(tmp_path: Path) -> None:
    """Symptom: after load_step the log has two lines for a step, or the next start takes the abandoned branch."""
    run_on(1, tmp_path / "run", **EVERY)
    run_on(1, tmp_path / "run", **EVERY, **{"checkpoint.load_step": 1, "train.steps": 2, "optimizer.lr": 1e-3})
    (seen,) = run_on(1, tmp_path / "run", **EVERY, **{"train.steps": 3, "optimizer.lr": 1e-3})
    assert any("resumed from" in line and "step 2," in line for line in seen.said)
    assert columns(tmp_path / "run", "lr") == {1: (3e-4,), 2: (1e-3,), 3: (1e-3,)}
    assert [row["step"] for row in files.read_dropped(tmp_path / "run")] == [2, 3, 4]


# --- a resume that cannot be ---


def contents(folder: Path) -> dict[Path, bytes | None]:
    """Everything in a run folder."""
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def refused(tmp_path: Path, ranks: int = 2, **changed: Any) -> str:
    """What each rank says about a resume with these changes; the run folder must stay as it was."""
    run_on(ranks, tmp_path / "run", **{"train.steps": 1})
    before = contents(tmp_path / "run")
    said = {seen.error for seen in run_on(ranks, tmp_path / "run", **{"train.steps": 2, **changed})}
    assert len(said) == 1 and None not in said, said
    assert contents(tmp_path / "run") == before
    ((_, message),) = said  # type: ignore[misc]
    assert "\n" not in message
    return message


def test_another_shape_of_the_model_is_refused_by_the_name_of_a_tensor(tmp_path: Path) -> None:
    message = refused(tmp_path, **{"model.ffn_dim": 64})
    assert "feed_forward" in message and "(48, 32)" in message and "(64, 32)" in message


def test_another_number_of_layers_is_refused_by_the_name_of_a_tensor(tmp_path: Path) -> None:
    """Symptom: a shallower model silently takes the first layers of a deeper one."""
    assert "layers.1." in refused(tmp_path, **{"model.n_layers": 1})


def test_more_layers_are_refused_by_the_name_of_a_tensor(tmp_path: Path) -> None:
    assert "layers.2." in refused(tmp_path, **{"model.n_layers": 3})


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    assert "exp_avg" in refused(tmp_path, **{"optimizer.name": "sgd"})


def test_another_dtype_of_the_masters_is_refused(tmp_path: Path) -> None:
    assert "float64" in refused(tmp_path, **FLOAT64)


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """Symptom (OC #617): ids that mean something else are trained on without a word."""
    vocabulary = {
        "<|endoftext|>": 0,
        **{letter: n + 1 for n, letter in enumerate("0123456789 abcdefghijklmnopqrstuvwxyz.")},
    }
    content = {"version": "1.0", "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<|endoftext|>"}}
    path = tmp_path / "tokenizer.json"
    path.write_text(
        json.dumps(
            {
                **content,
                "pre_tokenizer": {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False},
            }
        )
    )
    message = refused(tmp_path, **{"data.tokenizer": str(path)})
    assert "another tokenizer" in message and str(path) in message


@pytest.mark.parametrize("key", ["run.seed", "data.validation_fraction"])
def test_another_order_of_the_data_is_refused(tmp_path: Path, key: str) -> None:
    """Symptom: with another seed the cursor points into another order, and samples repeat without a word."""
    message = refused(tmp_path, **{key: {"run.seed": 1, "data.validation_fraction": 0.1}[key]})
    assert key in message and "data.allow_changes" in message


# --- being asked to stop ---


def _signal_at(step: int, name: str, ranks: tuple[int, ...], trainer: Any, at: int) -> None:
    if at == step and trainer.mesh.rank in ranks:
        os.kill(os.getpid(), getattr(signal, name))


@pytest.mark.parametrize(("name", "who"), [("SIGTERM", (1,)), ("SIGUSR1", (0, 1))])
def test_a_signal_to_any_rank_finishes_the_step_on_all_and_saves(
    tmp_path: Path, name: str, who: tuple[int, ...]
) -> None:
    """Symptom: the rank that got the signal leaves alone, and the others hang or die without a checkpoint."""
    seen = run_on(2, tmp_path / "run", partial(_signal_at, 2, name, who), **{"train.steps": 9})
    assert [len(one.samples) for one in seen] == [2, 2] and [one.error for one in seen] == [None, None]
    assert checkpoints(tmp_path / "run") == ["step-00000002"]
    run_on(2, tmp_path / "run", **{"train.steps": 4})
    run_on(2, tmp_path / "whole", **{"train.steps": 4})
    assert columns(tmp_path / "run") == columns(tmp_path / "whole")
