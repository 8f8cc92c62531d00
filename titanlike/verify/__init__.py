"""Is my mesh the same run? A user's config, made small, on all its ranks beside the same steps on one.

    report = verify(config)          # starts the ranks itself, on CPU
    report.same, report.checks       # whether all agree, and each comparison
    print_report(report)

- shrink.py      the small config that keeps what a mesh can get wrong
- batches.py     the batches
- launch.py      the ranks
- rank.py        what a rank does and records
- oracle.py      what one rank alone computes
- compare.py     the comparison, tensor by tensor
- reading.py     what a difference looks like
- report.py      the table, and JSON
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from titanlike.config import CompileConfig, Config

if TYPE_CHECKING:
    from titanlike.verify.report import Report

TIMEOUT_S = 900.0


def verify(config: Config, timeout_s: float = TIMEOUT_S, plant: Callable[[Any], None] | None = None) -> Report:
    """Compare a few small steps of `config` on its mesh with the same steps on one rank. No mesh.dp means 1.

    `plant` is for tests: a module-level function that puts a fault into each rank's Trainer before the first step.

    Raises:
        UserError: the config cannot run on this mesh.
        RankFailed: a rank raised or died, or `timeout_s` seconds went by.
    """
    from titanlike.tables import check_architecture
    from titanlike.tokenizer import load_tokenizer
    from titanlike.verify.compare import compare
    from titanlike.verify.launch import Ranks
    from titanlike.verify.oracle import Oracle
    from titanlike.verify.rank import run_rank
    from titanlike.verify.reading import Facts, read
    from titanlike.verify.report import Report
    from titanlike.verify.shrink import shrink, with_clipping

    began = time.monotonic()
    if config.mesh.dp is None:
        config = config.model_copy(update={"mesh": config.mesh.model_copy(update={"dp": 1})})
    # By default eagerly: such ranks are quicker to start, and show what modules return.
    in_float64 = config.model_copy(update={"train": config.train.model_copy(update={"dtype": "float64"})})
    if not config.compile.model_fields_set or not in_float64.compiles:
        config = config.model_copy(update={"compile": CompileConfig(enable=False)})
    mesh = config.mesh
    assert mesh.dp is not None
    world = mesh.pp * mesh.dp * mesh.tp
    config.validate_for(world)
    given = getattr(config.model, "vocab_size", None)
    vocab_size = given or load_tokenizer(config.data.tokenizer).vocab_size
    check_architecture(config, vocab_size)

    small = shrink(config, vocab_size)
    if config.train.max_grad_norm:
        with_clipping(small, Oracle(small.config, small.vocab_size, small.document_mask).first_norm())
    oracle = Oracle(small.config, small.vocab_size, small.document_mask)
    with Ranks(world, run_rank, small.tables, small.vocab_size, small.document_mask, plant) as ranks:
        oracle.run()
        records = ranks.results(timeout_s)
    checks = compare(oracle.expected, records, mesh.tp)
    first = next((check for check in checks if not check.same), None)
    reading = [] if first is None else read(first, Facts(small.config, oracle, records))
    return Report(
        mesh={"pp": mesh.pp, "dp": mesh.dp, "tp": mesh.tp} | ({"ep": mesh.ep} if mesh.ep > 1 else {}),
        about=_about(small.config),
        changes=small.changes,
        notes=small.notes + _faint(oracle.faint_gradients()),
        checks=checks,
        reading=reading,
        seconds=time.monotonic() - began,
    )


def _faint(names: list[str]) -> list[str]:
    if not names:
        return []
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    return [f"the gradients of {shown} are so small that a fault in them could go unseen"]


def _about(config: Config) -> list[tuple[str, str]]:
    mesh = config.mesh
    degrees = f"pp {mesh.pp} x dp {mesh.dp} x tp {mesh.tp}" + (f", ep {mesh.ep} of dp" if mesh.ep > 1 else "")
    if mesh.tp > 1:
        degrees += ", sequence parallel" if mesh.sequence_parallel else ", no sequence parallel"
    lines = [("mesh", degrees)]
    if mesh.pp > 1:
        layers = f", layers {config.pipeline.split}" if config.pipeline.split else ""
        lines.append(("pipeline", f"{config.pipeline.schedule}, {config.n_stages} stages{layers}"))
    sizes = dataclasses.asdict(config.model_config_for(1))
    shown = ", ".join(f"{name} {value}" for name, value in sizes.items() if isinstance(value, int) and value)
    lines.append(("model", f"{config.model.architecture}: {shown}"))
    train = config.train
    lines.append(
        (
            "batch",
            f"{train.global_batch_size} sequences of {train.seq_len} tokens, {config.accumulation(mesh.dp or 1)} "
            f"microbatches of {train.microbatch_size} on each dp rank",
        )
    )
    clip = f"clipped to {train.max_grad_norm:.4g}" if train.max_grad_norm else "not clipped"
    lines.append(("optimizer", f"{config.optimizer.name}, {clip}, {len(config.optimizer.groups)} groups"))
    compiled = "on" if config.compiles else "off"
    lines.append(("compile", f"{compiled}, activation checkpointing {config.activation_checkpoint.mode}"))
    return lines
