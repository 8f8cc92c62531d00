"""torch.compile of a pipeline stage: one graph from tokens or hidden states to hidden states or loss.

A graph break is an error (`fullgraph`), and so never silent. Tensor-parallel collectives are inside the graph.
Parameter names do not change: the forward is compiled, not the module wrapped.
"""

from __future__ import annotations

import torch
from torch import nn


def compile_stage(stage: nn.Module) -> None:
    """Compile the forward of `stage` in place; the compiler runs at the first call."""
    # Static shapes: each batch shape gets its own graph, and a run has one for training and one for validation.
    stage.forward = torch.compile(stage.forward, fullgraph=True, dynamic=False)  # type: ignore[method-assign]
