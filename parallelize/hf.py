"""How an architecture looks in Hugging Face folders: whose class it is there, names of tensors, config.json.

A table for each form: an architecture of ours may be several of theirs. The conversions of configs are plain functions
from one dict to another, which raise ValueError, with a clause that says what cannot be said on the other side.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Values = dict[str, Any]


@dataclass(frozen=True)
class HuggingFace:
    """One form of an architecture in Hugging Face folders."""

    model_type: str
    """`model_type` of config.json"""
    class_name: str
    """the class of transformers, first of `architectures` in config.json"""
    names: Mapping[str, str]
    """Modules (or whole parameters) here -> there; `*` is a layer's number. The tensors are equal, but for names with
    `{}`: ours is a stack of theirs, numbered along its first dim."""
    from_config: Callable[[Values], Values]
    """config.json -> the fields of our config dataclass. KeyError for what it lacks, ValueError for what we cannot
    build."""
    to_config: Callable[[Values], Values]
    """The other way; without model_type, architectures, dtype and token ids. ValueError for a model that is not of this
    form."""

    def parts(self, name: str, shape: tuple[int, ...]) -> list[tuple[str, int | None]]:
        """Their tensors that make up our parameter `name`: (their name, its index in our first dim, None for all).

        Raises KeyError for a name that the table does not have.
        """
        numbers = iter(re.findall(r"(?<=\.)\d+(?=\.)", name))
        key = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
        theirs = self.names.get(key)
        if theirs is None:
            module, _, kind = key.rpartition(".")
            theirs = f"{self.names[module]}.{kind}"
        theirs = re.sub(r"\*", lambda _: next(numbers), theirs)
        if "{}" not in theirs:
            return [(theirs, None)]
        return [(theirs.format(index), index) for index in range(shape[0])]


def renamed(config: Values, fields: Mapping[str, str], defaults: Values) -> Values:
    """Our fields out of a config.json by a table of ours -> theirs; what is missing there, or null, is as in `defaults`
    (KeyError if not)."""
    given = defaults | {key: value for key, value in config.items() if value is not None}
    return {ours: given[theirs] for ours, theirs in fields.items()}


def rope_from(config: Values) -> Values:
    """rope_theta and rope_scaling out of a config.json: one table since transformers 5, two keys before."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "llama3"):
        raise ValueError(f"has rotary embeddings of type {kind!r}; only 'default' and 'llama3' can be read")
    scaling = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return {
        "rope_theta": float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        "rope_scaling": {key: rope[key] for key in scaling} if kind == "llama3" else None,
    }


def rope_to(model: Values) -> Values:
    """The keys for them in a config.json, as old and new versions of transformers read them."""
    scaling = model["rope_scaling"]
    return {
        "rope_theta": model["rope_theta"],
        "rope_scaling": None if scaling is None else {"rope_type": "llama3", **scaling},
    }


def only(config: Values, key: str, *allowed: Any) -> None:
    """Raise ValueError if a config.json has a value under `key` that is none of the allowed ones."""
    if key in config and config[key] not in allowed:
        raise ValueError(f"has {key} = {config[key]!r}; only {' or '.join(map(repr, allowed))} can be read")
