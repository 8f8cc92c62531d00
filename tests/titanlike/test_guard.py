"""Bad steps: the same decision on all ranks, and nothing touched."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.titanlike.runs import checkpoints, columns, digest, meta, run_on, runs, tiny, with_checkpoint
from titanlike.config import load_config
from titanlike.errors import UserError
from titanlike.guard import MAX_ROLLBACKS_TO_A_STEP, MAX_SKIPS_IN_A_ROW, Guard, GuardConfig
from titanlike.metrics import files

BAD = 4
"""the step of the fault"""
MESHES: dict[str, dict[str, Any]] = {"dp": {}, "tp": {"mesh.tp": 2}, "pp": {"mesh.pp": 2}}
FAULTS = ("gradient", "loss", "spike")
EVERY: dict[str, Any] = {
    **{"train.steps": 6, "checkpoint.interval": 1, "checkpoint.keep_last": 0, "checkpoint.mode": "sync"},
    **{"guard.spike_window": 3, "validation.samples": 8, "train.global_batch_size": 4},
}


def configs(folder: Path, policy: str, mesh: dict[str, Any]) -> list[Any]:
    """A run for each fault; the folder's name says which."""
    both = {"guard.nonfinite": policy, "guard.spike": policy}
    return [tiny(folder / fault, **EVERY, **both, **mesh) for fault in FAULTS]


def plant(trainer: Any, step: int) -> None:
    """Before step BAD, the fault that the run's name tells, on one rank alone; once in a run."""
    for undo in trainer.__dict__.pop("planted", []):
        undo()
    if step != BAD or trainer.__dict__.get("faulted"):
        return
    trainer.faulted, trainer.planted = True, []
    fault, mesh = trainer.config.run.name, trainer.mesh
    if fault == "gradient":
        if mesh.rank == 1:
            name = next(n for n, (bucket, _) in trainer.zero.slots.items() if "wq" in n)
            parameter = trainer.zero.slots[name][1].parameter
            trainer.planted.append(parameter.register_hook(lambda grad: grad * math.nan).remove)
        return
    # The loss is counted on the last stage, on one tp rank.
    if mesh.rank == {"dp": 1, "tp": 0, "pp": 1}[next(axis for axis in MESHES if mesh.degree(axis) == 2)]:
        before = trainer.forward_backward
        factor = math.inf if fault == "loss" else 1000.0
        trainer.forward_backward = lambda batch: before(batch) * factor
        trainer.planted.append(lambda: setattr(trainer, "forward_backward", before))


@pytest.mark.parametrize("mesh", MESHES)
def test_a_skipped_step_leaves_the_state_bitwise_as_it_was(tmp_path: Path, mesh: str) -> None:
    """Symptom (OC #352, TT PR #3863, DS #7171): ranks decide apart; a NaN gets into weights, moments or step counts."""
    ranks = run_ranks(2, runs, configs(tmp_path, "skip", MESHES[mesh]), plant)
    for seen in [one for rank in ranks for one in rank]:
        assert seen.error is None and len(seen.samples) == 6
    for n, fault in enumerate(FAULTS):
        folder = tmp_path / fault
        assert digest(folder, BAD) == digest(folder, BAD - 1), f"{fault}: weights or moments were touched"
        assert digest(folder, BAD + 1) != digest(folder, BAD)
        before, after, last = (meta(folder, step) for step in (BAD - 1, BAD, 6))
        assert (before["optimizer_steps"], after["optimizer_steps"], last["optimizer_steps"]) == (3, 3, 5)
        assert (after["step"], after["data"]["samples"], after["tokens"]) == (4, 16, 16 * 32)
        assert after["guard"]["skipped"] == 1 and after["guard"]["good"] == before["guard"]["good"]
        assert columns(folder, "skipped") == {step: (1 if step == BAD else None,) for step in range(1, 7)}
        assert all(map(math.isfinite, columns(folder)[6]))
        (event,) = [event for event in files.read_events(folder) if event["event"] == "bad_step"]
        rows = [ranks[rank][n].samples[BAD - 1] for rank in ((0, 1) if mesh == "dp" else (0,))]
        assert event["samples"] == [name for part in rows for name in part] and event["action"] == "skip"
        assert event["sources"] == ["text"] and event["data"] == before["data"]
        if fault == "gradient":
            assert event["gradients"] and all("wq" in name for name in event["gradients"])
        assert ("spike" in event["reason"]) == (fault == "spike")


@pytest.mark.parametrize("mesh", MESHES)
def test_a_stopped_run_says_why_on_all_ranks_and_saves_nothing_of_the_step(tmp_path: Path, mesh: str) -> None:
    ranks = run_ranks(2, runs, configs(tmp_path, "stop", MESHES[mesh]), plant)
    for n, fault in enumerate(FAULTS):
        errors = {rank[n].error for rank in ranks}
        assert len(errors) == 1, errors
        ((kind, message),) = errors
        assert kind == ("UserError" if fault == "spike" else "NonFinite")
        assert message.startswith("step 4 has ") and "the last checkpoint is of step 3, before it" in message
        assert checkpoints(tmp_path / fault) == [f"step-0000000{step}" for step in (1, 2, 3)]
        assert [event["action"] for event in files.read_events(tmp_path / fault) if "action" in event] == ["stop"]


