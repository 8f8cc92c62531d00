"""The command line of every script that takes a config: `--config PATH`, `--section.key value`, `--help`.

    config = cli.load(sys.argv[1:])
    config, options = cli.parse(sys.argv[1:], "Verify a checkpoint.", lambda parser: parser.add_argument("--step", type=int))

An argument whose name has a dot is a config key: `--train.steps 20`, `--train.steps=20`, `--model.rope_scaling.factor 8`,
`--pipeline.split "[3, 5]"`, `--compile.enable` (alone: true). With nothing after the equals sign (`--mesh.dp=`,
`--pipeline=`) the key, or the whole section, is taken out of the file. The last of several for one key counts.
"""

import argparse
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from titanlike.config import Config, config_keys, load_config
from titanlike.config_errors import unknown_key
from titanlike.config_keys import MISSING, Key, type_name
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
        architecture = overrides.get("model.architecture")
        print(help_text(parser, architecture if isinstance(architecture, str) else "llama"))
        sys.exit(0)
    options = parser.parse_args(rest)
    return load_config(options.config, overrides), options


def split(argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The plain arguments, and the config overrides by path. A value is the text as typed, True for a flag, None to unset."""
    rest: list[str] = []
    overrides: dict[str, Any] = {}
    sections = Config.model_fields
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not ("." in name or (equals and name in sections)):
            rest.append(word)
        elif equals:
            overrides[name] = value or None
        elif words and not words[0].startswith("--"):
            overrides[name] = words.pop(0)
        else:
            overrides[name] = True
    return rest, overrides


class _Parser(argparse.ArgumentParser):
    """argparse, but its complaints are `UserError`, and a mistyped option is compared with the config keys too."""

    def error(self, message: str) -> NoReturn:
        first, _, names = message.partition("unrecognized arguments: ")
        if not first and names:
            name = names.split()[0]
            if not name.startswith("-"):
                raise UserError(f"unexpected argument {name!r}: a config key is given as --section.key value")
            own = {option: Key(option, str, None, "") for option in self._option_strings()}
            raise unknown_key(
                name.lstrip("-").partition("=")[0], own | config_keys(), lambda path: " on the command line"
            )
        raise UserError(message)

    def _option_strings(self) -> list[str]:
        return [option.lstrip("-") for action in self._actions for option in action.option_strings]


def help_text(parser: argparse.ArgumentParser, architecture: str = "llama") -> str:
    """The parser's own help, then every config key by section: name, default, type, meaning."""
    lines = [
        parser.format_help().rstrip(),
        "",
        "config keys (in the file as [section] key = value; here --section.key value):",
    ]
    for key in config_keys(architecture).values():
        depth = key.path.count(".")
        if key.section and depth == 0:
            lines += ["", f"[{key.path}]"]
            lines += textwrap.wrap(_doc(key), WIDTH, initial_indent="  ", subsequent_indent="  ")
            continue
        default = "" if key.default is MISSING else f" = {_default(key.default)}"
        lines.append(f"  {key.path}{default}  ({type_name(key.annotation)})")
        lines += textwrap.wrap(_doc(key), WIDTH, initial_indent="      ", subsequent_indent="      ")
    return "\n".join(lines)


def _doc(key: Key) -> str:
    doc = key.doc or (key.annotation.__doc__ or "" if isinstance(key.annotation, type) else "")
    return " ".join(doc.split())


def _default(value: Any) -> str:
    if value is None:
        return "not given"
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
