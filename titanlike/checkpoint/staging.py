"""Copies of the state in host memory, from which a background save reads while training goes on."""

from __future__ import annotations

import torch

from titanlike.checkpoint.shard import Shard


class Stage:
    """Host buffers for one set of shards: allocated once, pinned if the shards are on an accelerator, used again.

    They cost as much host memory as this rank's shards are large.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def prepare(self, tensors: dict[str, Shard]) -> None:
        """Allocate the buffers and touch their pages, so that the first copy is as fast as the later ones."""
        for name, shard in tensors.items():
            self._buffer(name, shard.tensor)

    def copy(self, tensors: dict[str, Shard]) -> dict[str, Shard]:
        """The same boxes with their values of now in host memory. Returns when the values are there."""
        staged = {}
        accelerators = set()
        for name, shard in tensors.items():
            buffer = self._buffer(name, shard.tensor)
            buffer.copy_(shard.tensor.detach(), non_blocking=True)
            staged[name] = shard.on(buffer)
            if shard.tensor.device.type != "cpu":
                accelerators.add(shard.tensor.device)
        for device in accelerators:
            torch.accelerator.current_stream(device).synchronize()
        return staged

    @property
    def bytes(self) -> int:
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())

    def _buffer(self, name: str, like: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != like.shape or buffer.dtype != like.dtype:
            pinned = like.device.type == "cuda"
            buffer = torch.zeros(like.shape, dtype=like.dtype, device="cpu", pin_memory=pinned)
            self._buffers[name] = buffer
        return buffer
