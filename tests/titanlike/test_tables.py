"""The tables of an architecture: found, made up where they are missing, and refused by name where they are wrong."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from models.llama import Llama
from tests.titanlike import own_architecture
from tests.titanlike.own_architecture import Own
from titanlike.architectures import plain_model, resolve
from titanlike.config import load_config
from titanlike.errors import UserError
from titanlike.tables import check_architecture, stream_width, tables_of
from titanlike.verify import verify


class Bare(Own):
    """A model without any table: this module has none."""


class Elsewhere(Own):
    """Its tables are somebody else's."""

    tables = "tests.titanlike.own_architecture"


BARE = f"{__name__}:Bare"


def define(monkeypatch: pytest.MonkeyPatch, module: str, **names: Any) -> str:
    """Make an importable module with these names; its name."""
    made = types.ModuleType(module)
    vars(made).update(names)
    monkeypatch.setitem(sys.modules, module, made)
    tables_of.cache_clear()
    resolve.cache_clear()
    return module


def checked(architecture: str, **overrides: Any) -> str:
    """What a run of the architecture is refused with; empty if it is not."""
    values = {name.replace("__", "."): value for name, value in overrides.items()}
    config = load_config(None, {"model.architecture": architecture, "mesh.dp": 1, **values})
    try:
        check_architecture(config, 257)
    except UserError as error:
        return str(error)
    return ""


def test_without_tables_parts_costs_and_width_are_found() -> None:
    """Symptom: an architecture without tables cannot even be trained with dp and pp."""
    plain = plain_model(BARE, Own.config_class(vocab_size=50))
    tables = tables_of(BARE)
    assert tables.parts(plain) == (("embedding",), ("output",))
    assert tables.stage_costs(plain, 99) == (0.0, [2.0 * 2 * 96 * 400] * 6, 2.0 * 96 * 50)
    assert stream_width(plain) == 96
    assert tables.hf == () and tables.recompute_keeps == ()


def test_without_tables_dp_and_pp_are_the_same_run() -> None:
    assert checked(BARE, mesh__pp=2) == ""
    report = verify(load_config(None, {"model.architecture": BARE, "mesh.pp": 2, "mesh.dp": 2}))
    assert report.same, report.reading


def test_tp_without_a_plan_is_refused_before_ranks_start() -> None:
    assert checked(BARE, mesh__tp=2) == (
        f"mesh.tp = 2 needs a tensor plan, and {__name__} has no tensor_plan: write one (docs/new-architecture.md), "
        "or use mesh.tp = 1"
    )


def test_a_class_says_where_its_tables_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked(f"{__name__}:Elsewhere", mesh__tp=2, mesh__pp=2) == ""
    assert tables_of(f"{__name__}:Elsewhere").module is own_architecture
    for wrong in ("no_such.tables", 3, "tests.titanlike.no_such_tables"):
        lost = define(monkeypatch, "lost", Lost=type("Lost", (Own,), {"tables": wrong}))
        assert checked(f"{lost}:Lost").startswith(
            f"model.architecture 'lost:Lost': its tables are to be in {wrong!r}, which cannot be imported: "
        )


