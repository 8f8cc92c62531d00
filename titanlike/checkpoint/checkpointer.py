"""Saving and loading the state of a run: what the trainer calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from titanlike.checkpoint import manifest
from titanlike.checkpoint.config import CheckpointConfig
from titanlike.checkpoint.manifest import CheckpointError
from titanlike.checkpoint.shard import Shard

if TYPE_CHECKING:
    from titanlike.checkpoint.storage import Reader


class Loaded(NamedTuple):
    """What `Checkpointer.load` found: the step, the trainer's `meta`, the folder, and a line to show to the user."""

    step: int
    meta: dict[str, Any]
    folder: Path
    summary: str


class Checkpointer:
    """Saves and loads the checkpoints of one run folder. Every rank makes one, and all call its methods together.

    Without a default process group it works alone. With one, traffic goes over `group`, which must be able to carry CPU
    tensors (gloo); by default a new gloo group of all ranks is made, whatever the backend of the default group.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        run_dir: str | Path,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.config = config
        self.root = Path(run_dir) / "checkpoints"
        self.device = torch.device(device)
        self.distributed = dist.is_available() and dist.is_initialized()
        self.group = group or (dist.new_group(backend="gloo") if self.distributed else None)
        self.rank = dist.get_rank(self.group) if self.distributed else 0
        self.world_size = dist.get_world_size(self.group) if self.distributed else 1
        self.say = say if self.rank == 0 else lambda line: None

    def save(self, step: int, tensors: dict[str, Shard], meta: dict[str, Any]) -> None:
        """Save `tensors` and `meta` (JSON, the same on all ranks; rank 0's is stored) as the checkpoint of `step`.

        Raises CheckpointError on all ranks if any rank could not write; nothing is committed then.
        """
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException

        from titanlike.checkpoint.storage import SavePlanner_, Writer

        writer = Writer(self.root, step, meta, self.rank)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
                dcp.save(
                    dict(tensors),
                    storage_writer=writer,
                    planner=SavePlanner_(),
                    process_group=self.group,
                    no_dist=not self.distributed,
                )
        except CheckpointException as error:
            raise CheckpointError(f"the checkpoint of step {step} was not written: {_first(error)}") from error

    def load(self, tensors: dict[str, Shard]) -> Loaded | None:
        """Fill `tensors` in place from the newest checkpoint (or `load_step`); None if the run folder has none."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException

        from titanlike.checkpoint.storage import LoadPlanner_, Reader

        step = self._choose()
        if step is None:
            return None
        folder = self.root / manifest.step_name(step)
        manifest.read_manifest(folder)
        reader = Reader(folder)
        _check_match(reader, tensors)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
                dcp.load(
                    dict(tensors),
                    storage_reader=reader,
                    planner=LoadPlanner_(),
                    process_group=self.group,
                    no_dist=not self.distributed,
                )
        except CheckpointException as error:
            raise CheckpointError(f"{folder} could not be loaded: {_first(error)}") from error
        meta = manifest.from_json(folder / manifest.STATE)
        return Loaded(step, meta, folder, f"resumed from {folder}")

    def latest_step(self) -> int | None:
        """The step of the newest checkpoint that is whole by its manifest and file sizes. Looks only; no collective."""
        return next((item.step for item in manifest.find_checkpoints(self.root) if item.manifest), None)

    def _choose(self) -> int | None:
        """Rank 0 looks and decides, all follow: the folder may look different on another machine's view of the disk."""
        choice: list[Any] = [None]
        if self.rank == 0:
            found = manifest.find_checkpoints(self.root)
            steps = [item.step for item in found if item.manifest]
            wanted = self.config.load_step
            if wanted is None:
                choice = [steps[0] if steps else None]
            elif wanted in steps:
                choice = [wanted]
            else:
                there = ", ".join(map(str, sorted(steps))) or "none"
                choice = [
                    CheckpointError(f"checkpoint.load_step = {wanted}: {self.root} has no such step; it has {there}")
                ]
        if self.distributed:
            dist.broadcast_object_list(choice, src=dist.get_global_rank(self.group, 0), group=self.group)
        if isinstance(choice[0], Exception):
            raise choice[0]
        return choice[0]

    def poll(self) -> None:
        """Raise the error of a background save, if there was one. Call once a step."""

    def wait(self) -> None:
        """Return when the save in the background is committed; raise its error if it failed."""

    def close(self) -> None:
        """Finish the save in the background. Call before the process group is destroyed."""
        self.wait()


def _first(error: Any) -> str:
    """The first failing rank's message out of torch's CheckpointException."""
    rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    text = str(cause) if isinstance(cause, CheckpointError) else f"{type(cause).__name__}: {cause}"
    return f"rank {rank}: {text}"


def _check_match(reader: Reader, tensors: dict[str, Shard]) -> None:
    from titanlike.checkpoint.tensorfile import DTYPES

    for name, shard in tensors.items():
        entry = reader.index.get(name)
        if entry is None:
            raise CheckpointError(f"{reader.folder} has no tensor {name!r}: it was saved by another model or optimizer")
        if tuple(entry["shape"]) != tuple(shard.global_shape):
            raise CheckpointError(
                f"{name} has shape {tuple(entry['shape'])} in {reader.folder}, and {shard.global_shape} in this run"
            )
        if DTYPES[entry["dtype"]] != shard.tensor.dtype:
            raise CheckpointError(
                f"{name} is {DTYPES[entry['dtype']]} in {reader.folder}, and {shard.tensor.dtype} in this run"
            )
