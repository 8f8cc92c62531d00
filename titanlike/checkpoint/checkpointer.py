"""Saving and loading the state of a run: what the trainer calls.

checkpointer = Checkpointer(config.checkpoint, run_dir, device, stop=StopSignal().install())
loaded = checkpointer.load(tensors)              # None: nothing to resume from
for step in ...:
    ...
    decision = checkpointer.decide(step, last=step == steps)
    if decision.save:
        stall = checkpointer.save(step, tensors, meta)
    if decision.stop:
        break
checkpointer.close()
"""

from __future__ import annotations

import contextlib
import threading
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from titanlike.checkpoint import files, folder, manifest
from titanlike.checkpoint.config import CheckpointConfig
from titanlike.checkpoint.digest import digest_text
from titanlike.checkpoint.loading import load_newest
from titanlike.checkpoint.manifest import CheckpointError
from titanlike.checkpoint.moments import Decision, Moments, StopSignal
from titanlike.checkpoint.shard import Shard
from titanlike.checkpoint.staging import Stage
from titanlike.checkpoint.state_digest import StateDigest, shard_digests
from titanlike.errors import UserError

# A save in the background waits this long for the slowest rank's disk before it is given up with an error.
WRITE_TIMEOUT = timedelta(hours=1)


class Loaded(NamedTuple):
    """What `Checkpointer.load` found: the step, the trainer's `meta`, the folder, and a line to show to the user."""

    step: int
    meta: dict[str, Any]
    folder: Path
    summary: str


