"""A training step of one rank beside the loop that one would write by hand, and beside this machine's matrix products.

    python benchmarks/step.py [--preset 26m] [--rows 4] [--seq-len 512] [--dtypes float32 bfloat16] [--no-compile]

One process, the same weights and tokens for all, measured in turns. `by hand` is the plain model with cross-entropy,
clip_grad_norm_, fused AdamW and zero_grad, eager and compiled whole; in bfloat16 it has bfloat16 weights and moments,
which is less work than titanlike's float32 masters. `matmul peak` is the fastest of some large square products, and the
share of it counts 6 FLOPs per weight and token in matrix products plus attention. Goals: 1.00 of the compiled loop by
hand, and 0.85 of the peak in float32.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from contenders import add_preset, in_turns, print_table, ratio, spread, write_json
from steps import global_batch, join, vocabulary
from torch import nn

from titanlike.build import DTYPES, draw_parameter, group_of
from titanlike.config import Config, load_config
from titanlike.data.batch import Batch
from titanlike.metrics.flops import flops_per_token
from titanlike.startup import config_shape
from titanlike.trainer import Trainer


def config_for(args: argparse.Namespace, dtype: str, compiled: bool) -> Config:
    return load_config(
        None,
        {
            "model.preset": args.preset,
            "train.dtype": dtype,
            "train.seq_len": args.seq_len,
            "train.global_batch_size": args.rows,
            "train.microbatch_size": args.rows,
            "compile.enable": compiled,
        },
    )


def ours(config: Config) -> tuple[Callable[[], None], float]:
    """A step of titanlike's trainer, and its FLOPs."""
    vocab = vocabulary(config)
    trainer = Trainer(config, join(config), vocab)
    tokens, labels = global_batch(config.train.global_batch_size, config.train.seq_len, vocab)
    batch: Any = Batch(tokens, labels, None, None, [], {})

    def step() -> None:
        trainer.train_step(batch).loss.item()

    return step, flops_per_token(config_shape(trainer), config.train.seq_len).matmul * tokens.numel()


def by_hand(config: Config) -> Callable[[], None]:
    """A step of a plain loop."""
    vocab, dtype, o = vocabulary(config), DTYPES[config.train.dtype], config.optimizer
    model: Any = config.architecture.model_class(config.model_config_for(vocab)).to(dtype)
    groups: dict[float, list[nn.Parameter]] = {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            shape = tuple(parameter.shape)
            parameter.copy_(draw_parameter(model, config.run.seed, name, shape, parameter.device))
            groups.setdefault(group_of(o, name, shape)[1], []).append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": parameters, "weight_decay": decay} for decay, parameters in groups.items()],
        lr=o.lr,
        betas=(o.beta1, o.beta2),
        eps=o.eps,
        fused=True,
    )

    def loss_of(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten())

    forward = torch.compile(loss_of, fullgraph=True, dynamic=False) if config.compile.enable else loss_of
    tokens, labels = global_batch(config.train.global_batch_size, config.train.seq_len, vocab)

    def step() -> None:
        loss = forward(tokens, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.train.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()

    return step


def peak(dtype: torch.dtype) -> float:
    """FLOP/s of the fastest of a few square matrix products."""
    best = 0.0
    for size in (1024, 2048):
        a, b = torch.randn(2, size, size).to(dtype)
        for _ in range(3):
            began = time.perf_counter()
            torch.mm(a, b)
            best = max(best, 2 * size**3 / (time.perf_counter() - began))
    return best


def timed(step: Callable[[], None]) -> Callable[[], float]:
    def measure() -> float:
        began = time.perf_counter()
        step()
        return time.perf_counter() - began

    return measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_preset(parser)
    parser.add_argument("--rows", type=int, default=4, help="sequences of a step (default: 4)")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens of each (default: 512)")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5, help="(default: 5)")
    parser.add_argument("--seconds", type=float, default=60, help="for each dtype, about (default: 60)")
    parser.add_argument("--no-compile", action="store_true", help="eager only")
    parser.add_argument("--json", help="write the results here")
    args = parser.parse_args()

    rows, results = [], []
    for dtype in args.dtypes:
        steps: dict[Any, Callable[[], float]] = {}
        flops = 0.0
        for compiled in (False,) if args.no_compile else (False, True):
            config = config_for(args, dtype, compiled)
            mine, flops = ours(config)
            steps["titanlike", compiled] = timed(mine)
            steps["by hand", compiled] = timed(by_hand(config))
        steps["peak"] = lambda dtype=dtype: 1 / peak(DTYPES[dtype])
        found = in_turns(steps, args.rounds, warm=2, seconds=args.seconds)
        for compiled in (False,) if args.no_compile else (False, True):
            seconds, theirs = found["titanlike", compiled], found["by hand", compiled]
            against, share = ratio(theirs, seconds), ratio([flops * second for second in found["peak"]], seconds)
            kind = "compiled" if compiled else "eager"
            rows.append([f"{dtype}, {kind}", f"{statistics.median(seconds):.3f}", spread(against), spread(share)])
            results.append(
                {"dtype": dtype, "compiled": compiled, "seconds": seconds, "by_hand": theirs, "share": share}
            )
    print(
        f"{args.preset}, {args.rows} x {args.seq_len} tokens, {torch.get_num_threads()} thread(s), {args.rounds} rounds"
    )
    print_table(["", "s/step", "by hand / titanlike", "of the matmul peak"], rows)
    write_json(args.json, "step", vars(args), results)


if __name__ == "__main__":
    main()
