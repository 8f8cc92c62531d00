"""The private names of torch that this project uses, each with the reason. Nowhere else is one imported."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def raw_local(tensor: Tensor) -> Tensor:
    """The local tensor object of a DTensor (a plain tensor itself), so that its storage can be replaced.

    Why: ZeRO-1 on one dp rank lets the compute weights *be* the master weights. `to_local()` gives a new tensor for a
    Parameter (torch 2.13), and replacing that one's storage leaves the DTensor as it was.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
