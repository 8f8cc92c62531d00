"""What each balancing method does to the load of experts: a small model trained 200 steps with each, one process.

    python benchmarks/moe_balance.py [--steps 200]

The same weights and the same data (the standard library's source, bytes). Prints the coefficient of variation of the
experts' tokens, mean of the layers, over the last ten steps up to each mark; the busiest expert over the mean; loss.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from titanlike.config import load_config
from titanlike.data import open_data
from titanlike.mesh import Mesh, init_distributed, pick_device
from titanlike.trainer import Trainer

METHODS: dict[str, dict[str, Any]] = {
    "none": {},
    "loss over the batch": {"model.balance_loss": 0.01},
    "loss over all layers": {"model.balance_loss": 0.01, "model.balance_over": "model"},
    "loss over each sequence": {"model.balance_loss": 0.01, "model.balance_over": "sequence"},
    "bias": {"model.bias_rate": 0.003},
}
BASE: dict[str, Any] = {
    **{"model.architecture": "moe", "model.preset": "debug", "model.balance_loss": 0.0, "model.dim": 64},
    **{"model.n_layers": 3, "model.n_experts": 16, "model.ffn_dim": 64, "train.seq_len": 64},
    **{"train.global_batch_size": 16, "train.microbatch_size": 8, "optimizer.lr": 3e-3, "schedule.warmup": 20},
    **{"data.source": "python-stdlib", "run.device": "cpu", "model.max_seq_len": 64},
}
MARKS = (10, 50, 100, 200)


def main() -> None:
    steps = int(sys.argv[sys.argv.index("--steps") + 1]) if "--steps" in sys.argv else 200
    torch.set_num_threads(1)
    device = pick_device("cpu")
    init_distributed(device)
    marks = [mark for mark in MARKS if mark < steps] + [steps]
    print(
        f"{'load, coefficient of variation':32} "
        + " ".join(f"{f'step {mark}':>9}" for mark in marks)
        + "  max/mean   loss"
    )
    for name, options in METHODS.items():
        config = load_config(None, {**BASE, "train.steps": steps, **options})
        config.validate_for(1)
        data = open_data(config, 0, 1)
        trainer = Trainer(config, Mesh(1, 1, 1, device), data.tokenizer.vocab_size)
        variation, busiest, loss = [], [], []
        for _, batch in zip(range(steps), data.train_batches(None)):
            result = trainer.train_step(batch)
            values = trainer.auxiliary_values(result)
            variation.append(float(values["moe/load_cv"]))
            busiest.append(float(values["moe/load_max"]))
            loss.append(float(result.loss))

        def last(numbers: list[float], step: int) -> float:
            return sum(numbers[max(0, step - 10) : step]) / min(10, step)

        row = " ".join(f"{last(variation, mark):9.3f}" for mark in marks)
        print(f"{name:32} {row}  {last(busiest, steps):8.2f}  {last(loss, steps):5.3f}", flush=True)


if __name__ == "__main__":
    main()
