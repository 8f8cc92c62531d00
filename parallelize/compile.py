"""torch.compile of a pipeline stage, whole or block by block.

- `stage`: one graph from tokens or hidden states to hidden states or loss. Compile time grows with the layers.
- `block`: one graph for a block, reused by all layers, and one for head and loss. Depth adds no compile time.

A graph break is an error (`fullgraph`), and so never silent. Tensor-parallel collectives are inside the graphs.
Parameter names do not change: forwards are compiled, modules are not wrapped.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from parallelize.activation_checkpoint import apply_activation_checkpoint
from parallelize.loss_chunks import ChunkedLoss


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # Static shapes: each batch shape gets its own graph, and a run has one for training and one for validation.
    return torch.compile(function, fullgraph=True, dynamic=False)


def missing_compiler() -> str | None:
    """Why nothing can be compiled here, in torch's words; None if it can."""
    from torch._inductor import cpp_builder, exc  # private: the only place that knows which compiler is taken

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        return str(error).strip().splitlines()[0]
    return None


def keep_activations(budget: float) -> None:
    """Let the compiler keep this share, from 0 to 1, of the activation memory that it would keep by itself, and compute
    the rest again in the backward, what is cheapest first. For the whole process; before the first compilation."""
    import torch._functorch.config as functorch

    functorch.activation_memory_budget = budget


def separate_cache(rank: int) -> None:
    """Give this rank a compile cache of its own, below the user's or the default one, before the first compilation.

    Why: graphs of tensor-parallel ranks can differ in shapes alone that the cache's key does not see (an uneven
    vocabulary; pytorch#188390), and then one rank would run what another one compiled.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # private: the only name for this folder

    base = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default_cache_dir()
    if not base.endswith(f"/rank{rank}"):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(base, f"rank{rank}")


def compile_stage(stage: nn.Module, scope: str, checkpoint_mode: str, keep: tuple[Any, ...] = ()) -> None:
    """Compile the forward of `stage` in place, with activation checkpointing of its blocks; the compiler runs at the
    first call. `scope` is stage or block; for `checkpoint_mode` and `keep` see apply_activation_checkpoint."""
    blocks = list(stage.model.layers.values())  # type: ignore[union-attr, attr-defined]
    if scope == "stage":
        for block in blocks:
            apply_activation_checkpoint(block, checkpoint_mode, keep)
        stage.forward = _compiled(stage.forward)  # type: ignore[method-assign]
        return
    for block in blocks:
        if checkpoint_mode == "selective":  # its policy looks at single operations, so it must be inside the graph
            apply_activation_checkpoint(block, checkpoint_mode, keep)
            block.forward = _compiled(block.forward)
        else:  # a whole block is recomputed by running its graph again
            block.forward = _compiled(block.forward)
            apply_activation_checkpoint(block, checkpoint_mode, keep)
    assert isinstance(stage.loss, ChunkedLoss)
    stage.loss.inner = _compiled(stage.loss.inner)  # one graph for all chunks, run again to recompute
