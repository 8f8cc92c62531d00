"""metrics.jsonl: full digits, one line a step, and what a kill leaves."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from titanlike.metrics import files


@pytest.mark.parametrize("value", [0.1 + 0.2, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, 3.0, 2**53 + 1])
def test_numbers_come_back_bitwise(value: float) -> None:
    """Two runs are compared by their files: rounding on the way would hide where they part."""
    back = files.decode(files.encode({"loss": value}))["loss"]
    assert back == value and type(back) is type(value) and math.copysign(1, back) == math.copysign(1, value)


@pytest.mark.parametrize(("value", "text"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")])
def test_not_finite_values_are_valid_json(value: float, text: str) -> None:
    """Bare NaN is no JSON: other readers (jq, JavaScript) refuse the whole line."""
    line = files.encode({"loss": value})
    assert json.loads(line, parse_constant=pytest.fail) == {"loss": text}
    assert str(files.decode(line)["loss"]) == str(value)


def write(run_dir: Path, *lines: str, end: str = "\n") -> Path:
    path = run_dir / files.METRICS_FILE
    path.write_text("\n".join(lines) + end)
    return path


def test_missing_and_empty_files_are_no_steps(tmp_path: Path) -> None:
    """A run that died before its first step must not break its report."""
    assert files.read_metrics(tmp_path) == [] and files.read_events(tmp_path) == []
    write(tmp_path, end="")
    assert files.read_metrics(tmp_path) == []
    assert files.drop_after(tmp_path, 0) == 0


def test_torn_and_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    """A kill in the middle of a write leaves half an object at the end."""
    write(tmp_path, '{"step": 1, "loss": 2.0}', "", "[1, 2]", '{"loss": 1.0}', '{"step": 2, "lo', end="")
    assert files.read_metrics(tmp_path) == [{"step": 1, "loss": 2.0}]


def test_bytes_that_are_not_text_are_passed_over(tmp_path: Path) -> None:
    """A machine that lost power can leave zero bytes where a line should be."""
    (tmp_path / files.METRICS_FILE).write_bytes(b'{"step": 1}\n\x00\x00\xff\xfe\n{"step": 2}\n')
    assert [row["step"] for row in files.read_metrics(tmp_path)] == [1, 2]


def test_appending_after_a_torn_line_starts_a_new_one(tmp_path: Path) -> None:
    """Otherwise the first line after a restart would be glued to the torn one and lost with it."""
    path = write(tmp_path, '{"step": 1}', '{"ste', end="")
    with files.open_append(path) as file:
        file.write('{"step": 2}\n')
    assert [row["step"] for row in files.read_metrics(tmp_path)] == [1, 2]


def test_dropping_keeps_the_bytes_of_what_stays_and_moves_the_rest(tmp_path: Path) -> None:
    """Steps after the checkpoint are run again: one line a step, and nothing that was measured is deleted."""
    lines = [files.encode({"step": step, "loss": step / 3}) for step in range(1, 8)]
    path = write(tmp_path, *lines, '{"step": 8, "l', end="")
    assert files.drop_after(tmp_path, 5) == 2
    assert path.read_text() == "\n".join(lines[:5]) + "\n"
    assert (tmp_path / files.DROPPED_FILE).read_text() == "\n".join(lines[5:]) + "\n"
    assert files.drop_after(tmp_path, 5) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == [files.DROPPED_FILE, files.METRICS_FILE]


def test_the_later_line_of_a_step_counts(tmp_path: Path) -> None:
    write(tmp_path, '{"step": 2, "loss": 1.0}', '{"step": 1, "loss": 3.0}', '{"step": 2, "loss": 2.0}')
    assert files.read_metrics(tmp_path) == [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}]


WRITER = """
import sys
from pathlib import Path
from titanlike.metrics import Metrics, MetricsConfig
metrics = Metrics(MetricsConfig(tensorboard=False, log_interval=10**9), Path(sys.argv[1]), 10**9)
metrics.resume_from(int(sys.argv[2]))
step = int(sys.argv[2])
while True:
    step += 1
    metrics.log(step, {"loss": step / 3})
    if step == int(sys.argv[3]):
        print("there", flush=True)
        sys.stdin.read()
"""


def test_lines_survive_kill_9_and_resume_gives_one_line_a_step(tmp_path: Path) -> None:
    """Buffered logs lose the steps that explain a crash; appended ones hold some steps twice after a resume."""
    for begin, end in ((0, 50), (30, 70)):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(begin), str(end)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert any(line.strip() == "there" for line in process.stdout)
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        assert [row["step"] for row in files.read_lines(tmp_path / files.METRICS_FILE)] == list(range(1, end + 1))
    assert [event["event"] for event in files.read_events(tmp_path)] == ["start", "resume"]
    assert files.read_events(tmp_path)[1]["dropped_steps"] == 20
