"""dp 2 over a slow link: the time of a step against the larger of computing and sending.

    python benchmarks/network.py [--gbit 1 10] [--rows 4] [--seq-len 512] [--grad-comm-dtype bfloat16] [--json PATH]

Two ranks, each in a network namespace of its own, joined by a pair of virtual devices that let through so many Gbit/s
each way (tc, token bucket filter). Needs Linux, root, and the commands ip and tc (iproute2) and nsenter (util-linux).

In turns are measured: a step of dp 2 at each rate and unlimited, for each dtype that gradients are sent in, and the
same half batches on two ranks that do not know of each other ("compute"). Printed is the step as a multiple of
max(compute, bytes / rate), bytes being those that a rank must send: (dp - 1) / dp of the gradients and of the weights.
Goal at 1 Gbit/s with bfloat16 gradients: at most 1.15. What the device counted as sent is printed beside.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
from typing import Any

from contenders import Contender, add_arguments, add_preset, in_turns, machine, print_table, ratio, spread, write_json
from steps import titanlike_steps


def command(*words: str, inside: int | None = None) -> None:
    """Run a command, in the network namespace of process `inside`; RuntimeError with what it says if it fails."""
    prefix = () if inside is None else ("nsenter", "-t", str(inside), "-n")
    done = subprocess.run([*prefix, *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")


def connect(pids: list[int]) -> None:
    """Join the namespaces of two processes. The devices go when the processes end."""
    names = [f"tl{os.getpid()}x{i}" for i in range(2)]  # of at most 15 characters; only until they are moved
    command("ip", "link", "add", names[0], "type", "veth", "peer", "name", names[1])
    for i, (pid, name) in enumerate(zip(pids, names, strict=True)):
        command("ip", "link", "set", name, "netns", str(pid), "name", "link")
        command("ip", "addr", "add", f"10.77.0.{i + 1}/24", "dev", "link", inside=pid)
        for device in ("lo", "link"):
            command("ip", "link", "set", "dev", device, "up", inside=pid)


def limit(pids: list[int], gbit: float | None) -> None:
    """Let both ends send at most `gbit` Gbit/s; None: as fast as it goes."""
    for pid in pids:
        if gbit is None:
            subprocess.run(
                ["nsenter", "-t", str(pid), "-n", "tc", "qdisc", "del", "dev", "link", "root"], capture_output=True
            )
            continue
        # The bucket holds 4 ms: what the kernel sends at one wake-up.
        burst = f"{max(int(gbit * 1e9 / 8 * 0.004), 1 << 17)}"
        command(
            *("tc", "qdisc", "replace", "dev", "link", "root", "tbf", "rate", f"{gbit:g}gbit"),
            *("burst", burst, "latency", "100ms"), inside=pid,
        )  # fmt: skip


def missing() -> str | None:
    """What is not there, in words."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "network.py needs Linux and root, to make network namespaces"
    for name, package in (("ip", "iproute2"), ("tc", "iproute2"), ("nsenter", "util-linux")):
        if shutil.which(name) is None:
            return f"network.py needs the command {name} ({package})"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--gbit", type=float, nargs="+", default=[1, 10], help="Gbit/s of the link (default: 1 10)")
    add_preset(parser)
    parser.add_argument("--rows", type=int, default=4, help="sequences of a step, even (default: %(default)s)")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens of a sequence (default: %(default)s)")
    parser.add_argument(
        "--grad-comm-dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"],
        help="what gradients are sent in (default: both)",
    )  # fmt: skip
    parser.add_argument("--bucket-mb", type=float, default=25.0, help="optimizer.bucket_mb (default: %(default)s)")
    add_arguments(parser, seconds=110)
    args = parser.parse_args()
    if args.rows % 2:
        parser.error(f"--rows must be even, not {args.rows}")
    if (what := missing()) is not None:
        print(what, file=sys.stderr)
        return 2
    print(f"{machine()}")
    print(f"{args.preset}, float32, {args.rows} x {args.seq_len} tokens a step over dp 2, 1 thread per rank")
    keys = {
        "model.preset": args.preset,
        "train.seq_len": args.seq_len,
        "train.microbatch_size": args.rows // 2,
        "train.steps": 10000,
        "optimizer.bucket_mb": args.bucket_mb,
    }
    joined: dict[str, Contender] = {}
    alone: list[Contender] = []
    try:
        for dtype in args.grad_comm_dtype:
            settings = keys | {"optimizer.grad_comm_dtype": dtype, "train.global_batch_size": args.rows}
            joined[dtype] = Contender(f"dp 2, {dtype}", 2, titanlike_steps, settings, network=connect)
        for i in range(2):
            half = keys | {"train.global_batch_size": args.rows // 2}
            alone.append(Contender(f"alone {i}", 1, titanlike_steps, half))
        for contender in (*joined.values(), *alone):
            contender.ready()

        def compute() -> float:
            for contender in alone:
                contender.start("steps", None, 2)
            return max(contender.finish()[0] for contender in alone)

        def step(dtype: str, gbit: float | None) -> Any:
            def measure() -> float:
                limit(joined[dtype].pids, gbit)
                return joined[dtype].seconds()

            return measure

        rates: list[float | None] = [*args.gbit, None]
        took = in_turns(
            {"compute": compute} | {(dtype, gbit): step(dtype, gbit) for dtype in joined for gbit in rates},
            args.rounds,
            seconds=args.seconds,
        )
        facts = {dtype: contender.facts()[0] for dtype, contender in joined.items()}
    finally:
        for contender in (*joined.values(), *alone):
            contender.end()
    rows, results = [], []
    for dtype in joined:
        numel = facts[dtype]["parameters"]
        must = numel // 2 * ((2 if dtype == "bfloat16" else 4) + 4)
        for gbit in rates:
            link = must / (gbit * 1e9 / 8) if gbit else 0.0
            bound = [max(seconds, link) for seconds in took["compute"]]
            multiple = ratio(took[dtype, gbit], bound)
            name = f"{gbit:g} Gbit/s" if gbit else "unlimited"
            rows.append(
                [
                    f"{name}, {dtype} gradients",
                    f"{statistics.median(took[dtype, gbit]):.3f}",
                    f"{statistics.median(took['compute']):.3f}",
                    f"{link:.3f}",
                    spread(multiple),
                    f"{must / 1e6:.0f}",
                    f"{facts[dtype]['sent_bytes'] / 1e6:.0f}",
                ]
            )
            results.append(
                {"gbit": gbit, "gradients": dtype, "seconds": took[dtype, gbit], "compute": took["compute"]}
                | {"link_s": link, "multiple": multiple, "bytes": must, "device_bytes": facts[dtype]["sent_bytes"]}
            )
    print_table(["", "step s", "compute s", "link s", "x the larger", "MB to send", "MB sent"], rows)
    write_json(args.json, "network", vars(args), results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
