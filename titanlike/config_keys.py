"""The keys of a config as data: every dotted path with its type, default and meaning, and the nearest to a wrong path.

Everything that speaks about keys (help, overrides, error sentences) works from one table that is read off the pydantic
sections, so no list of keys is kept by hand. `[]` in a path stands for any element of a list, `*` for any name in a
table whose names the user chooses.
"""

import difflib
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from titanlike.config_elsewhere import key_elsewhere

MISSING = PydanticUndefined  # the default of a key that must be given


@dataclass(frozen=True)
class Key:
    """One key. `section` is true when it is a table with keys of its own, or holds such tables."""

    path: str
    annotation: Any
    default: object
    doc: str
    section: bool = False

    @property
    def is_element(self) -> bool:
        """Whether it stands for any element of a list or of a table of tables: nothing to suggest or to list."""
        return self.path.endswith(("[]", ".*"))


def keys_of(section: type[BaseModel], prefix: str = "") -> dict[str, Key]:
    """All keys below `section`, by dotted path, tables before their contents, in the order of the source."""
    found: dict[str, Key] = {}
    for name, field in section.model_fields.items():
        path = f"{prefix}{name}"
        inner = list(_sections_in(field.annotation))
        # Not for sections: making one may import its model, and says no more than the defaults of its keys.
        default = field.default if inner else field.get_default(call_default_factory=True)
        found[path] = Key(path, field.annotation, default, field.description or "", section=bool(inner))
        for suffix, nested in inner:
            element = path
            for part in re.findall(r"\[\]|\.\*", suffix):
                element += part
                found[element] = Key(element, nested, MISSING, "", section=True)
            found |= keys_of(nested, f"{element}.")
    return found


