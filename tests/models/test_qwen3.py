"""The plain Qwen3, beside transformers' and by its own properties."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from models.llama import Llama
from models.qwen3 import PRESETS, Qwen3, Qwen3Config
from titanlike.config import load_config
from titanlike.errors import UserError

CONFIG = Qwen3Config(vocab_size=61, dim=24, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=40)


def model(config: Qwen3Config = CONFIG) -> Qwen3:
    torch.manual_seed(0)
    made = Qwen3(config).double()
    with torch.no_grad():
        for name, value in made.named_parameters():
            value.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return made


def test_the_presets_have_the_published_numbers_of_parameters() -> None:
    """Symptom: a preset by the name of a published model is another one."""
    counts = {}
    with torch.device("meta"):
        for name, config in PRESETS.items():
            counts[name] = sum(parameter.numel() for parameter in Qwen3(config).parameters())
    del counts["debug"]
    assert counts == {
        "0.6b": 596_049_920,
        "1.7b": 1_720_574_976,
        "4b": 4_022_468_096,
        "8b": 8_190_735_360,
        "14b": 14_768_307_200,
        "32b": 32_762_123_264,
    }


def test_the_size_of_queries_and_keys_does_not_matter() -> None:
    """Symptom: the norms are made and not used, or over all heads at once: then one head's size would matter to the
    others."""
    made = model(dataclasses.replace(CONFIG, norm_eps=0.0))
    tokens = torch.arange(20).view(2, 10)
    before = made(tokens)
    with torch.no_grad():
        made.layers["0"].attention.wq.weight[: CONFIG.head_dim] *= 7  # one head
        made.layers["1"].attention.wk.weight *= 0.1
    torch.testing.assert_close(made(tokens), before, rtol=1e-10, atol=1e-10)
    with torch.no_grad():
        made.layers["0"].attention.q_norm.weight[1] *= 3
    assert (made(tokens) - before).abs().max() > 1e-3


def test_the_norms_start_at_1_and_the_rest_as_in_a_llama() -> None:
    made, plain = Qwen3(CONFIG), Llama(CONFIG)
    shared = {name for name, _ in plain.named_parameters()}
    added = {name.split(".", 2)[2] for name, _ in made.named_parameters() if name not in shared}
    assert added == {"attention.q_norm.weight", "attention.k_norm.weight"}
    value = torch.zeros(CONFIG.head_dim)
    made.init_parameter("layers.0.attention.q_norm.weight", value, torch.Generator())
    assert value.eq(1).all()


def test_what_a_qwen3_does_not_have_is_no_key() -> None:
    """Symptom: model.mlp_bias is taken, trained, and lost at the export."""
    assert "mlp_bias" not in {field.name for field in dataclasses.fields(Qwen3Config)}
    assert not any(name.endswith("bias") for name, _ in Qwen3(CONFIG).named_parameters())
    biased = Qwen3(dataclasses.replace(CONFIG, attention_bias=True))
    assert {name.split(".")[-2] for name, _ in biased.named_parameters() if name.endswith("bias")} == {
        *("wq", "wk", "wv", "wo")
    }
    with pytest.raises(UserError, match="unknown key model.mlp_bias"):
        load_config(None, {"model.architecture": "qwen3", "model.mlp_bias": True})
    assert load_config(None, {"model.architecture": "qwen3"}).model.norm_eps == 1e-6
