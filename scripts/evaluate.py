"""Loss on text, or lm-eval's tasks: python scripts/evaluate.py --checkpoint runs/llama (or torchrun, on any mesh)"""

import sys

from titanlike.errors import run_main
from titanlike.evaluate import main

if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
