"""Two ranks of one thread each beside one: dp 2, tp 2, pp 2, and torch's DDP and FSDP2 on the same model, in turns.

    python benchmarks/mesh.py [--preset 26m] [--rows 8] [--seq-len 256] [--compile] [--contenders ...] [--json PATH]

Prints, for each contender, tokens per second (median over the rounds), the speed as a multiple of our own 1 rank and of
DDP and FSDP2 in the same round (median, and least..most), and whether the loss after the same number of steps is that
of the first contender. Goals: dp 2 / tp 2 / pp 2 with 8 microbatches 1.85 / 1.55 / 1.70 times 1 rank; dp 2 at least
1.00 times DDP and 1.5 times FSDP2. All take the same global batch: dp in one microbatch per rank, the pipeline in 4
(pp4, zbv4) or 8 (pp8, zbv8). With --compile every contender is compiled (ours by the default scope, DDP whole, FSDP2
block by block) but zbv, which cannot be.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

from contenders import Contender, Steps, add_arguments, in_turns, machine, print_table, ratio, spread, write_json
from steps import titanlike_steps, torch_steps

# name -> (title, ranks, steps, keys and the number of microbatches of the step)
CONTENDERS: dict[str, tuple[str, int, Callable[[Any], Steps], dict[str, Any], int]] = {
    "one": ("titanlike 1 rank", 1, titanlike_steps, {}, 1),
    "dp": ("titanlike dp 2", 2, titanlike_steps, {"mesh.dp": 2}, 1),
    "tp": ("titanlike tp 2", 2, titanlike_steps, {"mesh.tp": 2}, 1),
    "pp4": ("titanlike pp 2, 1f1b, 4 microbatches", 2, titanlike_steps, {"mesh.pp": 2}, 4),
    "pp8": ("titanlike pp 2, 1f1b, 8 microbatches", 2, titanlike_steps, {"mesh.pp": 2}, 8),
    "zbv4": ("titanlike pp 2, zbv, 4 microbatches", 2, titanlike_steps, {"mesh.pp": 2, "pipeline.schedule": "zbv"}, 4),
    "zbv8": ("titanlike pp 2, zbv, 8 microbatches", 2, titanlike_steps, {"mesh.pp": 2, "pipeline.schedule": "zbv"}, 8),
    "ddp": ("torch DDP 2", 2, torch_steps, {"style": "ddp"}, 1),
    "fsdp": ("torch FSDP2 2", 2, torch_steps, {"style": "fsdp"}, 1),
}
DEFAULT = ["one", "dp", "tp", "pp4", "pp8", "ddp", "fsdp"]


def start(name: str, args: argparse.Namespace) -> Contender:
    """The ranks of a contender, being set up."""
    title, ranks, setup, keys, microbatches = CONTENDERS[name]
    dp = ranks if setup is torch_steps else keys.get("mesh.dp", 1)
    settings = {
        "model.preset": args.preset,
        "train.seq_len": args.seq_len,
        "train.global_batch_size": args.rows,
        "train.microbatch_size": args.rows // (dp * microbatches),
        "train.steps": 10000,
        "compile.enable": args.compile and "zbv" not in name,
    }
    return Contender(title, ranks, setup, settings | keys)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--preset", default="26m", help="of the model (default: %(default)s)")
    parser.add_argument(
        "--rows", type=int, default=8, help="sequences of a step, a multiple of 8 (default: %(default)s)"
    )
    parser.add_argument("--seq-len", type=int, default=256, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--compile", action="store_true", help="compile all contenders (minutes)")
    parser.add_argument(
        "--contenders", nargs="+", default=DEFAULT, choices=list(CONTENDERS), help=f"(default: {' '.join(DEFAULT)})"
    )
    add_arguments(parser, seconds=120)
    args = parser.parse_args()
    if args.rows % 8:
        parser.error(f"--rows must be a multiple of 8, not {args.rows}: the pipeline has 8 microbatches")
    names = [*dict.fromkeys(args.contenders)]
    print(f"{machine()}")
    how = "compiled" if args.compile else "eager"
    print(f"{args.preset}, float32, {how}, {args.rows} x {args.seq_len} tokens a step, 1 thread per rank")
    contenders: dict[str, Contender] = {}
    try:
        for name in names:
            contenders[name] = start(name, args)
            contenders[name].ready()
        took = in_turns(
            {name: contenders[name].seconds for name in names}, args.rounds, warm=2 if args.compile else 1,
            seconds=args.seconds,
        )  # fmt: skip
        losses = {name: contenders[name].loss() for name in names}
    finally:
        for contender in contenders.values():
            contender.end()
    rows, results = [], []
    against = [name for name in ("one", "ddp", "fsdp") if name in names]
    for name in names:
        speeds = {other: ratio(took[other], took[name]) for other in against}
        seconds = statistics.median(took[name])
        same = "agree" if abs(losses[name] - losses[names[0]]) < 1e-3 * losses[names[0]] else "DIFFER"
        title = contenders[name].name
        rows.append([title, f"{args.rows * args.seq_len / seconds:,.0f}", *(spread(s) for s in speeds.values()), same])
        results.append(
            {"contender": title, "seconds": took[name], "median_s": seconds, "speed_against": speeds}
            | {"loss": losses[name]}
        )
    titles = {"one": "x 1 rank", "ddp": "x DDP", "fsdp": "x FSDP2"}
    print_table(["", "tok/s", *(titles[name] for name in against), "loss"], rows)
    write_json(args.json, "mesh", vars(args), results)


if __name__ == "__main__":
    main()
