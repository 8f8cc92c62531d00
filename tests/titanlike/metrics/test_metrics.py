"""The facade that the trainer talks to, and what a person sees of it."""

from __future__ import annotations

import builtins
import contextlib
import io
import math
import os
import pty
import re
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest

from titanlike.errors import UserError, file_errors
from titanlike.metrics import Metrics, MetricsConfig, files
from titanlike.metrics.console import Console, format_duration, format_loss

VALUES = {"loss": 3.12341, "grad_norm": 1.2345, "lr": 3e-4, "tokens_per_s": 12345.4}


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def quiet(run_dir: Path, **options: Any) -> Metrics:
    return Metrics(MetricsConfig(tensorboard=False), run_dir, 10, file=io.StringIO(), **options)


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    """Every rank writing the same file gives each step world-size lines."""
    run_dir = tmp_path / "run"
    with Metrics(MetricsConfig(), run_dir, 10, is_main=False) as metrics:
        metrics.resume_from(0)
        metrics.log(1, VALUES)
        metrics.event("resume", 1)
        metrics.message("hello")
        metrics.tables([])
    assert not run_dir.exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("name", [files.METRICS_FILE, files.EVENTS_FILE])
def test_a_full_disk_is_told_once(tmp_path: Path, name: str) -> None:
    """The file's close failed with the same line again, and that traceback took the place of the sentence."""
    (tmp_path / name).symlink_to("/dev/full")
    with pytest.raises(UserError, match="No space left on device"), quiet(tmp_path) as metrics:
        with file_errors("the metrics of step 1"):  # as the run does it
            metrics.log(1, VALUES)
        metrics.event("resume", 1)


def test_a_line_has_step_values_and_time(tmp_path: Path) -> None:
    with quiet(tmp_path, clock=lambda: 5.0) as metrics:
        metrics.resume_from(0, mesh={"dp": 2})
        metrics.log(1, VALUES)
        metrics.log(2, {"loss": math.nan})
    first, second = files.read_metrics(tmp_path)
    assert first == {"step": 1, **VALUES, "wall_time": 5.0}
    assert list(first) == ["step", *VALUES, "wall_time"]
    assert math.isnan(second["loss"])
    assert files.read_events(tmp_path) == [{"event": "start", "step": 0, "wall_time": 5.0, "mesh": {"dp": 2}}]


def test_a_step_is_logged_once(tmp_path: Path) -> None:
    """Our own invariant: everything of a step goes into one call."""
    with quiet(tmp_path) as metrics:
        metrics.log(1, VALUES)
        with pytest.raises(AssertionError, match="step 1 logged after step 1"):
            metrics.log(1, VALUES)


def test_rollback_in_the_same_process(tmp_path: Path) -> None:
    """A rollback to step 1 leaves one line a step, with the numbers of the second try."""
    with quiet(tmp_path) as metrics:
        metrics.resume_from(0)
        for step in (1, 2, 3):
            metrics.log(step, {"loss": 1.0})
        metrics.resume_from(1)
        for step in (2, 3):
            metrics.log(step, {"loss": 2.0})
    assert [(row["step"], row["loss"]) for row in files.read_metrics(tmp_path)] == [(1, 1.0), (2, 2.0), (3, 2.0)]


def test_plain_lines() -> None:
    """What a log file or a pipe gets."""
    clock, out = Clock(), io.StringIO()
    console = Console(100, file=out, clock=clock)
    for step in (11, 12):
        clock.now += 0.7
        console.show(step, VALUES)
    console.message("saved [bold]runs/x[/bold]")
    assert out.getvalue().splitlines() == [
        "step  11/100 | loss 3.1234 | grad_norm 1.234 | lr 3.00e-04 | 12,345 tok/s | eta -:--:--",
        "step  12/100 | loss 3.1234 | grad_norm 1.234 | lr 3.00e-04 | 12,345 tok/s | eta 0:01:02",
        "saved [bold]runs/x[/bold]",
    ]


