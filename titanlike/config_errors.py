"""From what is wrong with a config to one sentence that a person can act on.

Types and ranges are checked by pydantic, key names by a walk over the table of keys, which can then suggest the nearest
name from the whole config. A mistake's place (file or command line) comes from the caller's `where(path)`.
"""

import dataclasses
import json
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from titanlike.config_elsewhere import value_elsewhere
from titanlike.config_keys import Key, choices, entry, general, keys_of, nearest, similarity, type_name
from titanlike.errors import UserError

SectionType = TypeVar("SectionType", bound=BaseModel)
Where = Callable[[str], str]


def nowhere(path: str) -> str:
    """The `where` of a config that was made in Python."""
    return ""


def unknown_key(path: str, keys: Mapping[str, Key], where: Where = nowhere) -> UserError:
    """The error for a key that does not exist: with the nearest one that does, or those that there are."""
    suggestion = nearest(general(path).replace('"', ""), [name for name, key in keys.items() if not key.is_element])
    above = path.rpartition(".")[0]
    if suggestion is None:
        section = general(above) if entry(above, keys) is not None else ""
        inside = [name for name in keys if name.rpartition(".")[0] == section and not keys[name].is_element]
        names = ", ".join(name.rpartition(".")[2] for name in inside)
        there = f"[{section}] has {names}" if section else f"the sections are {names}"
        return UserError(f"unknown key {path}{where(path)}: {there}")
    if "[" in above and suggestion.startswith(f"{general(above)}."):
        suggestion = above + suggestion.removeprefix(general(above))  # name the list's element that was written
    return UserError(f"unknown key {path}{where(path)}: the nearest valid key is {suggestion}")


def no_effect(path: str, valid: Sequence[str]) -> UserError:
    """The error for a key on the command line of a script that has a meaning for others alone, `valid`."""
    found = nearest(path, valid)
    hint = f"what has is --{', --'.join(valid)}" if found is None else f"the nearest that has is --{found}"
    return UserError(f"--{path} has no effect here: {hint}")


def check_plain_typos(paths: Iterable[str], keys: Mapping[str, Key], where: Where = nowhere) -> None:
    """Raise `UserError` for the first path that is surely a typing mistake of a key in its own section.

    `keys` are those that need no model to be imported, and torch with it: so the commonest mistake is told at once.
    What is not plain is left to `check_keys`, with all keys.
    """
    for path in paths:
        section, _, leaf = path.rpartition(".")
        bare = re.fullmatch(r"[\w.-]+", path) is not None
        if not bare or section == "model" or path.startswith("model.") or entry(path, keys) is not None:
            continue
        beside = [name for name in keys if name.rpartition(".")[0] == section]
        found = nearest(path, beside)
        if found is not None and similarity(leaf, found.rpartition(".")[2]) >= 0.8:
            raise unknown_key(path, {name: keys[name] for name in beside}, where)


def check_keys(raw: Mapping[str, Any], keys: Mapping[str, Key], where: Where = nowhere) -> None:
    """Walk nested tables and raise `UserError` for the first key that is not in `keys`, at any depth.

    A table where a list belongs, or the other way round, is left to the check of the types.
    """

    def walk(value: Any, path: str) -> None:
        at = entry(path, keys)
        if isinstance(value, Mapping) and (not path or any(key.startswith(f"{at}.") for key in keys)):
            for name, inner in value.items():
                below = f"{path}.{_shown(name)}" if path else _shown(name)
                if entry(below, keys) is None:
                    # A whole table of an unknown name: speak about the first key in it, that is what was meant.
                    while isinstance(inner, Mapping) and inner:
                        name, inner = next(iter(inner.items()))
                        below = f"{below}.{_shown(name)}"
                    raise unknown_key(below, keys, where)
                walk(inner, below)
        elif isinstance(value, list) and f"{at}[]" in keys:
            for index, inner in enumerate(value):
                walk(inner, f"{path}[{index}]")

    walk(raw, "")


def _shown(name: str) -> str:
    """A key as it has to be written in TOML: in quotes when it has dots, blanks or line breaks."""
    return name if re.fullmatch(r"[\w-]+", name) else json.dumps(name, ensure_ascii=False)


