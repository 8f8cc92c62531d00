"""Checkpoints that any mesh loads, that no crash can break, and that prove what they hold. Format: docs/checkpoint.md."""

from titanlike.checkpoint.checkpointer import Checkpointer, Loaded
from titanlike.checkpoint.config import CheckpointConfig
from titanlike.checkpoint.manifest import CheckpointError
from titanlike.checkpoint.shard import Shard

__all__ = ["CheckpointConfig", "CheckpointError", "Checkpointer", "Loaded", "Shard"]
