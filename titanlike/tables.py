"""What a run has to know of an architecture besides its model: the tables that say how it is cut.

They are names of one module: `parallelize.<name>` for a built-in architecture. A class of your own that is given by
import path names it in its attribute `tables = "my_package.my_tables"`; without that it is the module that the class
was found in. docs/new-architecture.md walks through one.

| name in the module | what it is | without it |
|---|---|---|
| `tensor_plan(config, tp, sequence_parallel)` | how each module is cut over tp | `mesh.tp` must be 1 |
| `FIRST_PARTS`, `LAST_PARTS` | the modules beside `layers` that `embed` and `head` use | found by running those two |
| `stage_costs(config, seq_len)` | FLOPs per token of embedding, each layer, head | from the weights of `nn.Linear` |
| `cut_experts(model, expert_mesh)` | spreads experts over ranks: parallelize/experts.py | `mesh.ep` must be 1 |
| `RECOMPUTE_KEEPS` | operations that selective checkpointing keeps besides the usual ones | none |
| `HF` | names and config in Hugging Face folders: parallelize/hf.py | no import or export |
| `flop_shape(plain)` | fields of metrics.flops.ModelShape that it counts otherwise | counted in the model |
| `shrink(model, tp)` | sizes for verify | those of titanlike/verify/shrink.py |
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from titanlike import architectures
from titanlike.errors import UserError

if TYPE_CHECKING:
    from torch import nn

    from parallelize.hf import HuggingFace
    from parallelize.tensor import TensorPlan
    from titanlike.config import Config


@functools.cache
def tables_of(architecture: str) -> Tables:
    """The tables of an architecture, by the name or import path that `[model]` has.

    Raises:
        UserError: there is no such architecture, or the module that it names cannot be imported.
    """
    found = architectures.resolve(architecture)
    if ":" not in architecture:
        name = f"parallelize.{architecture}"
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"model.architecture {architecture!r} has a model, models/{architecture}.py, but no tables: "
                f"parallelize/{architecture}.py is missing"
            )
        return Tables(importlib.import_module(name))
    name = getattr(found.model_class, "tables", None)
    if name is None:
        return Tables(importlib.import_module(architecture.split(":")[0]))
    try:
        return Tables(importlib.import_module(name))
    except (ImportError, TypeError, AttributeError, ValueError) as error:
        raise UserError(
            f"model.architecture {architecture!r}: its tables are to be in {name!r}, which cannot be imported: {error}"
        ) from error


def check_architecture(config: Config, vocab_size: int) -> None:
    """Raise `UserError` for a model that is not what one here has to be, or tables that do not fit it on the config's
    mesh. `vocab_size` is the tokenizer's. Nothing is computed, and no process group is needed."""
    name, mesh = config.model.architecture, config.mesh
    plain = architectures.plain_model(name, config.model_config_for(vocab_size))
    tables = tables_of(name)
    if mesh.tp > 1:
        tables.tensor_plan(plain, mesh.tp, mesh.sequence_parallel)
    if config.n_stages > 1:
        tables.parts(plain)
    if mesh.ep > 1 and tables.get("cut_experts") is None:
        raise UserError(f"mesh.ep needs a function cut_experts, and {tables.name} has none: use mesh.ep = 1")