@pytest.mark.parametrize("mesh", MESHES)
def test_a_rollback_takes_the_last_good_checkpoint_and_leaves_out_the_bad_data(tmp_path: Path, mesh: str) -> None:
    every = {"checkpoint.interval": 2}
    asked = [
        load_config(None, {**_flat(config), **every, "run.name": fault})
        for fault, config in zip(FAULTS, configs(tmp_path, "rollback", MESHES[mesh]))
    ]
    ranks = run_ranks(2, runs, asked, plant)
    for rank in ranks:
        for seen in rank:
            assert seen.error is None
            # Steps 1-4, then from the checkpoint of step 2 on steps 3-6 with the data after the bad batch.
            assert len(seen.samples) == 8
            names = [name for batch in seen.samples for name in batch]
            assert len(set(names)) == len(names), "data was read twice"
    for fault in FAULTS:
        folder = tmp_path / fault
        assert list(columns(folder)) == [1, 2, 3, 4, 5, 6]
        assert [row["step"] for row in files.read_dropped(folder)] == [3, 4]
        assert (meta(folder, 6)["optimizer_steps"], meta(folder, 6)["data"]["samples"]) == (6, 32)
        assert meta(folder, 2)["data"]["samples"] == 16 and meta(folder, 2)["data"]["step"] == 2
        events = [event for event in files.read_events(folder) if "rolled_back_from" in event]
        assert [(event["step"], event["rolled_back_from"]) for event in events] == [(2, 4)]


def _flat(config: Any) -> dict[str, Any]:
    from titanlike.config import resolved
    from titanlike.resume import flattened

    return flattened(resolved(config))


def test_a_run_resumed_after_a_skip_is_the_run_that_was_not_interrupted(tmp_path: Path) -> None:
    """Symptom: AdamW's bias correction counts steps that it did not make, after a resume at the latest."""
    one = {**EVERY, "guard.nonfinite": "skip", "guard.spike": "skip", "train.steps": 5}
    run_on(2, tmp_path / "gradient", plant, **one)
    run_on(2, with_checkpoint(tmp_path / "gradient", BAD, tmp_path / "resumed"), **one)
    assert digest(tmp_path / "resumed", 5) == digest(tmp_path / "gradient", 5)
    assert meta(tmp_path / "resumed", 5) | {"config": 0} == meta(tmp_path / "gradient", 5) | {"config": 0}


# --- the judge ---


def test_a_spike_is_measured_against_the_good_steps_of_the_window() -> None:
    guard = Guard(GuardConfig(spike="skip", spike_sigma=3.0, spike_window=4))
    for loss in (2.0, 100.0, 2.2, 1.8):  # too few to judge by
        assert guard.judge(loss, 1.0) is None
    assert guard.judge(150.0, 1.0) is None  # within 3 sigma of that window
    for loss in (2.0, 2.1, 1.9, 2.0):
        assert guard.judge(loss, 1.0) is None
    verdict = guard.judge(3.0, 1.0)
    assert verdict is not None and verdict.action == "skip" and "loss 3 is a spike" in verdict.reason
    again = Guard(guard.config)
    again.load(guard.state())
    assert again.state() == guard.state() and again.judge(3.0, 1.0) == verdict, "the spike itself is not in the window"
    assert guard.judge(2.05, 1.0) is None and guard.judge(0.1, 1.0) is None, "a fall is no spike"


@pytest.mark.parametrize("norm", [math.nan, math.inf, -math.inf])
def test_it_gives_up_after_too_many_skips_in_a_row(norm: float) -> None:
    """Symptom: weights went bad, and the run skips every step to its end."""
    guard = Guard(GuardConfig(nonfinite="skip"))
    guard.judge(1.0, 1.0)
    for _ in range(2):
        for _ in range(MAX_SKIPS_IN_A_ROW):
            verdict = guard.judge(1.0, norm)
            assert verdict is not None and verdict.action == "skip"
        last = guard.judge(1.0, norm)
        assert last is not None and last.action == "stop" and "in a row" in last.reason
        assert guard.judge(1.0, 1.0) is None


def test_it_gives_up_after_too_many_rollbacks_to_one_step() -> None:
    """Symptom: the weights are the reason, and the run goes back and forth for ever."""
    guard = Guard(GuardConfig(nonfinite="rollback"))
    saved = guard.state()
    assert [guard.rolled_back(6, saved) for _ in range(MAX_ROLLBACKS_TO_A_STEP + 1)] == [True, True, True, False]
    assert guard.rolled_back(8, saved)


def test_keys_of_spikes_without_spikes_are_inert() -> None:
    with pytest.raises(UserError, match=r"guard.spike_sigma has no effect with guard.spike = .off."):
        load_config(None, {"guard.spike_sigma": 3.0}).validate_for(1)
