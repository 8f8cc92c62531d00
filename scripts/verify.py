"""Is my mesh the same run? python scripts/verify.py --config configs/llama.toml --mesh.tp 2 --mesh.pp 2 --mesh.dp 2

Takes the config of a run, makes the model and the batch small, starts the ranks itself (on CPU, in float64), and
compares three optimizer steps with the same steps on one rank.
"""

import argparse
import json
import signal
import sys

from titanlike import cli
from titanlike.errors import UserError, run_main

DESCRIPTION = """Compare three optimizer steps of a config on its mesh with the same steps on one rank, in float64 on
CPU. Mesh, pipeline schedule, tying, optimizer, clipping, accumulation and compile setting are those of the config;
depth, width, vocabulary and batch are made small. No launcher is needed: mesh.pp * mesh.dp * mesh.tp ranks are started
here, so a mesh.dp that is not given is 1, not what is left. Exit code: 0 all is the same, 1 it is not, 2 a mistake in
the config."""


def main() -> int:
    """Verify and print. Returns the exit code."""
    config, options = cli.parse(sys.argv[1:], DESCRIPTION, _options)
    if config.mesh.pp * (config.mesh.dp or 1) * config.mesh.tp == 1:
        raise UserError(
            "there is nothing to compare: mesh.pp, mesh.dp and mesh.tp are 1, which is one rank; give the mesh that is "
            "to train, such as --mesh.dp 2 or --mesh.tp 2"
        )
    # After the config has been found good: these import torch.
    import torch

    from titanlike.verify import verify
    from titanlike.verify.launch import RankFailed
    from titanlike.verify.report import print_report

    torch.set_num_threads(1)  # the ranks need the cores
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # as an error: the ranks are ended
    try:
        report = verify(config, options.timeout)
    except RankFailed as error:
        print(error, file=sys.stderr)
        if options.json:
            print(json.dumps({"same": False, "error": str(error)}))
        return 1
    except KeyboardInterrupt:
        print("interrupted; the ranks are ended", file=sys.stderr)
        return 130
    if options.json:
        print(json.dumps(report.as_json(), indent=1))
    else:
        print_report(report)
    return 0 if report.same else 1


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument(
        "--timeout", type=float, default=900.0, metavar="SECONDS", help="end the ranks after so long (default 900)"
    )


if __name__ == "__main__":
    run_main(main)
