"""The columns of metrics.jsonl are those of one rank on every mesh, as whole runs write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import launch, run_ranks
from tests.titanlike.runs import FLOAT64, arguments, columns, run, run_on
from titanlike.config import load_config
from titanlike.config_combinations import torch_version

SCHEDULES = ("afab", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev")
MESH_COLUMNS = ("loss", "grad_norm", "val_loss", "lr", "tokens")

LONG: dict[str, Any] = {**FLOAT64, "train.steps": 10, "model.n_layers": 4, "validation.interval": 4}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int]]:
    """Ten steps of four layers in float64 on one rank: the folder, and the sample at the end."""
    run_dir = tmp_path_factory.mktemp("oracle") / "run"
    (seen,) = run_on(1, run_dir, **LONG)
    return run_dir, seen.text


def equal_columns(ours: Path, theirs: Path, relative: float, names: tuple[str, ...] = MESH_COLUMNS) -> None:
    mine, reference = columns(ours, *names), columns(theirs, *names)
    assert mine.keys() == reference.keys()
    for step, values in reference.items():
        for name, value, expected in zip(names, mine[step], values):
            assert (value is None) == (expected is None), f"step {step}: {name}"
            if expected is not None:
                assert abs(value - expected) <= relative * abs(expected), f"step {step}: {name} {value}, not {expected}"


@pytest.mark.parametrize(("dtype", "relative"), [("float32", 1e-5), ("float64", 1e-10)])
def test_two_ranks_write_the_columns_of_one(tmp_path: Path, dtype: str, relative: float) -> None:
    """Symptom (TT #1750, #3329): the logged loss depends on the number of ranks."""
    for ranks in (1, 2):
        run_on(ranks, tmp_path / f"ranks{ranks}", **{"train.dtype": dtype, "train.steps": 6, "validation.interval": 3})
    equal_columns(tmp_path / "ranks2", tmp_path / "ranks1", relative)
    assert len(columns(tmp_path / "ranks1")) == 6


@pytest.mark.parametrize(
    "schedule",
    [pytest.param(name, marks=() if name == "interleaved_1f1b" else pytest.mark.slow) for name in SCHEDULES],
)
def test_eight_ranks_write_the_columns_of_one(tmp_path: Path, one_rank: tuple[Path, list[int]], schedule: str) -> None:
    """Symptom (TT #596, #2972): with a pipeline the norm, the gradients or the validation loss have another scale."""
    if schedule in ("zbv", "dualpipev") and torch_version() < (2, 13):
        pytest.skip("refused on CPU ranks before torch 2.13")
    mesh = {"mesh.pp": 2, "mesh.dp": 2, "mesh.tp": 2, "pipeline.schedule": schedule}
    seen = run_on(8, tmp_path / "run", **LONG, **mesh)
    reference, text = one_rank
    equal_columns(tmp_path / "run", reference, 1e-10)
    assert [one.text for one in seen] == [text] * 8, "the generated text differs"


@pytest.mark.parametrize(
    ("ranks", "mesh"),
    [
        (2, {"mesh.pp": 2}),
        (2, {"mesh.tp": 2, "train.microbatch_size": 4}),
        (4, {"mesh.tp": 2, "mesh.sequence_parallel": False, "train.microbatch_size": 4}),
    ],
    ids=["pp2", "tp2", "dp2tp2 without sequence parallelism"],
)
def test_each_axis_writes_the_columns_of_one(
    tmp_path: Path, one_rank: tuple[Path, list[int]], ranks: int, mesh: dict[str, Any]
) -> None:
    seen = run_on(ranks, tmp_path / "run", **LONG, **mesh)
    reference, text = one_rank
    equal_columns(tmp_path / "run", reference, 1e-10)
    assert [one.text for one in seen] == [text] * ranks, "the generated text differs"


def test_optimizer_state_is_halved_by_two_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Symptom: ZeRO-1 by name, and every rank holds all moments."""
    (alone,) = run_on(1, tmp_path / "one", **{"train.steps": 1})
    both = run_on(2, tmp_path / "two", **{"train.steps": 1})
    whole = alone.bytes["optimizer_states"]
    for seen in both:
        half = seen.bytes["optimizer_states"]
        print(f"optimizer states: {whole:,} bytes on one rank, {half:,} on each of two")
        # Each parameter's rows are halved, rounded up: at most one row of padding each, and a count of steps.
        assert whole / 2 <= half + 64 * 8 and half <= whole / 2 + 0.02 * whole


def test_the_config_that_a_run_writes_is_the_config_that_it_ran(tmp_path: Path) -> None:
    """Symptom: a run cannot be repeated from what it left."""
    run_on(2, tmp_path / "run", **{"train.steps": 2, "schedule.decay": "cosine", "optimizer.lr": 1e-3})
    written = load_config(tmp_path / "run" / "config.toml", {"run.name": "again"})
    run_ranks(2, run, written)
    assert columns(tmp_path / "again") == columns(tmp_path / "run")
    assert load_config(tmp_path / "again" / "config.toml") == written


# --- the commands as the issues have them, under torchrun ---


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "relative"), [("float32", 1e-5), ("float64", 1e-10)])
def test_torchrun_on_two_ranks_writes_the_columns_of_one(tmp_path: Path, dtype: str, relative: float) -> None:
    command = ["scripts/train.py", "--config", "configs/debug.toml", "--train.steps", "20", "--train.dtype", dtype]
    for ranks in (1, 2):
        done = launch([*command, "--run.dir", tmp_path, "--run.name", f"ranks{ranks}"], ranks, timeout=900)
        assert done.returncode == 0, done.stderr
    equal_columns(tmp_path / "ranks2", tmp_path / "ranks1", relative)
    assert len(columns(tmp_path / "ranks1")) == 20


@pytest.mark.slow
def test_torchrun_on_eight_ranks_writes_the_columns_of_one(tmp_path: Path) -> None:
    mesh = {"mesh.pp": 2, "mesh.tp": 2}
    for ranks, more in ((1, {}), (8, mesh)):
        done = launch(arguments(tmp_path / f"ranks{ranks}", **FLOAT64, **{"train.steps": 10}, **more), ranks)
        assert done.returncode == 0, done.stderr
    equal_columns(tmp_path / "ranks8", tmp_path / "ranks1", 1e-10)
