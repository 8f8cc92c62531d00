"""Hooks that make a run fail in the ways of tests/titanlike/test_faults.py: by rank, at step 3."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any


def _now(run: Any, step: int) -> bool:
    return step == 3 and run.mesh.rank == run.mesh.device_mesh.size() - 1


class Sleeps:
    """The last rank waits for something that never comes."""

    def before_step(self, run: Any, step: int, batch: Any) -> None:
        if _now(run, step):
            time.sleep(3600)


class Raises:
    """The last rank has a bug."""

    def before_step(self, run: Any, step: int, batch: Any) -> None:
        if _now(run, step):
            raise KeyError("a bug in a hook")


class Mismatches:
    """The last rank calls another collective than the rest."""

    def before_step(self, run: Any, step: int, batch: Any) -> None:
        import torch
        import torch.distributed as dist

        if step < 3:
            return
        if _now(run, step):
            dist.broadcast(torch.zeros(2), src=0)
        else:
            dist.all_reduce(torch.zeros(3))


class DiesOnce:
    """The last rank kills itself, unless the file of the marker is there."""

    def before_step(self, run: Any, step: int, batch: Any) -> None:
        marker = Path(run.config.run_dir) / "died"
        if _now(run, step) and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class RunsOutOfMemory:
    """The last rank asks for more memory than any machine has."""

    def before_step(self, run: Any, step: int, batch: Any) -> None:
        import torch

        if _now(run, step):
            stage = run.trainer.built.stages[0]
            stage.register_forward_pre_hook(lambda *_: torch.empty(2**55))
