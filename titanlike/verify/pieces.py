"""What ranks send to the comparison: parts of named tensors, and where they belong in the whole ones."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from torch import Tensor

WEIGHTS = "weights"
COMPUTE_WEIGHTS = "weights in use"
ACTIVATIONS = "activations"
MICROBATCH_LOSSES = "microbatch losses"
GRADIENTS = "gradients"
GRADIENT_NORM = "gradient norm"
CLIPPED = "clipped gradients"
LOSS = "logged loss"
MOMENTS = "moments"
VALIDATION = "validation loss"

CHECKS = (
    WEIGHTS,
    COMPUTE_WEIGHTS,
    ACTIVATIONS,
    MICROBATCH_LOSSES,
    LOSS,
    GRADIENTS,
    GRADIENT_NORM,
    CLIPPED,
    MOMENTS,
    VALIDATION,
)
"""What is compared, in the order of the table."""

ORDER_IN_STEP = (
    ACTIVATIONS,
    MICROBATCH_LOSSES,
    LOSS,
    GRADIENTS,
    GRADIENT_NORM,
    CLIPPED,
    MOMENTS,
    WEIGHTS,
    COMPUTE_WEIGHTS,
    VALIDATION,
)
"""The order in which a step computes them: the first one that differs is nearest to the cause."""


class Key(NamedTuple):
    """One comparison at one step; step 0 is before the first one."""

    check: str
    step: int


class Piece(NamedTuple):
    """A box of a named tensor on one rank."""

    key: Key
    name: str
    tensor: Tensor
    """float64 (or the type that it has), detached"""
    offset: tuple[int, ...] | None
    """of the box in the whole tensor; None: to be told from the shapes, one dim being cut over tp"""


@dataclasses.dataclass
class RankRecord:
    """All that one rank found."""

    rank: int
    pp: int
    dp: int
    tp: int
    pieces: list[Piece] = dataclasses.field(repr=False)
    stage_of: dict[str, int]
    """parameter -> pipeline stage; -1 for a tied weight that two stages use"""
    replicated: set[str]
    """parameters that each tp rank holds whole"""
    module_stage: dict[str, int]
    """module -> pipeline stage"""
    clip_factors: list[float]
    """by step: what the gradients of the mean loss were multiplied by"""

    @property
    def place(self) -> str:
        """The rank and its coordinates, for people."""
        return f"rank {self.rank} (pp {self.pp}, dp {self.dp}, tp {self.tp})"
