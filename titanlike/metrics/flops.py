"""FLOPs of a training step by formula, and how far they are from the device's peak (MFU).

A multiply and an add are two FLOPs, and the backward pass costs twice the forward, so a weight that a token is
multiplied by costs 6 FLOPs a token. Attention costs, per layer and token, 2 matmuls forward and 4 backward of
`heads * head_dim * seq_len` multiply-adds each: `12 * heads * head_dim * seq_len`. Activation checkpointing's second
forward is not counted (model FLOPs, not hardware FLOPs). Conventions differ between codebases, so each is stated:

- `palm`: 6 * all parameters + full attention (PaLM, appendix B). Of experts, those that a token goes through count, in
  all three.
- `matmul`: 6 * weights that take part in a matmul + full attention. The input embedding is a look-up and does not
  count (a tied one counts once, as the head); norms and biases do not either. This is what torch's FlopCounterMode
  counts with the math attention kernel, exactly.
- `causal`: `matmul` with half the attention, which is what a causal kernel has to compute.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ModelShape:
    """What the formulas need to know of a model. Counts are of the whole model, not of one rank's part."""

    parameters: int
    """All parameters, tied ones once."""
    embedding_parameters: int
    """Parameters of the input embedding."""
    matmul_parameters: int
    """Elements of the weights that each token is multiplied by, tied head included."""
    layers: int
    """Layers with attention."""
    heads: int
    """Query heads."""
    head_dim: int
    active_parameters: int | None = None
    """Parameters that one token goes through, in a mixture of experts; None: all."""


@dataclass(frozen=True)
class FlopsPerToken:
    """Training FLOPs (forward and backward) per token by convention; see the module."""

    palm: float
    matmul: float
    causal: float


def model_shape(model: torch.nn.Module, layers: int, heads: int, head_dim: int) -> ModelShape:
    """Count the parameters of a plain single-device model; the meta device will do.

    Matmul weights are those of the `nn.Linear` modules; input embeddings those of the `nn.Embedding` modules.
    """
    from torch import nn

    modules = list(model.modules())
    return ModelShape(
        parameters=sum(p.numel() for p in model.parameters()),
        embedding_parameters=sum(m.weight.numel() for m in modules if isinstance(m, nn.Embedding)),
        matmul_parameters=sum(m.weight.numel() for m in modules if isinstance(m, nn.Linear)),
        layers=layers,
        heads=heads,
        head_dim=head_dim,
    )


def flops_per_token(shape: ModelShape, seq_len: int) -> FlopsPerToken:
    """Training FLOPs per token for sequences of `seq_len` tokens. Document masks are not taken into account."""
    attention = 12 * shape.layers * shape.heads * shape.head_dim * seq_len
    return FlopsPerToken(
        palm=6 * (shape.active_parameters or shape.parameters) + attention,
        matmul=6 * shape.matmul_parameters + attention,
        causal=6 * shape.matmul_parameters + attention / 2,
    )


# Datasheet peaks of dense bfloat16 matmuls, TFLOP/s, by a pattern on the device's name; the first match counts.
_BF16_PEAKS: tuple[tuple[str, float], ...] = (
    (r"\bGB[23]00\b", 2500.0),
    (r"\bB[23]00\b", 2250.0),
    (r"\bGH200\b", 989.4),
    (r"\bH[12]00 NVL\b", 835.5),
    (r"\bH100 PCIe\b", 756.0),
    (r"\bH[128]00\b", 989.4),
    (r"\bA[18]00\b", 312.0),
    (r"\bL40S\b", 362.0),
    (r"\bL4\b", 121.0),
    (r"\bA40\b", 149.7),
    (r"\bA30\b", 165.0),
    (r"\bA10\b", 125.0),
    (r"\bMI355X\b", 2516.0),
    (r"\bMI3(00|25)X\b", 1307.4),
    (r"\bMI250X\b", 383.0),
)


def device_peak_flops(device_name: str, dtype: torch.dtype | str) -> float | None:
    """Datasheet peak of dense matmuls in FLOP/s, or None if it is not known: no MFU is better than a guessed one.

    Known are data-centre GPUs in bfloat16. `device_name` is what the driver calls the device.
    """
    if str(dtype).removeprefix("torch.") != "bfloat16":
        return None
    for pattern, tflops in _BF16_PEAKS:
        if re.search(pattern, device_name):
            return tflops * 1e12
    return None


def device_name(device: torch.device | str) -> str:
    """The name of the device, "cpu" for the CPU."""
    import torch

    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def measure_matmul_peak(device: torch.device | str, dtype: torch.dtype) -> float:
    """The best rate in FLOP/s of a large square matmul, measured now; a second or so. All ranks of a host should do it
    at the same time, so that they share its cores as they do in training."""
    import time

    import torch

    device = torch.device(device)
    on_cpu = device.type == "cpu"
    size, repeats = (1024, 8) if on_cpu else (8192, 20)
    a = torch.randn(size, size, device=device, dtype=dtype)
    b = torch.randn(size, size, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(repeats):
        if not on_cpu:
            torch.accelerator.synchronize()
        begin = time.perf_counter()
        a @ b
        if not on_cpu:
            torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - begin)
    return 2 * size**3 / best
