"""Traces of some steps by torch's profiler, with a summary that can be read without a viewer. docs/profile.md.

Properties:
- Into the run's folder profile/, per rank asked for: `steps-A-B-rank-R.json.gz` (Chrome's format, for
  ui.perfetto.dev), the summary `.txt`, and on CUDA the allocator's `-memory.pickle` (for pytorch.org/memory_viz).
- The phases of a step and its waits are named in the trace like in metrics.jsonl.
- Nothing that is computed changes; without `profile.steps` there is no profiler at all.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from titanlike.errors import file_errors
from titanlike.section import Section

if TYPE_CHECKING:
    from titanlike.metrics.timers import Timers

FOLDER = "profile"
TOP_OPS = 20
COLLECTIVES = ("c10d::", "_c10d_functional::", "gloo:", "nccl:")
WAIT = "_c10d_functional::wait_tensor"
"""where the host of a gloo rank is blocked until a collective inside the model is done"""


class ProfileConfig(Section):
    """A trace of some steps by torch's profiler (docs/profile.md)."""

    steps: list[int] | None = Field(None, min_length=2, max_length=2)
    """The first and the last step to trace, [first, last]; they get slower. Not given: none."""

    ranks: list[int] = Field([0], min_length=1)
    """The global ranks to trace; each writes files of its own."""

    @field_validator("steps")
    @classmethod
    def _in_order(cls, steps: list[int] | None) -> list[int] | None:
        if steps is not None and not 1 <= steps[0] <= steps[1]:
            raise ValueError(f"the first step must be 1 or more and the last not before it, got {steps}")
        return steps

    @field_validator("ranks")
    @classmethod
    def _are_ranks(cls, ranks: list[int]) -> list[int]:
        if min(ranks) < 0 or len(set(ranks)) < len(ranks):
            raise ValueError(f"a rank is 0 or more and is named once, got {ranks}")
        return ranks