def test_log_interval_keeps_first_last_and_validation() -> None:
    out = io.StringIO()
    console = Console(10, log_interval=4, file=out)
    for step in range(1, 11):
        console.show(step, {"loss": 1.0, **({"val_loss": 2.0} if step == 6 else {})})
    assert [line.split("/")[0] for line in out.getvalue().splitlines()] == [
        "step  1", "step  4", "step 6", "step  8", "step 10",
    ]  # fmt: skip
    assert "val_loss 2.0000" in out.getvalue()


def test_eta_leaves_out_the_first_step() -> None:
    """The first step compiles: extrapolating it promises days for a run of minutes."""
    clock, out = Clock(), io.StringIO()
    console = Console(100, file=out, clock=clock)
    for seconds in (300.0, 1.0, 1.0):
        clock.now += seconds
        console.show(1 + len(out.getvalue().splitlines()), {"loss": 1.0})
    assert out.getvalue().splitlines()[-1].endswith("eta 0:01:37")


def on_terminal(show: Callable[[IO[str]], None]) -> str:
    """What `show` prints to a terminal."""
    main, side = pty.openpty()
    with open(side, "w") as terminal:
        show(terminal)
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while data := os.read(main, 65536):
            shown += data
    os.close(main)
    return shown.decode()


def test_terminal_shows_a_bar_and_gets_its_cursor_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal: a live bar, messages above it, and the cursor shown again also after an exception."""

    def show(terminal: IO[str]) -> None:
        config = MetricsConfig(tensorboard=False)
        with pytest.raises(RuntimeError), Metrics(config, tmp_path, 3, file=terminal) as metrics:
            metrics.log(1, VALUES)
            metrics.message("checkpoint [x] saved")
            metrics.log(2, {**VALUES, "val_loss": 2.5})
            raise RuntimeError

    monkeypatch.setenv("COLUMNS", "100")
    text = on_terminal(show)
    assert "checkpoint [x] saved" in text and "step 2 | val_loss 2.5000" in text
    last = text.splitlines()[-2]
    for piece in ("step 2/3", "━", "loss 3.1234", "12,345 tok/s", "eta"):
        assert piece in last
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


@pytest.mark.parametrize("columns", [80, 40, 12])
def test_narrow_terminal_keeps_step_and_loss_on_one_line(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that wraps can't be drawn over: each refresh leaves another piece of it on the screen."""

    def show(terminal: IO[str]) -> None:
        console = Console(100000, file=terminal)
        console.show(99999, VALUES)
        console.close()

    monkeypatch.setenv("COLUMNS", str(columns))
    text = re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", on_terminal(show))
    assert all(len(line) <= columns for line in text.splitlines())
    assert "step 99999"[:columns] in text and (columns < 40 or ("loss 3.1234" in text and "eta -" in text))


def test_tensorboard_has_the_same_names_and_hides_steps_run_again(tmp_path: Path) -> None:
    """TensorBoard keeps the events of a process that died: without a purge the curve goes back on itself."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for begin, loss in ((0, 1.0), (2, 2.0)):
        with Metrics(MetricsConfig(), tmp_path, 10, file=io.StringIO()) as metrics:
            metrics.resume_from(begin)
            for step in range(begin + 1, 5):
                metrics.log(step, {**VALUES, "loss": loss})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == set(VALUES)
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]


def test_tensorboard_missing_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("tensorboard"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    metrics = Metrics(MetricsConfig(), tmp_path, 10, file=io.StringIO())
    with pytest.raises(UserError, match=r"metrics\.tensorboard = false"):
        metrics.resume_from(0)


@pytest.mark.parametrize(
    ("loss", "text"),
    [(3.12345, "3.1235"), (0.0123456, "0.012346"), (312.345, "312.35"), (math.nan, "nan"), (math.inf, "inf")],
)
def test_loss_has_four_significant_digits_or_more(loss: float, text: str) -> None:
    assert format_loss(loss) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-:--:--"), (0, "0:00:00"), (62, "0:01:02"), (59.6, "0:01:00"), (90061, "1d 1:01:01")],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert format_duration(seconds) == text
