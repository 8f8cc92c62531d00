"""Train a model: torchrun --nproc-per-node N scripts/train.py --config configs/llama.toml [--section.key value ...]"""

import sys

from titanlike import cli
from titanlike.errors import run_main


def main() -> None:
    """Load the config, then run it. torch is imported after the config has been found good."""
    config = cli.load(sys.argv[1:])
    from titanlike.run import train

    train(config)


if __name__ == "__main__":
    run_main(main)
