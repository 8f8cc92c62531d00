"""Tensor parallelism with DTensor: applies an architecture's table of styles to a plain model.

Properties:
- Activations between blocks stay DTensors; inside attention and feed-forward, local tensors of the rank's own heads and
  hidden units are computed on. One all-gather enters and one reduce-scatter leaves each half of a block.
- Every parameter of the model is covered by exactly one entry of the table, or `check_plan` raises.
- A vocabulary-parallel embedding looks up local rows alone: neither the table nor its gradient is ever gathered.
"""

from __future__ import annotations

import fnmatch
import re
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from parallelize.gloo import exchange_parts

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


class ReplicatedOverHeads(ParallelStyle):
    """A module inside attention whose parameters are whole on every rank, and which computes on the local tensor
    [batch, seq, heads, ...] of the rank's own heads (QK-norm). Gradients of the parameters are partial sums over tp,
    added up once per step."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, input_fn=_heads_in, output_fn=_heads_out)


def _heads_in(_module: nn.Module, arguments: Any, mesh: DeviceMesh) -> Any:
    x, *more = arguments
    return DTensor.from_local(x, mesh, [Shard(2)], run_check=False), *more


def _heads_out(_module: nn.Module, out: Any, _mesh: DeviceMesh) -> Any:
    return out.to_local()


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


def check_plan(model: Any, plan: TensorPlan) -> None:
    """Raise ValueError, listing all of them, for parameters of the whole model that no entry covers or that several do,
    patterns that match no module, entries that cannot cut what they match, and tied weights that are cut unlike."""
    modules = dict(model.named_modules())
    matches = {name: covered_by(plan, name) for name in modules}
    own = {name: [p for p, _ in module.named_parameters(recurse=False)] for name, module in modules.items()}
    uncovered, twice, unfit = [], [], []
    for name, module in modules.items():
        path = f"{name}." if name else ""
        if own[name] and not matches[name]:
            uncovered.append(", ".join(f"{path}{p}" for p in own[name]))
        if len(matches[name]) > 1:
            twice.append(f"{name} is matched by {', '.join(matches[name])}")
        for pattern in matches[name]:
            style = plan[pattern]
            wanted = _CUTS.get(type(style), (nn.Module,))
            if not isinstance(style, ParallelStyle):
                unfit.append(f"{name} has {style!r}, which is no ParallelStyle")
            elif not isinstance(module, wanted):
                kinds = " or ".join(kind.__name__ for kind in wanted)
                unfit.append(f"{name} is a {type(module).__name__}, and {type(style).__name__} cuts a {kinds}")
            elif isinstance(style, _WITH_ALL_BELOW):
                twice += [
                    f"{below} is matched by {', '.join(matches[below])}, and is part of {name}, all of which "
                    f"{type(style).__name__} makes whole"
                    for below in modules
                    if below.startswith(path) and below != name and own[below] and matches[below]
                ]
    layers = list(model.layers)
    problems = [f"no entry covers {each}" for each in _for_all_layers(uncovered, layers)]
    problems += _for_all_layers(twice, layers) + _for_all_layers(unfit, layers)
    used = {pattern for patterns in matches.values() for pattern in patterns}
    problems += [f"{pattern} matches no module" for pattern in plan if pattern not in used]
    if not problems:
        problems = _tied_unlike(modules, plan, matches)
    if problems:
        raise ValueError("; ".join(problems))


_CUTS: dict[type, tuple[type[nn.Module], ...]] = {
    ColwiseParallel: (nn.Linear, nn.Embedding),
    RowwiseParallel: (nn.Linear, nn.Embedding),
    ReplicatedKV: (nn.Linear,),
    VocabParallelEmbedding: (nn.Embedding,),
}
"""style -> the modules that it can cut; those that are not here look for themselves"""

_WITH_ALL_BELOW = (Replicated, ReplicatedOverHeads, SequenceParallel)
"""styles that take the parameters of a module's parts along"""


def _for_all_layers(sentences: list[str], layers: list[str]) -> list[str]:
    """The sentences, with one about `layers.*` in the place of those that are the same for each layer."""
    starred = [re.sub(r"\blayers\.\d+\.", "layers.*.", sentence) for sentence in sentences]
    short: dict[str, None] = {}
    for sentence, star in zip(sentences, starred):
        short[star if layers and starred.count(star) == len(layers) else sentence] = None
    return list(short)


def _tied_unlike(modules: dict[str, nn.Module], plan: TensorPlan, matches: dict[str, list[str]]) -> list[str]:
    """Weights that two modules share, and that their entries cut along different dims."""
    cuts: dict[int, tuple[str, int | None]] = {}
    problems = []
    for name, module in modules.items():
        weight, style = getattr(module, "weight", None), plan[matches[name][0]] if matches[name] else None
        if weight is None or style is None:
            continue
        of_embedding = isinstance(module, nn.Embedding)
        dims: dict[type, int] = {
            ColwiseParallel: int(of_embedding),
            RowwiseParallel: int(not of_embedding),
            VocabParallelEmbedding: 0,
        }
        dim = dims.get(type(style))
        first, first_dim = cuts.setdefault(id(weight), (name, dim))
        if dim != first_dim:
            problems.append(f"{first} and {name} share a weight, but are cut along dim {first_dim} and {dim} of it")
    return problems


def apply_tensor_plan(model: nn.Module, mesh: DeviceMesh, plan: TensorPlan) -> None:
    """Cut `model` (whole, or one pipeline stage of it) in place over the one-dimensional tp `mesh`.

    Entries for parts that this stage does not hold are passed over: call `check_plan` on the whole model first.
    """
    if mesh.device_type == "cpu":
        exchange_parts()
    held = {name for name, _ in model.named_modules()}
    here = {
        pattern: style for pattern, style in plan.items() if any(covered_by({pattern: style}, name) for name in held)
    }
    parallelize_module(model, mesh, here, src_data_rank=None)
