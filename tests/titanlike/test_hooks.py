"""A user's own code at the points of a run."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import ROOT, RankError, run_ranks
from tests.titanlike.runs import columns, meta, run, run_on, runs, tiny
from titanlike.errors import UserError
from titanlike.hooks import POINTS, Hooks
from titanlike.metrics import files

HERE = "tests.titanlike.test_hooks"
CALLS: list[tuple[Any, ...]] = []


class Watching:
    """Notes every point, and what the state is at it."""

    def __init__(self, config: Any) -> None:
        CALLS.append(("made", config.run.name))

    def on_start(self, run: Any) -> None:
        CALLS.append(("on_start", run.trainer.step_count))

    def before_step(self, run: Any, step: int, batch: Any) -> None:
        self.before = self._weights(run)
        CALLS.append(("before_step", step, len(batch.sample_ids)))

    def before_optimizer(self, run: Any, step: int, result: Any) -> None:
        assert self._weights(run) == self.before
        assert run.trainer.zero.buckets[0].grad_shard.abs().max() > 0
        CALLS.append(("before_optimizer", step, result.loss.item()))

    def after_step(self, run: Any, step: int, values: dict[str, float]) -> None:
        assert self._weights(run) != self.before
        values["watching/double"] = 2 * values["loss"]
        CALLS.append(("after_step", step, values["loss"]))

    def on_validation(self, run: Any, step: int, values: dict[str, float]) -> None:
        CALLS.append(("on_validation", step, values["val_loss"]))

    def on_save(self, run: Any, step: int, meta: dict[str, Any]) -> None:
        meta["watching"] = {"step": step}
        CALLS.append(("on_save", step))

    def on_end(self, run: Any) -> None:
        CALLS.append(("on_end",))

    def _weights(self, run: Any) -> bytes:
        return next(iter(run.trainer.zero.shards.values())).detach().numpy().tobytes()


class Failing:
    """Raises in one point, on rank 1 alone."""

    def before_optimizer(self, run: Any, step: int, result: Any) -> None:
        if step == 2 and run.mesh.rank == 1:
            raise ValueError("no luck")


class Ending:
    """Ends the run with a sentence."""

    def after_step(self, run: Any, step: int, values: dict[str, float]) -> None:
        raise UserError("that is enough")


class Misspelt:
    """Has a point that does not exist."""

    def on_saved(self) -> None: ...


def _watched(config: Any) -> tuple[list[tuple[Any, ...]], Any]:
    CALLS.clear()
    seen = run(config)
    return list(CALLS), seen


def test_every_point_is_called_on_every_rank_with_the_state_of_that_moment(tmp_path: Path) -> None:
    hooked = {"run.hooks": [f"{HERE}:Watching"], "train.steps": 2, "validation.interval": 2, "checkpoint.interval": 2}
    ranks = run_ranks(2, _watched, tiny(tmp_path / "run", **hooked))
    loss = {step: row[0] for step, row in columns(tmp_path / "run").items()}
    for calls, seen in ranks:
        assert seen.error is None
        assert [call[:2] for call in calls] == [
            ("made", "run"), ("on_start", 0),
            ("before_step", 1), ("before_optimizer", 1), ("after_step", 1),
            ("before_step", 2), ("before_optimizer", 2), ("on_validation", 2), ("after_step", 2),
            ("on_save", 2), ("on_end",),
        ]  # fmt: skip
        assert {call[1]: call[2] for call in calls if call[0] in ("before_optimizer", "after_step")} == loss
    assert columns(tmp_path / "run", "watching/double") == {step: (2 * value,) for step, value in loss.items()}
    assert meta(tmp_path / "run", 2)["watching"] == {"step": 2}
    assert {call[0] for call in ranks[0][0]} - {"made"} == set(POINTS)


def test_a_hook_changes_nothing_of_the_run(tmp_path: Path) -> None:
    run_ranks(
        2,
        runs,
        [tiny(tmp_path / "hooked", **{"run.hooks": [f"{HERE}:Watching"]}), tiny(tmp_path / "plain")],
    )
    assert columns(tmp_path / "hooked") == columns(tmp_path / "plain")


def test_what_a_hook_raises_names_the_hook_the_point_and_the_step(tmp_path: Path) -> None:
    """Symptom: a traceback of ten frames of the trainer, and the hook is to be guessed."""
    said = re.escape(f"the hook {HERE}:Failing failed in before_optimizer of step 2 on rank 1: ValueError: no luck")
    with pytest.raises(RankError, match=said):
        run_on(2, tmp_path / "run", **{"run.hooks": [f"{HERE}:Failing"]})
    (seen,) = run_on(1, tmp_path / "other", **{"run.hooks": [f"{HERE}:Ending"]})
    assert seen.error == ("UserError", f"the hook {HERE}:Ending failed in after_step of step 1: that is enough")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("nonsense", "is not an import path"),
        ("no.such.module:Hook", "cannot be imported"),
        (f"{HERE}:Nothing", "has no class 'Nothing'"),
        (f"{HERE}:Misspelt", "has the method on_saved, which is never called: the nearest point is on_save"),
        ("pathlib:PurePath", "has none of the methods of a hook"),
    ],
)
def test_a_hook_that_cannot_be_is_told_before_the_run(tmp_path: Path, path: str, said: str) -> None:
    """Symptom: a misspelt point is never called, and nobody knows."""
    with pytest.raises(UserError, match=re.escape(said)):
        Hooks(tiny(tmp_path / "run", **{"run.hooks": [path]}))


def test_the_example_of_the_documentation_runs(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "hooks.md").read_text()
    (tmp_path / "my_hooks.py").write_text(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1])  # type: ignore[index]
    (path,) = json.loads(re.search(r"hooks = (\[.*\])", text)[1])  # type: ignore[index]
    run_ranks(2, _with_path, str(tmp_path), tiny(tmp_path / "run", **{"run.hooks": [path], "train.steps": 2}))
    assert len(files.read_metrics(tmp_path / "run")) == 2
    assert all(row["embedding/rms"] > 0 for row in files.read_metrics(tmp_path / "run"))
    for point in POINTS:
        assert f"`{point}" in text, f"docs/hooks.md does not tell of {point}"


def _with_path(folder: str, config: Any) -> None:
    sys.path.insert(0, folder)
    try:
        importlib.invalidate_caches()
        assert run(config).error is None
    finally:
        sys.path.remove(folder)
