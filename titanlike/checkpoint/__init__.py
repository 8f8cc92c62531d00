"""Checkpoints that any mesh loads, that no crash can break, and that prove what they hold. See docs/checkpoint.md.

The names below are imported when they are first used: the config reads its section from here, and should not wait for
torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titanlike.checkpoint.checkpointer import Checkpointer, Loaded
    from titanlike.checkpoint.config import CheckpointConfig
    from titanlike.checkpoint.manifest import CheckpointError, DamagedCheckpoint
    from titanlike.checkpoint.moments import Decision, StopSignal
    from titanlike.checkpoint.shard import Shard

_WHERE = {
    "CheckpointConfig": "config",
    "CheckpointError": "manifest",
    "Checkpointer": "checkpointer",
    "DamagedCheckpoint": "manifest",
    "Decision": "moments",
    "Loaded": "checkpointer",
    "Shard": "shard",
    "StopSignal": "moments",
}

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


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
