"""Memory of this process, now and at its highest."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


def memory_bytes(device: torch.device | str) -> tuple[int, int]:
    """(current, peak) bytes: the allocator's on an accelerator, the resident set of the process on CPU."""
    import torch

    device = torch.device(device)
    if device.type == "cpu":
        return _resident_set()
    return torch.accelerator.memory_allocated(device), torch.accelerator.max_memory_allocated(device)


def memory_over_ranks(device: torch.device, group: dist.ProcessGroup | None) -> dict[str, int]:
    """Bytes in use on the ranks of `group`, least and most loaded. One small collective of all ranks of the group."""
    import torch
    import torch.distributed as dist

    current, peak = memory_bytes(device)
    # The minimum travels as the maximum of the negated values, so that one reduction does both. float64 is exact here.
    numbers = torch.tensor([current, peak, -current, -peak], dtype=torch.float64, device=device)
    if group is not None:
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=group)
    current_max, peak_max, current_min, peak_min = (int(number) for number in numbers.tolist())
    return {
        "memory/current_max_bytes": current_max,
        "memory/current_min_bytes": -current_min,
        "memory/peak_max_bytes": peak_max,
        "memory/peak_min_bytes": -peak_min,
    }


@dataclass
class Peak:
    """Filled in when the block of `peak_above` ends."""

    bytes: int | None = None


@contextlib.contextmanager
def peak_above(device: torch.device) -> Generator[Peak]:
    """The highest memory in use in the block, above what is in use at its begin; None where it cannot be told.

    The allocator's on an accelerator. On CPU the kernel's mark of the process's resident set, which is set back: Linux
    alone has that, and a sandbox may not.
    """
    import torch

    peak = Peak()
    if device.type != "cpu":
        torch.accelerator.synchronize()
        before = torch.accelerator.memory_allocated(device)
        torch.accelerator.reset_peak_memory_stats(device)
        yield peak
        peak.bytes = torch.accelerator.max_memory_allocated(device) - before
        return
    told = _set_back_high_water()
    before = _resident_set()[0]
    yield peak
    after = _high_water() if told else None
    peak.bytes = None if after is None else max(after - before, 0)


def _set_back_high_water() -> bool:
    """Set the process's high-water mark back to what is resident now (proc(5), clear_refs); whether that can be."""
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except OSError:
        return False
    return _high_water() is not None


def _high_water() -> int | None:
    """The mark, in bytes."""
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _resident_set() -> tuple[int, int]:
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak_bytes = peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB, macOS bytes
    try:
        with open("/proc/self/statm") as file:
            current_bytes = int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return peak_bytes, peak_bytes  # no /proc on this system: the peak is the best that is known
    # The kernel updates the two numbers at different moments; a peak below the present would be nonsense.
    return current_bytes, max(current_bytes, peak_bytes)
