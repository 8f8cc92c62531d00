"""One step of a run again, in one process, sample by sample: where do its numbers stop being finite?

    for line in replay(Path("runs/llama"), 1200): print(line)

The newest checkpoint before the step is loaded and the steps from there to it are taken again, on one rank: by the
promise of this trainer they are the same on any mesh, to rounding. Nothing is written to the run folder.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from titanlike.checkpoint import Checkpointer, Shard
from titanlike.checkpoint.folder import find_checkpoints
from titanlike.config import Config, load_config
from titanlike.data import open_data
from titanlike.errors import UserError
from titanlike.mesh import Mesh, init_distributed, pick_device
from titanlike.metrics import files
from titanlike.trainer import Trainer

SHOWN = 160
"""characters of a document"""


def replay(run_dir: Path, step: int) -> Iterator[str]:
    """Take step `step` of the run again; lines that say what was found. Needs the default process group or makes one.

    Raises UserError: no such run, or no checkpoint before the step.
    """
    run_dir = Path(run_dir)
    if not (run_dir / "config.toml").exists():
        raise UserError(f"{run_dir} is not a run folder: it has no config.toml")
    config = _config(run_dir)
    good = [item.step for item in find_checkpoints(run_dir / "checkpoints") if item.manifest is not None]
    before = [number for number in good if number < step]
    if step < 1 or not before:
        there = ", ".join(map(str, sorted(good))) or "none"
        raise UserError(
            f"replaying step {step} needs a checkpoint of an earlier step, and {run_dir / 'checkpoints'} has: {there} "
            "(checkpoint.save_initial and checkpoint.keep_last keep more)"
        )
    first = max(before)
    data = open_data(config, 0, 1)
    device = pick_device(config.run.device)
    init_distributed(device)
    trainer = Trainer(config, Mesh(1, 1, 1, device), data.tokenizer.vocab_size)
    tensors = {name: Shard(*box) for name, box in trainer.boxes().items()}
    loader = config.checkpoint.model_copy(update={"load_step": first, "init_from": None})
    loaded = Checkpointer(loader, run_dir, device, say=lambda line: None).load(tensors)
    assert loaded is not None
    trainer.zero.set_step_count(loaded.meta.get("optimizer_steps", first))
    trainer.zero.gather()
    trainer.step_count = first

    bad = {event["step"]: event for event in files.read_events(run_dir) if event["event"] == "bad_step"}
    cursor = loaded.meta["data"]
    taken, cursor, same = _go_to(step, trainer, data, cursor, bad)
    now = trainer.step_count
    yield f"step {step}, with the weights of step {now}: checkpoint of step {first}, {taken} steps replayed"
    if not same:
        yield "(the run was rolled back since: the batch is that of the bad step, the weights are near those it met)"
    yield from _look(trainer, data, next(data.train_batches(cursor)))


def _config(run_dir: Path) -> Config:
    """The run's config for one rank that takes a sample at a time, eagerly."""
    return load_config(
        run_dir / "config.toml",
        {
            **{"run.dir": str(run_dir.resolve().parent), "run.name": run_dir.resolve().name},
            **{"mesh.pp": 1, "mesh.dp": 1, "mesh.tp": 1, "mesh.ep": 1, "train.microbatch_size": 1},
            **{"compile.enable": False, "activation_checkpoint.mode": "none"},
        },
    )


def _go_to(
    step: int, trainer: Trainer, data: Any, cursor: dict[str, Any] | None, bad: dict[int, Any]
) -> tuple[int, dict[str, Any] | None, bool]:
    """Take the steps before `step`. Returns how many, where the data stands then, and whether `step` met just these
    weights: after a rollback the checkpoints are of other data, and no steps are taken."""
    missing = step - 1 - trainer.step_count
    if step in bad:
        there = bad[step]["data"]
        samples = (there or {"samples": 0})["samples"] - (cursor or {"samples": 0})["samples"]
        if samples != missing * trainer.config.train.global_batch_size:
            return 0, there, False
    if missing == 0:
        return 0, cursor, True
    batches = data.train_batches(cursor)
    for number in range(trainer.step_count + 1, step):
        batch = next(batches)
        trainer.before_update = lambda result, number=number: number not in bad
        trainer.train_step(batch)
        trainer.step_count, cursor = number, batch.cursor
    return missing, cursor, True


