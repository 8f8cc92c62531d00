"""Whole runs of the shipped debug config, shrunk to a second, on the pool of ranks; and what they left behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.ranks import ROOT, run_ranks
from titanlike.config import Config, load_config
from titanlike.metrics import files

SHRUNK = {
    **{"run.device": "cpu", "compile.enable": False},
    **{"model.dim": 32, "model.n_layers": 2, "model.n_heads": 4, "model.n_kv_heads": 2, "model.ffn_dim": 48},
    **{"train.steps": 4, "train.global_batch_size": 8, "train.seq_len": 32},
    **{"data.source": "text", "validation.samples": 16, "metrics.tensorboard": False},
}
FLOAT64 = {"train.dtype": "float64"}


def text_file(folder: Path) -> Path:
    """A text of 80,000 characters, made once."""
    path = folder / "text.txt"
    if not path.exists():
        path.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(3000)))
    return path


def overrides(run_dir: Path, **more: Any) -> dict[str, Any]:
    """The keys of a run in `run_dir`; a text of its own lies beside it."""
    own = {"run.dir": str(run_dir.parent), "run.name": run_dir.name, "data.paths": [str(text_file(run_dir.parent))]}
    return {**SHRUNK, **own, **more}


def arguments(run_dir: Path, **more: Any) -> list[str]:
    """The same as a command line for scripts/train.py."""
    given = overrides(run_dir, **more)
    words = ["scripts/train.py", "--config", "configs/debug.toml"]
    for key, value in given.items():
        words += [f"--{key}", json.dumps(value) if isinstance(value, bool | list) else str(value)]
    return words


def tiny(run_dir: Path, **more: Any) -> Config:
    return load_config(ROOT / "configs/debug.toml", overrides(run_dir, **more))


class Seen:
    """What a rank saw of a run that the files do not tell."""

    def __init__(self) -> None:
        self.samples: list[list[str]] = []
        """of each step, the names of this dp coordinate's rows"""
        self.text: list[int] = []
        """the sample of the model at the end"""
        self.said: list[str] = []
        """what was said to the user; rank 0's"""
        self.bytes: dict[str, int] = {}
        """bytes of weights, gradients and states"""
        self.error: tuple[str, str] | None = None
        """class and message of what the run raised"""


def run(config: Config, before_step: Callable[[Any, int], None] | None = None) -> Seen:
    """titanlike.run.train on this rank, observed. An error that ends all ranks alike, a UserError, is noted."""
    import titanlike.run as subject
    from titanlike.errors import UserError

    seen = Seen()
    step, sample, message = subject.Trainer.train_step, subject.sample, subject.Metrics.message

    def train_step(trainer: Any, batch: Any, **options: Any) -> Any:
        seen.samples.append(batch.sample_ids)
        seen.bytes = trainer.zero.bytes_per_rank()
        if before_step is not None:
            before_step(trainer, trainer.step_count + 1)
        return step(trainer, batch, **options)

    def short_sample(*args: Any, **kwargs: Any) -> list[int]:
        seen.text = sample(args[0], args[1], 6, **kwargs)
        return seen.text

    def noted(metrics: Any, text: str) -> None:
        seen.said.append(text)

    subject.Trainer.train_step, subject.sample, subject.Metrics.message = train_step, short_sample, noted
    try:
        subject.train(config)
    except UserError as error:
        seen.error = (type(error).__name__, str(error))
    finally:
        subject.Trainer.train_step, subject.sample, subject.Metrics.message = step, sample, message
    return seen


def run_on(ranks: int, run_dir: Path, before_step: Callable[[Any, int], None] | None = None, **more: Any) -> list[Seen]:
    """The tiny run on so many ranks."""
    return run_ranks(ranks, run, tiny(run_dir, **more), before_step)


def runs(configs: list[Config], before_step: Callable[[Any, int], None] | None = None) -> list[Seen]:
    """Several runs one after the other on this rank: for one call of the pool."""
    return [run(config, before_step) for config in configs]


def columns(run_dir: Path, *names: str) -> dict[int, tuple[Any, ...]]:
    """Columns of metrics.jsonl by step; by default those that every mesh must agree on."""
    names = names or ("loss", "grad_norm", "lr", "tokens")
    return {row["step"]: tuple(row.get(name) for name in names) for row in files.read_metrics(run_dir)}


def checkpoint(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


def checkpoints(run_dir: Path) -> list[str]:
    """The names in the folder of checkpoints, hidden ones too."""
    folder = run_dir / "checkpoints"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def digest(run_dir: Path, step: int) -> str:
    """The digest that is stored with a checkpoint: equal for equal weights and moments, whatever the mesh."""
    return json.loads((checkpoint(run_dir, step) / "manifest.json").read_text())["digest"]


def meta(run_dir: Path, step: int) -> dict[str, Any]:
    """What a checkpoint holds besides tensors."""
    return json.loads((checkpoint(run_dir, step) / "state.json").read_text())


def with_checkpoint(source: Path, step: int, run_dir: Path) -> Path:
    """A run folder that has one checkpoint of another run."""
    shutil.copytree(checkpoint(source, step), checkpoint(run_dir, step))
    return run_dir
