"""Train a model: torchrun --nproc-per-node N scripts/train.py --config configs/llama.toml [--section.key value ...]"""

import sys

from titanlike import cli
from titanlike.errors import run_main


def main() -> None:
    """Load the config and check it for the ranks that there are; what the run needs is imported after that."""
    config = cli.load(sys.argv[1:])
    from titanlike.mesh import world_size

    config.validate_for(world_size())
    from titanlike.run import train

    train(config)


if __name__ == "__main__":
    run_main(main)
