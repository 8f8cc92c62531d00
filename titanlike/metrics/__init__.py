"""What a run tells about itself: metrics.jsonl, events.jsonl, TensorBoard, Weights & Biases, and the console.

- Only the main rank writes; on the others every call returns at once.
- `metrics.jsonl` has one line a step with full digits, also over resumes (see files.py).
- The names that are logged, with units and formulas, are in names.py, from which docs/metrics.md is made.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TextIO

from titanlike.errors import file_errors
from titanlike.metrics import files
from titanlike.metrics.config import MetricsConfig
from titanlike.metrics.console import Console
from titanlike.metrics.tensorboard import TensorBoard
from titanlike.metrics.weights_and_biases import WeightsAndBiases

__all__ = ["Metrics", "MetricsConfig"]


class Metrics:
    """Where the trainer's numbers go. One per process; usable as a context manager.

    `run_dir` is made if it does not exist. `total_steps` is the last step of the run, for the display. `file` is where
    the console writes (standard output by default); `clock` gives seconds since the epoch.
    """

    def __init__(
        self,
        config: MetricsConfig,
        run_dir: Path,
        total_steps: int,
        is_main: bool = True,
        *,
        file: IO[str] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.config = config
        self.run_dir = Path(run_dir)
        self.is_main = is_main
        self._clock = clock
        self._last_step = 0
        self._metrics_file: TextIO | None = None
        self._events_file: TextIO | None = None
        self._tensorboard: Any = None
        self._wandb: Any = None
        if is_main:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            self._console = Console(total_steps, config.log_interval, file)

    def resume_from(self, step: int, **fields: Any) -> None:
        """The run goes on after `step`, or starts if it is 0. Call before the first `log`, and again after a rollback.

        Lines of metrics.jsonl after `step` are moved away, and an event `resume` (or `start`) with `fields` is written;
        the fields are JSON values: mesh={"pp": 1, "dp": 2, "tp": 1}, world_size=2, ...
        Raises UserError if TensorBoard or Weights & Biases are asked for and cannot be used.
        """
        if not self.is_main:
            return
        self._close_files()
        dropped = files.drop_after(self.run_dir, step)
        self._last_step = step
        if self.config.tensorboard:
            self._tensorboard = TensorBoard(self.run_dir / "tensorboard", step + 1)
        if self.config.wandb and self._wandb is None:
            self._wandb = WeightsAndBiases(self.run_dir, self.config.wandb_project, self.config.wandb_offline)
        self.event("resume" if step else "start", step, **fields, **({"dropped_steps": dropped} if dropped else {}))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of one step everywhere. Steps ascend: a step is logged once, with all that belongs to it.

        Values are Python numbers (a tensor's `.item()`); `step` and `wall_time` (seconds since the epoch) are added.
        """
        if not self.is_main:
            return
        assert step > self._last_step, f"step {step} logged after step {self._last_step}"
        self._last_step = step
        if self._metrics_file is None:
            self._metrics_file = files.open_append(self.run_dir / files.METRICS_FILE)
        row = {"step": step, **values, "wall_time": self._clock()}
        self._metrics_file.write(files.encode(row) + "\n")
        if self._wandb is not None:
            self._wandb.log(row)
        if self.config.tensorboard:
            if self._tensorboard is None:
                self._tensorboard = TensorBoard(self.run_dir / "tensorboard", step)
            self._tensorboard.log(step, values)
        self._console.show(step, values)

    def event(self, event: str, step: int, **fields: Any) -> None:
        """Write one line to events.jsonl: `event`, the step after which it happened, the time, and JSON fields."""
        if not self.is_main:
            return
        line = files.encode({"event": event, "step": step, "wall_time": self._clock(), **fields}) + "\n"
        with file_errors(f"the event {event} after step {step}"):
            if self._events_file is None:
                self._events_file = files.open_append(self.run_dir / files.EVENTS_FILE)
            self._events_file.write(line)

    def samples(self, step: int, texts: Sequence[str]) -> None:
        """Texts that the model made after `step`: on the console, as an event `samples`, and in TensorBoard."""
        if not self.is_main:
            return
        self.event("samples", step, texts=list(texts))
        self.message("\n".join([f"text after step {step}:", *texts]))
        if self._tensorboard is not None:
            # Indented by four spaces, Markdown shows a text as it is.
            shown = ("\n".join(f"    {line}" for line in text.splitlines()) for text in texts)
            self._tensorboard.text(step, "samples", "\n\n---\n\n".join(shown))

    def message(self, text: str) -> None:
        """Print a line without breaking the progress bar."""
        if self.is_main:
            self._console.message(text)

    def tables(self, tables: list[Any]) -> None:
        """Print start-up tables (see tables.py)."""
        if self.is_main:
            for table in tables:
                self._console.render(table)

    def close(self) -> None:
        """Close the files and give the terminal back. May be called twice."""
        if not self.is_main:
            return
        self._console.close()
        self._close_files()
        if self._wandb is not None:
            self._wandb.close()
            self._wandb = None

    def _close_files(self) -> None:
        for file in (self._metrics_file, self._events_file, self._tensorboard):
            if file is not None:
                file.close()
        self._metrics_file = self._events_file = self._tensorboard = None

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        # A line that a full disk did not take is tried again when its file closes: the first error is the one to tell.
        with file_errors("the metrics") if error is None else contextlib.suppress(OSError):
            self.close()
