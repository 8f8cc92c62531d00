"""Where config values come from: a TOML file, and texts that were typed on a command line."""

import re
from pathlib import Path
from typing import Any

import tomli

from titanlike.config_keys import Key, holds
from titanlike.errors import UserError


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        UserError: the file is missing, unreadable, or not TOML; the message names the file and the line.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except FileNotFoundError:
        raise UserError(f"the config file {path} does not exist{_others(path.parent)}") from None
    except IsADirectoryError:
        raise UserError(f"the config file {path} is a folder{_others(path)}") from None
    except UnicodeDecodeError:
        raise UserError(f"the config file {path} is not UTF-8 text, so not TOML") from None
    except OSError as error:
        raise UserError(f"the config file {path} cannot be read: {error.strerror}") from None
    try:
        return tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        raise UserError(f"the config file {path} is not valid TOML: {error}") from None


def _others(folder: Path) -> str:
    names = sorted(other.name for other in folder.glob("*.toml") if other.name != "pyproject.toml")
    return f" ({folder} has {', '.join(names)})" if names else ""


def from_text(text: str, key: Key | None) -> Any:
    """The value that a text typed for `key` stands for: TOML where it is TOML, else the text itself.

    A key that holds strings and nothing else takes the text as it is (`--run.name 2024`), or without its quotes.
    Numbers may leave out the digits before or after the point.
    """
    parsed = _toml_value(text)
    if isinstance(parsed, str):
        return parsed
    if key is not None and holds(key.annotation, (str, Path)) and not holds(key.annotation, (int, float, bool)):
        return text
    if parsed is not None:
        return parsed
    return float(text) if re.fullmatch(r"[+-]?(\d+\.|\.\d+)([eE][+-]?\d+)?", text) else text


def _toml_value(text: str) -> Any:
    """The value of `text` read as TOML, or None when it is not one TOML value."""
    try:
        table = tomli.loads(f"value = {text}")
    except tomli.TOMLDecodeError:
        return None
    return table["value"] if set(table) == {"value"} else None


def set_path(tables: dict[str, Any], path: str, value: Any) -> None:
    """Set `tables["a"]["b"]` for the path `a.b`, making tables on the way; None takes the key, or table, out.

    Raises:
        UserError: the path leads through something that is not a table.
    """
    *above, name = path.split(".")
    if "[" in path:
        raise UserError(f"{path} on the command line: a list is given whole, as TOML")
    for index, part in enumerate(above):
        if value is None and part not in tables:
            return
        tables = tables.setdefault(part, {})
        if not isinstance(tables, dict):
            what = "a list, which is given whole, as TOML" if isinstance(tables, list) else "not a table"
            raise UserError(f"{path} on the command line: {'.'.join(above[: index + 1])} is {what}")
    if value is None:
        tables.pop(name, None)
    else:
        tables[name] = value
