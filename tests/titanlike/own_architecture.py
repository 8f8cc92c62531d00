"""A small architecture of somebody else's: no attention, sizes with names of its own, its tables in the same file."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from parallelize.tensor import Replicated, TensorPlan, VocabParallelEmbedding


@dataclass(frozen=True)
class OwnConfig:
    """Sizes."""

    vocab_size: int
    """Number of token ids."""
    dim: int = 96
    """Width of the residual stream."""
    n_layers: int = 6
    """Number of blocks."""
    bottleneck: int = 400
    """Hidden width."""


class Mixer(nn.Module):
    """A bottleneck and back, and the mean of all earlier positions."""

    def __init__(self, config: OwnConfig) -> None:
        super().__init__()
        self.enter = nn.Linear(config.dim, config.bottleneck)
        self.leave = nn.Linear(config.bottleneck, config.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.enter(x)  # [batch, seq, hidden units]
        count = torch.arange(1, hidden.shape[1] + 1, dtype=hidden.dtype, device=hidden.device)
        return self.leave(torch.tanh(hidden) + hidden.cumsum(1) / count[:, None])


class OwnBlock(nn.Module):
    """x + mixer(norm(x))."""

    def __init__(self, config: OwnConfig) -> None:
        super().__init__()
        self.scale = nn.LayerNorm(config.dim)
        self.mixer = Mixer(config)

    def forward(self, x: Tensor, _context: None) -> Tensor:
        return x + self.mixer(self.scale(x))


class Own(nn.Module):
    """tokens [batch, seq] -> logits [batch, seq, vocab_size]."""

    config_class = OwnConfig
    tied_parameters: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, config: OwnConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): OwnBlock(config) for i in range(config.n_layers)})
        self.output = nn.Linear(config.dim, config.vocab_size)

    def context(self, *_: Tensor | None) -> None:
        """The blocks share nothing."""

    def embed(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens)

    def head(self, x: Tensor) -> Tensor:
        return self.output(x)

    def forward(self, tokens: Tensor, **_masks: Tensor | None) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers.values():
            x = layer(x, None)
        return self.head(x)

    def init_parameter(self, name: str, value: Tensor, generator: torch.Generator) -> None:
        value.normal_(1.0 if "scale" in name else 0.0, 0.3, generator=generator)


FIRST_PARTS = ("embedding",)
LAST_PARTS = ("output",)


def tensor_plan(config: OwnConfig, tp: int, sequence_parallel: bool) -> TensorPlan:
    stream = Shard(1) if sequence_parallel else Replicate()
    return {
        "embedding": VocabParallelEmbedding(output=stream),
        "layers.*.scale": Replicated(),
        "layers.*.mixer": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),)),
        "layers.*.mixer.enter": ColwiseParallel(),
        "layers.*.mixer.leave": RowwiseParallel(output_layouts=stream, use_local_output=False),
        "output": ColwiseParallel(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False),
    }


def stage_costs(config: OwnConfig, seq_len: int) -> tuple[float, list[float], float]:
    return 0.0, [1.0] * config.n_layers, 1.0


def shrink(model: dict[str, object], tp: int) -> dict[str, object]:
    """What verify cannot know: `bottleneck` is a width."""
    return {"bottleneck": 10 * tp}
