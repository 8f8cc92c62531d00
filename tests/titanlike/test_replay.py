"""A bad step is taken again on one rank, and the module and the document are named.

The module is also where titanlike looks for the tables of `Poisoned`: those of Llama.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.llama import Block, Llama, LlamaConfig
from parallelize.llama import FIRST_PARTS, LAST_PARTS, stage_costs, tensor_plan
from tests.ranks import ROOT, run_ranks
from tests.titanlike.runs import run_on
from titanlike.errors import UserError
from titanlike.metrics import files

__all__ = ["FIRST_PARTS", "LAST_PARTS", "stage_costs", "tensor_plan"]


class Poison(nn.Module):
    """Has no number for the hidden state of one token."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.where(x.abs().amax(-1, keepdim=True) > 50, torch.inf, 0.0)


class PoisonedBlock(Block):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.poison = Poison()

    def forward(self, x: Tensor, context: Any) -> Tensor:
        return super().forward(self.poison(x), context)


class Poisoned(Llama):
    """A Llama whose second block fails on the character ~."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.layers["1"] = PoisonedBlock(config)

    def init_parameter(self, name: str, value: Tensor, generator: torch.Generator) -> None:
        super().init_parameter(name, value, generator)
        if "embedding" in name:
            value[ord("~")] = 100.0


RUN: dict[str, Any] = {
    **{"model.preset": None, "model.architecture": "tests.titanlike.test_replay:Poisoned"},
    **{"train.steps": 8, "train.global_batch_size": 8, "guard.nonfinite": "skip"},
    **{"checkpoint.interval": 4, "checkpoint.save_initial": True, "checkpoint.keep_last": 0},
}


def replayed(folder: str, step: int) -> list[str]:
    from titanlike.replay import replay

    return list(replay(Path(folder), step))


def test_the_first_module_and_the_document_of_a_bad_step_are_named(tmp_path: Path) -> None:
    """Symptom: a run logs NaN, and nobody can say which layer made it, of which text."""
    (tmp_path / "text.txt").write_text(
        "".join(f"{n} times {n} is {n * n}{'~' if n == 40 else '.'}\n" for n in range(90))
    )
    run_on(2, tmp_path / "run", **RUN, **{"mesh.tp": 2, "validation.samples": 2})
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    bad = [event for event in files.read_events(tmp_path / "run") if event["event"] == "bad_step"]
    assert bad, "the text has one ~ and the steps are a pass over it"
    for event in bad:
        (lines,) = run_ranks(1, replayed, str(tmp_path / "run"), event["step"])
        found = [line for line in lines if line.startswith("sample ")]
        assert len(found) == 1 and "the output of layers.1.poison is the first that is not finite" in found[0]
        assert re.search(r"sample (\S+):", found[0])[1] in event["samples"]  # type: ignore[index]
        assert "40 times 40 is 1600~" in lines[2]
        assert lines[0] == f"step {event['step']}, with the weights of step 6: checkpoint of step 4, 2 steps replayed"
        assert lines[-1] == "1 of 8 samples are not finite"
    good = next(step for step in range(1, 9) if step not in {event["step"] for event in bad})
    (lines,) = run_ranks(1, replayed, str(tmp_path / "run"), good)
    assert lines[-1] == "all outputs, losses and gradients of the 8 samples are finite on one rank"
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}, "the run was touched"


def test_after_a_rollback_the_batch_is_still_that_of_the_bad_step() -> None:
    """Symptom: the checkpoint before the step was saved anew with other data, and an innocent batch is shown."""
    from titanlike.replay import _go_to

    trainer: Any = SimpleNamespace(step_count=2, config=SimpleNamespace(train=SimpleNamespace(global_batch_size=4)))
    bad = {4: {"data": {"samples": 12}}}
    assert _go_to(4, trainer, None, {"samples": 16}, bad) == (0, {"samples": 12}, False)
    trainer.step_count = 3
    assert _go_to(4, trainer, None, {"samples": 20}, bad) == (0, {"samples": 12}, False)
    assert _go_to(4, trainer, None, {"samples": 12}, bad) == (0, {"samples": 12}, True)


def test_what_cannot_be_replayed_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run folder"):
        replayed(str(tmp_path), 3)
    done = subprocess.run(
        [sys.executable, "scripts/replay.py", str(tmp_path), "--step", "3"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
