"""A small random model for generation, on a mesh, and the same one plain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from models.llama import Llama, LlamaConfig
from models.qwen3 import Qwen3, Qwen3Config
from titanlike.build import draw_parameter, generator_for
from titanlike.generate.generator import Completion, Generator
from titanlike.generate.model import InferenceModel
from titanlike.mesh import Mesh

# A large init_std: with the usual one a random model says the same token for ever.
CONFIG = LlamaConfig(
    vocab_size=97, dim=32, n_layers=4, n_heads=4, n_kv_heads=2, ffn_dim=48, max_seq_len=64, init_std=0.3
)
QWEN3 = Qwen3Config(
    vocab_size=97, dim=32, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=12, ffn_dim=48, max_seq_len=64, init_std=0.3
)
PROMPTS = [[5, 17, 3], [88], [1, 2, 3, 4, 5, 6, 7, 8, 9], [40, 41], [9, 9, 9, 9]]


def decode(ids: Sequence[int]) -> str:
    """A letter for each id."""
    return "".join(chr(ord("A") + i % 26) for i in ids)


def drawn(model: Any, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """A random parameter; biases too, which a model starts with as zeros."""
    value = draw_parameter(model, 0, name, shape, torch.device("cpu"))
    return value.normal_(0, 0.3, generator=generator_for(1, name, value.device)) if name.endswith("bias") else value


def model_on(mesh: Mesh, config: LlamaConfig = CONFIG, dtype: torch.dtype = torch.float64) -> InferenceModel:
    """The random model on this rank's part of the mesh."""
    architecture = "qwen3" if isinstance(config, Qwen3Config) else "llama"
    model = InferenceModel(architecture, config, mesh, dtype, config.max_seq_len)
    for name, shard in model.shards().items():
        whole = drawn(model.plain, name, shard.global_shape)
        sizes = zip(shard.offset, shard.tensor.shape, strict=True)
        shard.tensor.copy_(whole[tuple(slice(start, start + size) for start, size in sizes)])
    return model


def plain_model(config: LlamaConfig = CONFIG, dtype: torch.dtype = torch.float64) -> Llama:
    """The same, on one device."""
    model = (Qwen3 if isinstance(config, Qwen3Config) else Llama)(config).to(dtype).requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.copy_(drawn(model, name, tuple(parameter.shape)))
    return model


def generate(
    mesh: tuple[int, int, int],
    config: LlamaConfig = CONFIG,
    dtype: torch.dtype = torch.float64,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    count: int = 12,
    end_ids: Sequence[int] = (),
    **options: Any,
) -> list[Completion]:
    """What a rank of the mesh (pp, dp, tp) gets."""
    model = model_on(Mesh(*mesh, torch.device("cpu")), config, dtype)
    return Generator(model, decode, end_ids, config.max_seq_len).generate(prompts, count, **options)[0]


def greedy_without_cache(prompt: Sequence[int], count: int, model: Llama) -> list[int]:
    """The oracle: the plain model on the whole text for each token."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]
