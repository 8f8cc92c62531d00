"""What the user sees while the run goes on: a progress bar on a terminal, plain lines when the output is piped."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import IO

ETA_WINDOW = 50  # steps whose wall time the estimate of the remaining time averages
PIPED_WIDTH = 120


class Console:
    """Shows progress on `file` (standard output by default): a live bar if it is a terminal, else lines.

    `clock` gives seconds; tests inject their own.
    """

    def __init__(
        self,
        total_steps: int,
        log_interval: int = 1,
        file: IO[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        import rich.console

        self._rich = rich.console.Console(file=file, highlight=False)
        if not self._rich.is_terminal:
            self._rich.width = PIPED_WIDTH  # a pipe has no width, and rich would cut tables at 80
        self._total_steps = total_steps
        self._log_interval = log_interval
        self._clock = clock
        self._bar = None
        self._task = None
        # Times at which steps ended. The time of the first step is never used: it holds compilation and warm-up.
        self._ended: deque[tuple[int, float]] = deque(maxlen=ETA_WINDOW + 1)

    @property
    def is_terminal(self) -> bool:
        return self._rich.is_terminal

    def show(self, step: int, values: Mapping[str, float]) -> None:
        """Show the values of one step."""
        self._ended.append((step, self._clock()))
        parts = _parts(values)
        if self.is_terminal:
            self._show_bar(step, parts)
        elif step % self._log_interval == 0 or step == self._total_steps or len(self._ended) == 1:
            width = len(str(self._total_steps))
            line = [f"step {step:>{width}}/{self._total_steps}", *parts, f"eta {format_duration(self._eta(step))}"]
            print(" | ".join(line), file=self._rich.file, flush=True)
        elif any(name.startswith("val_loss") for name in values):
            # A validation between two progress lines is rare and worth its line.
            print(" | ".join([f"step {step}/{self._total_steps}", *parts]), file=self._rich.file, flush=True)

    def message(self, text: str) -> None:
        """Print a line (or several) above the bar."""
        if self.is_terminal:
            self._rich.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self._rich.file, flush=True)

    def render(self, renderable: object) -> None:
        """Print a rich renderable, a table say, above the bar."""
        self._rich.print(renderable)

    def close(self) -> None:
        """Leave the last state of the bar on the screen and give the terminal back."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _eta(self, step: int) -> float | None:
        """Seconds left by the mean wall time of the last steps, validation and saves included; None if unknown."""
        if step >= self._total_steps:
            return 0.0
        if len(self._ended) < 2:
            return None
        (first_step, first_time), (last_step, last_time) = self._ended[0], self._ended[-1]
        if last_step <= first_step:
            return None
        return (last_time - first_time) / (last_step - first_step) * (self._total_steps - step)

    def _show_bar(self, step: int, parts: list[str]) -> None:
        from rich.progress import BarColumn, Progress, TextColumn

        if self._bar is None:
            self._bar = Progress(
                TextColumn("[bold]step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[status]}", markup=False),
                TextColumn("eta {task.fields[eta]}", style="cyan"),
                console=self._rich,
                expand=True,
                refresh_per_second=4,
            )
            self._task = self._bar.add_task("", total=self._total_steps, status="", eta="-:--:--")
            self._bar.start()
        status, eta = "  ".join(parts), format_duration(self._eta(step))
        self._bar.update(self._task, completed=step, status=status, eta=eta)
        if any(part.startswith("val_loss") for part in parts):
            self._bar.console.print(" | ".join([f"step {step}", *parts]), markup=False, highlight=False)


def format_duration(seconds: float | None) -> str:
    """h:mm:ss, with days in front when there are any; `-:--:--` for a time that is not known."""
    if seconds is None:
        return "-:--:--"
    seconds = round(seconds)
    days, seconds = divmod(seconds, 86400)
    hours, seconds = divmod(seconds, 3600)
    minutes, seconds = divmod(seconds, 60)
    return f"{f'{days}d ' if days else ''}{hours}:{minutes:02d}:{seconds:02d}"


def format_loss(loss: float) -> str:
    """At least five significant digits, in at most a handful of characters: 3.1234, 0.012346, 312.35."""
    return f"{loss:.5g}" if abs(loss) < 1 or abs(loss) >= 10 else f"{loss:.4f}"


def _parts(values: Mapping[str, float]) -> list[str]:
    """The important numbers of a step, each as a short piece of text, in a fixed order."""
    parts = []
    if "loss" in values:
        parts.append(f"loss {format_loss(values['loss'])}")
    for name in sorted(values):
        if name == "val_loss" or name.startswith("val_loss/"):
            parts.append(f"{name} {format_loss(values[name])}")
    if "grad_norm" in values:
        parts.append(f"grad_norm {values['grad_norm']:.4g}")
    if "lr" in values:
        parts.append(f"lr {values['lr']:.2e}")
    if "tokens_per_s" in values:
        parts.append(f"{values['tokens_per_s']:,.0f} tok/s")
    if "mfu" in values:
        parts.append(f"mfu {values['mfu']:.1%}")
    return parts
