"""Two ranks of one thread each beside one: dp 2, tp 2, pp 2, and torch's DDP and FSDP2 on the same model, in turns.

    python benchmarks/mesh.py [--preset 26m] [--rows 8] [--seq-len 256] [--compile] [--contenders ...] [--json PATH]

Prints, for each contender, tokens per second (median over the rounds), the speed as a multiple of our own 1 rank and of
DDP and FSDP2 in the same round (median, and least..most), and whether the loss after the same number of steps is that
of the first contender. Goals: dp 2 / tp 2 / pp 2 with 8 microbatches 1.85 / 1.55 / 1.70 times 1 rank; dp 2 at least
1.00 times DDP and 1.5 times FSDP2. The row "2 ranks apart" is what the machine allows: two ranks that do not know of
each other, at the same time, on half of the batch each. All take the same global batch: dp in one microbatch per rank,
the pipeline in 4 (pp4, zbv4) or 8 (pp8, zbv8).

Where torchtitan 0.2.2 is installed (`pip install torchtitan==0.2.2`) it is a contender on each kind of mesh (titan-*),
and a second table has our speed as a multiple of its own on the same kind.

With --compile every contender is compiled (ours by the default scope, DDP whole, FSDP2 and torchtitan block by block)
but zbv, which cannot be, and titan-tp, which is left out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

from contenders import (
    Contender,
    Steps,
    add_arguments,
    add_preset,
    in_turns,
    machine,
    print_table,
    ratio,
    spread,
    write_json,
)
from steps import apart_steps, titanlike_steps, torch_steps
from torchtitan_steps import fails, missing, torchtitan_steps

# name -> (title, ranks, steps, keys and the number of microbatches of the step)
CONTENDERS: dict[str, tuple[str, int, Callable[[Any], Steps], dict[str, Any], int]] = {
    "one": ("titanlike 1 rank", 1, titanlike_steps, {}, 1),
    "dp": ("titanlike dp 2", 2, titanlike_steps, {"mesh.dp": 2}, 1),
    "apart": ("2 ranks apart", 2, apart_steps, {}, 1),
    "tp": ("titanlike tp 2", 2, titanlike_steps, {"mesh.tp": 2}, 1),
    "pp4": ("titanlike pp 2, 1f1b, 4 microbatches", 2, titanlike_steps, {"mesh.pp": 2}, 4),
    "pp8": ("titanlike pp 2, 1f1b, 8 microbatches", 2, titanlike_steps, {"mesh.pp": 2}, 8),
    "zbv4": ("titanlike pp 2, zbv, 4 microbatches", 2, titanlike_steps, {"mesh.pp": 2, "pipeline.schedule": "zbv"}, 4),
    "zbv8": ("titanlike pp 2, zbv, 8 microbatches", 2, titanlike_steps, {"mesh.pp": 2, "pipeline.schedule": "zbv"}, 8),
    "ddp": ("torch DDP 2", 2, torch_steps, {"style": "ddp"}, 1),
    "fsdp": ("torch FSDP2 2", 2, torch_steps, {"style": "fsdp"}, 1),
    "titan-one": ("torchtitan 1 rank", 1, torchtitan_steps, {"style": "one"}, 1),
    "titan-ddp": ("torchtitan DDP 2", 2, torchtitan_steps, {"style": "ddp"}, 1),
    "titan-fsdp": ("torchtitan FSDP2 2", 2, torchtitan_steps, {"style": "fsdp"}, 1),
    "titan-tp": ("torchtitan tp 2", 2, torchtitan_steps, {"style": "tp"}, 1),
    "titan-pp8": ("torchtitan pp 2, 1f1b, 8 microbatches", 2, torchtitan_steps, {"style": "pp"}, 8),
}
TITAN = [name for name in CONTENDERS if name.startswith("titan-")]
DEFAULT = ["one", "apart", "dp", "tp", "pp4", "pp8", "ddp", "fsdp", *TITAN]
SAME_MESH = [("one", "titan-one"), ("dp", "titan-ddp"), ("dp", "titan-fsdp"), ("tp", "titan-tp"), ("pp8", "titan-pp8")]
"""which of ours is beside which of torchtitan's"""


def start(name: str, args: argparse.Namespace) -> Contender:
    """The ranks of a contender, being set up."""
    title, ranks, setup, keys, microbatches = CONTENDERS[name]
    dp = ranks if keys.get("style") in ("ddp", "fsdp") else keys.get("mesh.dp", 1)
    settings = {
        "model.preset": args.preset,
        "train.seq_len": args.seq_len,
        "train.global_batch_size": args.rows,
        "train.microbatch_size": args.rows // (dp * microbatches),
        "train.steps": 10000,
        "compile.enable": args.compile and "zbv" not in name,
    }
    if setup is apart_steps:
        settings |= {name: args.rows // 2 for name in ("train.global_batch_size", "train.microbatch_size")}
    return Contender(title, ranks, setup, settings | keys)


def left_out(names: list[str], compiled: bool) -> dict[str, str]:
    """Those of the contenders that cannot be measured, and why, in one sentence."""
    found = {}
    for name in names:
        why = (missing() or fails(CONTENDERS[name][3]["style"], compiled)) if name in TITAN else None
        if why is not None:
            found[name] = why
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_preset(parser)
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
    out = left_out(names, args.compile)
    names = [name for name in names if name not in out]
    for why in dict.fromkeys(out.values()):
        print(f"{', '.join(name for name in out if out[name] == why)}: {why}", file=sys.stderr)
    if not names:
        raise SystemExit(2)
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
    against = [name for name in ("one", "ddp", "fsdp", "titan-one") if name in names]
    for name in names:
        speeds = {other: ratio(took[other], took[name]) for other in against}
        seconds = statistics.median(took[name])
        same = (
            ""
            if name == "apart"
            else "agree"
            if abs(losses[name] - losses[names[0]]) < 1e-3 * losses[names[0]]
            else "DIFFER"
        )
        title = contenders[name].name
        rows.append([title, f"{args.rows * args.seq_len / seconds:,.0f}", *(spread(s) for s in speeds.values()), same])
        results.append(
            {"contender": title, "seconds": took[name], "median_s": seconds, "speed_against": speeds}
            | {"loss": losses[name]}
        )
    titles = {"one": "x 1 rank", "ddp": "x DDP", "fsdp": "x FSDP2", "titan-one": "x torchtitan 1 rank"}
    print_table(["", "tok/s", *(titles[name] for name in against), "loss"], rows)
    beside = [(ours, theirs) for ours, theirs in SAME_MESH if ours in names and theirs in names]
    if beside:
        print()
        speeds = {pair: ratio(took[pair[1]], took[pair[0]]) for pair in beside}
        pairs = [[f"{contenders[a].name} / {contenders[b].name}", spread(speeds[a, b])] for a, b in beside]
        print_table(["", "speed"], pairs)
        results += [
            {"contender": contenders[a].name, "beside": contenders[b].name, "speed": speeds[a, b]} for a, b in beside
        ]
    write_json(args.json, "mesh", vars(args), results)


if __name__ == "__main__":
    main()
