"""torch's save and load planners, for a flat dict of `Shard`.

torch.distributed.checkpoint decides which rank writes which box (each once) and which stored boxes a shard is read
from. What is added here: lookups that know `Shard`, the comparison of what a run wants with what a checkpoint has, and
digests that are computed beside the reading.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan

from titanlike.checkpoint.digest import box_digest
from titanlike.checkpoint.manifest import CheckpointError
from titanlike.checkpoint.shard import Shard


class PlanCache:
    """The plan of the last save, on each rank. The boxes of a run don't change, so later saves exchange next to
    nothing: for 512 ranks planning anew is some ten seconds of the first rank's Python. After a failure all ranks begin
    anew."""

    def __init__(self) -> None:
        self.local: SavePlan | None = None  # what this rank asked for
        self.final: SavePlan | None = None  # and what it was given to write
        self.everyones: list[SavePlan] = []  # coordinator: what all asked for
        self.metadata: Metadata | None = None  # coordinator


class ShardSavePlanner(DefaultSavePlanner):
    """Plans a save. Replicas are written once, by the rank with the least to write."""

    def __init__(self, cache: PlanCache) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.cache = cache

    def lookup_object(self, index: MetadataIndex) -> torch.Tensor:
        shard: Shard = self.state_dict[index.fqn]
        return shard.__get_tensor_shard__(index)

    # `usable = False` stands for "as last time", from a rank to the coordinator and back.

    def create_local_plan(self) -> SavePlan:
        self._local = super().create_local_plan()
        if self.cache.final is not None and self.cache.local == self._local:
            return SavePlan([], usable=False)
        return self._local

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        if self.cache.metadata is not None and not any(plan.usable for plan in all_plans):
            return all_plans, self.cache.metadata
        everyones = [
            plan if plan.usable else before
            for plan, before in zip(all_plans, self.cache.everyones or all_plans, strict=True)
        ]
        try:
            plans, self.cache.metadata = super().create_global_plan(everyones)
        except ValueError as error:  # boxes that overlap, or don't cover their tensor
            raise CheckpointError(f"what the ranks hold does not make up the state: {error}") from error
        self.cache.everyones = everyones
        return plans, self.cache.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if new_plan.usable:
            self.cache.local, self.cache.final = self._local, new_plan
            return new_plan
        assert self.cache.final is not None
        return dataclasses.replace(self.cache.final, storage_data=new_plan.storage_data)


class ShardLoadPlanner(DefaultLoadPlanner):
    """Plans a load in which the run's tensors and the checkpoint's must be the same, with the same shapes and dtypes.

    `partial`: the checkpoint may hold more than the run wants, and dtypes may differ (weights alone are taken from it).
    `digests`, after the load: the digest of each of this rank's shards, or None with `partial`.
    """

    def __init__(self, source: Any, partial: bool = False) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.source = source  # what to call the checkpoint in a message
        self.partial = partial
        self._unread: Counter[str] = Counter()
        self._digests: dict[str, Future[int]] = {}
        # Beside the reading, on the shards that are complete. A digest takes as long as a read: one thread would still
        # be busy after the last read, two are not.
        self._digester = ThreadPoolExecutor(2, thread_name_prefix="digest")

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.state_dict = self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        for name, shard in self.state_dict.items():
            self._compare(name, shard)
        plan = create_default_local_load_plan(self.state_dict, self.metadata)
        return dataclasses.replace(plan, planner_data=list(self.state_dict))

    def _compare(self, name: str, shard: Shard) -> None:
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata.get(name)
        if stored is None:
            raise CheckpointError(f"{self.source} has no tensor {name!r}: it is of another model or optimizer")
        assert isinstance(stored, TensorStorageMetadata)  # nothing else is written
        shape, wanted = tuple(stored.size), tuple(shard.global_shape)
        if shape != wanted:
            raise CheckpointError(
                f"{name} has shape {shape} in {self.source}, but {wanted} in this run: a model of other sizes needs "
                "another run.name"
            )
        if not self.partial and stored.properties.dtype != shard.tensor.dtype:
            have, want = stored.properties.dtype, shard.tensor.dtype
            raise CheckpointError(f"{name} is {have} in {self.source}, but {want} in this run")

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Coordinator: nothing of the checkpoint may be left behind without a word."""
        assert self.metadata is not None
        if not self.partial:
            wanted = {name for plan in global_plan for name in plan.planner_data}
            if extra := sorted(set(self.metadata.state_dict_metadata) - wanted):
                more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
                raise CheckpointError(
                    f"{self.source} holds {extra[0]!r}{more}, which this run lacks: it is of another model or optimizer"
                )
        return [dataclasses.replace(plan, planner_data=None) for plan in global_plan]

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        self._unread = Counter(item.dest_index.fqn for item in new_plan.items)
        return new_plan

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        shard: Shard = self.state_dict[index.fqn]
        return shard.__get_tensor_shard__(index)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        name = read_item.dest_index.fqn
        self._unread[name] -= 1
        if self._unread[name] == 0 and not self.partial:
            shard: Shard = self.state_dict[name]
            self._digests[name] = self._digester.submit(shard_digest, name, shard)

    def digests(self) -> dict[str, int]:
        """After the load: name -> digest of this rank's shard, for each that had anything to read."""
        return {name: future.result() for name, future in self._digests.items()}

    def close(self) -> None:
        self._digester.shutdown(cancel_futures=True)


def shard_digest(name: str, shard: Shard) -> int:
    """The part of the digest that one shard gives, as an int64 number."""
    return int(box_digest(name, shard.tensor, shard.global_shape, shard.offset))
