"""Train a model: torchrun --nproc-per-node N scripts/train.py --config configs/llama.toml [--section.key value ...]

--dry-run builds all, takes a step without its update, prints what time and memory it took, and ends."""

import sys

from titanlike import cli
from titanlike.errors import run_main


def main() -> None:
    """Load the config and check it for the ranks that there are; what the run needs is imported after that."""
    config, options = cli.parse(
        sys.argv[1:],
        "Train a model.",
        lambda parser: parser.add_argument(
            "--dry-run", action="store_true", help="build all, take a step without its update, print time and memory"
        ),
    )
    from titanlike.mesh import world_size

    config.validate_for(world_size())
    if options.dry_run:
        from titanlike.dry_run import dry_run

        dry_run(config)
        return
    from titanlike.run import train

    train(config)


if __name__ == "__main__":
    run_main(main)
