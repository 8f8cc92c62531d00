"""What the user sees while the run goes on: a progress bar on a terminal, plain lines when the output is piped."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import IO, Any

from titanlike.printable import printable

ETA_WINDOW = 50  # steps whose wall time the estimate of the remaining time averages
PIPED_WIDTH = 120
MIN_BAR, MAX_BAR = 6, 40  # characters


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
        self._bar: Any = None
        # Times at which steps ended. The time of the first step is never used: it holds compilation and warm-up.
        self._ended: deque[tuple[int, float]] = deque(maxlen=ETA_WINDOW + 1)

    @property
    def is_terminal(self) -> bool:
        return self._rich.is_terminal

    def show(self, step: int, values: Mapping[str, float]) -> None:
        """Show the values of one step."""
        self._ended.append((step, self._clock()))
        if self.is_terminal:
            self._show_bar(step, values)
            return
        parts = _parts(values)
        if step % self._log_interval == 0 or step == self._total_steps or len(self._ended) == 1:
            width = len(str(self._total_steps))
            line = [f"step {step:>{width}}/{self._total_steps}", *parts, f"eta {format_duration(self._eta(step))}"]
            print(" | ".join(line), file=self._rich.file, flush=True)
        elif any(name.startswith("val_loss") for name in values):
            # A validation between two progress lines is rare and worth its line.
            print(" | ".join([f"step {step}/{self._total_steps}", *parts]), file=self._rich.file, flush=True)

    def message(self, text: str) -> None:
        """Print a line (or several) above the bar, what a terminal would obey in it made visible."""
        text = printable(text)
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

    def _show_bar(self, step: int, values: Mapping[str, float]) -> None:
        import rich.live

        if self._bar is None:
            self._line = _Line(self._total_steps)
            self._bar = rich.live.Live(self._line, console=self._rich, refresh_per_second=4)
            self._bar.start()
        validation = {name: value for name, value in values.items() if name.startswith("val_loss")}
        if validation:  # printed above the bar, where it stays
            text = " | ".join([f"step {step}", *_parts(validation)])
            self._rich.print(text, markup=False, highlight=False, soft_wrap=True)
        self._line.step, self._line.eta = step, format_duration(self._eta(step))
        self._line.parts = _parts({name: value for name, value in values.items() if name not in validation})


class _Line:
    """The live line, drawn anew for the width that the terminal has at the moment.

    When the room is short the bar goes first, then numbers from the right; step, loss and ETA stay.
    """

    def __init__(self, total_steps: int) -> None:
        self.total_steps = total_steps
        self.step = 0
        self.parts: list[str] = []
        self.eta = format_duration(None)

    def __rich_console__(self, console: Any, options: Any) -> Any:
        from rich.text import Text

        head, parts, tail = f"step {self.step}/{self.total_steps}", list(self.parts), f"eta {self.eta}"
        while len(parts) > 1 and len("  ".join([head, *parts, tail])) > options.max_width - 1:
            parts.pop()
        room = min(options.max_width - 3 - len("  ".join([head, *parts, tail])), MAX_BAR)
        line = Text(head, style="bold", no_wrap=True, overflow="crop")
        if room >= MIN_BAR:
            done = room * min(self.step, self.total_steps) // max(self.total_steps, 1)
            line.append("  ").append("━" * done, style="green").append("━" * (room - done), style="bright_black")
        for part in parts:
            line.append("  " + part, style="not bold")
        yield line.append("  " + tail, style="not bold cyan")


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
    mfu = values.get("mfu/matmul", values.get("mfu/measured"))
    if mfu is not None:
        parts.append(f"mfu {mfu:.1%}")
    return parts
