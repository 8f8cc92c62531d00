"""Finding a model by name, and reading its `[model]` keys off its config dataclass.

An architecture is a plain `nn.Module` class with `config_class`, a frozen stdlib dataclass, and what REQUIRED lists.
Built-in ones are modules of `models` that name their class in `ARCHITECTURE`; any other is given by import path,
`"package.module:Class"`. Presets are the module's `PRESETS`, if it has any. The keys that `[model]` accepts are exactly
the dataclass's fields, and a docstring under a field is its help text, so a new architecture needs no config code. How
it is cut is in its tables: titanlike/tables.py.
"""

import ast
import dataclasses
import functools
import importlib
import inspect
import itertools
import operator
import pkgutil
import re
import textwrap
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import Field, ValidationError, create_model

from titanlike.config_elsewhere import value_elsewhere
from titanlike.config_keys import nearest
from titanlike.errors import UserError
from titanlike.section import Section

REQUIRED = ("config_class", "context", "embed", "head", "init_parameter", "tied_parameters")
"""What a model class has, besides `config` and `layers` (a ModuleDict) once it is made: see models/llama.py."""


@dataclass(frozen=True)
class Architecture:
    """A model class, its config dataclass, that dataclass as a config section, and its named presets."""

    name: str
    model_class: type
    config_class: type
    section: type[Section]
    presets: dict[str, object]


@functools.cache
def resolve(name: str) -> Architecture:
    """The architecture called `name`: a module of `models`, or `package.module:Class`.

    Raises:
        UserError: there is no such module or class, or it has no config dataclass.
    """
    if re.fullmatch(r"\w+(\.\w+)*:\w+", name):
        module_name, _, class_name = name.partition(":")
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise UserError(
                f"model.architecture {name!r}: the module {module_name!r} cannot be imported: {error}"
            ) from error
        model_class = getattr(module, class_name, None)
        if model_class is None:
            raise UserError(f"model.architecture {name!r}: the module {module_name!r} has no class {class_name!r}")
    else:
        module = importlib.import_module(f"models.{name}") if name in _modules() else None
        model_class = getattr(module, "ARCHITECTURE", None)
        if model_class is None:
            found = value_elsewhere("model.architecture", name) or nearest(name, built_in())
            hint = f"there are {', '.join(built_in())}" if found is None else f"the nearest is {found!r}"
            raise UserError(
                f"model.architecture {name!r} is not known: {hint}, and a class of your own is given as "
                "'package.module:Class'"
            )
    config_class = getattr(model_class, "config_class", None)
    if not (isinstance(config_class, type) and dataclasses.is_dataclass(config_class)):
        raise UserError(f"model.architecture {name!r}: its config_class must be a dataclass")
    return Architecture(name, model_class, config_class, _section_of(config_class), getattr(module, "PRESETS", {}))


def _section_of(config_class: type) -> type[Section]:
    """A section with the dataclass's fields: the same types (nested dataclasses become tables), defaults and docs."""
    hints, docs = typing.get_type_hints(config_class), _field_docs(config_class)
    fields: dict[str, typing.Any] = {}
    for field in dataclasses.fields(config_class):
        settings: dict[str, typing.Any] = {"description": docs.get(field.name)}
        if field.default_factory is not dataclasses.MISSING:
            settings["default_factory"] = field.default_factory
        elif field.default is not dataclasses.MISSING:
            settings["default"] = field.default
        annotation = _with_sections(hints[field.name])
        if field.name == "vocab_size":  # never demanded: the tokenizer knows it
            annotation, settings["default"] = annotation | None, None
        fields[field.name] = (annotation, Field(**settings))
    return create_model(config_class.__name__, __base__=Section, **fields)


def _with_sections(annotation: typing.Any) -> typing.Any:
    """The annotation with every dataclass in it replaced by its section."""
    if dataclasses.is_dataclass(annotation):
        return _section_of(annotation)
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return functools.reduce(operator.or_, (_with_sections(arg) for arg in args))
    if origin in (list, tuple, dict):
        return types.GenericAlias(origin, tuple(_with_sections(arg) for arg in args))
    return annotation


