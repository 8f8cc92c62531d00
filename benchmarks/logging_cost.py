"""What logging costs a step: timers of phases and waits, memory, metrics.jsonl, TensorBoard, the console, on one rank.

    python benchmarks/logging_cost.py [--steps 1000] [--tensorboard false]

Prints microseconds per step, and how long a step must be for that to be 1% of it. The small collective that finds the
least and the most loaded rank is not in it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from titanlike.metrics import Metrics, MetricsConfig
from titanlike.metrics.flops import FlopsPerToken
from titanlike.metrics.memory import memory_over_ranks
from titanlike.metrics.throughput import Throughput
from titanlike.metrics.timers import Timers

SPANS = 40
"""waits and busy times of a pipeline rank with 16 microbatches and some buckets"""
PHASES = ("data", "forward_backward", "grad_reduce", "clip", "optimizer", "param_gather")


def measure(steps: int, tensorboard: bool) -> dict[str, list[float]]:
    """Seconds that each part took in each step."""
    parts: dict[str, list[float]] = {"timers": [], "memory": [], "log": []}
    rates = Throughput(4096, 2, FlopsPerToken(1e9, 1e9, 1e9), peak_flops=1e12, measured_peak_flops=1e12)
    timers = Timers("cpu")
    config = MetricsConfig(tensorboard=tensorboard)
    with (
        tempfile.TemporaryDirectory() as folder,
        open(os.devnull, "w") as file,
        Metrics(config, Path(folder), steps, file=file) as metrics,
    ):
        metrics.resume_from(0)
        for step in range(1, steps + 1):
            begin = time.perf_counter()
            for phase in PHASES:
                with timers.phase(phase):
                    pass
            for _ in range(SPANS):
                with timers.span("pipeline/busy"):
                    pass
            values = {"loss": 2.0 / step, "grad_norm": 1.0, "lr": 3e-4, "tokens": 4096 * step, **timers.end_step()}
            values |= {"comm/dp_s": timers.spans["pipeline/busy"]}
            values |= rates.values(values["step_time_s"])
            timed = time.perf_counter()
            values |= memory_over_ranks(torch.device("cpu"), None)
            known = time.perf_counter()
            metrics.log(step, values)
            end = time.perf_counter()
            for name, seconds in (("timers", timed - begin), ("memory", known - timed), ("log", end - known)):
                parts[name].append(seconds)
            time.sleep(0.002)  # the training; TensorBoard's thread works meanwhile
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--tensorboard", choices=("true", "false"), default="true")
    options = parser.parse_args()
    parts = measure(options.steps, options.tensorboard == "true")
    parts["all"] = [sum(step) for step in zip(*parts.values())]
    print(f"{'part':<8} {'median':>9} {'mean':>9}   microseconds per step, {options.steps} steps")
    for name, seconds in parts.items():
        print(f"{name:<8} {1e6 * statistics.median(seconds):9.0f} {1e6 * statistics.mean(seconds):9.0f}")
    print(f"1% of a step of {100 * 1e3 * statistics.mean(parts['all']):.0f} ms")


if __name__ == "__main__":
    main()
