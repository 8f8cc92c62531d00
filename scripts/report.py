"""Show runs as one HTML page, or tell where two runs part.

    python scripts/report.py runs/llama                       # writes runs/llama/report.html
    python scripts/report.py runs/a runs/b --output ab.html   # several runs overlaid
    python scripts/report.py --compare runs/a runs/b --tolerance 1e-5

The page is self-contained and opens offline. `--compare` exits with 0 if the runs agree and 1 if they part.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

from titanlike.errors import UserError, run_main
from titanlike.printable import printable


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line. A wrong one exits with 2, as argparse does."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="folder of a run, such as runs/llama")
    parser.add_argument(
        "--output", type=Path, help="the page; default RUN/report.html, or report.html for several runs"
    )
    parser.add_argument(
        "--compare", nargs=2, type=Path, metavar=("A", "B"), help="print where two runs part instead of making a page"
    )
    parser.add_argument(
        "--tolerance", type=float, default=0.0, help="relative difference up to which values agree (default: bitwise)"
    )
    options = parser.parse_args(arguments)
    if not 0 <= options.tolerance < math.inf:
        parser.error("--tolerance must be a number from 0")
    if bool(options.runs) == bool(options.compare):
        parser.error("give one or more runs, or --compare A B")
    return options


def main() -> int:
    options = parse()
    if options.compare:
        from titanlike.metrics.compare import compare_runs

        first, second = options.compare
        text, agree = compare_runs(first, second, options.tolerance)
        print(printable(text))
        return 0 if agree else 1

    from titanlike.metrics.report import load_runs, render

    runs = load_runs(options.runs)
    output = options.output or (options.runs[0] / "report.html" if len(runs) == 1 else Path("report.html"))
    beside = output.with_name(output.name + ".new")
    try:
        beside.write_text(render(runs), encoding="utf-8")
        os.replace(beside, output)
    except OSError as error:
        raise UserError(f"cannot write {output}: {error.strerror}; give another --output") from error
    print(f"{output}  ({output.stat().st_size / 1024:,.0f} KiB)")
    return 0


if __name__ == "__main__":
    run_main(main)
