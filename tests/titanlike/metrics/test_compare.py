"""Where two runs part."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest

from titanlike.errors import UserError
from titanlike.metrics import files
from titanlike.metrics.compare import Difference, compare_rows, compare_runs

ROOT = Path(__file__).resolve().parents[3]


def rows(losses: dict[int, float]) -> list[dict[str, float]]:
    return [{"step": step, "loss": loss} for step, loss in losses.items()]


def write(run_dir: Path, losses: dict[int, float]) -> Path:
    run_dir.mkdir()
    (run_dir / files.METRICS_FILE).write_text("".join(files.encode(row) + "\n" for row in rows(losses)))
    return run_dir


def test_first_difference_first_above_tolerance_and_largest() -> None:
    a = rows({1: 3.0, 2: 2.0, 3: 1.0, 4: 1.0})
    b = rows({1: 3.0, 2: math.nextafter(2.0, 3.0), 3: 1.001, 4: 1.1})
    (comparison,) = compare_rows(a, b, tolerance=1e-4)
    assert comparison.steps == [1, 2, 3, 4]
    assert (comparison.first_unequal.step, comparison.first_apart.step, comparison.largest.step) == (2, 3, 4)


def test_only_common_steps_are_compared() -> None:
    (comparison,) = compare_rows(rows({1: 9.0, 5: 1.0, 6: 1.0}), rows({5: 1.0, 6: 1.0, 7: 3.0}), tolerance=0.0)
    assert comparison.steps == [5, 6] and comparison.first_unequal is None


@pytest.mark.parametrize(
    ("a", "b", "relative"),
    [
        (math.nan, math.nan, 0.0),
        (math.nan, 1.0, math.inf),
        (math.inf, math.inf, 0.0),
        (math.inf, -math.inf, math.inf),
        (0.0, 0.0, 0.0),
        (0.0, 1e-300, 1.0),
        (-1.0, 1.0, 2.0),
    ],
)
def test_relative_difference_of_odd_numbers(a: float, b: float, relative: float) -> None:
    """A NaN compares false with everything: `a - b > tolerance` calls a diverged run equal."""
    assert Difference(1, a, b).relative == relative


def test_text_names_step_and_values(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", {1: 3.5, 2: 2.0}), write(tmp_path / "b", {1: 3.5, 2: 2.5, 3: 1.0})
    text, agree = compare_runs(a, b, 1e-5)
    assert not agree
    assert "loss: 2 common steps (1 to 2)" in text
    assert "parts by more than 1e-05 at  step 2: A 2.0  B 2.5  relative difference 2.00e-01" in text
    text, agree = compare_runs(a, b, 0.5)
    assert agree and "within 0.5 everywhere" in text
    text, agree = compare_runs(a, a, 0.0)
    assert agree and "loss: equal bitwise, 2 common steps (1 to 2)" in text


def test_text_of_runs_that_were_never_equal_says_so(tmp_path: Path) -> None:
    """Symptom: "bitwise equal before step 1", before which there is nothing."""
    a, b = write(tmp_path / "a", {1: 3.5, 2: 2.0}), write(tmp_path / "b", {1: 3.0, 2: 2.0})
    text, _ = compare_runs(a, b, 0.0)
    assert "  never equal, from     step 1: A 3.5  B 3.0" in text and "equal before" not in text
    text, _ = compare_runs(write(tmp_path / "c", {1: 3.0, 2: 2.5}), b, 0.0)
    assert "  bitwise equal before  step 2: A 2.5  B 2.0" in text


def test_text_where_a_number_belongs_is_no_value(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", {1: 1.0, 2: 2.0}), write(tmp_path / "b", {1: 1.0})
    with open(b / files.METRICS_FILE, "a") as file:
        file.write('{"step": 2, "loss": "low"}\n{"step": 3, "lo')
    text, agree = compare_runs(a, b, 0.0)
    assert agree and "1 common step (1)" in text


def test_nothing_in_common_is_a_mistake(tmp_path: Path) -> None:
    a, b, empty = write(tmp_path / "a", {1: 1.0}), write(tmp_path / "b", {2: 1.0}), write(tmp_path / "c", {})
    with pytest.raises(UserError, match="no step in common"):
        compare_runs(a, b, 0.0)
    with pytest.raises(UserError, match=r"\(no steps\)"):
        compare_runs(a, empty, 0.0)
    with pytest.raises(UserError, match=r"holds no metrics\.jsonl"):
        compare_runs(a, tmp_path / "missing", 0.0)


def test_command_exits_by_agreement(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", {1: 1.0}), write(tmp_path / "b", {1: 1.5})

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "scripts" / "report.py"), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})

    assert run("--compare", a, a).returncode == 0
    parted = run("--compare", a, b, "--tolerance", "0.1")
    assert parted.returncode == 1 and "step 1: A 1.0  B 1.5" in parted.stdout
    missing = run("--compare", a, tmp_path / "x")
    assert missing.returncode == 2 and missing.stderr.startswith("error: ") and missing.stderr.count("\n") == 1
    assert run().returncode == 2
    assert run(a, "--compare", a, b).returncode == 2
    assert run("--compare", a, b, "--tolerance", "nan").returncode == 2