class Checkpointer:
    """Saves and loads the checkpoints of one run folder. Every rank makes one, and all call its methods together.

    Without a default process group it works alone. With one, it makes two gloo groups of all ranks, whatever their
    backend: one for calls, one for saves in the background, so that neither waits for the other. `groups` are two of
    that kind to use instead, of some of the ranks.
    `say` gets lines for the user, on rank 0.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        run_dir: str | Path,
        device: torch.device | str = "cpu",
        groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None,
        say: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
        stop: StopSignal | None = None,
    ) -> None:
        self.config = config
        self.root = Path(run_dir) / "checkpoints"
        self.device = torch.device(device)
        self.group: dist.ProcessGroup | None = None
        self._write_group: dist.ProcessGroup | None = None
        if groups is not None:
            self.group, self._write_group = groups
        elif dist.is_available() and dist.is_initialized():
            self.group = dist.new_group(backend="gloo")  # type: ignore[assignment]
            self._write_group = dist.new_group(backend="gloo", timeout=WRITE_TIMEOUT)  # type: ignore[assignment]
        self.rank = dist.get_rank(self.group) if self.group is not None else 0
        self.say = say if self.rank == 0 else lambda line: None
        self.stall_s = 0.0
        """Seconds for which the last `save` held up its caller."""
        self.saved_step: int | None = None
        """The step of the newest checkpoint that this run knows to be committed: saved or loaded by it."""
        self._moments = Moments(config, clock)
        self._stop = stop
        self._stage = Stage()
        self._thread: threading.Thread | None = None
        self._writing_step: int | None = None
        self._error: BaseException | None = None
        self._cleaned = False
        self._plan: Any = None  # a planners.PlanCache, which is imported late
        self._digest: StateDigest | None = None
        self._digest_boxes: list[Any] = []

    # When

    def decide(self, step: int, last: bool = False) -> Decision:
        """What to do after `step` (0: before the first), the same on all ranks. Raises the error of a background save.

        Costs one small all-reduce over gloo if signals or minutes are watched, nothing otherwise.
        """
        asked, due = self._stop is not None and self._stop.received is not None, False
        if self._stop is not None or self.config.interval_minutes > 0:
            # Any rank may have got the signal, and clocks differ: all must decide alike. Minutes are rank 0's. And a
            # save that failed did so on all ranks, but they do not notice it at the same step.
            written = self._thread is not None and not self._thread.is_alive()
            failed, minutes = self._error is not None, self.rank == 0 and self._moments.by_minutes()
            flags = torch.tensor([asked, minutes, failed], dtype=torch.int32)
            if self.group is not None:
                dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
            asked, due, failed = map(bool, flags.tolist())
            if failed or written:
                self.wait()
        else:
            self.poll()
        if asked:
            by = f" by {self._stop.received}" if self._stop is not None and self._stop.received else ""
            self.say(f"asked to stop{by}: saving after step {step}, then ending")
        save = asked or due or self._moments.by_step(step, last)
        return Decision(save and step not in (self.saved_step, self._writing_step), asked or last)

    # Saving

    def prepare(self, tensors: dict[str, Shard]) -> None:
        """Optional, before the first step: allocate what an asynchronous save copies into, so that the first is
        quick."""
        if self.config.mode == "async":
            self._stage.prepare(tensors)

    def save(self, step: int, tensors: dict[str, Shard], meta: dict[str, Any]) -> float:
        """Save `tensors` and `meta` (JSON; rank 0's is stored) as the checkpoint of `step`. Returns the stall in
        seconds.

        With mode = "sync" it returns when the checkpoint is committed, and raises CheckpointError on all ranks if any
        could not write; nothing is committed then. With "async" it returns when the values are copied; errors come from
        `poll`, `decide`, `wait` or the next `save`. A save that is still being written is waited for.
        """
        began = time.perf_counter()
        if self._thread is not None and self._thread.is_alive():
            self.say(
                f"step {step}: waiting for the checkpoint of step {self._writing_step}, which is still being written"
            )
        self.wait()
        state = manifest.to_json(meta)
        self._moments.saved()
        self._writing_step = step
        if self.config.mode == "sync":
            self._write(step, dict(tensors), state)
            self._finished()
        else:
            staged = self._stage.copy(tensors)
            # A daemon: after an error elsewhere the process ends without it. A clean end calls `close`, which waits.
            self._thread = threading.Thread(
                target=self._write, args=(step, staged, state), name=f"checkpoint-{step}", daemon=True
            )
            self._thread.start()
        self.stall_s = time.perf_counter() - began
        return self.stall_s

    def poll(self) -> None:
        """Raise the error of a save in the background, if it has failed. Costs nothing."""
        if self._thread is not None and not self._thread.is_alive():
            self.wait()

    def wait(self) -> None:
        """Return when the save in the background is committed; raise its error if it failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self._finished()

    def close(self) -> None:
        """Wait for the save in the background. Call at a clean end, before the process group is destroyed."""
        self.wait()

    def _finished(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            self._writing_step = None
            raise error
        self.saved_step, self._writing_step = self._writing_step, None

    def _write(self, step: int, tensors: dict[str, Shard], state: bytes) -> None:
        """One save from planning to retention; leaves its error in `_error`. Runs in the background in async mode."""
        try:
            self._write_all(step, tensors, state)
        except BaseException as error:
            self._error = error

    def _write_all(self, step: int, tensors: dict[str, Shard], state: bytes) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException

        from titanlike.checkpoint.planners import PlanCache, ShardSavePlanner
        from titanlike.checkpoint.writer import ShardWriter

        if self.rank == 0 and not self._cleaned:
            self._cleaned = True
            self._tidy("remove what interrupted saves left", lambda: folder.clean(self.root))
        plan, self._plan = self._plan or PlanCache(), None  # kept only by a save that succeeds, on all ranks or on none
        writer = ShardWriter(self.root, step, state, self.rank, tensors)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
                # Plans, results and failures are gathered and scattered over the group (pickled between our own ranks,
                # never to a file). If any rank fails, all raise, and the coordinator does not commit.
                dcp.save(
                    dict(tensors),
                    storage_writer=writer,
                    planner=ShardSavePlanner(plan),
                    process_group=self._write_group,
                    no_dist=self._write_group is None,
                )
        except CheckpointException as error:
            if writer.temporary is not None:  # every rank has reported, so none is still writing there
                with contextlib.suppress(OSError):
                    files.remove_tree(writer.temporary)
            raise CheckpointError(f"the checkpoint of step {step} was not written: {first_failure(error)}") from error
        except RuntimeError as error:  # gloo: a rank is gone, or did not answer within WRITE_TIMEOUT
            reason = str(error).strip().splitlines()[-1]
            raise RuntimeError(f"the checkpoint of step {step} was not written: {reason}") from error
        self._plan = plan
        if self.rank == 0:
            self._tidy("delete old checkpoints", self._retain)

    def _retain(self) -> None:
        found = folder.find_checkpoints(self.root)
        for item in folder.to_delete(found, self.config.keep_last, self.config.keep_every):
            folder.delete(item.folder)

    def _tidy(self, what: str, action: Callable[[], None]) -> None:
        """Clean-up may fail without harm to the checkpoint that was just written: say so, and go on."""
        try:
            action()
        except (OSError, CheckpointError) as error:
            self.say(f"warning: could not {what} in {self.root}: {error}")

    # Loading

    def load(
        self, tensors: dict[str, Shard], check: Callable[[Path, dict[str, Any]], None] | None = None
    ) -> Loaded | None:
        """Fill `tensors` in place from `load_step` or the newest good checkpoint; None if the run folder has none.

        Rank 0 decides which one, all follow. What was read is proved by the digest that was stored at the save. A
        damaged checkpoint is named, and the one before it taken (`on_corrupt`). Raises CheckpointError on all ranks: no
        such step, none good, or one that doesn't fit the run. `check` gets the folder and the `meta` before any tensor
        is touched, and may raise too.
        """
        self.wait()
        found = load_newest(self.config, self.root, tensors, self.group, self.say, check)
        if found is None:
            return None
        where, step, digest, meta = found
        self.saved_step = step
        return Loaded(step, meta, where, f"resumed from {where}: step {step}, digest {digest} verified")

    def load_weights(self, path: str, tensors: dict[str, Shard], architecture: str, model: dict[str, Any]) -> list[str]:
        """Fill the shards of the weights (`model.*`) from `path`, for `init_from`; leave the optimizer's as they are.

        `path`: a titanlike checkpoint, a run folder (its newest good one), or a Hugging Face folder of safetensors.
        `model` is the config of the run's model, of `architecture`, as a dict (dataclasses.asdict). Every rank reads
        only its own slices; dtypes are converted. Returns lines for the user. Raises UserError on all ranks.
        """
        from titanlike.checkpoint.weights import load_weights

        try:
            return load_weights(path, tensors, architecture, model, self.group)
        except UserError as error:
            raise type(error)(f"checkpoint.init_from: {error}") from error

    def latest_step(self) -> int | None:
        """The step of the newest checkpoint that is whole by its manifest and file sizes. Looks only; no collective."""
        return next((item.step for item in folder.find_checkpoints(self.root) if item.manifest), None)

    def digest(self, tensors: dict[str, Shard]) -> str:
        """The digest of the state that all ranks hold together, as 16 hex digits: what a save would store now.

        The first call exchanges who holds what; later ones cost a pass over the shards and one small all-reduce. The
        boxes of `tensors` must not change between calls. Raises CheckpointError if the copies of a tensor differ.
        """
        boxes = [(name, shard.offset, shard.tensor.shape) for name, shard in tensors.items()]
        if self._digest is None or self._digest_boxes != boxes:
            self._digest, self._digest_boxes = StateDigest(tensors, self.group), boxes
        return digest_text(self._digest.compute(shard_digests(tensors)))


def first_failure(error: Any) -> str:
    """The message of the lowest failing rank, out of torch's CheckpointException."""
    rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
    if isinstance(cause, CheckpointError):
        return str(cause)
    if isinstance(cause, OSError):
        return f"rank {rank}: {cause.strerror or cause}" + (f": {cause.filename}" if cause.filename else "")
    return f"rank {rank}: {type(cause).__name__}: {cause}"
