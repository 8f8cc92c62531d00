"""How a user's mistake leaves the program: one sentence, exit code 2, and no traceback."""

import os
import sys
import time
import traceback
from collections.abc import Callable


class UserError(ValueError):
    """A mistake of the user. Its message is one sentence that names the key, file or value and what would be right."""


def run_main(main: Callable[[], int | None]) -> None:
    """Run a script's `main`; a `UserError` becomes one line on stderr and exit code 2.

    Under torchrun every rank usually finds the same mistake. The first rank of a machine speaks at once; the others
    wait a moment, so that the launcher, which ends all ranks when the first one fails, finds the sentence already
    printed, and speak only if they are still alive: then the mistake was theirs alone.

    After distributed work the process leaves without running exit handlers: a gloo thread that frees a Python object
    during interpreter shutdown now and then aborts the process, which would turn a finished run into a failed one
    (pytorch#179291).
    """
    try:
        code = main() or 0
    except UserError as error:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            time.sleep(2.0)
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = 2
    except Exception:
        traceback.print_exc()
        code = 1
    if "torch.distributed" not in sys.modules:
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
