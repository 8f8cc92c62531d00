"""Asynchronous tensor parallelism: what the compiler makes of our graphs, as far as that shows without a GPU.

Blocks are compiled for a tp group of fake ranks, up to where the compiler would make kernels. There its own passes are
run on the graphs, and what they have put in the place of collectives is counted.
"""

from __future__ import annotations

import collections
import copy
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import parallelize.compile
import titanlike.build
from parallelize import async_tp
from tests.distributed.compare import batches, case, rows_of
from titanlike.mesh import Mesh
from titanlike.trainer import Trainer

GATHERS, SCATTERS = "all_gather_into_tensor", "reduce_scatter_tensor"
FUSED_GATHERS, FUSED_SCATTERS = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"


@pytest.fixture(autouse=True)
def _two_fake_ranks() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()


def graphs(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> list[tuple[bool, collections.Counter[str]]]:
    """(whether it is a backward, collectives and their fused forms by name) of each graph of a step, as compiled."""
    from torch._guards import detect_fake_mode
    from torch._inductor import config as inductor
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
    from torch._inductor.virtualized import V
    from torch.distributed._symmetric_memory import _test_mode

    seen: list[tuple[bool, collections.Counter[str]]] = []

    def look(module: Any, inputs: Any, *, is_backward: bool = False, **_: Any) -> Any:
        # As compile_fx does before it makes kernels, on a copy: those are to run here, which the fused ones cannot.
        passed = copy.deepcopy(module)
        view_to_reshape(passed)
        values = [node.meta["val"] for node in passed.graph.nodes if node.op == "placeholder"]
        with V.set_fake_mode(detect_fake_mode(values)), _test_mode():
            post_grad_passes(passed, False)
        passed.graph.lint()
        names = [str(node.target).split(".")[1] for node in passed.graph.nodes if "." in str(node.target)]
        counted = collections.Counter(n for n in names if n in (GATHERS, SCATTERS, FUSED_GATHERS, FUSED_SCATTERS))
        seen.append((is_backward, counted))
        return module

    backend = functools.partial(compile_fx, inner_compile=look)
    compiled = functools.partial(torch.compile, fullgraph=True, dynamic=False, backend=backend)
    monkeypatch.setattr(parallelize.compile, "_compiled", lambda function, *_: compiled(function))
    monkeypatch.setattr(titanlike.build, "missing_compiler", lambda *_: None)  # no kernel is made
    monkeypatch.setattr(titanlike.build, "separate_cache", lambda rank: None)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    asked = case(tp=2, steps=1, **{"compile__enable": True, "train__dtype": "float32"} | changes)
    with inductor.patch(_micro_pipeline_tp=False, post_grad_custom_pre_pass=None):
        mesh = Mesh(1, 1, 2, torch.device("cpu"))
        async_tp.enable(mesh.group("tp"))
        assert inductor._micro_pipeline_tp
        trainer = Trainer(asked.config(), mesh, asked.vocab)
        trainer.train_step(rows_of(next(batches(asked, trainer.config)), 1, 0))
    return seen


@pytest.mark.parametrize("sequences", [1, 2])
def test_collectives_of_a_block_become_one_with_their_products(sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: the setting is on, and a step takes as long as before, for the compiler has found no pattern."""
    forward, _head, _head_backward, backward = graphs(
        monkeypatch, model__n_layers=1, train__microbatch_size=sequences, train__global_batch_size=sequences
    )
    # One all-gather enters attention and one the feed-forward; a reduce-scatter leaves each.
    assert forward == (False, collections.Counter({FUSED_GATHERS: 2, FUSED_SCATTERS: 2}))
    # The gradients of wo's and w2's outputs are gathered for one product each. Those of the two inputs are sums of the
    # gradients of several products, so they are scattered as ever.
    assert backward == (True, collections.Counter({FUSED_GATHERS: 2, SCATTERS: 2}))


def test_what_is_gathered_is_the_same() -> None:
    """The rewritten gather of one sequence, beside the one that it stands for."""
    from torch._inductor.fx_passes.post_grad import view_to_reshape
    from torch.fx.experimental.proxy_tensor import make_fx

    c10d = torch.ops._c10d_functional
    group = dist.group.WORLD
    assert group is not None

    def block(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wait = c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, group.group_name))
        whole = wait.reshape(1, 6, 4)
        return (whole.reshape(6, 4) @ w).reshape(1, 6, 5), whole.sum(1)

    x, w = torch.randn(1, 3, 4), torch.randn(4, 5)
    traced = make_fx(block, tracing_mode="fake")(x, w)
    rewritten = copy.deepcopy(traced)
    view_to_reshape(rewritten)
    async_tp.gather_rows(rewritten.graph)
    rewritten.graph.lint()
    rewritten.recompile()
    products = [node for node in rewritten.graph.nodes if node.target is torch.ops.aten.mm.default]
    assert [node.args[0].target for node in products] == [c10d.wait_tensor.default]
    for mine, right in zip(_run(rewritten, x, w), _run(traced, x, w)):
        torch.testing.assert_close(mine, right, rtol=0, atol=0)


def _run(module: torch.fx.GraphModule, x: torch.Tensor, w: torch.Tensor) -> Any:
    """With an all-gather of two ranks, of which the other one holds 2 `x`."""

    class Two(torch.fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if target is torch.ops._c10d_functional.all_gather_into_tensor.default:
                return torch.cat([args[0], 2 * args[0]])
            if target is torch.ops._c10d_functional.wait_tensor.default:
                return args[0]
            return super().call_function(target, args, kwargs)

    return Two(module).run(x, w)
