"""Weights in the memory layout that a CPU's matrix kernels like best: a few rows at a time wait for memory alone.

Measured on torch 2.13, AMD EPYC, one thread (docs/generate.md): in blocks of oneDNN a product with 8 rows takes 0.5 to
0.8 of the time of a row-major weight, with 128 rows 0.7 to 0.95. With a single float32 row, a column-major weight is
the fastest where it is wider than its input (0.5 to 0.7).

Properties:
- What is computed stays the same but for rounding. The modules stay what they are: nn.Linear with another forward or
  another stride.
- Nothing is held twice, but for a weight that another module shares (a tied embedding).
- float64, accelerators and DTensors stay as they are.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

PLAIN, COLUMNS, BLOCKS = "plain", "columns", "blocks"


class PackedLinears:
    """The linear layers of a module, which can be laid out anew. No gradients."""

    def __init__(self, module: nn.Module) -> None:
        uses: dict[int, int] = {}
        for _, parameter in module.named_parameters(remove_duplicate=False):
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
        self._layers = [
            _Layer(layer, uses[id(layer.weight)] > 1)
            for layer in module.modules()
            if isinstance(layer, nn.Linear) and not isinstance(layer.weight, DTensor)
        ]

    def for_rows(self, rows: int) -> None:
        """Choose each layer's layout for products with so many rows, most of the time."""
        for layer in self._layers:
            layer.lay_out(layer.best(rows))


class _Layer:
    def __init__(self, module: nn.Linear, shared: bool) -> None:
        self.module = module
        self.shared = shared  # the weight is another module's too, which needs it row-major
        self.layout = PLAIN
        self.plain = module.weight
        self.wide = module.weight.shape[0] >= module.weight.shape[1]  # a rank's part may be other than out_features
        self.blocks: Tensor | None = None

    def best(self, rows: int) -> str:
        weight = self.plain
        if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
            return PLAIN
        if rows == 1 and weight.dtype == torch.float32:
            return COLUMNS if self.wide else PLAIN
        return BLOCKS if _has_blocks() else PLAIN

    def lay_out(self, layout: str) -> None:
        if layout == self.layout:
            return
        module = self.module
        whole = self.plain.data if self.blocks is None or self.shared else self.blocks.to_dense()
        self.blocks = None
        module.__dict__.pop("forward", None)
        if layout == BLOCKS:
            self.blocks = torch.ops.mkldnn._reorder_linear_weight(whole.contiguous())
            module.forward = partial(_blocked, self.blocks, module.bias)  # type: ignore[method-assign]
            kept = whole.new_empty(0)
        else:
            kept = whole.contiguous() if layout == PLAIN else whole.t().contiguous().t()
        if not self.shared:
            self.plain.data = kept
        elif layout == COLUMNS:
            module.weight = nn.Parameter(kept, requires_grad=False)
        else:
            module.weight = self.plain
        self.layout = layout


def _blocked(weight: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def _has_blocks() -> bool:
    # Private operators, the ones that the compiler lays out weights with: there is no public way to multiply a plain
    # tensor with a weight in blocks. Without them all works, slower.
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
