"""How a run ends when something is wrong: one sentence of ours, all ranks gone at once, and nothing bad saved."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import ROOT, Launched, launch, launching, run_ranks
from tests.titanlike.runs import arguments, checkpoints, columns, digest, meta, run, run_on, tiny
from titanlike.metrics import files


def ours(stderr: str) -> list[str]:
    """What our ranks wrote to stderr: the launcher's own report and warnings are not ours."""
    return [line for line in stderr.splitlines() if line.startswith("error: ")]


def a_rank_spoke_python(stderr: str) -> bool:
    """Whether a traceback of one of our files is there; torchrun's own shows files of torch alone."""
    return str(ROOT) + "/titanlike" in stderr or str(ROOT) + "/scripts" in stderr


# --- before anything was started ---


@pytest.mark.parametrize(
    ("ranks", "wrong", "sentence"),
    [
        (
            2,
            ["--train.stpes", "20"],
            "unknown key train.stpes on the command line: the nearest valid key is train.steps",
        ),
        (3, ["--mesh.tp", "2"], "but the number of ranks is 3"),
        (
            2,
            ["--mesh.tp", "2", "--model.n_heads", "5", "--model.head_dim", "8", "--model.n_kv_heads", "5"],
            "model.n_heads (5)",
        ),
        (1, ["--pipeline.schedule", "1f1b"], "pipeline.schedule has no effect with mesh.pp = 1"),
        (2, ["--mesh.pp", "2", "--pipeline.schedule", "zbv", "--compile.enable"], "compile.enable = true"),
    ],
    ids=["typo", "product", "heads", "schedule without pipeline", "zero bubble compiled"],
)
def test_a_mistake_in_the_config_is_one_line_on_a_rank_alone(ranks: int, wrong: list[str], sentence: str) -> None:
    """Symptom (TT #1656, #1574, MG #2458): a typo is ignored, a wrong world size hangs. As a rank of a launcher whose
    other ranks never come: no process group is waited for."""
    environment = {
        "WORLD_SIZE": str(ranks),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
    }
    done = subprocess.run(
        [sys.executable, "scripts/train.py", "--config", "configs/debug.toml", *wrong],
        env={**os.environ, **environment}, cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and sentence in done.stderr


def test_a_typing_mistake_is_told_without_importing_torch() -> None:
    """Symptom: two ranks import for seconds to say that a word is misspelt."""
    script = """
import sys
from titanlike import cli
try:
    cli.load(["--train.stpes", "20"])
except ValueError:
    print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr


def test_under_torchrun_a_mistake_is_one_sentence_and_the_second_rank_is_silent() -> None:
    """The command of the issue. torchrun adds a report of its own, in which no line of ours stands."""
    done = launch(["scripts/train.py", "--config", "configs/debug.toml", "--train.stpes", "20"], 2)
    assert done.returncode != 0
    assert ours(done.stderr) == [
        "error: unknown key train.stpes on the command line: the nearest valid key is train.steps"
    ]
    assert not a_rank_spoke_python(done.stderr) and done.stdout == ""


# --- the run folder ---


def test_a_run_folder_that_cannot_be_made_is_told_on_every_rank(tmp_path: Path) -> None:
    for seen in run_on(2, tmp_path / "run", **{"run.dir": "/proc/runs"}):
        assert seen.error is not None and seen.error[0] == "UserError"
        assert "the run folder /proc/runs/run (run.dir/run.name): cannot use /proc/runs" in seen.error[1]


@pytest.mark.parametrize("name", ["", "checkpoints", "tensorboard"])
def test_a_file_in_the_place_of_a_folder_is_told_on_every_rank(tmp_path: Path, name: str) -> None:
    """Symptom: the run trains for hours, and fails at its first save."""
    path = tmp_path / "run" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("in the way")
    for seen in run_on(2, tmp_path / "run", **{"metrics.tensorboard": True}):
        assert seen.error is not None and seen.error[0] == "UserError" and str(path) in seen.error[1]


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.toml", "events.jsonl"])
def test_a_folder_in_the_place_of_a_file_is_told_on_every_rank(tmp_path: Path, name: str) -> None:
    (tmp_path / "run" / name).mkdir(parents=True)
    for seen in run_on(2, tmp_path / "run"):
        assert seen.error is not None and seen.error[0] == "UserError" and name in seen.error[1], seen.error
        assert seen.samples == []


def _runs_while_another_job_holds(config: Any) -> tuple[str, str] | None:
    """A second job, with this rank as its only one, is started in the middle of the first."""
    script = "import sys, titanlike.run_folder as f; f.run_folder(f.Path(sys.argv[1]), 0).__enter__()"
    said: list[str] = []

    def start_another(trainer: Any, step: int) -> None:
        if step == 2 and trainer.mesh.rank == 0:
            command = [sys.executable, "-c", script, str(config.run_dir)]
            said.append(subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stderr)

    error = run(config, start_another).error
    return error or ("", said[0] if said else "")


def test_two_jobs_do_not_write_to_one_run_folder(tmp_path: Path) -> None:
    """Symptom: a job is started twice, by mistake or because its launcher was killed and its ranks were not; the second
    removes what the first is saving, and the log has the steps of both."""
    first, _ = run_ranks(2, _runs_while_another_job_holds, tiny(tmp_path / "run"))
    assert first is not None and first[0] == "", first
    assert f"another job is writing to the run folder {tmp_path / 'run'} (process " in first[1]
    (again,) = run_on(1, tmp_path / "run", **{"train.steps": 5})  # and when it has ended, the folder is free
    assert again.error is None and len(columns(tmp_path / "run")) == 5


def _run_in_a_folder_of_its_own(config: Any) -> tuple[str, str] | None:
    own = config.run.model_copy(update={"name": f"rank{os.environ['RANK']}"})
    return run(config.model_copy(update={"run": own})).error


def test_a_run_folder_that_the_ranks_do_not_share_is_told_at_the_start(tmp_path: Path) -> None:
    """Symptom: two nodes with local disks train for hours, and the first save fails."""
    errors = run_ranks(2, _run_in_a_folder_of_its_own, tiny(tmp_path / "run"))
    for number, error in enumerate(errors):
        assert error is not None and error[0] == "UserError"
        assert error[1].startswith(f"the run folder {tmp_path / f'rank{number}'} (run.dir/run.name) is not the same on")
        assert "rank 1 does not see what rank 0 wrote there" in error[1]


# --- numbers that are not finite ---


def _infinite_on_rank_1(trainer: Any, step: int) -> None:
    import torch

    if step == 3 and trainer.mesh.rank == 1:
        parameter = trainer.zero.buckets[0].slots[0].parameter
        hook = parameter.register_hook(lambda grad: torch.full_like(grad, float("inf")))
        trainer.infinite = hook


@pytest.mark.parametrize("mesh", [{}, {"mesh.pp": 2}], ids=["dp2", "pp2"])
def test_an_infinite_gradient_on_one_rank_ends_all_alike_with_a_clean_checkpoint(
    tmp_path: Path, mesh: dict[str, Any]
) -> None:
    """Symptom (TT PR #3863, DS #7171, OC #352): NaN is trained on, or is saved, or one rank skips a step alone."""
    every = {**mesh, "checkpoint.interval": 1, "checkpoint.keep_last": 0}
    run_on(2, tmp_path / "clean", **every)
    for seen in run_on(2, tmp_path / "run", _infinite_on_rank_1, **every):
        assert seen.error is not None and seen.error[0] == "NonFinite"
        assert seen.error[1].startswith("step 3 has grad_norm inf")
        assert "the last checkpoint is of step 2" in seen.error[1]
        assert len(seen.samples) == 3
    assert checkpoints(tmp_path / "run") == ["step-00000001", "step-00000002"]
    assert digest(tmp_path / "run", 2) == digest(tmp_path / "clean", 2)
    assert [row["step"] for row in files.read_metrics(tmp_path / "run")] == [1, 2, 3], "the bad step is in the log"
    run_on(2, tmp_path / "run", **every)  # without the fault: the run goes on as if nothing had been
    assert columns(tmp_path / "run") == columns(tmp_path / "clean")
    assert digest(tmp_path / "run", 4) == digest(tmp_path / "clean", 4)


def _poison_and_compare(config: Any) -> list[Any]:
    import torch

    from titanlike.data import open_data
    from titanlike.mesh import Mesh
    from titanlike.trainer import Trainer

    mesh = Mesh(1, 2, 1, torch.device("cpu"))
    data = open_data(config, mesh.coordinate("dp"), 2)
    trainer = Trainer(config, mesh, data.tokenizer.vocab_size)
    batches = data.train_batches(None)
    trainer.train_step(next(batches))
    before = {name: box[0].clone() for name, box in trainer.zero.boxes().items()}
    _infinite_on_rank_1(trainer, 3)
    result = trainer.train_step(next(batches))
    trainer.infinite.remove() if mesh.rank == 1 else None
    same = all(torch.equal(before[name], box[0]) for name, box in trainer.zero.boxes().items())
    after = trainer.train_step(next(batches))
    return [same, bool(result.grad_norm.isfinite()), trainer.step_count, bool(after.grad_norm.isfinite())]


def test_a_step_that_is_not_finite_leaves_weights_and_moments_as_they_were(tmp_path: Path) -> None:
    """Symptom (DS #7171): an infinite norm became NaN in the clipping and poisoned the weights."""
    assert run_ranks(2, _poison_and_compare, tiny(tmp_path / "run")) == [[True, False, 2, True]] * 2


# --- saving ---


def _checkpoints_become_a_file(path: str, trainer: Any, step: int) -> None:
    if step == 3 and trainer.mesh.rank == 0:
        for _ in range(2000):  # the save before the first step is in the background
            if (Path(path) / "step-00000000").exists():
                break
            time.sleep(0.05)
        os.rename(path, path + ".away")
        Path(path).write_text("a disk that went away")


def test_an_error_of_a_save_in_the_background_reaches_the_user_as_one_sentence(tmp_path: Path) -> None:
    """Symptom (DS #7741): the writer fails, and training goes on for hours, or waits for ever."""
    root = tmp_path / "run" / "checkpoints"
    hook = partial(_checkpoints_become_a_file, str(root))
    saves = {"checkpoint.interval": 3, "checkpoint.save_initial": True, "train.steps": 50}
    told = run_on(2, tmp_path / "run", hook, **saves)
    for seen in told:
        assert seen.error is not None and seen.error[0] == "CheckpointError"
        assert "the checkpoint of step 3 was not written" in seen.error[1] and str(root) in seen.error[1]
    assert len(told[0].samples) == len(told[1].samples) < 50, "noticed late, or not by all at the same step"


# --- a rank that dies, raises, or is told to end, under torchrun ---


def wait_for(condition: Callable[[], bool], run: Launched, seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end and run.process.poll() is None, run.stdout + run.stderr
        time.sleep(0.05)


def logged(run_dir: Path, step: int) -> Callable[[], bool]:
    return lambda: len(files.read_metrics(run_dir)) >= step


ENDLESS = {"train.steps": 100_000, "checkpoint.interval": 2}


def test_the_death_of_a_rank_ends_the_other_and_the_next_start_resumes(tmp_path: Path) -> None:
    """Symptom: after kill -9 of one rank the others wait in a collective, for minutes or for ever."""
    run_dir = tmp_path / "run"
    with launching(arguments(run_dir, **ENDLESS), 2) as run:
        wait_for(logged(run_dir, 5), run)
        os.kill(run.rank_pids()[1], signal.SIGKILL)
        killed = time.monotonic()
        done = run.wait(120.0)
        print(f"gone {time.monotonic() - killed:.1f} s after the kill, with code {done.returncode}")
        assert done.returncode != 0 and "SIGKILL" in done.stderr
        assert not a_rank_spoke_python(done.stderr), "a traceback that says no more than that another rank is gone"
        assert run.rank_pids() == {}
    newest = [name for name in checkpoints(run_dir) if name.startswith("step-")][-1]
    step = int(newest.removeprefix("step-"))
    assert step >= 2 and meta(run_dir, step)["step"] == step
    seen = run_on(2, run_dir, **{"train.steps": step + 2})
    assert any(f"step {step}, digest" in line and "verified" in line for line in seen[0].said)
    assert list(columns(run_dir)) == list(range(1, step + 3))


def test_a_rank_that_raises_in_the_middle_of_a_pipeline_schedule_ends_the_job(tmp_path: Path) -> None:
    """Symptom: the stage before it waits for a gradient that never comes."""
    model = {"model.architecture": "tests.unusual_models:FailingLlama", "mesh.pp": 2, "train.steps": 1000}
    command = [*arguments(tmp_path / "run", **model), "--model.preset="]
    began = time.monotonic()
    done = launch(command, 2, env={"PYTHONPATH": str(ROOT)})
    print(f"the whole job took {time.monotonic() - began:.1f} s")
    assert done.returncode != 0
    assert done.stderr.count("RuntimeError: a bug in the model") == 1
    assert "Connection closed" not in done.stderr, "the other rank spoke too"
    assert done.stderr.startswith("Traceback"), "torch's table of the schedule stands before the error"


def test_a_stage_that_cannot_be_compiled_is_one_sentence_in_a_pipeline_too(tmp_path: Path) -> None:
    """Symptom: torch wraps what a stage raises, so a mistake of the user ends in four tracebacks."""
    model = {"model.architecture": "tests.unusual_models:LookingLlama", "mesh.pp": 2, "compile.enable": True}
    done = launch([*arguments(tmp_path / "run", **model), "--model.preset="], 2, env={"PYTHONPATH": str(ROOT)})
    (sentence,) = ours(done.stderr)
    assert (
        sentence.startswith("error: a LookingBlock cannot be compiled as one graph: ")
        and "if x.sum() > 1e9:" in sentence
    )
    assert not a_rank_spoke_python(done.stderr)


@pytest.mark.slow
@pytest.mark.parametrize(("who", "workers"), [("torchrun", 2), ("rank 1", 0)])
def test_sigterm_finishes_the_step_saves_and_ends_well(tmp_path: Path, who: str, workers: int) -> None:
    """Symptom: torchrun signals whole process groups; the data workers died at once, and took the rank with them."""
    run_dir = tmp_path / "run"
    endless = {"train.steps": 100_000, "checkpoint.interval": 0, "data.workers": workers}
    with launching(arguments(run_dir, **endless), 2) as run:
        wait_for(logged(run_dir, 3), run)
        os.kill(run.process.pid if who == "torchrun" else run.rank_pids()[1], signal.SIGTERM)
        done = run.wait(120.0)
    assert ours(done.stderr) == [] and not a_rank_spoke_python(done.stderr)
    assert "asked to stop" in done.stdout
    # torchrun, when it is the one that is told to end, says so by its own code; the ranks end with 0 either way.
    assert (done.returncode == 0) == (who == "rank 1")
    (name,) = checkpoints(run_dir)
    step = int(name.removeprefix("step-"))
    assert step == len(files.read_metrics(run_dir)) >= 3
