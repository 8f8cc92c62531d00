"""When a save happens, which checkpoints stay, and how a run is asked to stop."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from titanlike.checkpoint import CheckpointConfig, Checkpointer, Shard, StopSignal
from titanlike.checkpoint.folder import find_checkpoints


def tiny(step: int = 0) -> dict[str, Shard]:
    return {"a": Shard.whole(torch.full((2,), float(step)))}


def saved_steps(config: CheckpointConfig, folder: Path, steps: int, clock=None) -> list[int]:
    """The steps that a run of `steps` steps saves; `clock` gives the seconds at each step."""
    now = [0.0]
    checkpointer = Checkpointer(config, folder, clock=lambda: now[0])
    saved = []
    for step in range(steps + 1):
        now[0] = clock[step] if clock else 0.0
        decision = checkpointer.decide(step, last=step == steps)
        if decision.save:
            checkpointer.save(step, tiny(), {})
            saved.append(step)
        assert decision.stop == (step == steps)
    checkpointer.close()
    return saved


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        ({"interval": 4}, [4, 8, 10]),
        ({"interval": 5}, [5, 10]),  # the last step is saved once
        ({"interval": 4, "save_last": False}, [4, 8]),
        ({"interval": 0}, [10]),
        ({"interval": 0, "save_initial": True}, [0, 10]),
        ({"interval": 3, "interval_minutes": 1.0}, [3, 6, 9, 10]),
    ],
)
def test_steps(config: dict, steps: list[int], tmp_path: Path) -> None:
    assert saved_steps(CheckpointConfig(mode="sync", **config), tmp_path, 10) == steps


def test_minutes_count_from_the_last_save(tmp_path: Path) -> None:
    config = CheckpointConfig(mode="sync", interval=7, interval_minutes=1.0, save_last=False)
    clock = [0, 30, 59, 60, 90, 119, 121, 122, 170, 183, 200]
    assert saved_steps(config, tmp_path, 10, clock) == [3, 6, 7, 9]


def test_a_step_that_was_loaded_is_not_saved_again(tmp_path: Path) -> None:
    """A finished run that is started again leaves its last checkpoint as it is."""
    config = CheckpointConfig(mode="sync", interval=5)
    assert saved_steps(config, tmp_path, 10) == [5, 10]
    again = Checkpointer(config, tmp_path)
    again.load(tiny())
    assert not again.decide(10, last=True).save


@pytest.mark.parametrize(
    ("config", "left"),
    [
        ({"keep_last": 2}, [9, 10]),
        ({"keep_last": 1}, [10]),
        ({"keep_last": 0}, list(range(1, 11))),
        ({"keep_last": 2, "keep_every": 4}, [4, 8, 9, 10]),
        ({"keep_last": 0, "keep_every": 4}, list(range(1, 11))),
    ],
)
def test_retention(config: dict, left: list[int], tmp_path: Path) -> None:
    saved_steps(CheckpointConfig(mode="sync", interval=1, **config), tmp_path, 10)
    assert sorted(item.step for item in find_checkpoints(tmp_path / "checkpoints")) == left
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_retention_never_deletes_the_newest_good_one(tmp_path: Path) -> None:
    """Damaged ones don't count towards keep_last."""
    checkpointer = Checkpointer(CheckpointConfig(mode="sync", keep_last=2), tmp_path)
    checkpointer.save(1, tiny(), {})
    checkpointer.save(2, tiny(), {})
    (checkpointer.root / "step-00000002" / "COMMIT").unlink()
    checkpointer.save(3, tiny(), {})
    assert sorted(path.name[-1] for path in checkpointer.root.iterdir()) == ["1", "2", "3"]
    checkpointer.save(4, tiny(), {})
    assert sorted(path.name[-1] for path in checkpointer.root.iterdir()) == ["3", "4"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_finishes_the_step_saves_and_stops(number: signal.Signals, tmp_path: Path) -> None:
    before = [signal.getsignal(n) for n in StopSignal.SIGNALS]
    stop = StopSignal().install()
    try:
        said: list[str] = []
        checkpointer = Checkpointer(CheckpointConfig(interval=0), tmp_path, stop=stop, say=said.append)
        assert checkpointer.decide(1) == (False, False)
        os.kill(os.getpid(), number)
        assert stop.received == number.name
        assert checkpointer.decide(2) == (True, True)
        assert said == [f"asked to stop by {number.name}: saving after step 2, then ending"]
    finally:
        stop.restore()
    assert [signal.getsignal(n) for n in StopSignal.SIGNALS] == before


def test_a_second_sigterm_acts_at_once(tmp_path: Path) -> None:
    """A save that hangs must not make the process immune."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whatever tests of scripts have left
    stop = StopSignal().install()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    finally:
        stop.restore()
        signal.signal(signal.SIGTERM, before)


def _decide_together(folder: str) -> list[tuple[bool, bool]]:
    stop = StopSignal()
    rank = dist.get_rank()
    config = CheckpointConfig(interval=0, interval_minutes=1.0, save_last=False)
    now = [0.0]
    checkpointer = Checkpointer(config, folder, clock=lambda: now[0], stop=stop)
    decisions = []
    for step in range(1, 6):
        # Rank 1's clock is far ahead and does not count; the signal reaches rank 1 alone.
        now[0] = step * (25.0 if rank == 0 else 1000.0)
        if step == 5 and rank == 1:
            stop.received = "SIGTERM"
        decision = checkpointer.decide(step)
        if decision.save:
            checkpointer.save(step, tiny(), {})
        decisions.append(tuple(decision))
    checkpointer.close()
    return decisions


def test_all_ranks_decide_alike(tmp_path: Path) -> None:
    no, save, leave = (False, False), (True, False), (True, True)
    for decisions in run_ranks(2, _decide_together, str(tmp_path)):
        assert decisions == [no, no, save, no, leave]
