"""The average of the weights of several checkpoints (arXiv:1803.05407), as a checkpoint of weights alone.

Properties: any mesh may have saved them; one process does it, with memory for a piece of one tensor at a time; sums are
in float64, so their order does not matter to what float32 can tell.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from titanlike.checkpoint import manifest
from titanlike.checkpoint.hf import tensor_pieces
from titanlike.checkpoint.manifest import CheckpointError
from titanlike.checkpoint.tensorfile import DTYPES
from titanlike.checkpoint.tools import open_checkpoint
from titanlike.checkpoint.weights_only import write_weights_only
from titanlike.errors import UserError


def shares(count: int, ema: float | None) -> list[float]:
    """The share of each of `count` checkpoints, the oldest first: equal ones, or those of an exponential moving average
    that starts at the first and keeps `ema` of itself at each next one. They add up to 1."""
    if ema is None:
        return [1 / count] * count
    if not 0 <= ema < 1:
        raise UserError(f"--ema must be 0 or more and less than 1, not {ema}")
    return [ema ** (count - 1 - i) * (1 - ema if i else 1) for i in range(count)]


def average(paths: Sequence[str | Path], out: str | Path, ema: float | None = None) -> list[str]:
    """Write the average of checkpoints, or of runs' newest ones, to `out`. Returns lines for the user.

    Raises UserError: a checkpoint is damaged, or of another model than the first.
    """
    if len(paths) < 2:
        raise UserError("an average needs two checkpoints or more, and then the folder to make")
    parts = shares(len(paths), ema)
    if Path(out).exists():
        raise UserError(f"{out} exists already: give a new name")
    opened = [open_checkpoint(path) for path in paths]
    folder, _, index, state = opened[0]
    names = [name for name in index.tensors if name.startswith("model.")]
    if not names:
        raise CheckpointError(f"{folder} holds no weights")
    specs = {name: (DTYPES[index.tensors[name]["dtype"]], tuple(index.tensors[name]["shape"])) for name in names}
    for where, _, other, other_state in opened[1:]:
        for key, value in (state.get("model") or {}).items():
            if (found := (other_state.get("model") or {}).get(key)) != value:
                raise UserError(f"model.{key} is {found} in {where}, but {value} in {folder}: they can't be averaged")
        theirs = {name: tuple(entry["shape"]) for name, entry in other.tensors.items() if name.startswith("model.")}
        if theirs != {name: shape for name, (_, shape) in specs.items()}:
            raise UserError(f"{where} has other weights than {folder}: they can't be averaged")
    for where, found, _, _ in opened:
        for file in found.files:
            manifest.verify_file(where, found, file)

    def pieces(name: str) -> Iterator[torch.Tensor]:
        sources = [tensor_pieces(each, name, torch.float64) for _, _, each, _ in opened]
        for same in zip(*sources, strict=True):
            total = torch.zeros_like(same[0])
            for share, piece in zip(parts, same, strict=True):
                total.add_(piece, alpha=share)
            yield total.to(specs[name][0])

    *_, last = opened
    averaged = [{"folder": str(o[0]), "step": o[1].step, "share": share} for o, share in zip(opened, parts)]
    kept = {key: last[3][key] for key in ("architecture", "model", "tokenizer", "config") if key in last[3]}
    try:
        write_weights_only(Path(out), specs, pieces, {**kept, "averaged": averaged}, step=last[1].step)
    finally:
        for _, _, each, _ in opened:
            with contextlib.suppress(OSError):
                each.close()
    lines = [f"{each['share']:.6f}  {each['folder']} (step {each['step']}), checksums verified" for each in averaged]
    return [*lines, f"-> {out}: {len(names)} tensors; weights alone, for checkpoint.init_from, generation, evaluation"]
