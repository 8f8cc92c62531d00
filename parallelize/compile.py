"""torch.compile of a pipeline stage, whole or block by block.

- `stage`: one graph from tokens or hidden states to hidden states or loss. Compile time grows with the layers.
- `block`: one graph for a block, reused by all layers, and one for head and loss. Depth adds no compile time.

A graph break is an error (`fullgraph`), and so never silent. Tensor-parallel collectives are inside the graphs.
Parameter names do not change: forwards are compiled, modules are not wrapped.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from parallelize.activation_checkpoint import apply_activation_checkpoint
from parallelize.loss_chunks import ChunkedLoss


def _compiled(function: Callable[..., Any], what: str, error_class: type[Exception]) -> Callable[..., Any]:
    from torch._dynamo.exc import TorchDynamoException  # what the two halves of the compiler raise
    from torch._inductor.exc import InductorError

    # Static shapes: each batch shape gets its own graph, and a run has one for training and one for validation.
    compiled = torch.compile(function, fullgraph=True, dynamic=False)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return compiled(*args, **kwargs)
        except (TorchDynamoException, InductorError) as error:
            raise error_class(
                f"{what} cannot be compiled as one graph: {_gist(str(error))}; mend it, or say compile.enable = false"
            ) from error

    return call


def _gist(message: str) -> str:
    """The first sentence of what the compiler says, and the line of the model that it was at."""
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    places = [i for i, line in enumerate(lines) if line.startswith('File "') and i + 1 < len(lines)]
    gist = lines[0].rstrip(":.") if lines else "no reason was given"
    return gist if not places else f"{gist} ({lines[places[-1]]}: {lines[places[-1] + 1]})"


def missing_compiler(device_type: str = "cpu") -> tuple[str, str] | None:
    """(why nothing can be compiled here, what would help); None if it can."""
    from torch._inductor import cpp_builder, exc  # private: the only place that knows which compiler is taken
    from torch.utils._triton import has_triton

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        why = str(error).strip().splitlines()[0]
        help_ = "install g++ or clang, or name one in the environment variable CXX"
        return f"there is no C++ compiler here ({why})", help_
    if device_type == "cuda" and not has_triton():
        return "triton, which makes the kernels, is not installed or does not know this GPU", "install triton"
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


def compile_stage(
    stage: nn.Module,
    scope: str,
    checkpoint_mode: str,
    keep: tuple[Any, ...] = (),
    error_class: type[Exception] = RuntimeError,
) -> None:
    """Compile the forward of `stage` in place, with activation checkpointing of its blocks; the compiler runs at the
    first call. `scope` is stage or block; for `checkpoint_mode` and `keep` see apply_activation_checkpoint. What cannot
    be compiled raises `error_class` with a sentence that says what and where."""
    blocks = list(stage.model.layers.values())  # type: ignore[union-attr, attr-defined]

    def compiled(function: Callable[..., Any], what: str) -> Callable[..., Any]:
        return _compiled(function, what, error_class)

    if scope == "stage":
        for block in blocks:
            apply_activation_checkpoint(block, checkpoint_mode, keep)
        stage.forward = compiled(stage.forward, "the model")  # type: ignore[method-assign]
        return
    for block in blocks:
        if checkpoint_mode == "selective":  # its policy looks at single operations, so it must be inside the graph
            apply_activation_checkpoint(block, checkpoint_mode, keep)
            block.forward = compiled(block.forward, f"a {type(block).__name__}")
        else:  # a whole block is recomputed by running its graph again
            block.forward = compiled(block.forward, f"a {type(block).__name__}")
            apply_activation_checkpoint(block, checkpoint_mode, keep)
    assert isinstance(stage.loss, ChunkedLoss)
    # One graph for all chunks, run again to recompute.
    stage.loss.inner = compiled(stage.loss.inner, "the head with the loss")
