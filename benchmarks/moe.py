"""Grouped products against a loop over the experts, and ep 2 against ep 1, in one run.

    torchrun --nproc-per-node 2 benchmarks/moe.py [--tokens 1024] [--experts 8 64] [--repeats 7] [--dtype float32]

First, on one rank while the other waits: the experts of one layer, forward and backward, by grouped products and by the
readable loop (models/moe.py). Then, on both: training steps of a small model with the experts on each rank (ep 1) and
shared out (ep 2), in turns. Prints medians, and the ratio, the median of the ratios of neighbouring measurements, which
load on the machine hits alike. Losses of the two are compared.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from models.moe import MoEConfig
from models.routing import loop_over_experts, route, run_experts
from titanlike.config import load_config
from titanlike.data.batch import Batch
from titanlike.mesh import Mesh, init_distributed, pick_device
from titanlike.trainer import Trainer


def in_turns(first: Callable[[], Any], second: Callable[[], Any], repeats: int) -> list[tuple[float, float]]:
    """Seconds of both, by repeat; each ran once before."""
    first(), second()
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        first()
        middle = time.perf_counter()
        second()
        found.append((middle - begin, time.perf_counter() - middle))
    return found


def report(label: str, names: tuple[str, str], found: list[tuple[float, float]]) -> None:
    one, two = (statistics.median(times) * 1e3 for times in zip(*found))
    ratios = sorted(b / a for a, b in found)
    spread = f"{ratios[0]:.2f}..{ratios[-1]:.2f}"
    print(
        f"{label:34} {names[0]:>8} {one:8.1f} ms  {names[1]:>8} {two:8.1f} ms  ratio {statistics.median(ratios):5.2f} "
        f"({spread})",
        flush=True,
    )


def experts(n_experts: int, tokens: int, dtype: torch.dtype, repeats: int) -> None:
    """One layer's experts: top 2 of dim 256 and hidden width 512 * 8 / n_experts."""
    config = MoEConfig(vocab_size=1, dim=256, n_experts=n_experts, top_k=2, ffn_dim=4096 // n_experts)
    torch.manual_seed(0)
    x = torch.randn(1, tokens, 256).to(dtype).requires_grad_()
    hidden = 4096 // n_experts
    shapes = ((n_experts, hidden, 256), (n_experts, 256, hidden), (n_experts, hidden, 256))
    weights = [(torch.randn(shape) * 0.05).to(dtype).requires_grad_() for shape in shapes]
    where = route(x.detach(), torch.randn(n_experts, 256).to(dtype) * 0.05, None, config, True)

    def run(how: Callable[..., torch.Tensor]) -> Callable[[], Any]:
        def step() -> None:
            torch.autograd.grad(how(x[0], where, *weights).float().square().sum(), [x, *weights])

        return step

    found = in_turns(run(run_experts), run(loop_over_experts), repeats)
    report(f"{n_experts} experts, {tokens} tokens, {str(dtype)[6:]}", ("grouped", "loop"), found)


def expert_parallel(tokens: int, dtype: str, repeats: int) -> None:
    """Steps of two ranks, the experts on each or shared out."""
    device = pick_device("cpu")
    trainers = []
    for ep in (1, 2):
        config = load_config(
            None,
            {
                **{"model.architecture": "moe", "model.preset": "debug", "model.balance_loss": 0.0, "mesh.dp": 2},
                **{"mesh.ep": ep, "train.seq_len": tokens, "train.global_batch_size": 2, "train.dtype": dtype},
            },
        )
        config.validate_for(2)
        trainers.append(Trainer(config, Mesh(1, 2, 1, device, ep), 512))
    generator = torch.Generator().manual_seed(dist.get_rank())
    text = torch.randint(0, 512, (1, tokens + 1), generator=generator)
    batch = Batch(text[:, :-1], text[:, 1:], None, None, [], {})
    losses: list[list[float]] = [[], []]

    def step(index: int) -> Callable[[], Any]:
        def run() -> None:
            losses[index].append(float(trainers[index].train_step(batch).loss))

        return run

    found = in_turns(step(0), step(1), repeats)
    if dist.get_rank() == 0:
        report(f"a step, 2 ranks of {tokens} tokens, {dtype}", ("ep 1", "ep 2"), found)
        held = [trainer.zero.bytes_per_rank() for trainer in trainers]
        sizes = [(each["weights"] + each["gradients"]) / 1e6 for each in held]
        worst = max(abs(a - b) for a, b in zip(*losses))
        print(f"{'weights and gradients of a rank':34} {'ep 1':>8} {sizes[0]:8.1f} MB  {'ep 2':>8} {sizes[1]:8.1f} MB")
        print(f"largest difference of a loss: {worst:.2g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    init_distributed(pick_device("cpu"))
    if dist.get_rank() == 0:
        for count in args.experts:
            experts(count, args.tokens, getattr(torch, args.dtype), args.repeats)
    dist.barrier()  # the other rank has waited, so that the loop had a core of its own
    if dist.get_world_size() == 2:
        expert_parallel(args.tokens, args.dtype, args.repeats)
    elif dist.get_rank() == 0:
        print("ep 2 against ep 1 needs two ranks: torchrun --nproc-per-node 2 benchmarks/moe.py")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
