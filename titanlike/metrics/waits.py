"""What a step waited for other ranks, by mesh axis, and the measured bubble of the pipeline.

The trainer puts spans around its waits (`comm/<axis>`), around a pipeline's whole step (`pipeline`) and around each
forward and backward in it (`pipeline/busy`). Here they become numbers. docs/metrics.md says what they cover.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from titanlike.mesh import Mesh


def waits(spans: Mapping[str, float], mesh: Mesh) -> dict[str, float]:
    """The numbers of a step from its spans, in seconds. With pp, one small all-reduce of the pipeline's ranks; the
    spans must be of the same step on all of them."""
    values = {f"comm/{axis}_s": spans.get(f"comm/{axis}", 0.0) for axis in ("dp", "tp") if mesh.degree(axis) > 1}
    if mesh.pp == 1 or "pipeline" not in spans:
        return values
    whole, busy = spans["pipeline"], spans.get("pipeline/busy", 0.0)
    table = torch.zeros(mesh.pp, 2, dtype=torch.float64, device=mesh.device)
    table[mesh.coordinate("pp")] = torch.tensor([whole, busy], dtype=torch.float64)
    dist.all_reduce(table, group=mesh.group("pp"))  # each rank of the pipeline has filled in its own row
    shares = idle_shares(*zip(*table.tolist()))
    values["comm/pp_s"] = max(whole - busy, 0.0) + spans.get("comm/pp", 0.0)
    values["bubble"] = sum(shares) / len(shares)
    return values | {f"bubble/{n}": share for n, share in enumerate(shares)}


def idle_shares(whole: Sequence[float], busy: Sequence[float]) -> list[float]:
    """The idle share of each pipeline rank, from 0 to 1: `1 - busy / T`, where T is the longest `whole`, each rank's
    time from the common begin of the step to the end of its last action."""
    longest = max(whole)
    return [max(0.0, 1 - one / longest) if longest > 0 else 0.0 for one in busy]
