"""Tensor parallelism with DTensor: applies an architecture's table of styles to a plain model.

Properties:
- Activations between blocks stay DTensors; inside attention and feed-forward, local tensors of the rank's own heads and
  hidden units are computed on. One all-gather enters and one reduce-scatter leaves each half of a block.
- Every parameter of the model is covered by exactly one entry of the table, or `apply_tensor_plan` raises.
- A vocabulary-parallel embedding looks up local rows alone: neither the table nor its gradient is ever gathered.
"""

from __future__ import annotations

import fnmatch
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

TensorPlan = dict[str, ParallelStyle]
"""Name pattern of modules (`layers.*.attention.wq`) -> how they are cut"""


class Replicated(ParallelStyle):
    """The module's parameters are whole on every rank and it computes on DTensors as they come (norms). Under sequence
    parallelism the gradient of such a parameter is a partial sum over tp; ZeRO adds it up once per step.

    `local_output`, for activations that are whole on every rank: hand on the local tensor. The DTensor that the next
    module makes of it brings the gradient back summed over tp (arXiv:1909.08053, section 3, the operator f); a gradient
    left as a partial sum would make DTensor gather whole weights in the backward of the module before."""

    def __init__(self, local_output: bool = False) -> None:
        self.local_output = local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not self.local_output:
            return distribute_module(module, device_mesh)
        return distribute_module(module, device_mesh, output_fn=lambda _module, out, _mesh: out.to_local())


class VocabParallelEmbedding(ParallelStyle):
    """Rows of the table are split over tp. Each rank looks up the tokens that it has rows for, the sum over ranks is
    the embedding, left with placement `output` (arXiv:1909.08053, section 3)."""

    def __init__(self, output: Placement) -> None:
        self.output = output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding)
        weight = distribute_tensor(module.weight, device_mesh, [Shard(0)], src_data_rank=None)
        module.weight = nn.Parameter(weight)
        rows = -(-module.num_embeddings // device_mesh.size())
        first = device_mesh.get_local_rank() * rows
        module.forward = partial(_lookup, module, first, device_mesh, self.output)  # type: ignore[method-assign]
        return module


def _lookup(module: nn.Embedding, first: int, mesh: DeviceMesh, output: Placement, tokens: Tensor) -> Tensor:
    weight = module.weight.to_local()  # type: ignore[attr-defined]  # [rows of this rank, dim]
    local = tokens - first
    elsewhere = (local < 0) | (local >= weight.shape[0])
    out = F.embedding(local.masked_fill(elsewhere, 0), weight).masked_fill(elsewhere[..., None], 0)
    return DTensor.from_local(out, mesh, [Partial()], run_check=False).redistribute(placements=[output])


class ReplicatedKV(ParallelStyle):
    """A key or value projection with fewer heads than tp ranks: the weight is whole on every rank, and a rank goes on
    with the one head that its query heads attend to. Gradients are partial sums over tp, added up once per step."""

    def __init__(self, n_kv_heads: int) -> None:
        self.n_kv_heads = n_kv_heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Linear)
        head_dim = module.out_features // self.n_kv_heads
        head = device_mesh.get_local_rank() * self.n_kv_heads // device_mesh.size()
        distribute_module(module, device_mesh)
        rows = slice(head * head_dim, (head + 1) * head_dim)
        module.forward = partial(_project_one_head, module, rows)  # type: ignore[method-assign]
        return module


def _project_one_head(module: nn.Linear, rows: slice, x: DTensor) -> Tensor:
    weight = module.weight.to_local(grad_placements=[Partial()])[rows]  # type: ignore[attr-defined]
    bias = None
    if module.bias is not None:
        bias = module.bias.to_local(grad_placements=[Partial()])[rows]  # type: ignore[attr-defined]
    return F.linear(x.to_local(grad_placements=[Partial()]), weight, bias)


def covered_by(plan: TensorPlan, module_name: str) -> list[str]:
    """The patterns of `plan` that match a module's name."""
    return [
        pattern
        for pattern in plan
        if fnmatch.fnmatchcase(module_name, pattern) and pattern.count(".") == module_name.count(".")
    ]


def check_plan(model: nn.Module, plan: TensorPlan) -> None:
    """Raise ValueError, listing all of them, for parameters that no entry covers or that several do, and for patterns
    that match no module."""
    modules = dict(model.named_modules())
    used: set[str] = set()
    problems: list[str] = []
    for name, module in modules.items():
        matches = covered_by(plan, name)
        used.update(matches)
        own = [f"{name}.{p}" for p, _ in module.named_parameters(recurse=False)]
        if own and not matches:
            problems.append(f"no entry covers {', '.join(own)}")
        if len(matches) > 1:
            problems.append(f"{name} is matched by {', '.join(matches)}")
    problems += [f"{pattern} matches no module" for pattern in plan if pattern not in used]
    if problems:
        raise ValueError("the tensor-parallel plan does not fit the model: " + "; ".join(problems))


def apply_tensor_plan(model: nn.Module, mesh: DeviceMesh, plan: TensorPlan) -> None:
    """Cut `model` (whole, or one pipeline stage of it) in place over the one-dimensional tp `mesh`.

    Entries for parts that this stage does not hold are passed over: call `check_plan` on the whole model first.
    """
    held = {name for name, _ in model.named_modules()}
    here = {
        pattern: style for pattern, style in plan.items() if any(covered_by({pattern: style}, name) for name in held)
    }
    parallelize_module(model, mesh, here, src_data_rank=None)
