"""The same text as transformers' generate, from the same folder; and there and back through three training steps."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import run_ranks
from tests.titanlike.runs import run, text_file
from titanlike.checkpoint import tools
from titanlike.checkpoint.hf_tokenizer import byte_tokenizer_files
from titanlike.config import load_config
from titanlike.generate.command import main
from titanlike.generate.source import load_model, open_source
from titanlike.mesh import Mesh

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install -e '.[test]')")

SIZES: dict[str, Any] = {
    **{"vocab_size": 260, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 80},
    **{"num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 256, "eos_token_id": 256},
}
SCALING = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
KINDS: dict[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "untied, scaled": {
        "tie_word_embeddings": False,
        "rope_parameters": {**SCALING, "rope_theta": 5000.0, "original_max_position_embeddings": 32},
    },
    "qwen3": {"tie_word_embeddings": True, "head_dim": 12, "rope_parameters": {"rope_theta": 5000.0}},
}
PROMPTS = ["The same text", "x", "A longer prompt than the others: naïve ✓"]
NEW_TOKENS = 64


def _saved(kind: str, folder: Path) -> Any:
    """A random model, saved by transformers, with the byte tokenizer."""
    torch.manual_seed(0)
    family = "Qwen3" if kind == "qwen3" else "Llama"
    config = getattr(transformers, f"{family}Config")(**SIZES, **KINDS[kind])
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(folder)
    for name, content in byte_tokenizer_files().items():
        (folder / name).write_bytes(content)
    return model


def _their_text(model: Any, folder: Path) -> list[list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True)
    with torch.no_grad():
        out = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[:, inputs["input_ids"].shape[1] :].tolist()


def _our_text(folder: Path, *more: str) -> list[list[int]]:
    out = io.StringIO()
    argv = ["--checkpoint", str(folder), "--max-new-tokens", str(NEW_TOKENS), "--json", *more]
    main([*argv, *(word for prompt in PROMPTS for word in ("--prompt", prompt))], out)
    return [each["ids"] for each in json.loads(out.getvalue())["completions"]] if out.getvalue() else []


def _until_the_end(ids: list[int]) -> list[int]:
    return ids[: ids.index(256) + 1] if 256 in ids else ids


def _logits(path: Path, tokens: torch.Tensor) -> torch.Tensor:
    """Of a checkpoint or folder, here, on one rank."""
    model = load_model(open_source(path), Mesh(1, 1, 1, torch.device("cpu")), torch.float32)
    with torch.no_grad():
        return model.logits(model.hidden(tokens, torch.arange(tokens.shape[1])[None], None))


def _their_logits(path: Path, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return transformers.AutoModelForCausalLM.from_pretrained(path)(tokens).logits


def _train_from(folder: Path, out: Path, kind: str) -> Any:
    """Three steps from the weights of a folder; what the rank raised."""
    shape = {"vocab_size": 260, "dim": 48, "n_layers": 3, "n_heads": 6, "n_kv_heads": 2, "ffn_dim": 80}
    shape |= {"max_seq_len": 128, "norm_eps": 1e-6, "tie_embeddings": kind != "untied, scaled"}
    if kind == "qwen3":
        shape |= {"architecture": "qwen3", "head_dim": 12, "rope_theta": 5000.0}
    if kind == "untied, scaled":
        shape |= {"rope_theta": 5000.0, "rope_scaling": {**SCALING, "original_max_position_embeddings": 32}}
        shape["rope_scaling"].pop("rope_type")
    train = {"steps": 3, "global_batch_size": 2, "seq_len": 64}
    config = load_config(
        None,
        {
            **{"run.dir": str(out.parent), "run.name": out.name, "run.device": "cpu"},
            **{"model": shape, "train": train, "mesh.tp": 2, "checkpoint.init_from": str(folder)},
            **{"data.source": "text", "data.paths": [str(text_file(out.parent))], "data.validation_fraction": 0.0},
            **{"optimizer.lr": 1e-2, "metrics.tensorboard": False, "compile.enable": False},
        },
    )
    return run(config).error


@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(kind: str, tmp_path: Path) -> None:
    """nanotron #241, torchtitan #335: the rotary layout is permuted on the way; vllm-like engines pad on the wrong
    side."""
    theirs = _saved(kind, tmp_path / "hf")
    wanted = [_until_the_end(ids) for ids in _their_text(theirs, tmp_path / "hf")]
    assert len({tuple(ids) for ids in wanted}) == len(PROMPTS)
    assert run_ranks(1, _our_text, tmp_path / "hf") == [wanted]
    assert run_ranks(2, _our_text, tmp_path / "hf", "--mesh.tp", "2")[0] == wanted

    tokens = torch.randint(0, 257, (2, 50), generator=torch.Generator().manual_seed(1))
    before = _their_logits(tmp_path / "hf", tokens)
    torch.testing.assert_close(run_ranks(1, _logits, tmp_path / "hf", tokens)[0], before, rtol=1e-4, atol=1e-4)

    text_file(tmp_path)
    assert run_ranks(2, _train_from, tmp_path / "hf", tmp_path / "run", kind) == [None, None]
    tools.export(tmp_path / "run", tmp_path / "out", "float32")
    after = _their_logits(tmp_path / "out", tokens)
    assert (after - before).abs().max() > 0.1
    torch.testing.assert_close(run_ranks(1, _logits, tmp_path / "run", tokens)[0], after, rtol=1e-4, atol=1e-4)
    if kind != "untied, scaled":
        return  # without a scaling, texts end at the length of the training
    exported = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    again = run_ranks(1, _our_text, tmp_path / "run")[0]
    assert again == [_until_the_end(ids) for ids in _their_text(exported, tmp_path / "out")]
