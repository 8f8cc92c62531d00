"""What the trainer hands over: the part of a plain single-device tensor that this rank holds.

A shard is an n-dimensional box of the tensor that a single device would hold, so a checkpoint knows nothing of meshes:
whatever cut the tensor (tp, dp, pp) left boxes, and any other cut is loaded from them. `Shard` satisfies the protocol
by which torch.distributed.checkpoint plans saves and loads (`torch.distributed._checkpointable`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


@dataclass(frozen=True, eq=False)
class Shard:
    """The box `[offset, offset + tensor.shape)` of a tensor of shape `global_shape`.

    `tensor` is contiguous, on any device, and may be empty (a rank that dim 0 left nothing for). `load` writes into it
    in place. The same box may be held by several ranks: it is stored once, and the copies are checked against each
    other. Different boxes must not overlap, and together they must cover the tensor.
    """

    tensor: torch.Tensor
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]

    def __post_init__(self) -> None:
        shape = tuple(self.tensor.shape)
        assert len(shape) == len(self.global_shape) == len(self.offset), (shape, self.global_shape, self.offset)
        assert self.tensor.is_contiguous(), "a shard's local tensor must be contiguous"
        if self.tensor.numel():
            for size, start, whole in zip(shape, self.offset, self.global_shape, strict=True):
                assert 0 <= start <= start + size <= whole, (shape, self.offset, self.global_shape)

    @classmethod
    def whole(cls, tensor: torch.Tensor) -> Shard:
        """The shard of a rank that holds all of `tensor`."""
        return cls(tensor, tuple(tensor.shape), (0,) * tensor.dim())

    def on(self, tensor: torch.Tensor) -> Shard:
        """The same box with its values in another tensor."""
        return Shard(tensor, self.global_shape, self.offset)

    # The protocol of torch.distributed.checkpoint. An empty shard has nothing to write and nothing to read.

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(dtype=self.tensor.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(self.global_shape)),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        if self.tensor.numel() == 0:
            return []
        return [ChunkStorageMetadata(offsets=torch.Size(self.offset), sizes=self.tensor.shape)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is None or tuple(index.offset) == tuple(self.offset), (index, self.offset)
        return self.tensor
