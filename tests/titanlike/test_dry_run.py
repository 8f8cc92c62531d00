"""`--dry-run`: the run's first step without the run."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import launch, run_ranks
from tests.titanlike.runs import arguments, run, tiny
from titanlike.metrics.startup_times import process_began


def tree(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file with its content and the time of its last change."""
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


def dried(config: Any) -> tuple[bool, list[str]]:
    """On a rank: whether the state is bitwise that of the start, and what was printed."""
    import titanlike.dry_run as subject
    from titanlike.mesh import Mesh
    from titanlike.metrics.console import Console

    made: list[Any] = []
    printed: list[str] = []
    trainer_class, message, render = subject.Trainer, Console.message, Console.render

    def noted(*given: Any) -> Any:
        made.append(trainer_class(*given))
        return made[-1]

    subject.Trainer = noted  # type: ignore[misc, assignment]
    Console.message = lambda _self, text: printed.append(text)  # type: ignore[method-assign]
    Console.render = lambda _self, table: printed.append(_text(table))  # type: ignore[method-assign]
    try:
        subject.dry_run(config)
        (trainer,) = made
        assert trainer.step_count == trainer.updates == 0
        mesh: Mesh = trainer.mesh
        fresh = trainer_class(config, mesh, trainer.built.plain.config.vocab_size)
        same = all(
            torch.equal(tensor, fresh.boxes()[name][0]) for name, (tensor, _, _) in trainer.boxes().items()
        ) and all(
            torch.equal(mine.parameter.data, fresh.zero.slots[name][1].parameter.data)
            for name, (_, mine) in trainer.zero.slots.items()
        )
        return same, printed
    finally:
        subject.Trainer, Console.message, Console.render = trainer_class, message, render  # type: ignore[misc]


def _text(table: Any) -> str:
    import io

    import rich.console

    console = rich.console.Console(file=io.StringIO(), width=120)
    console.print(table)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [(2, {"mesh.tp": 2}), (4, {"mesh.pp": 2, "train.dtype": "bfloat16"})],
    ids=["tp2", "pp2 dp2 bfloat16"],
)
def test_the_state_is_bitwise_untouched_and_nothing_is_written(
    ranks: int, mesh: dict[str, Any], tmp_path: Path
) -> None:
    """Symptom: the real run resumes from the trial's step 1, or starts from weights that it moved."""
    config = tiny(tmp_path / "run", **mesh)
    results = run_ranks(ranks, dried, config)
    assert all(same for same, _ in results)
    assert not config.run_dir.exists()
    printed = "\n".join(results[0][1])
    assert not any(text for _, text in results[1:])
    for phase in ("data", "forward backward", "grad reduce", "clip", "param gather", "in all"):
        assert re.search(rf"^{phase} +\d+\.\d{{4}} +\d+\.\d{{4}} +\d+\.\d{{4}}", printed, re.MULTILINE), printed
    for kind in ("weights", "gradients", "optimizer", "in all"):
        assert re.search(rf"^{kind} +[\d.]+ [KM]i?B +rank \d +[\d.]+ [KM]iB +rank \d", printed, re.MULTILINE), printed
    assert "activations" in printed and "nothing was updated" in printed and "start-up" in printed


def test_a_run_that_is_there_is_left_alone(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", **{"train.steps": 2})
    run_ranks(1, run, config)
    before = tree(config.run_dir)
    assert run_ranks(1, dried, config)[0][0]
    assert tree(config.run_dir) == before


def test_too_little_memory_is_one_sentence_that_says_what_helps(tmp_path: Path) -> None:
    """It is what a dry run is for."""
    (said,) = run_ranks(1, _out_of_memory, tiny(tmp_path / "run", **{"train.microbatch_size": 2}))
    assert said.startswith("out of memory in the dry run on rank 0 (") and "what would help most: " in said


def _dried_for(config: Any, memory: float) -> tuple[str, list[str]]:
    import titanlike.dry_run as subject
    from titanlike.errors import UserError
    from titanlike.metrics.console import Console

    printed: list[str] = []
    message, render = Console.message, Console.render
    Console.message = lambda _self, text: printed.append(text)  # type: ignore[method-assign]
    Console.render = lambda _self, table: None  # type: ignore[method-assign]
    try:
        subject.dry_run(config, memory)
        return "", printed
    except UserError as error:
        return str(error), printed
    finally:
        Console.message, Console.render = message, render  # type: ignore[method-assign]


def test_a_dry_run_for_a_device_that_is_too_small_says_what_helps(tmp_path: Path) -> None:
    """Symptom: the tables say how much it takes, and not what to change."""
    config = tiny(tmp_path / "run", **{"train.microbatch_size": 2})
    for said, _ in run_ranks(2, _dried_for, config, 2.0**17):
        assert re.match(r"rank \d needs [\d.]+ [KM]iB, more than 128\.0 KiB, with [\d,]+ parameters, ", said), said
        assert "; what would help most: " in said and "\n" not in said
    (said, printed), (_, silent) = run_ranks(2, _dried_for, config, 2.0**40)
    assert said == "" and re.match(r"rank \d needs most, [\d.]+ [KM]iB: 1\.0 TiB do", printed[-1]), printed
    assert silent == []


def test_memory_without_a_dry_run_is_a_mistake() -> None:
    done = launch(["scripts/train.py", "--config", "configs/debug.toml", "--memory", "3"], 1)
    assert "error: --memory is a number of GiB above 0, and is given with --dry-run alone\n" in done.stderr


def _out_of_memory(config: Any) -> str:
    import titanlike.dry_run as subject
    from titanlike.errors import UserError

    class Large(subject.Trainer):
        def train_step(self, batch: Any) -> Any:
            return torch.empty(2**55)

    before, subject.Trainer = subject.Trainer, Large  # type: ignore[misc]
    try:
        subject.dry_run(config)
    except UserError as error:
        return str(error)
    finally:
        subject.Trainer = before  # type: ignore[misc]
    return ""


def test_the_command_under_torchrun_ends_with_0(tmp_path: Path) -> None:
    done = launch([*arguments(tmp_path / "run", **{"mesh.pp": 2}), "--dry-run"], 2)
    assert done.returncode == 0, done.stderr
    assert "dry run: nothing was updated" in done.stdout and not (tmp_path / "run").exists()
    parts = "launcher imports data process_group build first_step".replace("_", " ")
    if process_began(os.getpid()) is not None:  # this system tells when a process began
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("start-up ")]
        assert re.sub(r"[\d., ]+", " ", line.partition(":")[2]).split() == parts.split()
