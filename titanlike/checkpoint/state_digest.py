"""The digest of the state that all ranks hold together, and whether the copies of it agree.

Who holds which box is exchanged once. From then on a digest is one all-reduce of four numbers, replicas counted once; a
fifth and sixth tell whether all copies are equal. Only if they are not, or if a digest is not what was expected, do the
ranks exchange the parts and say which tensor it is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from titanlike.checkpoint.digest import add, box_digest, seed_of
from titanlike.checkpoint.manifest import CheckpointError
from titanlike.checkpoint.shard import Shard

_MASK = (1 << 64) - 1
_HALF = (1 << 32) - 1


class StateDigest:
    """Digests of the boxes that `tensors` are, whatever their values. All ranks of `group` call together.

    `group` carries CPU tensors (gloo); None: this process alone.
    """

    def __init__(self, tensors: dict[str, Shard], group: dist.ProcessGroup | None) -> None:
        self.group = group
        self._offsets = {name: tuple(shard.offset) for name, shard in tensors.items() if shard.tensor.numel()}
        mine = list(self._offsets.items())
        rank = dist.get_rank(group) if group is not None else 0
        holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        for other, boxes in enumerate(self._exchange(mine)):
            for box in boxes:
                holders.setdefault(box, []).append(other)
        # Each box counts with weight 1 on its first holder. For the comparison of copies, every further holder has a
        # pseudo-random odd weight and the first one minus their sum: the total is 0 if all copies are equal.
        self._counts: dict[str, bool] = {}
        self._weights: dict[str, int] = {}
        for name, offset in mine:
            ranks = holders[name, offset]
            weights = {other: _weight(name, offset, other) for other in ranks[1:]}
            weights[ranks[0]] = -sum(weights.values())
            self._counts[name] = rank == ranks[0]
            self._weights[name] = weights[rank]

    def compute(self, parts: dict[str, int]) -> int:
        """The digest of the state, on all ranks, from the digests of this rank's shards (of each that is not empty).

        Raises CheckpointError, on all ranks, naming a tensor whose copies differ.
        """
        digest = add(*(value for name, value in parts.items() if self._counts[name]))
        difference = add(*(value * self._weights[name] for name, value in parts.items()))
        # Halves of 32 bits: sums of up to 2^31 ranks don't overflow the int64 that they travel in.
        numbers = torch.tensor([digest & _HALF, digest >> 32, difference & _HALF, difference >> 32])
        if self.group is not None:
            dist.all_reduce(numbers, group=self.group)
        low, high, difference_low, difference_high = numbers.tolist()
        if (difference_low + (difference_high << 32)) & _MASK:
            self._name_the_difference(parts)
        return (low + (high << 32)) & _MASK

    def by_tensor(self, parts: dict[str, int]) -> dict[str, int]:
        """The digest of every tensor of the state, on all ranks. For finding out which one is wrong; it exchanges
        much."""
        totals: dict[str, int] = {}
        for theirs in self._exchange({name: value for name, value in parts.items() if self._counts[name]}):
            for name, value in theirs.items():
                totals[name] = add(totals.get(name, 0), value)
        return totals

    def _name_the_difference(self, parts: dict[str, int]) -> None:
        seen: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}
        mine = [(name, self._offsets[name], value) for name, value in parts.items()]
        for rank, boxes in enumerate(self._exchange(mine)):
            for name, offset, value in boxes:
                first_rank, first = seen.setdefault((name, offset), (rank, value))
                if value != first:
                    raise CheckpointError(
                        f"the copies of {name} on ranks {first_rank} and {rank} differ, though they should be equal: "
                        "the state of the run is wrong"
                    )
        raise AssertionError("copies differ, but none was found that does")

    def _exchange(self, value: Any) -> list[Any]:
        if self.group is None:
            return [value]
        everyone: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(everyone, value, group=self.group)
        return everyone


def shard_digests(tensors: dict[str, Shard]) -> dict[str, int]:
    """The digests of a rank's shards, the empty ones left out. On an accelerator all are launched before one is
    awaited."""
    sums = {
        name: box_digest(name, shard.tensor, shard.global_shape, shard.offset)
        for name, shard in tensors.items()
        if shard.tensor.numel()
    }
    return {name: int(value) for name, value in sums.items()}


def _weight(name: str, offset: tuple[int, ...], rank: int) -> int:
    """A pseudo-random odd 64-bit number for one copy of one box."""
    return seed_of(f"copy {rank} of {name}", torch.uint8, offset) | 1
