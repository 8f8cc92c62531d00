"""Checkpoints that any mesh loads, that no crash can break, and that prove what they hold. See docs/checkpoint.md."""

from titanlike.checkpoint.checkpointer import Checkpointer, Loaded
from titanlike.checkpoint.config import CheckpointConfig
from titanlike.checkpoint.manifest import CheckpointError, DamagedCheckpoint
from titanlike.checkpoint.moments import Decision, StopSignal
from titanlike.checkpoint.shard import Shard

__all__ = [
    "CheckpointConfig",
    "CheckpointError",
    "Checkpointer",
    "DamagedCheckpoint",
    "Decision",
    "Loaded",
    "Shard",
    "StopSignal",
]
