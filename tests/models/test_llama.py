"""The plain Llama is the published one: its sizes, its rotary frequencies, its logits."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from models.llama import PRESETS, Llama, LlamaConfig, RopeScaling, make_context, rope_frequencies, rotate

SMALL: dict[str, Any] = {"vocab_size": 61, "dim": 32, "n_layers": 3, "n_heads": 4, "ffn_dim": 40, "init_std": 0.1}


def built(config: LlamaConfig, dtype: torch.dtype = torch.float64) -> Llama:
    """A model with random weights, biases too."""
    torch.manual_seed(1)
    model = Llama(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if parameter.dim() == 1 else 0.0))
    return model


@pytest.mark.parametrize(
    ("preset", "parameters"),
    # Counted in the published checkpoints: Llama 3.2 1B and 3B, Llama 3.1 8B and 70B.
    [("1b", 1_235_814_400), ("3b", 3_212_749_824), ("8b", 8_030_261_248), ("70b", 70_553_706_496)],
)
def test_presets_have_the_published_number_of_parameters(preset: str, parameters: int) -> None:
    with torch.device("meta"):
        model = Llama(PRESETS[preset])
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def test_every_parameter_is_in_the_plain_names() -> None:
    """Symptom: a name that a checkpoint or an optimizer group uses changes."""
    with torch.device("meta"):
        names = [n for n, _ in Llama(LlamaConfig(**SMALL | {"n_layers": 1, "attention_bias": True})).named_parameters()]
    assert names == [
        "tok_embeddings.weight",
        "layers.0.attention_norm.weight",
        *(f"layers.0.attention.{w}.{kind}" for w in ("wq", "wk", "wv", "wo") for kind in ("weight", "bias")),
        "layers.0.ffn_norm.weight",
        *(f"layers.0.feed_forward.{w}.weight" for w in ("w1", "w2", "w3")),
        "norm.weight",
        "output.weight",
    ]


# -- rotary positions ------------------------------------------------------------------------------------------------


def scaled_by_the_paper(frequency: float, scaling: RopeScaling) -> float:
    """Llama 3.1's rule as published in its reference code, by wavelength and one frequency at a time."""
    wavelength = 2 * math.pi / frequency
    context = scaling.original_max_position_embeddings
    if wavelength < context / scaling.high_freq_factor:
        return frequency
    if wavelength > context / scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = (context / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


@pytest.mark.parametrize("preset", ["1b", "8b"])
def test_rotary_frequencies_are_scaled_as_in_llama_3(preset: str) -> None:
    """Symptom: the bands are mixed up, and long contexts fail quietly."""
    config = PRESETS[preset]
    assert config.rope_scaling is not None
    plain = rope_frequencies(dataclasses.replace(config, rope_scaling=None), torch.device("cpu"), torch.float64)
    scaled = rope_frequencies(config, torch.device("cpu"), torch.float64)
    head_dim = config.head_dim or 0
    for i, frequency in enumerate(plain.tolist()):
        assert frequency == pytest.approx(config.rope_theta ** (-2 * i / head_dim), rel=1e-14)
        assert scaled[i].item() == pytest.approx(scaled_by_the_paper(frequency, config.rope_scaling), rel=1e-13)
    ratio = plain / scaled
    kept = (ratio == 1.0).sum().item()
    slowed = torch.isclose(ratio, torch.tensor(config.rope_scaling.factor).double(), rtol=1e-12).sum().item()
    assert 0 < kept < head_dim / 2 and 0 < slowed < head_dim / 2 and kept + slowed < head_dim / 2


def test_rotation_depends_on_the_distance_alone() -> None:
    """The property that defines RoPE (arXiv:2104.09864, section 3.1): q at m times k at n is a function of m - n."""
    config = LlamaConfig(**SMALL)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def product(m: int, n: int) -> float:
        at = [
            make_context(config, torch.empty(1, 1, 0, dtype=torch.float64), torch.tensor([[p]]), None) for p in (m, n)
        ]
        return (rotate(q, at[0]) * rotate(k, at[1])).sum().item()

    assert product(5, 3) == pytest.approx(product(1005, 1003), rel=1e-10)
    assert product(5, 3) != pytest.approx(product(5, 4), rel=1e-3)
    assert product(0, 0) == pytest.approx((q * k).sum().item(), rel=1e-14)


def test_angles_are_exact_for_bfloat16_models() -> None:
    """Symptom: bfloat16 cannot tell position 257 from 256, so the table must not be made in it."""
    context = make_context(LlamaConfig(**SMALL), torch.empty(1, 512, 0, dtype=torch.bfloat16), None, None)
    assert context.cos.dtype == torch.float32
    assert (context.cos[:, 256] != context.cos[:, 257]).any()


# -- documents -------------------------------------------------------------------------------------------------------


def test_packed_documents_equal_the_documents_one_by_one() -> None:
    """Symptom: a token attends to another document in its row."""
    model = built(LlamaConfig(**SMALL | {"n_kv_heads": 2}))
    lengths = (5, 1, 7)
    tokens = torch.randint(0, 61, (2, sum(lengths)))
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).expand(2, -1)
    positions = torch.cat([torch.arange(n) for n in lengths]).expand(2, -1)
    packed = model(tokens, positions, documents)
    alone = torch.cat([model(part) for part in tokens.split(lengths, dim=1)], dim=1)
    assert torch.allclose(packed, alone, rtol=0, atol=1e-12)
    assert not torch.allclose(model(tokens), alone, rtol=0, atol=1e-3)


