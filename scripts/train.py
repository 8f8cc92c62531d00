"""Train a model: torchrun --nproc-per-node N scripts/train.py --config configs/llama.toml [--section.key value ...]

--dry-run builds all, takes a step without its update, prints what time and memory it took, and ends."""

import argparse
import os
import sys

from titanlike import cli
from titanlike.errors import UserError, run_main


def main() -> None:
    """Load the config and check it for the ranks that there are; what the run needs is imported after that."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own lines; read when torch is loaded
    config, options = cli.parse(sys.argv[1:], "Train a model.", _options)
    if options.memory is not None and not (options.dry_run and 0 < options.memory < float("inf")):
        raise UserError("--memory is a number of GiB above 0, and is given with --dry-run alone")
    from titanlike.mesh import world_size

    config.validate_for(world_size())
    if options.dry_run:
        from titanlike.dry_run import dry_run

        dry_run(config, None if options.memory is None else options.memory * 2**30)
        return
    from titanlike.run import train

    train(config)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dry-run", action="store_true", help="build all, take a step without its update, print time and memory"
    )
    parser.add_argument(
        "--memory", type=float, metavar="GIB", help="with --dry-run: say what would help if a rank needs more than this"
    )


if __name__ == "__main__":
    run_main(main)
