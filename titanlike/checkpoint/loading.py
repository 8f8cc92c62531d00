"""Choosing a checkpoint and filling shards from it: rank 0 decides, all follow, damage is named, and what is read is
proved."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from titanlike.checkpoint import manifest
from titanlike.checkpoint.config import CheckpointConfig
from titanlike.checkpoint.digest import digest_text, parse_digest
from titanlike.checkpoint.folder import Found, find_checkpoints
from titanlike.checkpoint.manifest import CheckpointError, DamagedCheckpoint, Manifest
from titanlike.checkpoint.shard import Shard
from titanlike.checkpoint.state_digest import StateDigest

T = TypeVar("T")
Group = dist.ProcessGroup | None
Check = Callable[[Path, dict[str, Any]], None]


def load_newest(
    config: CheckpointConfig,
    root: Path,
    tensors: dict[str, Shard],
    group: Group,
    say: Callable[[str], None],
    check: Check | None = None,
) -> tuple[Path, int, str, dict[str, Any]] | None:
    """See `Checkpointer.load`. Returns (folder, step, digest, meta)."""
    candidates: list[Found] = from_rank_0(lambda: _candidates(config, root), group)
    problems = []
    for item in candidates:
        try:
            if item.manifest is None:
                raise DamagedCheckpoint(item.problem)
            meta = load_folder(item.folder, item.manifest, tensors, group, check=check)
        except DamagedCheckpoint as damage:
            problems.append(str(damage))
            if config.load_step is not None or config.on_corrupt == "error":
                raise DamagedCheckpoint(f"{damage} (an older step can be chosen by checkpoint.load_step)") from damage
            say(f"warning: damaged checkpoint: {damage}; trying the one before it")
            continue
        return item.folder, item.step, item.manifest.digest, meta
    if problems:
        raise DamagedCheckpoint(f"no checkpoint in {root} is good ({problems[0]}); move the folder away to start anew")
    return None


def _candidates(config: CheckpointConfig, root: Path) -> list[Found]:
    found = find_checkpoints(root)
    if config.load_step is None:
        return found
    wanted = [item for item in found if item.step == config.load_step]
    if not wanted:
        there = ", ".join(str(item.step) for item in sorted(found, key=lambda item: item.step)) or "none"
        raise CheckpointError(f"checkpoint.load_step = {config.load_step} is not in {root}, which has: {there}")
    return wanted


def load_folder(
    folder: Path,
    found: Manifest,
    tensors: dict[str, Shard],
    group: Group,
    partial: bool = False,
    check: Check | None = None,
) -> dict[str, Any]:
    """Fill `tensors` from one checkpoint and return its state.json. All ranks together; errors reach all of them.

    `check` gets the folder and state.json before any tensor is touched, and may raise.

    All of the state is proved by its digest, on the way. With `partial` only some tensors are wanted, maybe in another
    dtype: no digest can tell, so the checksums of the files are compared first.
    """
    from titanlike.checkpoint.planners import ShardLoadPlanner
    from titanlike.checkpoint.reader import ShardReader, TensorIndex

    def read_index() -> tuple[Any, dict[str, Any]]:
        return TensorIndex(folder, found), manifest.read_listed_json(folder, found, manifest.STATE)

    index, state = together(read_index, group)
    if check is not None:
        together(lambda: check(folder, state), group)
    if partial:
        verify_files(folder, found, group)
    planner = ShardLoadPlanner(folder, partial)
    try:
        run_load(tensors, ShardReader(index), planner, group)
        if not partial:
            _prove(index, found, StateDigest(tensors, group), planner.digests(), group)
    finally:
        planner.close()
    return state


def run_load(tensors: dict[str, Shard], reader: Any, planner: Any, group: Group) -> None:
    """torch.distributed.checkpoint's load, with one sentence instead of its nested tracebacks."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException

    from titanlike.checkpoint.checkpointer import first_failure

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            dcp.load(dict(tensors), storage_reader=reader, planner=planner, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        causes = [cause for _, (cause, _) in sorted(error.failures.items())]
        for cause in causes:
            if isinstance(cause, CheckpointError):
                raise type(cause)(str(cause)) from error
        raise CheckpointError(f"{planner.source} could not be loaded: {first_failure(error)}") from error


def _prove(index: Any, found: Manifest, state: StateDigest, parts: dict[str, int], group: Group) -> None:
    """Compare the digest of what was loaded with the one stored at the save. If it differs, find out what is
    damaged."""
    if state.compute(parts) == parse_digest(found.digest):
        return
    verify_files(index.folder, found, group)  # names the file, if it is one
    stored = {name: entry["digest"] for name, entry in index.tensors.items()}
    wrong = sorted(name for name, value in state.by_tensor(parts).items() if digest_text(value) != stored[name])
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    named = f"{wrong[0]}{more}" if wrong else "the state"
    raise DamagedCheckpoint(f"{index.folder}: {named} is not what was saved, by its digest, though all checksums fit")


def verify_files(folder: Path, found: Manifest, group: Group) -> None:
    """Compare the checksums of all files, shared out over the ranks. Raises DamagedCheckpoint on all, naming a file."""
    rank, world_size = (dist.get_rank(group), dist.get_world_size(group)) if group is not None else (0, 1)
    mine = sorted(found.files)[rank::world_size]

    def verify() -> None:
        for name in mine:
            manifest.verify_file(folder, found, name)

    together(verify, group)


def together(action: Callable[[], T], group: Group) -> T:
    """Run `action` on every rank; if it raises on any, raise the lowest rank's error on all."""
    error: Exception | None = None
    result: T | None = None
    try:
        result = action()
    except Exception as problem:
        error = problem
    errors: list[Any] = [error]
    if group is not None:
        errors = [None] * dist.get_world_size(group)
        dist.all_gather_object(errors, error, group=group)
    for problem in errors:
        if problem is not None:
            raise problem
    return result  # type: ignore[return-value]


def from_rank_0(action: Callable[[], T], group: Group) -> T:
    """Run `action` on rank 0 and give its result, or its error, to all: other ranks may see another state of the
    disk."""
    answer: list[Any] = [None, None]
    if group is None or dist.get_rank(group) == 0:
        try:
            answer[0] = action()
        except Exception as problem:
            answer[1] = problem
    if group is not None:
        dist.broadcast_object_list(answer, src=dist.get_global_rank(group, 0), group=group)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]
