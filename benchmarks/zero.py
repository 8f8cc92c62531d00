"""ZeRO-1 beside DistributedDataParallel with an unsharded fused AdamW: the same model, the same tokens, in turns.

    python benchmarks/zero.py [--preset 26m] [--seq-len 128] [--microbatches 1 4 16] [--rounds 5] [--json PATH]

On 2 ranks (dp 2, against DDP) and on 1 (against a plain loop), one thread each. For each number of microbatches of one
sequence: the time of a step as a multiple of theirs (median over the rounds, and least..most; goal: at most 1.02),
collectives per step, bytes that a rank sends per step, bytes of optimizer state per rank (goal: 1/dp), and whether the
losses after the same steps agree. The goal for collectives over dp is 2 per bucket and step whatever the number of
microbatches, and one small one for the numbers of the step.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from contenders import Contender, add_arguments, add_preset, in_turns, machine, print_table, ratio, spread, write_json
from steps import titanlike_steps, torch_steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_preset(parser)
    parser.add_argument("--seq-len", type=int, default=128, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 4, 16], help="per rank (default: 1 4 16)")
    parser.add_argument("--dp", type=int, nargs="+", default=[2, 1], choices=[1, 2], help="ranks (default: 2 1)")
    parser.add_argument("--bucket-mb", type=float, default=25.0, help="optimizer.bucket_mb (default: %(default)s)")
    add_arguments(parser, seconds=110)
    args = parser.parse_args()
    print(f"{machine()}")
    print(f"{args.preset}, float32, microbatches of 1 x {args.seq_len} tokens, 1 thread per rank")
    contenders: dict[Any, Contender] = {}
    results: list[dict[str, Any]] = []
    try:
        for dp in args.dp:
            keys = {
                "model.preset": args.preset,
                "train.seq_len": args.seq_len,
                "train.global_batch_size": dp,
                "train.steps": 10000,
                "optimizer.bucket_mb": args.bucket_mb,
                "mesh.dp": dp,
            }
            contenders["ours", dp] = Contender(f"titanlike dp {dp}", dp, titanlike_steps, keys)
            style = {"style": "ddp" if dp > 1 else "plain"}
            contenders["theirs", dp] = Contender(f"torch dp {dp}", dp, torch_steps, keys | style)
        for contender in contenders.values():
            contender.ready()

        def measurement(who: str, dp: int, microbatches: int) -> Any:
            return lambda: contenders[who, dp].seconds(microbatches, max(1, 8 // microbatches))

        took = in_turns(
            {
                (who, dp, n): measurement(who, dp, n)
                for dp in args.dp
                for n in args.microbatches
                for who in ("ours", "theirs")
            },
            args.rounds,
            seconds=args.seconds,
        )
        rows = []
        for dp in args.dp:
            for n in args.microbatches:
                mine, yours = contenders["ours", dp].facts(n)[0], contenders["theirs", dp].facts(n)[0]
                losses = [contenders[who, dp].loss() for who in ("ours", "theirs")]
                times = ratio(took["ours", dp, n], took["theirs", dp, n])
                seconds = [statistics.median(took[who, dp, n]) for who in ("ours", "theirs")]
                memory = mine["optimizer_bytes"] / yours["optimizer_bytes"]
                results.append(
                    {"dp": dp, "microbatches": n, "ours": mine, "theirs": yours, "seconds": seconds}
                    | {"step_ratio": times, "optimizer_ratio": memory, "losses": losses}
                )
                rows.append(
                    [
                        f"dp {dp}, {n} microbatch{'es' if n > 1 else ''}",
                        f"{seconds[0]:.3f}",
                        f"{seconds[1]:.3f}",
                        spread(times),
                        *(_collectives(each["collectives"]) for each in (mine, yours)),
                        *(f"{each['sent_bytes'] / 1e6:.0f}" for each in (mine, yours)),
                        f"{memory:.3f}",
                        "agree" if abs(losses[0] - losses[1]) < 1e-3 * losses[1] else "DIFFER",
                    ]
                )
    finally:
        for contender in contenders.values():
            contender.end()
    heads = ["", "ours s", "theirs s", "step x", "collectives", "theirs", "MB sent", "theirs", "optimizer x", "losses"]
    print_table(heads, rows)
    print(f"collectives: r reductions, g gathers, + all-reduces; ours has {results[0]['ours']['buckets']} buckets")
    write_json(args.json, "zero", vars(args), results)


def _collectives(counted: dict[str, int]) -> str:
    reductions = counted.get("alltoall", 0) + counted.get("reduce_scatter", 0)
    return f"{reductions}r {counted.get('allgather', 0)}g +{counted.get('allreduce', 0)}"


if __name__ == "__main__":
    main()
