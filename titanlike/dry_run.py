"""`scripts/train.py --dry-run`: what a run needs of time and memory, without starting it.

Builds all that the run builds, and takes its first step twice: the first time with what a first step has on top
(compilation, warm-up), the second time as a step is. The update is left out.

Properties:
- Weights, moments and step counts stay as they were, bitwise. (The gather of the weights is run, for its time and its
  memory; it brings the values that are there.)
- Nothing is written to the run folder, nor is it made: a later start is a start, not a resume. Checkpoints that are
  there are left alone and not read; hooks are made, which checks them, and not called.
- Memory: weights, gradients and optimizer are counted; `activations` is what the step needs on top at its highest. On
  an accelerator that is the allocator's number, of the second step. On CPU it is the growth of the process in the
  first step, as the kernel tells it: libraries' own buffers, and under compilation the compiler, are in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from titanlike import out_of_memory
from titanlike.config import Config
from titanlike.data import open_data
from titanlike.hooks import Hooks
from titanlike.mesh import Mesh, init_distributed, pick_device, world_size
from titanlike.metrics.console import Console
from titanlike.metrics.memory import peak_above
from titanlike.metrics.startup_times import StartupTimes
from titanlike.metrics.tables import format_bytes
from titanlike.metrics.timers import PHASES, Timers
from titanlike.startup import tables
from titanlike.tables import check_architecture
from titanlike.trainer import Trainer

MEMORY = ("weights", "gradients", "optimizer", "activations")


def dry_run(config: Config, memory: float | None = None) -> None:
    """Build the run and take its first step without the update, on all ranks that the launcher started; print what it
    took. Raises UserError as the run would, and where a rank needs more than `memory` bytes."""
    world, times = world_size(), StartupTimes.of_this_process()
    config.validate_for(world)
    times.done("imports")
    dp, rank = config.resolved_dp(world), int(os.environ.get("RANK", "0"))
    Hooks(config)
    data = open_data(config, rank // config.mesh.tp % dp, dp)
    check_architecture(config, data.tokenizer.vocab_size)
    times.done("data")
    device = pick_device(config.run.device)
    init_distributed(device)
    mesh = Mesh(config.mesh.pp, dp, config.mesh.tp, device, config.mesh.ep)
    times.done("process_group")
    try:
        most, which = _try(config, mesh, data, times)
    except (RuntimeError, MemoryError) as error:
        told = out_of_memory.told(error, config, world, data.tokenizer.vocab_size, f"the dry run on rank {rank}")
        if told is not None:
            raise told from error
        raise
    if memory is not None:
        if most > memory:
            raise out_of_memory.too_little(most, which, memory, config, dp, data.tokenizer.vocab_size)
        if mesh.is_main:
            Console(config.train.steps).message(f"{which} needs most, {format_bytes(most)}: {format_bytes(memory)} do")


def _try(config: Config, mesh: Mesh, data: Any, times: StartupTimes) -> tuple[int, str]:
    """Build, take the two steps, and print. Returns the bytes that a rank needs at most, and which one that is."""
    trainer = Trainer(config, mesh, data.tokenizer.vocab_size)
    times.done("build")
    console = Console(config.train.steps) if mesh.is_main else None
    for table in tables(config, trainer, data):
        if console is not None:
            console.render(table)

    trainer.before_update = lambda _result: False
    batches = data.train_batches(None)
    first, grown = _step(trainer, batches)
    times.done("first_step")
    second, peak = _step(trainer, batches)
    held = trainer.zero.bytes_per_rank()
    mine = {
        "weights": held["weights"],
        "gradients": held["gradients"],
        "optimizer": held["master_weights"] + held["optimizer_states"],
        "activations": grown if mesh.device.type == "cpu" else peak,
    }
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (first, second, mine))  # all ranks: each tells its own
    if console is not None:
        console.message("")
        console.render(_time_table([one[0] for one in everyone], [one[1] for one in everyone]))
        console.message("")
        console.render(_memory_table([one[2] for one in everyone]))
        console.message("")
        console.message(times.line())
        console.message("dry run: nothing was updated, and nothing was written to the run folder")
    sums = [sum(size or 0 for size in one[2].values()) for one in everyone]
    return max(sums), f"rank {sums.index(max(sums))}"


def _step(trainer: Trainer, batches: Iterator[Any]) -> tuple[dict[str, float], int | None]:
    """Seconds of each phase of a step without its update, and the bytes that it needed on top of what was there."""
    device = trainer.mesh.device
    dist.barrier()  # all ranks begin together, so that none is charged with the others' lateness
    timers = trainer.timers = Timers(device.type)
    with peak_above(device) as peak:
        with timers.phase("data"):
            batch = next(batches)
        trainer.seed_step(trainer.step_count + 1)
        trainer.train_step(batch)
        with timers.phase("param_gather"):
            trainer.zero.gather()
        if device.type != "cpu":
            torch.accelerator.synchronize()
    values = timers.end_step() or timers.end_step()  # on an accelerator a step is told at the end of the next
    return {phase: values[f"time/{phase}_s"] for phase in PHASES if f"time/{phase}_s" in values}, peak.bytes


def _time_table(first: Sequence[Mapping[str, float]], second: Sequence[Mapping[str, float]]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold cyan")
    table.add_column("seconds", style="dim", no_wrap=True)
    for name in ("first step, most", "next step, least", "most"):
        table.add_column(name, justify="right", no_wrap=True)
    for phase in second[0]:
        rows = [one.get(phase, 0.0) for one in first], [one.get(phase, 0.0) for one in second]
        table.add_row(phase.replace("_", " "), *(f"{x:.4f}" for x in (max(rows[0]), min(rows[1]), max(rows[1]))))
    whole = [sum(one.values()) for one in first], [sum(one.values()) for one in second]
    table.add_row("in all", *(f"{x:.4f}" for x in (max(whole[0]), min(whole[1]), max(whole[1]))))
    return table


def _memory_table(ranks: Sequence[Mapping[str, int | None]]) -> Any:
    """Of each kind, and of all, the rank that holds least and the one that holds most."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold cyan")
    table.add_column("memory", style="dim", no_wrap=True)
    for name in ("least", "most"):
        table.add_column(name, justify="right", no_wrap=True)
        table.add_column("", style="dim", no_wrap=True)
    known = [kind for kind in MEMORY if all(one[kind] is not None for one in ranks)]
    rows = {kind: [one[kind] or 0 for one in ranks] for kind in known}
    rows["in all"] = [sum(one[kind] or 0 for kind in known) for one in ranks]
    for kind, sizes in rows.items():
        least, most = (choose(range(len(sizes)), key=sizes.__getitem__) for choose in (min, max))
        table.add_row(kind, format_bytes(sizes[least]), f"rank {least}", format_bytes(sizes[most]), f"rank {most}")
    if "activations" not in known:
        table.add_row("activations", "not told by this system, and not in the sum", "", "", "")
    return table