def _look(trainer: Trainer, data: Any, batch: Any) -> Iterator[str]:
    """Run each sample alone, and say where it stops being finite."""
    model = trainer.built.stages[0].model
    weights = [name for name, value in model.named_parameters() if not value.isfinite().all()]
    if weights:
        yield f"weights that are not finite before the step: {', '.join(weights)}"
    trainer.accumulation = 1
    found = 0
    rows = batch.tokens.shape[0]
    for i in range(rows):
        one = dataclasses.replace(
            batch,
            **{
                name: value[i : i + 1]
                for name in ("tokens", "labels", "positions", "document_ids")
                if (value := getattr(batch, name)) is not None
            },
        )
        with Watch(model) as watch:
            loss = trainer.forward_backward(one)
        trainer.zero.finish_reduction()
        gradients = [n for n, shard in trainer.zero.shards.items() if not _finite(shard.grad)]
        if watch.first is None and loss.isfinite() and not gradients:
            continue
        found += 1
        name = batch.sample_ids[i] if i < len(batch.sample_ids) else f"row {i}"
        if watch.first is not None:
            module, where, position = watch.first
            what = "the output" if where == "forward" else "the gradient of the output"
            yield f"sample {name}: {what} of {module or 'the model'} is the first that is not finite"
            if position is not None:
                yield f"  at position {position}, in the document: {_document(data, one, position)!r}"
        else:
            yield f"sample {name}: all outputs of modules are finite, and the loss is {loss.item()}"
        if gradients:
            yield f"  gradients that are not finite: {', '.join(gradients[:4])}" + (" ..." if gradients[4:] else "")
    if not found:
        yield f"all outputs, losses and gradients of the {rows} samples are finite on one rank"
    else:
        yield f"{found} of {rows} samples are not finite"


class Watch:
    """Notes the first module whose output, or the gradient of whose output, is not finite."""

    def __init__(self, model: nn.Module) -> None:
        self.first: tuple[str, str, int | None] | None = None
        """(module, "forward" or "backward", position in the sequence)"""
        self._model = model
        self._handles: list[Any] = []

    def __enter__(self) -> Watch:
        for name, module in self._model.named_modules():
            self._handles.append(module.register_forward_hook(self._hook(name)))
        return self

    def __exit__(self, *_: object) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _hook(self, name: str) -> Any:
        def look(_module: nn.Module, _inputs: Any, output: Any) -> None:
            for tensor in output if isinstance(output, tuple | list) else (output,):
                if isinstance(tensor, Tensor) and tensor.is_floating_point():
                    self._note(name, "forward", tensor.detach())
                    if tensor.requires_grad:
                        tensor.register_hook(lambda grad: self._note(name, "backward", grad))

        return look

    def _note(self, name: str, where: str, tensor: Tensor) -> None:
        if self.first is None and not _finite(tensor):
            # Activations are [1, seq, ...]; the rest has no position.
            position = None
            if tensor.dim() >= 2 and tensor.shape[0] == 1:
                bad = ~tensor[0].isfinite().reshape(tensor.shape[1], -1).all(-1)
                position = int(bad.nonzero()[0])
            self.first = (name, where, position)


def _finite(tensor: Tensor | None) -> bool:
    return tensor is None or bool(torch.isfinite(tensor).all())


def _document(data: Any, batch: Any, position: int) -> str:
    """The text around a position, up to the borders of its document."""
    tokens = batch.tokens[0].tolist()
    end_id = data.tokenizer.end_id
    begin = max((i + 1 for i in range(position) if tokens[i] == end_id), default=0)
    end = next((i for i in range(position, len(tokens)) if tokens[i] == end_id), len(tokens))
    begin, end = max(begin, position - SHOWN // 2), min(end, position + SHOWN // 2)
    return data.tokenizer.decode(tokens[begin:end])