class Tables:
    """The tables in a module, and what stands in for those that it does not have."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.name = module.__name__

    def get(self, name: str) -> Any:
        """What the module has under a name, or None."""
        return getattr(self.module, name, None)

    def tensor_plan(self, plain: Any, tp: int, sequence_parallel: bool) -> TensorPlan:
        """The plan by which `plain`, the whole model on meta, is cut over tp ranks.

        Raises:
            UserError: there is none, or it does not fit the model.
        """
        from parallelize.tensor import check_plan

        plan_of = self.get("tensor_plan")
        if plan_of is None:
            raise UserError(
                f"mesh.tp = {tp} needs a tensor plan, and {self.name} has no tensor_plan: write one "
                "(docs/new-architecture.md), or use mesh.tp = 1"
            )
        plan = plan_of(plain.config, tp, sequence_parallel)
        if not isinstance(plan, dict):
            raise UserError(f"{self.name}.tensor_plan must return a dict of names and styles, not {plan!r}")
        try:
            check_plan(plain, plan)
        except ValueError as error:
            raise UserError(f"{self.name}.tensor_plan does not fit the model: {error}") from None
        return plan

    def parts(self, plain: Any) -> tuple[Sequence[str], Sequence[str]]:
        """The names of the modules beside `layers` that the first pipeline stage holds, and the last.

        Raises:
            UserError: a module of the model is in neither, or in both, or not there.
        """
        first, last = self.get("FIRST_PARTS"), self.get("LAST_PARTS")
        given = first is not None or last is not None
        if not given:
            first, last = _used_by(plain)
        first, last = tuple(first or ()), tuple(last or ())
        others = [
            name
            for name, module in plain.named_children()
            if name != "layers" and any(True for _ in module.parameters())
        ]
        problems = [f"{name} is in neither" for name in others if name not in (*first, *last)]
        problems += [f"{name} is in both" for name in first if name in last]
        problems += [f"{name} is no module of the model" for name in (*first, *last) if not hasattr(plain, name)]
        problems += [f"the parameter {name} belongs to no module" for name, _ in plain.named_parameters(recurse=False)]
        if problems:
            how = "" if given else " (not given, so found by running embed and head)"
            raise UserError(
                f"FIRST_PARTS and LAST_PARTS of {self.name}{how} do not fit the model: {'; '.join(problems)}"
            )
        for method, parts in (("embed", first), ("head", last)):
            used = _misses(plain, method, [name for name in others if name not in parts])
            if used:
                raise UserError(
                    f"{method} of the model uses {used}, which FIRST_PARTS and LAST_PARTS of {self.name} have on "
                    "another pipeline stage: a weight that both ends use needs a module on each: tied_parameters"
                )
        return first, last

    def head_parts(self, plain: Any) -> tuple[str, ...]:
        """The modules beside `layers` that `head` uses and `embed` does not; none where that cannot be told, as of a
        model that a pipeline could not be made of."""
        try:
            return tuple(self.parts(plain)[1])
        except UserError:
            return ()

    def stage_costs(self, plain: Any, seq_len: int) -> tuple[float, list[float], float]:
        """Forward FLOPs per token of the embedding, of each layer, and of the head: what stages are balanced by."""
        costs = self.get("stage_costs")
        if costs is not None:
            first, layers, last = costs(plain.config, seq_len)
            if len(layers) != len(plain.layers):
                raise UserError(
                    f"{self.name}.stage_costs gives the costs of {len(layers)} layers, and the model has "
                    f"{len(plain.layers)}"
                )
            return first, layers, last
        _, last = self.parts(plain)
        head = sum(_matmul_flops(getattr(plain, name)) for name in last)
        return 0.0, [_matmul_flops(layer) for layer in plain.layers.values()], head

    @property
    def recompute_keeps(self) -> tuple[Any, ...]:
        """Operations whose results selective checkpointing keeps besides the usual ones."""
        return tuple(self.get("RECOMPUTE_KEEPS") or ())

    @property
    def hf(self) -> tuple[HuggingFace, ...]:
        """The forms that the architecture has in Hugging Face folders."""
        return tuple(self.get("HF") or ())


def stream_width(plain: Any) -> int:
    """The width of what blocks hand on, [batch, seq, width], of a whole model on meta."""
    return _embedded(plain).shape[-1]


def _embedded(plain: Any) -> Any:
    import torch

    with torch.no_grad():
        return plain.embed(torch.zeros(1, 1, dtype=torch.int64, device="meta"))


def _misses(plain: Any, method: str, absent: list[str]) -> str:
    """Which of the modules `absent` the method `embed` or `head` cannot do without; empty if none."""
    x = _embedded(plain)
    for name in absent:
        module = getattr(plain, name)
        setattr(plain, name, None)
        try:
            plain.head(x) if method == "head" else _embedded(plain)
        except (AttributeError, TypeError) as error:
            if "NoneType" in str(error):
                return name
        finally:
            setattr(plain, name, module)
    return ""


def _matmul_flops(module: nn.Module) -> float:
    from torch import nn

    return float(sum(2 * m.weight.numel() for m in module.modules() if isinstance(m, nn.Linear)))


def _used_by(plain: Any) -> tuple[list[str], list[str]]:
    """The children of the model on meta that `embed` and `head` call."""
    import torch

    def called(run: Any) -> tuple[list[str], Any]:
        names: list[str] = []
        handles = [
            module.register_forward_pre_hook(lambda *_, name=name: names.append(name))
            for name, module in plain.named_children()
        ]
        try:
            with torch.no_grad():
                return names, run()
        finally:
            for handle in handles:
                handle.remove()

    first, x = called(lambda: _embedded(plain))
    last, _ = called(lambda: plain.head(x))
    return first, last
