"""Continue prompts: python scripts/generate.py --checkpoint runs/llama --prompt "def " (or torchrun, on any mesh)"""

import sys

from titanlike.errors import run_main
from titanlike.generate.command import main

if __name__ == "__main__":
    run_main(lambda: main(sys.argv[1:]))