def _field_docs(config_class: type) -> dict[str, str]:
    """The docstring under each field; empty where the source is not at hand."""
    docs: dict[str, str] = {}
    for base in reversed(config_class.__mro__[:-1]):
        try:
            statements = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError):
            continue
        body = statements[0].body if isinstance(statements[0], ast.ClassDef) else []
        for statement, after in itertools.pairwise(body):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    docs[statement.target.id] = inspect.cleandoc(str(after.value.value))
    return docs


def preset(architecture: Architecture, name: str) -> typing.Any:
    """The config dataclass of a preset.

    Raises:
        UserError: the architecture has no preset of this name.
    """
    if name not in architecture.presets:
        known = ", ".join(architecture.presets) or "none"
        raise UserError(f"model.preset {name!r} is not a preset of {architecture.name}: its presets are {known}")
    return architecture.presets[name]


def build(architecture: Architecture, values: Mapping[str, object], vocab_size: int | None) -> typing.Any:
    """The architecture's dataclass from the values of its section.

    A vocab_size of None among the values becomes `vocab_size`, and 1 while that is None too.

    Raises:
        UserError: the dataclass refuses the values.
    """
    values = dict(values)
    if "vocab_size" in values and values["vocab_size"] is None:
        values["vocab_size"] = vocab_size or 1
    try:
        return _from_values(architecture.config_class, values)
    except (ValueError, ArithmeticError) as error:
        raise UserError(f"[model]: {error}") from error


def from_json(name: str, values: Mapping[str, typing.Any], what: str = "the checkpoint's model") -> typing.Any:
    """The config dataclass of the architecture `name` out of JSON (dataclasses.asdict of one); `what` is for an error.

    Raises:
        UserError: the values don't fit the architecture, which may have changed since.
    """
    found = resolve(name)
    try:
        return build(found, dict(found.section.model_validate(dict(values))), None)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(f"{what} does not fit the architecture {name}: {key}: {first['msg']}") from None


def plain_model(name: str, config: typing.Any) -> typing.Any:
    """The whole model on the meta device.

    Raises:
        UserError: it is not what a model here has to be.
    """
    import torch
    from torch import nn

    model_class = resolve(name).model_class
    lacking = [attribute for attribute in REQUIRED if not hasattr(model_class, attribute)]
    if lacking:
        raise UserError(
            f"model.architecture {name!r}: {model_class.__name__} lacks {', '.join(lacking)} (docs/new-architecture.md)"
        )
    with torch.device("meta"):
        model = model_class(config)
    if not isinstance(model, nn.Module) or not isinstance(getattr(model, "layers", None), nn.ModuleDict):
        raise UserError(
            f"model.architecture {name!r}: {model_class.__name__} must be an nn.Module whose `layers` is an "
            "nn.ModuleDict (docs/new-architecture.md)"
        )
    state = getattr(model_class, "state_buffers", ())
    lost = [buffer for buffer, _ in model.named_buffers() if buffer.rpartition(".")[2] not in state]
    if lost:
        raise UserError(
            f"model.architecture {name!r}: the buffers {', '.join(lost[:3])}{', ...' * (len(lost) > 3)} would be 0 in "
            "a run: compute in context() what depends on positions, and name in `state_buffers` what starts at 0 "
            "(docs/new-architecture.md)"
        )
    if getattr(model, "config", None) != config:
        raise UserError(f"model.architecture {name!r}: {model_class.__name__} must keep its config as `self.config`")
    return model


def built_in() -> list[str]:
    """The names of the architectures that come with titanlike: modules of `models` with an ARCHITECTURE."""
    return [name for name in _modules() if hasattr(importlib.import_module(f"models.{name}"), "ARCHITECTURE")]


def _modules() -> list[str]:
    import models

    return [info.name for info in pkgutil.iter_modules(models.__path__)]


def _from_values(config_class: type, values: Mapping[str, object]) -> typing.Any:
    hints = typing.get_type_hints(config_class)
    return config_class(**{name: _from_value(hints[name], value) for name, value in values.items()})


def _from_value(annotation: typing.Any, value: typing.Any) -> typing.Any:
    """Undo `_with_sections` for a value: sections become the dataclasses that they were made from."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(value, Section):
        inner = [arg for arg in (annotation, *args) if dataclasses.is_dataclass(arg)]
        return _from_values(inner[0], dict(value))
    if origin in (list, tuple) and args:
        return origin(_from_value(args[0], item) for item in value)
    return value
