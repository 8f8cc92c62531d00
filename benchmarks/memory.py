"""Peak memory of a training step by activation checkpointing and chunks of the loss, beside a prediction.

    python benchmarks/memory.py [--preset 26m] [--rows 4] [--seq-len 512] [--chunk 64]

Each mode is a process of its own, which measures how far its resident memory rises in a step above what it was before
(weights, gradient sums and moments are there already), in eager float32. The prediction counts what autograd keeps:

- logits: rows x seq x vocabulary x 4 bytes, three times: the logits, their log-softmax, and the gradient of it
- a block, `none`: 2 norms' inputs and outputs, q, k, v, attention's output, three ffn_dim activations and the two
  residual sums, as elements of [rows, seq] x 4 bytes; `selective`: what the products and attention give and the
  block's input; `full`: the block's input alone, and one block of `none` while it is recomputed
- chunks of the loss: the logits' share of a chunk
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from typing import Any

from contenders import add_preset, alone, print_table, write_json

MODES = ("none", "selective", "full")


def resident() -> int:
    """Bytes of this process in memory now (Linux)."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(args: argparse.Namespace, mode: str, chunk: int) -> dict[str, float]:
    """In this process: bytes by which a step raises the memory, and those that are predicted."""
    import torch
    from steps import titanlike_steps, vocabulary

    from titanlike.config import load_config

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    settings: dict[str, Any] = {
        "model.preset": args.preset,
        "train.seq_len": args.seq_len,
        "train.global_batch_size": args.rows,
        "train.microbatch_size": args.rows,
        "train.loss_chunk": chunk,
        "activation_checkpoint.mode": mode,
    }
    steps = titanlike_steps(settings)
    steps.step(None)  # gradient buffers, workspaces
    peak, running = [0], threading.Event()

    def watch() -> None:
        while not running.is_set():
            peak[0] = max(peak[0], resident())
            time.sleep(0.0005)

    before = resident()
    watcher = threading.Thread(target=watch)
    watcher.start()
    steps.step(None)
    running.set()
    watcher.join()

    config = load_config(None, settings)
    model = config.model_config_for(vocabulary(config))
    positions = args.rows * args.seq_len * 4
    kv = model.n_kv_heads * (model.head_dim or model.dim // model.n_heads)
    products = 4 * model.dim + 2 * kv + 2 * model.ffn_dim  # q, attention, wo, w2; k, v; w1, w3
    everything = (
        products + 4 * model.dim + 3 * model.ffn_dim + model.dim + kv
    )  # norms, residuals; silu, product; rotary
    kept = {"none": everything, "selective": products + model.dim, "full": model.dim}[mode]
    blocks = kept * model.n_layers + (everything if mode != "none" else 0)
    logits = 3 * model.vocab_size / args.seq_len * (chunk or args.seq_len)
    return {"measured": peak[0] - before, "predicted": positions * (blocks + logits)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_preset(parser)
    parser.add_argument("--rows", type=int, default=4, help="(default: 4)")
    parser.add_argument("--seq-len", type=int, default=512, help="(default: 512)")
    parser.add_argument("--chunk", type=int, default=64, help="positions of a chunk of the loss (default: 64)")
    parser.add_argument("--json", help="write the results here")
    parser.add_argument("--one", nargs=2, metavar=("MODE", "CHUNK"), help="one measurement, in this process")
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measure(args, args.one[0], int(args.one[1]))))
        return
    rows, results = [], []
    first = 0.0
    for mode in MODES:
        for chunk in (0, args.chunk):
            # The allocator gives large blocks back at once, so that resident memory is what is in use.
            arguments = [*sys.argv, "--one", mode, str(chunk)]
            found = alone(arguments, MALLOC_TRIM_THRESHOLD_="0", MALLOC_MMAP_THRESHOLD_="65536")
            first = first or found["measured"]
            rows.append(
                [
                    f"{mode}, loss {f'in chunks of {chunk}' if chunk else 'at once'}",
                    f"{found['measured'] / 1e6:,.0f}",
                    f"{found['predicted'] / 1e6:,.0f}",
                    f"{found['measured'] / found['predicted']:.2f}",
                    f"{found['measured'] / first:.2f}",
                ]
            )
            results.append({"mode": mode, "chunk": chunk, **found})
    print(f"{args.preset}, {args.rows} x {args.seq_len} tokens, eager float32; MB that a step adds at its peak")
    print_table(["activation checkpointing", "measured", "predicted", "ratio", "of the first"], rows)
    write_json(args.json, "memory", vars(args), results)


if __name__ == "__main__":
    main()