def _sections_in(annotation: Any) -> Iterator[tuple[str, type[BaseModel]]]:
    """The sections an annotation may hold, each with what stands between the key and its name: "", "[]" or ".*"."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield "", annotation
    elif origin is typing.Annotated:
        yield from _sections_in(args[0])
    elif origin in (typing.Union, types.UnionType):
        for arg in args:
            yield from _sections_in(arg)
    elif origin in (list, tuple):
        for arg in args:
            yield from (("[]" + suffix, nested) for suffix, nested in _sections_in(arg))
    elif origin is dict:
        yield from ((".*" + suffix, nested) for suffix, nested in _sections_in(args[1]))


def general(path: str) -> str:
    """The path with every list index as `[]`."""
    return re.sub(r"\[\d+\]", "[]", path)


def entry(path: str, keys: Mapping[str, Key]) -> str | None:
    """The entry of `keys` for a concrete path (`optimizer.groups[0].match`: `optimizer.groups[].match`), or None."""
    path = general(path)
    if path in keys:
        return path
    for candidate in keys:
        if "*" in candidate and re.fullmatch(re.escape(candidate).replace(r"\*", r"[^.]+"), path):
            return candidate
    return None


NEAR = 0.7
"""The least `similarity` of a mistyped name to the one that was meant; below, a hint would lead astray."""

SURE = 0.9
"""The least where the section is another one."""

ALIKE = 0.6
"""The least of a mistyped section, and of names that differ by a letter, which in short ones is much."""

ANYWHERE = ("enable", "mode", "dir", "scope", "format")
"""names that any section could have"""


def nearest(path: str, candidates: Iterable[str]) -> str | None:
    """The candidate that `path` was meant to be: the one most like it, if it is near, or None.

    The last name counts most, so the right name in a wrong section is found too; so are other trainers' names.
    """
    candidates = list(candidates)
    section, _, leaf = path.lower().replace("-", "_").rpartition(".")

    def score(candidate: str) -> float:
        other_section, _, other_leaf = candidate.rpartition(".")
        if not section:
            # Only a name was given: prefer a top-level name, then a key of that name anywhere.
            return similarity(leaf, other_leaf) - (0.01 if other_section else 0.0)
        # What is exactly right, the name more than the section, is hardly ever the part that was mistyped; less so a
        # name of two letters, which a typo makes of another one (eps, ep).
        exact = 0.1 * min(len(leaf), 3) * (leaf == other_leaf) + 0.1 * (section == other_section)
        # Sections less alike than a typo makes them are equally far: the first of them in the config's order it is.
        near = similarity(section, other_section)
        return 0.7 * similarity(leaf, other_leaf) + 0.3 * (near if near >= ALIKE else 0.0) + exact

    def likeness(candidate: str) -> float:
        """Of the last names, and 0 where they are not near."""
        found = similarity(leaf, candidate.rpartition(".")[2])
        by_a_letter = abs(len(leaf) - len(candidate.rpartition(".")[2])) <= 1
        return found if found >= (ALIKE if by_a_letter else NEAR) else 0.0

    def best(among: Iterable[str]) -> str | None:
        return max(among, key=score, default=None)

    here = [one for one in candidates if not section or similarity(section, one.rpartition(".")[0]) >= ALIKE]
    found = None
    if section and section not in {one.rpartition(".")[0] for one in candidates}:
        named = [one for one in candidates if one.rpartition(".")[2] == section]
        found = named[0] if len(named) == 1 else None  # tokenizer.path is data.tokenizer
    if found is None:
        found = best(one for one in here if likeness(one) >= SURE)
    if found is None and (elsewhere := key_elsewhere(path)) in candidates:
        found = elsewhere
    if found is None:
        found = best(one for one in here if likeness(one))
    if found is None:
        # In another section: a name that many have, or could have, says nothing of one of them.
        leaves = [one.rpartition(".")[2] for one in candidates]
        alone = [one for one, other in zip(candidates, leaves) if leaves.count(other) == 1 and other not in ANYWHERE]
        found = best(one for one in alone if likeness(one) >= SURE)
    return found


def similarity(a: str, b: str) -> float:
    """Between 0 and 1. The order of the letters counts half, the letters themselves half: a swap stays close."""
    matcher = difflib.SequenceMatcher(None, a, b, autojunk=False)
    return (matcher.ratio() + matcher.quick_ratio()) / 2


def choices(annotation: Any) -> list[str]:
    """The values that a Literal (also inside Optional or Annotated) allows, or an empty list."""
    if typing.get_origin(annotation) is typing.Literal:
        return [str(value) for value in typing.get_args(annotation)]
    return [choice for arg in typing.get_args(annotation) for choice in choices(arg)]


def type_name(annotation: Any) -> str:
    """The type of a key as a reader of TOML would say it: "an integer", "a list of strings", "one of a, b"."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_name(args[0])
    if origin is typing.Literal:
        return "one of " + ", ".join(str(value) for value in args)
    if origin in (typing.Union, types.UnionType):
        names = list(dict.fromkeys(type_name(arg) for arg in args if arg is not type(None)))
        return " or ".join(name for name in names if name != "an integer" or "a number" not in names)
    if origin in (list, tuple) and args:
        one = type_name(args[0])
        plural = {"an integer": "integers", "a number": "numbers", "a string": "strings", "a table": "tables"}
        return f"a list of {plural.get(one, f'values, each {one}')}"
    if dict in (origin, annotation) or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "a table"
    simple = {
        bool: "true or false",
        int: "an integer",
        float: "a number",
        str: "a string",
        Path: "a path",
        list: "a list",
    }
    return simple.get(annotation, str(annotation).removeprefix("typing."))


def holds(annotation: Any, kinds: tuple[type, ...]) -> bool:
    """Whether an annotation allows one of these plain types (looking into Optional, Union and Annotated)."""
    if typing.get_origin(annotation) is typing.Literal:
        return any(type(value) in kinds for value in typing.get_args(annotation))
    if typing.get_origin(annotation) in (typing.Union, types.UnionType, typing.Annotated):
        return any(holds(arg, kinds) for arg in typing.get_args(annotation))
    return annotation in kinds