def test_a_token_sees_no_later_one() -> None:
    model = built(LlamaConfig(**SMALL))
    tokens = torch.randint(0, 61, (1, 9))
    changed = tokens.clone()
    changed[0, 6] = (tokens[0, 6] + 1) % 61
    difference = (model(tokens) - model(changed)).abs().amax(-1)[0]
    assert (difference[:6] == 0).all() and (difference[6:] > 0).all()


# -- initial weights -------------------------------------------------------------------------------------------------


def test_initial_weights_have_the_stated_spread() -> None:
    config = LlamaConfig(vocab_size=500, dim=128, n_layers=8, ffn_dim=512, init_std=0.03, attention_bias=True)
    with torch.device("meta"):
        model = Llama(config)
    for name, parameter in model.named_parameters():
        value = torch.full(parameter.shape, math.nan)
        model.init_parameter(name, value, torch.Generator().manual_seed(0))
        if name.endswith(".bias"):
            assert (value == 0).all()
        elif "norm" in name:
            assert (value == 1).all()
        else:
            std = 0.03 / 4 if name.endswith(("wo.weight", "w2.weight")) else 0.03  # sqrt(2 * 8 layers) = 4
            assert value.std().item() == pytest.approx(std, rel=0.05), name
            assert abs(value.mean().item()) < 0.03 * std * 5


# -- Hugging Face's implementation -----------------------------------------------------------------------------------

NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}


def hugging_face_name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module.startswith("layers."):
        _, number, part = module.split(".", 2)
        return f"model.layers.{number}.{NAMES[part]}.{kind}"
    return f"{NAMES[module]}.{kind}"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_kv_heads": 2},
        {"n_kv_heads": 1, "head_dim": 12, "tie_embeddings": True},
        {"n_kv_heads": 2, "attention_bias": True, "mlp_bias": True},
        {
            "head_dim": 16,
            "rope_theta": 500000.0,
            "rope_scaling": RopeScaling(8.0, original_max_position_embeddings=16),
            "max_seq_len": 64,
        },
    ],
    ids=["plain", "grouped", "tied", "biases", "scaled"],
)
def test_logits_are_those_of_transformers(changes: dict[str, Any]) -> None:
    """Symptom: the RoPE layout is permuted wrongly (NT #241, TT #335), or the kv heads are grouped in another order."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = LlamaConfig(**SMALL | changes)
    model = built(config)
    rope: dict[str, Any] = {"rope_type": "default"}
    if config.rope_scaling is not None:
        rope = {"rope_type": "llama3", **dataclasses.asdict(config.rope_scaling)}
    theirs_config = transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=config.ffn_dim,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_seq_len,
        rms_norm_eps=config.norm_eps,
        attention_bias=config.attention_bias,
        mlp_bias=config.mlp_bias,
        tie_word_embeddings=config.tie_embeddings,
        **_rope_keys(transformers.LlamaConfig, rope, config.rope_theta),
    )
    theirs = transformers.LlamaForCausalLM(theirs_config).to(torch.float64)
    weights = {hugging_face_name(name): value for name, value in model.state_dict().items()}
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not missing and not unexpected
    tokens = torch.randint(0, 61, (2, 48))
    with torch.no_grad():
        ours, right = model(tokens), theirs(tokens).logits
    # transformers makes its rotary table in float32 whatever the model computes in: angles up to 48 are right to 4e-6.
    assert _worst(ours, right) < 2e-5 * right.abs().max().item()


def _rope_keys(config_class: Any, rope: dict[str, Any], theta: float) -> dict[str, Any]:
    """transformers 5 has the base frequency inside of rope_parameters; 4 has rope_theta and rope_scaling."""
    if hasattr(config_class(), "rope_parameters"):
        return {"rope_parameters": rope | {"rope_theta": theta}}
    return {"rope_theta": theta, "rope_scaling": None if rope["rope_type"] == "default" else rope}


def _worst(a: Tensor, b: Tensor) -> float:
    assert a.isfinite().all() and b.isfinite().all()
    return (a - b).abs().max().item()


def test_shapes_that_cannot_be_built_are_refused() -> None:
    for changes, words in (
        ({"n_kv_heads": 3}, "n_heads (4) must be a multiple of n_kv_heads (3)"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"n_layers": 0}, "n_layers must be at least 1"),
    ):
        with pytest.raises(ValueError) as caught:
            LlamaConfig(**SMALL | changes)
        assert words in str(caught.value)