def test_a_built_in_model_without_tables_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "parallelize.llama" else find(name))
    tables_of.cache_clear()
    assert "parallelize/llama.py is missing" in checked("llama")
    tables_of.cache_clear()


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"layers.*.scale": None}, "no entry covers layers.*.scale.weight, layers.*.scale.bias"),
        (
            {"output": None, "layers.*.mixer.enter": None},
            "no entry covers layers.*.mixer.enter.weight, layers.*.mixer.enter.bias; no entry covers output.weight, "
            "output.bias",
        ),
        ({"layers.*.mixer.exit": own_architecture.Replicated()}, "layers.*.mixer.exit matches no module"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_with_the_name_of_its_module(
    plan: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tensor_plan(config: Any, tp: int, sequence_parallel: bool) -> dict[str, Any]:
        made = own_architecture.tensor_plan(config, tp, sequence_parallel) | plan
        return {name: style for name, style in made.items() if style is not None}

    define(monkeypatch, "planned", tensor_plan=tensor_plan, Planned=type("Planned", (Own,), {}))
    assert checked("planned:Planned", mesh__tp=2) == f"planned.tensor_plan does not fit the model: {said}"


def test_a_plan_that_is_no_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    define(monkeypatch, "none", tensor_plan=lambda *_: None, Planned=type("Planned", (Own,), {}))
    assert checked("none:Planned", mesh__tp=2) == "none.tensor_plan must return a dict of names and styles, not None"


@pytest.mark.parametrize(
    ("first", "last", "said"),
    [
        (("embedding",), (), "output is in neither"),
        (("embedding", "output"), ("output",), "output is in both"),
        (("embedding", "wte"), ("output",), "wte is no module of the model"),
        (None, ("output",), "embedding is in neither"),
    ],
)
def test_parts_that_do_not_fit_are_refused_with_pp(
    first: Any, last: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: a module that no stage was given is on all of them, and its copies drift apart."""
    names = {"FIRST_PARTS": first, "LAST_PARTS": last} if first is not None else {"LAST_PARTS": last}
    define(monkeypatch, "parted", Parted=type("Parted", (Own,), {}), **names)
    assert checked("parted:Parted") == ""  # nothing is cut
    text = checked("parted:Parted", mesh__pp=2)
    assert text == f"FIRST_PARTS and LAST_PARTS of parted do not fit the model: {said}"


class WithScale(Own):
    """A parameter of the model's own, and a module that neither embed nor head calls."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.scale = torch.nn.Parameter(torch.ones(3))
        self.unused = torch.nn.Linear(2, 2)


def test_parameters_outside_of_parts_are_refused_with_pp() -> None:
    assert checked(f"{__name__}:WithScale") == ""
    assert checked(f"{__name__}:WithScale", mesh__pp=2) == (
        f"FIRST_PARTS and LAST_PARTS of {__name__} (not given, so found by running embed and head) do not fit the "
        "model: unused is in neither; the parameter scale belongs to no module"
    )


class UsesBothEnds(Own):
    """A head that is the embedding's weight, without a module for it."""

    def head(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(x) @ self.output.weight @ self.embedding.weight.T


def test_a_head_that_uses_the_embedding_itself_is_refused_with_pp() -> None:
    """Symptom: AttributeError on the last stage, whose embedding is elsewhere."""
    assert checked(f"{__name__}:UsesBothEnds") == ""
    assert checked(f"{__name__}:UsesBothEnds", mesh__pp=2).startswith(
        f"head of the model uses embedding, which FIRST_PARTS and LAST_PARTS of {__name__} have on"
    )


def test_costs_of_other_layers_than_the_model_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: the layers that a table forgot are on no stage, and the run trains without them."""
    mine = define(monkeypatch, "costs", Mine=type("Mine", (Own,), {}), stage_costs=lambda *_: (0.0, [1.0] * 5, 0.0))
    plain = plain_model(f"{mine}:Mine", Own.config_class(vocab_size=50))
    with pytest.raises(UserError, match="costs.stage_costs gives the costs of 5 layers, and the model has 6"):
        tables_of(f"{mine}:Mine").stage_costs(plain, 99)


def test_a_class_that_is_no_model_here_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: AttributeError on every rank, some minutes later."""

    class Half(torch.nn.Module):
        config_class = Own.config_class
        embed = head = None

        def __init__(self, config: Any) -> None:
            super().__init__()

    class ListOfLayers(Own):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.layers = torch.nn.ModuleList(self.layers.values())

    class NoConfig(Own):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.config = None

    class Buffers(Own):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            for name in ("mask", "inv_freq", "steps"):
                self.layers["0"].register_buffer(name, torch.ones(3))
            self.layers["1"].register_buffer("seen", torch.zeros(3))

    classes = {made.__name__: made for made in (Half, ListOfLayers, NoConfig, Buffers)}
    Named = type("Named", (Buffers,), {"state_buffers": ("mask", "inv_freq", "steps", "seen")})
    define(monkeypatch, "odd", Named=Named, **classes)
    assert checked("odd:Named") == ""
    assert "the buffers layers.0.mask, layers.0.inv_freq, layers.0.steps, ... would be 0" in checked("odd:Buffers")
    assert checked("odd:Half") == (
        "model.architecture 'odd:Half': Half lacks context, init_parameter, tied_parameters (docs/new-architecture.md)"
    )
    assert "whose `layers` is an nn.ModuleDict" in checked("odd:ListOfLayers")
    assert "must keep its config as `self.config`" in checked("odd:NoConfig")


def test_a_llama_of_ones_own_can_use_llamas_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its names in Hugging Face folders: the tables go with the names of parameters, not with the class."""
    mine = define(monkeypatch, "mine", Mine=type("Mine", (Llama,), {"tables": "parallelize.llama"}))
    assert checked(f"{mine}:Mine", mesh__tp=2, mesh__pp=2, model__preset=None) == ""
    assert [form.class_name for form in tables_of(f"{mine}:Mine").hf] == ["LlamaForCausalLM"]
