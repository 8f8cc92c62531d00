"""Reduce-scatters and all-gathers of activations between CPU ranks, by exchanging parts.

gloo's reduce-scatter is an all-reduce, which sends twice what is needed, and its all-gather takes more than twice the
time of an all-to-all of as many bytes. Here both are an all-to-all. What is replaced are the operations that DTensor
and compiled graphs call, so nothing else has to know of it. Numbers in docs/LOG.md.

Properties:
- A reduce-scatter adds the parts up in the order of the ranks. Of two ranks that is bitwise what gloo gives.
- Groups of other backends, other reductions and other dtypes go the usual way.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # private: operations get the name of a group

from parallelize.buckets import add_up

_EXCHANGED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

_library: torch.library.Library | None = None
_usual: dict[str, Any] = {}
"""the kernels that were there before"""


def exchange_parts() -> None:
    """Replace the two collectives, for CPU tensors and in this process. May be called again."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("_c10d_functional", "IMPL")  # private: no public name for what DTensor calls
    for name, kernel in (("reduce_scatter_tensor", _reduce_scatter), ("all_gather_into_tensor", _all_gather)):
        _usual[name] = torch.library.get_kernel(f"_c10d_functional::{name}", "CPU")
        _library.impl(name, kernel, "CPU", with_keyset=True)


def _can_exchange(x: Tensor, named: Any) -> bool:
    group = _resolve_process_group(named) if isinstance(named, str) else named  # type: ignore[arg-type]
    return x.dtype in _EXCHANGED and x.dim() > 0 and dist.get_backend(group) == "gloo"


def _exchange(x: Tensor, ranks: int, named: Any) -> Tensor:
    """Send the r-th part of x [ranks * n, ...] to rank r; gives the parts from all ranks, when it is waited for. All
    ranks of the group take part."""
    sizes = [x.shape[0] // ranks] * ranks
    return torch.ops._c10d_functional.all_to_all_single(x.contiguous(), sizes, sizes, named)


def _reduce_scatter(keys: Any, x: Tensor, reduction: str, ranks: int, named: Any) -> Tensor:
    if reduction != "sum" or ranks == 1 or not _can_exchange(x, named):
        return _usual["reduce_scatter_tensor"].call_boxed(keys, x.contiguous(), reduction, ranks, named)
    parts = torch.ops._c10d_functional.wait_tensor(_exchange(x, ranks, named)).unflatten(0, (ranks, -1))
    out = torch.empty_like(parts[0])
    add_up(parts, out)
    return out


def _all_gather(keys: Any, x: Tensor, ranks: int, named: Any) -> Tensor:
    if not _can_exchange(x, named):
        return _usual["all_gather_into_tensor"].call_boxed(keys, x.contiguous(), ranks, named)
    return _exchange(x.expand(ranks, *x.shape).flatten(0, 1), ranks, named)