class Profiler:
    """Traces the steps of `config` on this rank. `timers` are those of the run, whose phases it names in the trace."""

    def __init__(
        self, config: ProfileConfig, run_dir: Path, rank: int, mesh: Mapping[str, int], device_type: str, timers: Timers
    ) -> None:
        assert config.steps is not None
        self.first, self.last = config.steps
        self.folder = Path(run_dir) / FOLDER
        self.rank = rank
        self.mesh = mesh
        self.traced = rank in config.ranks
        self.device_type = device_type
        self.timers = timers
        self.rows: list[dict[str, float]] = []
        """what was logged of each traced step"""
        self._begun = 0
        self._profile: Any = None
        self._step: Any = None

    def before_step(self, step: int) -> None:
        """Start, if `step` is the first that is to be traced (or a resume begins among them)."""
        if not self.traced or not self.first <= step <= self.last:
            return
        import torch
        from torch.profiler import ProfilerActivity, profile, record_function

        if self._profile is None:
            activities = [ProfilerActivity.CPU]
            if self.device_type == "cuda":
                activities.append(ProfilerActivity.CUDA)
                # Private, and the only way there is to the allocator's history.
                torch.cuda.memory._record_memory_history(max_entries=200_000)
            self._begun, self.rows = step, []
            with self.timers.aside():
                self._profile = profile(activities=activities)
                self._profile.start()
            self.timers.annotate = record_function
        self._end_step()  # one that was taken back
        self._step = record_function(f"step {step}")
        self._step.__enter__()

    def after_step(self, step: int, values: Mapping[str, float]) -> str | None:
        """The step is done and `values` were logged of it. Writes the files after the last; returns where they are."""
        if self._profile is not None:
            self.rows.append({name: value for name, value in values.items() if isinstance(value, (int, float))})
            self._end_step()
            if step >= self.last:
                with self.timers.aside():  # the next step is not slower for it
                    self._write(step)
        return f"profile of steps {self.first} to {self.last}: {self.folder}" if step == self.last else None

    def close(self) -> None:
        """The run ends: write what there is, if that was before the last step."""
        if self._profile is not None:
            self._write(self._begun + len(self.rows) - 1)

    def _end_step(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def _write(self, last: int) -> None:
        import torch

        profiled, self._profile = self._profile, None
        self._end_step()
        self.timers.annotate = None
        profiled.stop()
        stem = f"steps-{self._begun}-{last}-rank-{self.rank}"
        with file_errors("the profile"):
            self.folder.mkdir(parents=True, exist_ok=True)
            trace = self.folder / f"{stem}.json.gz"
            profiled.export_chrome_trace(str(trace))
            if self.device_type == "cuda":
                torch.cuda.memory._dump_snapshot(str(self.folder / f"{stem}-memory.pickle"))
                torch.cuda.memory._record_memory_history(enabled=None)
            kernels = None
            if self.device_type != "cpu":
                with gzip.open(trace, "rt", encoding="utf-8") as file:
                    kernels = kernel_seconds(json.load(file)["traceEvents"])
            title = f"steps {self._begun} to {last} on rank {self.rank} of {spelled(self.mesh)}, {self.device_type}"
            ops = [
                Op(event.key, event.count, event.self_cpu_time_total / 1e6, event.self_device_time_total / 1e6)
                for event in profiled.key_averages()
            ]
            spans = [(event.name, event.time_range.start, event.time_range.end) for event in profiled.events()]
            text = summary(title, self.rows, ops, blocked_inside(spans), kernels)
            (self.folder / f"{stem}.txt").write_text(text, encoding="utf-8")


class Op:
    """A kind of operation in a trace: calls, and the seconds in itself, without what it calls."""

    def __init__(self, name: str, calls: int, host_s: float, device_s: float) -> None:
        self.name, self.calls, self.host_s, self.device_s = name, calls, host_s, device_s


def spelled(mesh: Mapping[str, int]) -> str:
    return " x ".join(f"{axis} {degree}" for axis, degree in mesh.items())


def summary(
    title: str,
    rows: Sequence[Mapping[str, float]],
    ops: Iterable[Op],
    blocked: float = 0.0,
    kernels: tuple[float, float] | None = None,
) -> str:
    """The text beside a trace. `rows` are the lines of metrics.jsonl of its steps; `blocked` see `blocked_inside`,
    `kernels` see `kernel_seconds`."""
    steps = max(len(rows), 1)

    def mean(name: str) -> float | None:
        found = [row[name] for row in rows if name in row]
        return sum(found) / len(found) if found else None

    step_s = mean("step_time_s")
    lines = [title, "", "seconds a step (means; docs/metrics.md has the names)"]
    names = dict.fromkeys(name for row in rows for name in row if name == "step_time_s" or name.startswith("time/"))
    for name in names:
        lines.append(f"  {name:<26} {mean(name):10.4f}")
    lines += ["", "exposed communication, seconds a step"]
    ops = [op for op in ops if not is_mark(op.name)]
    waits = {name: mean(name) for name in dict.fromkeys(n for row in rows for n in row if n.startswith("comm/"))}
    if blocked and kernels is None:
        waits["inside the model (tp)"] = blocked / steps
    for name, seconds in waits.items():
        if seconds is not None:
            share = f" {seconds / step_s:6.1%} of the step" if step_s else ""
            lines.append(f"  {name:<26} {seconds:10.4f}{share}")
    if kernels is not None:
        lines.append(f"  {'NCCL kernels, in all':<26} {kernels[0] / steps:10.4f}")
        lines.append(f"  {'with no other kernel':<26} {kernels[1] / steps:10.4f}")
    if not waits and kernels is None:
        lines.append("  none: one rank")
    bubbles = [name for name in dict.fromkeys(n for row in rows for n in row) if name.startswith("bubble")]
    lines += ["", "pipeline bubble, idle share"]
    lines += [f"  {name:<26} {mean(name):10.1%}" for name in bubbles] or ["  no pipeline"]
    on_device = any(op.device_s for op in ops)
    top = sorted(ops, key=lambda op: op.device_s if on_device else op.host_s, reverse=True)[:TOP_OPS]
    host, device = sum(op.host_s for op in ops), sum(op.device_s for op in ops)
    lines += ["", f"top operations by self time{' on the device' if on_device else ''}, all traced steps"]
    lines.append(f"  {'operation':<56} {'calls':>8} {'host s':>10} {'share':>7}" + " device s   share" * on_device)
    for op in top:
        line = f"  {op.name[:56]:<56} {op.calls:>8} {op.host_s:10.4f} {op.host_s / host if host else 0:7.1%}"
        lines.append(line + (f" {op.device_s:8.4f} {op.device_s / device:7.1%}" if on_device else ""))
    collectives = [op for op in ops if op.name.startswith(COLLECTIVES)]
    lines += ["", "collectives in the trace"]
    lines += [f"  {op.name[:56]:<56} {op.calls:>8} {op.host_s:10.4f}" for op in collectives] or ["  none"]
    return "\n".join(lines) + "\n"


def is_mark(name: str) -> bool:
    """Whether an entry of a trace is a name that was put there, not an operation."""
    from titanlike.metrics.timers import PHASES

    return name in PHASES or name.startswith(("step ", "comm/", "pipeline", "ProfilerStep"))


def blocked_inside(spans: Iterable[tuple[str, float, float]]) -> float:
    """Seconds for which the host was blocked by collectives of the model in forward and backward, from the (name, begin
    and end in microseconds) of a trace. Validation, which waits likewise, is not in it."""
    spans = list(spans)
    inside = [(begin, end) for name, begin, end in spans if name == "forward_backward"]
    waits = [(begin, end) for name, begin, end in spans if name == WAIT]
    return sum(end - begin for begin, end in waits if any(a <= begin and end <= b for a, b in inside)) / 1e6


def kernel_seconds(events: Iterable[Mapping[str, Any]]) -> tuple[float, float]:
    """(seconds of NCCL kernels, those of them in which no other kernel ran) in the events of a trace of a GPU."""
    theirs: list[tuple[float, float]] = []
    others: list[tuple[float, float]] = []
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in event:
            interval = (float(event["ts"]), float(event["ts"]) + float(event["dur"]))
            (theirs if "nccl" in str(event.get("name", "")).lower() else others).append(interval)
    both = _length(theirs) + _length(others) - _length(theirs + others)  # where one of each kind runs
    return _length(theirs) / 1e6, (_length(theirs) - both) / 1e6  # traces count microseconds


def _length(intervals: Sequence[tuple[float, float]]) -> float:
    """The length of the union."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total
