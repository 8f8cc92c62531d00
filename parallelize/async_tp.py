"""Asynchronous tensor parallelism: the compiler cuts an all-gather before matrix products, and a reduce-scatter after
one, into a piece for each rank, and computes with one piece while the next is on its way through symmetric memory,
which the devices of a tp group map for each other.

What it needs of a graph is that a gathered tensor goes straight into products, and that a product, and nothing else, is
scattered. Of a block under sequence parallelism that holds for the four collectives of the forward, and in the backward
for the two gathers. The two reduce-scatters there add up gradients of several products (wq, wk, wv; w1, w3), and stay
as they are. tests/parallelize/test_async_tp.py counts them.

The names here that begin with _ are private to torch, and this is the only place that has them: torch has no public
switch yet (2.13).
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist


def missing() -> str | None:
    """What of this torch is missing for it; None if nothing is."""
    try:
        import torch.distributed._symmetric_memory as memory

        _ = memory.enable_symm_mem_for_group, torch.ops.symm_mem.fused_all_gather_matmul
    except (ImportError, AttributeError):
        return f"torch {torch.__version__} has no symmetric memory"
    if not dist.is_nccl_available():
        return f"torch {torch.__version__} has no NCCL"
    return None


def enable(group: dist.ProcessGroup) -> None:
    """Let the compiler do so with collectives over this tp group. For the whole process; before the first compilation.
    All ranks of the group call it."""
    import torch._inductor.config as inductor
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    class GatherRows(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            gather_rows(graph)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__,))  # a part of the key by which compiled graphs are kept

    inductor._micro_pipeline_tp = True
    inductor.post_grad_custom_pre_pass = GatherRows()  # the compiler's own pass comes after it
    with warnings.catch_warnings():
        # It is said to be needless, but the compiler's pass leaves alone what was not announced by it (2.13).
        warnings.simplefilter("ignore", FutureWarning)
        enable_symm_mem_for_group(group.group_name)


def gather_rows(graph: torch.fx.Graph) -> None:
    """Let all-gathers of one sequence, [1, seq / tp, dim], gather its rows, [seq / tp, dim], instead.

    Why: for several sequences a gather along dim 1 is one along dim 0, a split and a concatenation, which the
    compiler's pass knows. For one it is a reshape, which that pass does not know: it would leave the gather as it is.
    """
    reshape, c10d = torch.ops.aten.reshape.default, torch.ops._c10d_functional
    for wait in list(graph.nodes):
        gather = wait.args[0] if wait.target is c10d.wait_tensor.default else None
        if not isinstance(gather, torch.fx.Node) or gather.target is not c10d.all_gather_into_tensor.default:
            continue
        source = gather.args[0]
        assert isinstance(source, torch.fx.Node)
        part, whole = source.meta["val"], wait.meta["val"]  # [1, seq / tp, dim] and [tp, seq / tp, dim]
        if part.dim() != 3 or part.shape[0] != 1 or len(gather.users) != 1:
            continue
        shape = [whole.shape[0] * whole.shape[1], whole.shape[2]]
        with graph.inserting_before(gather):
            flat = graph.call_function(reshape, (source, list(part.shape[1:])))
            flat.meta["val"] = part.reshape(part.shape[1:])
            gathered = graph.call_function(gather.target, (flat, *gather.args[1:]), dict(gather.kwargs))
            rows = graph.call_function(wait.target, (gathered,))
            again = graph.call_function(reshape, (rows, list(whole.shape)))
            gathered.meta["val"] = rows.meta["val"] = whole.reshape(shape)
            again.meta["val"] = whole
        wait.replace_all_uses_with(again)
        graph.erase_node(wait)
        graph.erase_node(gather)
        views = [again]
        for view in views:  # grows
            views += [user for user in view.users if user.target is reshape]
        for view in views:
            if list(view.meta["val"].shape) == shape:
                view.replace_all_uses_with(rows)
        for view in reversed(views):
            if not view.users:
                graph.erase_node(view)