def validate(
    section: type[SectionType],
    raw: Mapping[str, Any],
    prefix: str = "",
    keys: Mapping[str, Key] | None = None,
    where: Where = nowhere,
) -> SectionType:
    """`section` from plain values, strictly typed. `prefix` is the path of the section ("model."), for the messages.

    Raises:
        UserError: the first mistake, as one sentence.
    """
    try:
        # Through JSON, because there pydantic's strict mode means what a reader of TOML expects: a list may become a
        # tuple and a string a path, but a string never becomes a number.
        return section.model_validate_json(json.dumps(raw, default=plain), strict=True, context={"where": where})
    except ValidationError as error:
        raise UserError(_sentence(error, prefix, keys_of(section, prefix) if keys is None else keys, where)) from error


def plain(value: Any) -> Any:
    """A config value, or a dataclass, as what JSON and TOML can hold."""
    if dataclasses.is_dataclass(value):
        return dataclasses.asdict(value)
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else str(value)


def _sentence(error: ValidationError, prefix: str, keys: Mapping[str, Key], where: Where) -> str:
    """The first mistake of a ValidationError."""
    details = error.errors(include_url=False)
    path = _path(details[0]["loc"], prefix, keys)
    # A key of several types gives one complaint per type; one about the value says more than one about the type.
    same = [detail for detail in details if _path(detail["loc"], prefix, keys) == path]
    detail = next((d for d in same if d["type"] in _ABOUT_THE_VALUE), same[0])
    kind, context, value = detail["type"], detail.get("ctx", {}), detail["input"]
    if kind == "value_error":
        cause = context["error"]
        return str(cause) if isinstance(cause, UserError) else f"{path}{where(path)}: {cause}".removeprefix(": ")
    if kind == "extra_forbidden":
        return str(unknown_key(path, keys, where))
    annotation = _annotation(path, keys)
    if kind == "missing":
        return f"{path} is missing: it must be {type_name(annotation)}"
    got = f"got {_short(value)}{where(path)}"
    if kind == "literal_error":
        allowed = choices(annotation)
        found = (value_elsewhere(general(path), value) or nearest(value, allowed)) if isinstance(value, str) else None
        hint = f" (the nearest is {found!r})" if found is not None else ""
        return f"{path} must be one of {', '.join(allowed)}{hint}, {got}"
    if kind in _ABOUT_THE_VALUE:
        limits = {name: _round(limit) for name, limit in context.items()}
        return f"{path} must be {_ABOUT_THE_VALUE[kind].format(**limits)}, {got}"
    return f"{path} must be {type_name(annotation)}, {got}"


_ABOUT_THE_VALUE = {
    "greater_than": "greater than {gt}",
    "greater_than_equal": "{ge} or more",
    "less_than": "less than {lt}",
    "less_than_equal": "{le} or less",
    "finite_number": "a finite number",
    "multiple_of": "a multiple of {multiple_of}",
    "string_too_short": "a string of at least {min_length} character(s)",
    "too_short": "a list of at least {min_length}",
    "too_long": "a list of at most {max_length}",
    "string_pattern_mismatch": "a string that matches {pattern}",
}


def _annotation(path: str, keys: Mapping[str, Key]) -> Any:
    """The type of a key, or of an element of a list."""
    at, above = entry(path, keys), entry(path.rpartition("[")[0], keys)
    if at is not None:
        return keys[at].annotation
    held = keys[above].annotation if above is not None else Any
    lists = [kind for kind in (held, *typing.get_args(held)) if typing.get_origin(kind) in (list, tuple)]
    return typing.get_args(lists[0])[0] if lists else Any


def _round(limit: Any) -> Any:
    """A limit without the decimal point of a whole number."""
    return int(limit) if isinstance(limit, float) and limit.is_integer() else limit


def _path(location: tuple[str | int, ...], prefix: str, keys: Mapping[str, Key]) -> str:
    """The key's path from pydantic's location, without the names of types that it appends to the keys of unions."""
    path = prefix.removesuffix(".")
    for part in location:
        at = entry(path, keys)
        leaf = at is not None and not keys[at].section
        if isinstance(part, int):
            path = f"{path}[{part}]"
        elif leaf:
            return path
        else:
            path = f"{path}.{part}" if path else part
    return path


def _short(value: Any) -> str:
    """A value as a TOML reader writes it, cut to a readable length."""
    text = json.dumps(value, default=plain, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
