"""Architectures for tests, given to a run by import path (`model.architecture = "tests.unusual_models:..."`).

The module is also where titanlike looks for the tables by which they are cut: those of Llama.
"""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor, nn

from models.llama import Block, Llama, LlamaConfig
from parallelize.llama import FIRST_PARTS, LAST_PARTS, stage_costs, tensor_plan

__all__ = [
    "FIRST_PARTS",
    "LAST_PARTS",
    "FailingLlama",
    "LlamaWithDropout",
    "LookingLlama",
    "stage_costs",
    "tensor_plan",
]

FAIL_AT = 6
"""The forward pass of a block, counted from 1, at which rank 1 raises in `FailingLlama`."""


class DropoutBlock(Block):
    """A block whose output loses a tenth of its elements in training."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, context: Any) -> Tensor:
        return self.dropout(super().forward(x, context))


class LlamaWithDropout(Llama):
    """A Llama whose training draws random numbers."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleDict({name: DropoutBlock(config) for name in self.layers})


class FailingBlock(Block):
    """A block with a bug that shows on rank 1 alone, some steps into the run."""

    calls = 0

    def forward(self, x: Tensor, context: Any) -> Tensor:
        self.calls += 1
        if self.calls == FAIL_AT and os.environ["RANK"] == "1":
            raise RuntimeError("a bug in the model")
        return super().forward(x, context)


class FailingLlama(Llama):
    """A Llama that raises in the middle of a step."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleDict({name: FailingBlock(config) for name in self.layers})


class LookingBlock(Block):
    """A block that asks for a number in the middle, which cannot be compiled."""

    def forward(self, x: Tensor, context: Any) -> Tensor:
        if x.sum() > 1e9:
            x = x * 0
        return super().forward(x, context)


class LookingLlama(Llama):
    """A Llama that cannot be compiled."""

    block_class = LookingBlock
