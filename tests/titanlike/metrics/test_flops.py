"""FLOPs against torch's own counter, and MFU only against peaks that are known."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models.llama import PRESETS, Llama, LlamaConfig
from models.qwen3 import Qwen3, Qwen3Config
from titanlike.metrics.flops import (
    ModelShape,
    device_name,
    device_peak_flops,
    flops_per_token,
    measure_matmul_peak,
    model_shape,
)
from titanlike.metrics.throughput import Throughput

BASE = LlamaConfig(vocab_size=70, dim=24, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=10, ffn_dim=40)
VARIANTS = {
    "grouped": BASE,
    "multi-head": dataclasses.replace(BASE, n_kv_heads=4),
    "one kv head": dataclasses.replace(BASE, n_kv_heads=1),
    "tied": dataclasses.replace(BASE, tie_embeddings=True),
    "biases": dataclasses.replace(BASE, attention_bias=True, mlp_bias=True),
    "one layer": dataclasses.replace(BASE, n_layers=1),
}


QWEN3 = Qwen3Config(vocab_size=70, dim=24, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=10, ffn_dim=40)
VARIANTS |= {"qwen3": QWEN3, "qwen3, tied": dataclasses.replace(QWEN3, tie_embeddings=True)}


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("seq_len", [1, 17])
def test_formula_equals_flop_counter_mode(config: LlamaConfig, seq_len: int) -> None:
    """MFU wrong by a forgotten head, a double-counted embedding or grouped heads (reports against several trainers)."""
    model, rows = (Qwen3 if isinstance(config, Qwen3Config) else Llama)(config), 3
    tokens = torch.randint(0, config.vocab_size, (rows, seq_len))
    # The math kernel is made of matmuls that the counter sees; torch does not count the CPU's flash kernel at all.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    shape = model_shape(model, config.n_layers, config.n_heads, config.head_dim)
    assert counter.get_total_flops() == flops_per_token(shape, seq_len).matmul * rows * seq_len


def test_formula_of_experts_equals_flop_counter_mode() -> None:
    """MFU over 1 for a mixture of experts, all of whose experts are counted for each token."""
    from models.grouped import grouped_outer, grouped_product
    from models.moe import MoE, MoEConfig
    from parallelize.moe import flop_shape

    def flops(x: tuple[int, ...], weight: tuple[int, ...], *_: object, **__: object) -> int:
        return 2 * x[0] * x[1] * weight[-1]  # rows x in x out, and likewise for the outer products

    config = MoEConfig(
        vocab_size=70, dim=24, n_layers=3, n_heads=4, n_kv_heads=2, ffn_dim=40, n_experts=6, top_k=2, n_shared_experts=1
    )
    model, rows, seq_len = MoE(config), 3, 17
    tokens = torch.randint(0, config.vocab_size, (rows, seq_len))
    counted = {op._opoverload.overloadpacket: flops for op in (grouped_product, grouped_outer)}
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False, custom_mapping=counted) as counter:
        model(tokens).sum().backward()
    shape = model_shape(model, config.n_layers, config.n_heads, config.head_dim or 0)
    shape = dataclasses.replace(shape, **flop_shape(model))
    assert counter.get_total_flops() == flops_per_token(shape, seq_len).matmul * rows * seq_len
    expert = 3 * 24 * 40
    assert shape.active_parameters == shape.parameters - 3 * 4 * expert


def test_active_parameters_of_published_shapes() -> None:
    """Mixtral 8x7B: 46.7B, of which 12.9B; Qwen3-30B-A3B: 30.5B, of which 3.3B."""
    from models.moe import PRESETS as MOE
    from models.moe import MoE
    from parallelize.moe import flop_shape

    with torch.device("meta"):
        active = {name: flop_shape(MoE(MOE[name]))["active_parameters"] for name in ("mixtral-8x7b", "qwen3-30b-a3b")}
    assert active == {"mixtral-8x7b": 12_879_925_248, "qwen3-30b-a3b": 3_353_032_704}


def test_conventions_differ_by_what_they_say() -> None:
    shape = ModelShape(1000, embedding_parameters=200, matmul_parameters=790, layers=2, heads=3, head_dim=5)
    flops = flops_per_token(shape, seq_len=7)
    assert flops.palm == 6 * 1000 + 12 * 2 * 3 * 5 * 7
    assert flops.matmul == 6 * 790 + 12 * 2 * 3 * 5 * 7
    assert flops.causal == 6 * 790 + 6 * 2 * 3 * 5 * 7


def test_shape_of_the_8b_preset_on_meta() -> None:
    """Llama 3.1 8B: 8,030,261,248 parameters, of which 525,336,576 in the input embedding and 266,240 in norms."""
    config = PRESETS["8b"]
    with torch.device("meta"):
        shape = model_shape(Llama(config), config.n_layers, config.n_heads, config.head_dim)
    assert shape.parameters == 8_030_261_248
    assert shape.embedding_parameters == 128256 * 4096
    assert shape.matmul_parameters == 8_030_261_248 - 128256 * 4096 - (2 * 32 + 1) * 4096


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A800-SXM4-80GB", 312),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA A10G", None),
        ("NVIDIA A1000", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("NVIDIA H20", None),
        ("cpu", None),
        ("", None),
    ],
)
def test_peak_by_device_name(name: str, tflops: float | None) -> None:
    """An unknown device gives no MFU, and no device is taken for another whose name begins alike."""
    peak = device_peak_flops(name, torch.bfloat16)
    assert peak == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_no_datasheet_peak_for_other_dtypes() -> None:
    assert device_peak_flops("NVIDIA H100 80GB HBM3", torch.float32) is None


def test_measured_peak_is_a_rate() -> None:
    assert device_name("cpu") == "cpu"
    assert 1e8 < measure_matmul_peak("cpu", torch.float32) < 1e15


def test_rates() -> None:
    flops = flops_per_token(ModelShape(1000, 200, 790, 2, 3, 5), seq_len=7)
    full = Throughput(4096, 4, flops, peak_flops=1e9, measured_peak_flops=5e8).values(2.0)
    assert full["tokens_per_s"] == 2048 and full["tokens_per_s_per_rank"] == 512
    assert full["tflops_per_rank"] == 512 * flops.matmul / 1e12
    assert full["mfu/palm"] == 512 * flops.palm / 1e9
    assert full["mfu/causal"] < full["mfu/matmul"] < full["mfu/palm"]
    assert full["mfu/measured"] == 2 * full["mfu/matmul"]


def test_unknown_peak_gives_no_mfu_and_no_time_no_rate() -> None:
    """Rather than an MFU of 0 or against a guess."""
    flops = flops_per_token(ModelShape(1000, 200, 790, 2, 3, 5), seq_len=7)
    assert set(Throughput(4096, 4, flops).values(1.0)) == {"tokens_per_s", "tokens_per_s_per_rank", "tflops_per_rank"}
    assert set(Throughput(4096, 4).values(1.0)) == {"tokens_per_s", "tokens_per_s_per_rank"}
    assert Throughput(4096, 4, flops).values(0.0) == {}
