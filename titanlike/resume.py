"""Where a run begins: the newest good checkpoint of its folder, weights from elsewhere, or weights drawn from its seed.

What each function does it does on all ranks together: what one of them finds wrong all raise.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from titanlike.checkpoint import Loaded
from titanlike.checkpoint.loading import together
from titanlike.config import write_resolved
from titanlike.errors import UserError, file_errors

if TYPE_CHECKING:
    from titanlike.run import Run


def start(run: Run) -> None:
    """Bring the state to where the run begins, and say so in its folder."""
    loaded = run.checkpointer.load(run.tensors(), lambda folder, meta: _check_fits(run, folder, meta))
    changes: list[str] = []
    if loaded is not None:
        changes = _resume(run, loaded)
    elif run.config.checkpoint.init_from is not None:
        _start_from_weights(run, run.config.checkpoint.init_from)
    run.checkpointer.prepare(run.tensors())

    def write() -> None:
        if run.mesh.is_main:
            with file_errors("the run folder"):
                write_resolved(run.config, run.config.run_dir / "config.toml")
                run.metrics.resume_from(
                    run.trainer.step_count,
                    mesh=run.degrees(),
                    world_size=dist.get_world_size(),
                    **({"changes": changes} if changes else {}),
                )

    together(write, dist.group.WORLD)  # rank 0 writes, and its error should be everyone's


def take(run: Run, loaded: Loaded) -> None:
    """Make the state of a checkpoint, whose tensors are loaded, that of the run."""
    meta, trainer = loaded.meta, run.trainer
    trainer.step_count = loaded.step
    trainer.updates = meta.get("optimizer_steps", loaded.step)
    trainer.zero.set_step_count(trainer.updates)
    trainer.zero.gather()
    run.cursor = meta["data"]
    run.tokens = meta["tokens"]
    run.best_val_loss = math.inf if meta["best_val_loss"] is None else meta["best_val_loss"]


def _check_fits(run: Run, folder: Path, meta: dict[str, Any]) -> None:
    """Raise UserError for a checkpoint that this run cannot go on from, whatever the shapes of its tensors."""
    if meta["tokenizer"] != run.data.tokenizer.fingerprint:
        raise UserError(
            f"the checkpoint {folder} was trained with another tokenizer than data.tokenizer = "
            f'"{run.config.data.tokenizer}": use the one it was trained with, or another run.name'
        )
    run.data.check_cursor(meta["data"])


def _start_from_weights(run: Run, path: str) -> None:
    """Take the weights alone of a checkpoint or a Hugging Face folder; step, data and optimizer start anew."""
    model = dataclasses.asdict(run.trainer.built.plain.config)
    for line in run.checkpointer.load_weights(path, run.tensors(), run.config.model.architecture, model):
        run.metrics.message(line)
    run.trainer.zero.gather()


def _resume(run: Run, loaded: Loaded) -> list[str]:
    """Go on from a checkpoint whose tensors are loaded. Returns what has changed in the config since it."""
    meta, config = loaded.meta, run.config
    take(run, loaded)
    if "guard" in meta:
        run.guard.load(meta["guard"])
    run.metrics.message(loaded.summary)
    changes = changed_keys(meta["config"], config.model_dump(mode="json"))
    if meta["mesh"] != run.degrees():
        changes.append(f"mesh {spelled(meta['mesh'])} -> {spelled(run.degrees())}")
    if changes:
        run.metrics.message(f"changed since that checkpoint: {', '.join(changes)}")
    for sentence in run.data.check_cursor(meta["data"]):
        run.metrics.message(sentence)
    if config.checkpoint.init_from is not None:
        run.metrics.message(
            f"checkpoint.init_from = {config.checkpoint.init_from} was not used, because {config.run_dir} has a "
            "checkpoint to resume from: a new run.name starts from those weights"
        )
    return changes


def changed_keys(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """The keys of two configs (as JSON) that differ, "train.steps 10 -> 20", but for those that change nothing in the
    run itself: where it lives, what it writes, and the mesh, which is told by its degrees."""
    old, new = flattened(before), flattened(now)
    aside = ("run.dir", "run.name", "run.hang_timeout", "run.debug_collectives")
    aside += ("checkpoint.", "metrics.", "profile.", "mesh.")
    return [
        f"{key} {old.get(key)} -> {new.get(key)}"
        for key in [*new, *(key for key in old if key not in new)]
        if old.get(key) != new.get(key) and not key.startswith(aside)
    ]


def flattened(tables: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables by dotted path."""
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        flat |= flattened(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def spelled(mesh: dict[str, int]) -> str:
    return " x ".join(f"{axis} {degree}" for axis, degree in mesh.items())
