"""What compiling costs: seconds of a first step, cold and with a warm cache, by depth and scope, and when it pays.

    python benchmarks/compile.py [--layers 4 12 32] [--scopes stage block] [--dim 128] [--tokens 512]

Each measurement is a process of its own with one thread: it builds a small Llama (the depth is what counts here), takes
a step, which compiles, and three more. `cold` starts with an empty compile cache, `warm` with the one that `cold` left.
`pays after` is the number of steps after which the time to compile is won back from eager steps, if they are slower.
Goals: 32 layers at most 1.5 times 4 layers in the default scope, warm at most 0.3 of cold.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from typing import Any

from contenders import alone, print_table, write_json


def measure(layers: int, scope: str, dim: int, tokens: int) -> dict[str, float]:
    """In this process: seconds of the first step, and of the best of the next three."""
    from steps import titanlike_steps

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    settings: dict[str, Any] = {
        "model.dim": dim,
        "model.n_layers": layers,
        "model.n_heads": 4,
        "model.n_kv_heads": 2,
        "model.ffn_dim": 4 * dim,
        "model.vocab_size": 512,
        "train.seq_len": tokens,
        "train.global_batch_size": 1,
        "compile.enable": scope != "eager",
    }
    if scope != "eager":
        settings["compile.scope"] = scope
    steps = titanlike_steps(settings)
    seconds = []
    for _ in range(4):
        began = time.perf_counter()
        steps.step(None)
        seconds.append(time.perf_counter() - began)
    return {"first": seconds[0], "later": min(seconds[1:])}


def in_process(layers: int, scope: str, args: argparse.Namespace, cache: str) -> dict[str, float]:
    """The measurement in a process of its own, with a compile cache."""
    arguments = [__file__, "--one", str(layers), scope, "--dim", str(args.dim), "--tokens", str(args.tokens)]
    return alone(arguments, TORCHINDUCTOR_CACHE_DIR=cache)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 12, 32], help="(default: 4 12 32)")
    parser.add_argument("--scopes", nargs="+", default=["stage", "block"], choices=["stage", "block"])
    parser.add_argument("--dim", type=int, default=128, help="(default: 128)")
    parser.add_argument("--tokens", type=int, default=512, help="of a step (default: 512)")
    parser.add_argument("--json", help="write the results here")
    parser.add_argument("--one", nargs=2, metavar=("LAYERS", "SCOPE"), help="one measurement, in this process")
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measure(int(args.one[0]), args.one[1], args.dim, args.tokens)))
        return
    rows, results, colds = [], [], {}
    for layers in args.layers:
        with tempfile.TemporaryDirectory(prefix="compile-cache-") as cache:
            eager = in_process(layers, "eager", args, cache)
        for scope in args.scopes:
            with tempfile.TemporaryDirectory(prefix="compile-cache-") as cache:
                cold = in_process(layers, scope, args, cache)
                warm = in_process(layers, scope, args, cache)
            compiling = [each["first"] - each["later"] for each in (cold, warm)]
            gain = eager["later"] - cold["later"]
            colds[scope, layers] = compiling[0]
            shallow = compiling[0] / colds[scope, args.layers[0]]
            rows.append(
                [
                    f"{scope}, {layers} layers",
                    *(f"{seconds:.1f}" for seconds in compiling),
                    f"{compiling[1] / compiling[0]:.2f}",
                    f"{shallow:.2f}",
                    f"{eager['later'] / cold['later']:.2f}",
                    f"{compiling[0] / gain:,.0f} steps" if gain > 0 else "never",
                ]
            )
            results.append({"scope": scope, "layers": layers, "cold": cold, "warm": warm, "eager": eager})
    print(f"dim {args.dim}, {args.tokens} tokens a step, one thread; seconds to compile, beyond those of a step")
    heads = ["", "cold", "warm", "warm/cold", f"cold/{args.layers[0]} layers", "eager/compiled step", "pays after"]
    print_table(heads, rows)
    write_json(args.json, "compile", vars(args), results)


if __name__ == "__main__":
    main()
