"""What a terminal would obey is made visible wherever text that was not written here is shown."""

from __future__ import annotations

import io
import json
import os
import pty
from collections.abc import Sequence
from pathlib import Path

import pytest

from titanlike.errors import UserError, run_main
from titanlike.generate.command import Printer
from titanlike.generate.text import StopStrings
from titanlike.metrics import Metrics, MetricsConfig, files
from titanlike.metrics.console import Console
from titanlike.metrics.tables import BatchFacts, ModelFacts, startup_tables
from titanlike.printable import printable, printable_json

TITLE = "a\x1b]0;mine\x07b\x9b2Jc"  # renames a window; clears the screen by the one-byte form of an escape
SHOWN = r"a\x1b]0;mine\x07b\x9b2Jc"


def _byte_text(ids: Sequence[int]) -> str:
    return bytes(ids).decode("latin-1")


def test_only_newlines_and_tabs_of_control_characters_are_let_through() -> None:
    controls = "".join(map(chr, [*range(32), *range(127, 160)]))
    assert not set(printable(controls)) & (set(controls) - {"\n", "\t"})
    assert printable("a\r\n\tb\u202ec\udc80") == "a\\r\n\tb\\u202ec\\udc80"
    text = "plain, größer, 日本, \\x1b\n\t"
    assert printable(text) == text


def test_json_with_control_characters_is_printable_and_the_same_value() -> None:
    """json.dumps(..., ensure_ascii=False) leaves DEL and the second control characters as they are."""
    value = {"text": f"{TITLE}\x7f é\udcff"}
    text = printable_json(json.dumps(value, ensure_ascii=False))
    assert printable(text) == text and json.loads(text) == value and "é" in text


def test_generated_text_does_not_command_the_terminal() -> None:
    """A model of bytes that has learnt little renamed the window and cleared the screen: scripts/generate.py wrote its
    text as it was, in pieces or whole."""
    ids = list(TITLE.encode("latin-1"))
    out = io.StringIO()
    printer = Printer(["p\x1b[31m", "q"], _byte_text, StopStrings([], _byte_text), out)
    for i in ids:
        printer.tokens(0, [i], False)
    printer.tokens(0, [], True)
    printer.tokens(1, ids, True)
    assert out.getvalue() == f"--- prompt 1\np\\x1b[31m{SHOWN}\n--- prompt 2\nq{SHOWN}\n"


def test_samples_of_a_run_do_not_command_the_terminal(tmp_path: Path) -> None:
    """Texts during a run and the sample at its end went to terminal and log as they were; events.jsonl keeps them."""
    out = io.StringIO()
    with Metrics(MetricsConfig(tensorboard=False), tmp_path, 10, file=out) as metrics:
        metrics.samples(3, [TITLE])
    assert out.getvalue() == f"text after step 3:\n{SHOWN}\n"
    assert files.read_events(tmp_path)[0]["texts"] == [TITLE]

    leader, follower = pty.openpty()
    with os.fdopen(leader, "rb"), os.fdopen(follower, "w") as terminal:
        console = Console(10, file=terminal)
        assert console.is_terminal
        console.message(TITLE)
        assert os.read(leader, 1000).decode().rstrip() == SHOWN


def test_names_in_the_startup_tables_do_not_command_the_terminal() -> None:
    """A file's name, which the tables of a start show, can hold any byte but a slash."""
    out = io.StringIO()
    tables = startup_tables(
        ModelFacts("m", 1, 0, {}), {"dp": 1}, BatchFacts(1, 1, 1, 1, 1), data=[("files", f"{TITLE}.txt")]
    )
    for table in tables:
        Console(10, file=out).render(table)
    assert f"{SHOWN}.txt" in out.getvalue()


def test_an_error_does_not_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Error sentences name files and tensors, which others have named."""

    def main() -> None:
        raise UserError(f"{TITLE} has no tensor")

    exits: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "_exit", exits.append)  # where torch.distributed is loaded already
        patch.setattr("sys.exit", exits.append)
        run_main(main)
    assert exits[0] == 2 and capsys.readouterr().err == f"error: {SHOWN} has no tensor\n"
