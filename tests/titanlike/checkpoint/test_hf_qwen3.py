"""Qwen3 to and from Hugging Face: logits equal transformers' both ways; one form is not taken for another."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from models.llama import RopeScaling
from models.qwen3 import Qwen3, Qwen3Config
from parallelize.hf import HuggingFace
from parallelize.qwen3 import HF
from titanlike.checkpoint import CheckpointConfig, Checkpointer, Shard, tools
from titanlike.checkpoint.hf import HfFolder
from titanlike.checkpoint.hf_config import form_for, from_hf_config, to_hf_config
from titanlike.checkpoint.hf_import import import_hf
from titanlike.errors import UserError

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install -e '.[test]')")

SIZES: dict[str, Any] = {
    **{"vocab_size": 257, "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 12, "ffn_dim": 40},
    "max_seq_len": 64,
}
SCALING = RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"tie_embeddings": True, "rope_theta": 5000.0},
    "untied": {"norm_eps": 1e-3},
    "biases, scaled rope": {"attention_bias": True, "rope_scaling": SCALING},
}


def randomised(model: Any) -> Any:
    torch.manual_seed(1)
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        out = model(torch.randint(0, 257, (2, 40), generator=torch.Generator().manual_seed(5)))
    return getattr(out, "logits", out)


def weights(model: torch.nn.Module) -> dict[str, Shard]:
    return {f"model.{name}": Shard.whole(value.detach()) for name, value in model.named_parameters()}


def save(folder: Path, model: Qwen3) -> None:
    config = {"model": {"architecture": "qwen3"}, "data": {"tokenizer": "bytes"}}
    meta = {"model": dataclasses.asdict(model.config), "tokenizer": "bytes", "config": config}
    Checkpointer(CheckpointConfig(mode="sync"), folder).save(5, weights(model), meta)


@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_those_of_transformers_both_ways(kind: str, tmp_path: Path) -> None:
    """Symptom: norms of queries and keys exchanged or after RoPE, another head_dim, biases dropped."""
    model = randomised(Qwen3(Qwen3Config(**SIZES, **MODELS[kind])))
    shape = dataclasses.asdict(model.config)
    save(tmp_path / "run", model)
    tools.export(tmp_path / "run", tmp_path / "out", "float32")
    theirs, told = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert type(theirs).__name__ == "Qwen3ForCausalLM"
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"], told
    torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-5, atol=1e-5)

    theirs = randomised(
        transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**to_hf_config(HF[0], shape, "float32", 3)))
    )
    theirs.save_pretrained(tmp_path / "hf")
    ours = Qwen3(Qwen3Config(**SIZES, **MODELS[kind]))
    checkpointer = Checkpointer(CheckpointConfig(), tmp_path)
    assert len(checkpointer.load_weights(str(tmp_path / "hf"), weights(ours), "qwen3", shape)) == 1
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-5, atol=1e-5)

    lines = import_hf(tmp_path / "hf", tmp_path / "imported")
    assert 'architecture = "qwen3"' in lines
    state = tools.open_checkpoint(tmp_path / "imported")[3]
    assert (state["architecture"], state["model"]) == ("qwen3", json.loads(json.dumps(shape)))
    again = Qwen3(Qwen3Config(**SIZES, **MODELS[kind]))
    checkpointer.load_weights(str(tmp_path / "imported"), weights(again), "qwen3", shape)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True))

    tools.export(tmp_path / "imported", tmp_path / "back", "float32")  # weights alone know what they are
    with HfFolder(tmp_path / "back") as back, HfFolder(tmp_path / "hf") as before:
        assert back.config["model_type"] == "qwen3" and back.names == before.names


def test_a_published_config_is_read() -> None:
    """config.json of the 0.6B model, as published."""
    config = {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
        "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960,
        "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True,
        "use_sliding_window": False, "vocab_size": 151936,
    }  # fmt: skip
    from models.qwen3 import PRESETS

    found = from_hf_config(config, Path("config.json"))
    assert found.architecture == "qwen3" and found.model == dataclasses.asdict(PRESETS["0.6b"])
    with pytest.raises(UserError, match="config.json has use_sliding_window = True; only False"):
        from_hf_config(config | {"use_sliding_window": True}, Path("config.json"))
    with pytest.raises(UserError, match="lacks what a Qwen3ForCausalLM needs: KeyError.*hidden_size"):
        from_hf_config({k: v for k, v in config.items() if k != "hidden_size"}, Path("config.json"))


def test_another_familys_folder_is_refused_by_name(tmp_path: Path) -> None:
    """Symptom: a Qwen3 is trained from a Llama's weights, its norms being what they were."""
    model = randomised(Qwen3(Qwen3Config(**SIZES)))
    save(tmp_path / "run", model)
    tools.export(tmp_path / "run", tmp_path / "out", "float32")
    load = Checkpointer(CheckpointConfig(), tmp_path).load_weights
    with pytest.raises(UserError, match=r"a 'qwen3' model; only 'llama' can be read, for model.architecture = 'llama'"):
        load(str(tmp_path / "out"), weights(model), "llama", dataclasses.asdict(model.config))
    with pytest.raises(UserError, match="tests.titanlike.own_architecture:Own has no Hugging Face form"):
        load(str(tmp_path / "out"), weights(model), "tests.titanlike.own_architecture:Own", {})


def test_a_stack_is_many_tensors_there_and_one_here(tmp_path: Path) -> None:
    """Experts: one tensor each in Hugging Face folders. Boxes of the stack are read from the tensors that they cut."""
    form = HuggingFace(
        "x", "X", {"layers.*.experts.w1": "model.layers.*.experts.{}.up.weight", "layers.*.a": "b.*"}, dict, dict
    )
    assert form.parts("layers.7.experts.w1", (3, 4, 5)) == [
        (f"model.layers.7.experts.{i}.up.weight", i) for i in range(3)
    ]
    assert form.parts("layers.12.a.bias", (3,)) == [("b.12.bias", None)]
    from safetensors.torch import save_file

    whole = torch.randn(3, 4, 5)
    parts = form.parts("layers.7.experts.w1", (3, 4, 5))
    save_file({key: whole[row].clone() for key, row in parts}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with HfFolder(tmp_path) as folder:
        folder.check_parts("w1", parts, (3, 4, 5), "{} here")
        with pytest.raises(UserError, match=r"experts.0.up.weight has shape \(4, 5\) in .*, but \(4, 6\) here"):
            folder.check_parts("w1", parts, (3, 4, 6), "{} here")
        for offset, size in (
            ((0, 0, 0), (3, 4, 5)),
            ((1, 2, 0), (2, 2, 5)),
            ((2, 0, 3), (1, 4, 2)),
            ((3, 0, 0), (0, 4, 5)),
        ):
            box = torch.zeros(size)
            folder.read_parts(parts, offset, box)
            assert torch.equal(box, whole[tuple(slice(o, o + n) for o, n in zip(offset, size))])


def test_a_model_that_no_form_can_say_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import parallelize.qwen3

    def never(_model: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("has no experts")

    forms = tuple(dataclasses.replace(HF[0], class_name=name, to_config=never) for name in ("A", "B"))
    monkeypatch.setattr(parallelize.qwen3, "HF", (*forms, HF[0]))
    shape = dataclasses.asdict(Qwen3Config(**SIZES))
    assert form_for("qwen3", shape) is HF[0]
    monkeypatch.setattr(parallelize.qwen3, "HF", forms)
    with pytest.raises(UserError, match="no Hugging Face form: a A has no experts; a B has no experts"):
        form_for("qwen3", shape)
