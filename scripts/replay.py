"""Where does a step stop being finite? python scripts/replay.py runs/llama --step 1200

Rebuilds the batch of that step in one process, from the newest checkpoint before it, and names the first module whose
output is not finite for each of its samples, with the document.
"""

import argparse
from pathlib import Path

from titanlike.errors import run_main
from titanlike.printable import printable


def main() -> None:
    """Replay and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the run folder")
    parser.add_argument("--step", type=int, required=True, help="the step to take again, counted from 1")
    options = parser.parse_args()
    from titanlike.replay import replay

    for line in replay(options.run, options.step):
        print(printable(line), flush=True)


if __name__ == "__main__":
    run_main(main)
