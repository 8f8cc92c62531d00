"""The command line of every script that takes a config: `--config PATH`, `--section.key value`, `--help`.

    config = cli.load(sys.argv[1:])
    config, options = cli.parse(sys.argv[1:], "Check a run.", lambda parser: parser.add_argument("--step", type=int))

An argument whose name has a dot is a config key: `--train.steps 20`, `--train.steps=20`, `--compile.enable` (alone:
true), `--model.rope_scaling.factor 8`, `--pipeline.split "[3, 5]"`. With nothing after the equals sign (`--mesh.dp=`,
`--pipeline=`) the key, or the whole section, is taken out of the file. The last of several for one key counts.
"""

import argparse
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from titanlike import architectures
from titanlike.config import Config, config_keys, load_config
from titanlike.config_input import read_toml
from titanlike.config_keys import MISSING, Key, holds, nearest, type_name
from titanlike.errors import UserError

WIDTH = 110  # of the help text, in characters


def load(argv: Sequence[str], description: str = "Train a model.") -> Config:
    """The config that a command line asks for; `--help` prints every key and exits.

    Raises:
        UserError: an argument or the config is wrong.
    """
    return parse(argv, description)[0]


def parse(
    argv: Sequence[str], description: str, add_options: Callable[[argparse.ArgumentParser], Any] | None = None
) -> tuple[Config, argparse.Namespace]:
    """The config, and the script's own options (and positional arguments) that `add_options` put on the parser.

    Raises:
        UserError: an argument or the config is wrong.
    """
    rest, overrides = split(argv)
    parser = _Parser(description=description, add_help=False, allow_abbrev=False)
    parser.add_argument("--config", metavar="PATH", help="the TOML file of the run; all defaults without it")
    parser.add_argument("--help", "-h", action="store_true", help="print this and exit")
    if add_options is not None:
        add_options(parser)
    if "--help" in rest or "-h" in rest:
        print(help_text(parser, _architecture(rest, overrides)))
        sys.exit(0)
    options, unknown = parser.parse_known_args(rest)
    if unknown:
        raise _unknown_argument(unknown[0], parser)
    return load_config(options.config, overrides), options


def split(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The plain arguments, and the config overrides by path: the text as typed, True for a flag, None to take it out.

    Raises:
        UserError: a key that is not true or false has no value.
    """
    rest: list[str] = []
    overrides: dict[str, Any] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        is_key = "." in name or (bool(equals) and name in Config.model_fields)
        if not word.startswith("--") or not is_key:
            rest.append(word)
        elif equals:
            overrides[name] = value or None
        elif words and not words[0].startswith("--"):
            overrides[name] = words.pop(0)
        else:
            key = config_keys().get(name)
            if key is not None and not holds(key.annotation, (bool,)):
                raise UserError(f"--{name} needs a value: {type_name(key.annotation)}")
            overrides[name] = True
    return rest, overrides


def check_no_positional(rest: Sequence[str], option: str) -> None:
    """Raise `UserError` for a value in front of all options, which should have been that of `option`."""
    if rest and not rest[0].startswith("-"):
        raise UserError(f"unexpected argument {rest[0]!r}: it is given as {option} {rest[0]}")


class _Parser(argparse.ArgumentParser):
    """argparse, but what it complains about is a `UserError`."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _unknown_argument(word: str, parser: argparse.ArgumentParser) -> UserError:
    name = word.lstrip("-").partition("=")[0]
    if word.endswith(".toml") and not word.startswith("-"):
        return UserError(f"unexpected argument {word!r}: a config is given as --config {word}")
    if not word.startswith("-"):
        return UserError(f"unexpected argument {word!r}: a config key is given as --section.key value")
    if name in Config.model_fields:
        return UserError(f"--{name} is a section: its keys are given as --{name}.key value, see --help")
    own = [option.lstrip("-") for action in parser._actions for option in action.option_strings]
    keys = [path for path, key in config_keys().items() if not key.section]
    found = nearest(name, own + keys)
    hint = "--help lists what there is" if found is None else f"the nearest valid one is --{found}"
    return UserError(f"unknown argument {word.partition('=')[0]}: {hint}")


def _architecture(rest: Sequence[str], overrides: dict[str, Any]) -> str:
    """The architecture whose keys `--help` lists: the one asked for, as far as that can be told."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    path = parser.parse_known_args(list(rest))[0].config
    model = read_toml(Path(path)).get("model") if path else None
    named = overrides.get("model.architecture") or (model.get("architecture") if isinstance(model, dict) else None)
    return named if isinstance(named, str) else "llama"


def help_text(parser: argparse.ArgumentParser, architecture: str = "llama") -> str:
    """The parser's own help, then every config key by section: path, default, type, meaning."""
    lines = [parser.format_help().rstrip(), "", "config keys ([section] key = value in the file, --section.key here):"]
    for key in config_keys(architecture).values():
        if key.is_element:
            continue
        indent = "      "
        if key.section and "." not in key.path:
            lines += ["", f"[{key.path}]"]
            indent = "  "
        else:
            default = "" if key.default is MISSING else f" = {_default(key.default)}"
            lines.append(f"  {key.path}{default}  ({type_name(key.annotation)})")
        lines += textwrap.wrap(_doc(key, architecture), WIDTH, initial_indent=indent, subsequent_indent=indent)
    return "\n".join(lines)


def _doc(key: Key, architecture: str) -> str:
    doc = key.doc
    if not doc and key.section and isinstance(key.annotation, type):
        doc = key.annotation.__doc__ or ""
    if key.path == "model.preset":
        doc += f" Presets: {', '.join(architectures.resolve(architecture).presets)}."
    return " ".join(doc.split())


def _default(value: Any) -> str:
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
