"""How a mistake leaves the program: one sentence, an exit code that is not 0, and no traceback that nobody can use.

| what happened | on stderr | exit code |
|---|---|---|
| a mistake of the user, also a run that diverged (`UserError`) | one sentence | 2 |
| another rank is gone, so that this one lost its connection | one sentence, unless the launcher ends it first | 1 |
| interrupted from the keyboard | one word | 130 |
| anything else is a bug | the traceback | 1 |

On a machine with several ranks, one of them speaks where all have the same to say.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Generator
from pathlib import Path

from titanlike.printable import printable

YIELD_S = 2.0
"""Seconds for which a rank whose words are not needed waits for the launcher to end it."""

_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Socket closed",
    "remote process exited",
)


class UserError(ValueError):
    """A mistake of the user. Its message is one sentence that names the key, file or value and what would be right."""


class NonFinite(UserError):
    """The loss or the gradient norm of a step is infinite or not a number. Raised on all ranks alike."""


@contextlib.contextmanager
def file_errors(what: str) -> Generator[None]:
    """Turn an `OSError` of the block into a `UserError`: `what`, the file, and what the system says about it."""
    try:
        yield
    except OSError as error:
        path = f" {error.filename}" if isinstance(error.filename, str | Path) else ""
        raise UserError(f"{what}: cannot use{path}: {error.strerror or error}") from error


def connection_lost(error: BaseException) -> str | None:
    """What an error says if it says no more than that another rank is gone, whose own words say why; else None."""
    if not isinstance(error, RuntimeError):
        return None
    return next((words for words in _LOST if words in str(error)), None)


def run_main(main: Callable[[], int | None]) -> None:
    """Run a script's `main`, and end the process as the table above says.

    Under torchrun every rank usually finds the same mistake. The first rank of a machine speaks at once; the others
    wait a moment, so that the launcher, which ends all ranks when the first one fails, finds the sentence already
    printed, and speak only if they are still alive: then the mistake was theirs alone. So with a bug. A rank that lost
    its connection waits likewise, for the one that it lost it to.

    After distributed work the process leaves without running exit handlers: a gloo thread that frees a Python object
    during interpreter shutdown now and then aborts the process, which would turn a finished run into a failed one
    (pytorch#179291).
    """
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        code = main() or 0
    except UserError as error:
        if not first:
            time.sleep(YIELD_S)
        print(f"error: {printable(str(error))}", file=sys.stderr, flush=True)
        code = 2
    except KeyboardInterrupt:
        if first:
            print("interrupted", file=sys.stderr, flush=True)
        code = 130
    except Exception as error:
        lost = connection_lost(error)
        if lost is not None or not first:
            time.sleep(YIELD_S)
        if lost is not None:
            rank = os.environ.get("RANK", "0")
            print(f"error: rank {rank} lost another rank, which ended before its time ({lost})", file=sys.stderr)
        else:
            traceback.print_exc()
        code = 1
    if "torch.distributed" not in sys.modules:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
