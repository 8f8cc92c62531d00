"""Mixtral and Qwen3-MoE folders: the same logits as transformers both ways, and the same loss of a training step."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import tomli
import torch

from models.moe import MoE, MoEConfig
from tests.ranks import run_ranks
from tests.titanlike.runs import checkpoint, run, text_file
from titanlike import architectures
from titanlike.checkpoint import tools
from titanlike.checkpoint.hf_import import import_hf
from titanlike.config import load_config
from titanlike.errors import UserError
from titanlike.generate.source import load_model, open_source
from titanlike.mesh import Mesh

transformers = pytest.importorskip("transformers", reason="transformers is not installed (pip install -e '.[test]')")

SIZES: dict[str, Any] = {
    **{"vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "max_position_embeddings": 64, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.3},
    **{"bos_token_id": 256, "eos_token_id": 256, "tie_word_embeddings": False},
}
KINDS: dict[str, dict[str, Any]] = {
    "Mixtral": {"intermediate_size": 48, "num_local_experts": 6},
    "Qwen3Moe": {"moe_intermediate_size": 24, "num_experts": 6, "head_dim": 12, "norm_topk_prob": True},
    "Qwen3Moe, weights as they are": {"moe_intermediate_size": 24, "num_experts": 6, "norm_topk_prob": False},
}
TOKENS = torch.randint(0, 260, (3, 17), generator=torch.Generator().manual_seed(1))


def theirs(kind: str) -> Any:
    """A random model of transformers."""
    torch.manual_seed(0)
    name = kind.split(",")[0]
    config = getattr(transformers, f"{name}Config")(**SIZES, **KINDS[kind])
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for path, value in model.named_parameters():
            value.normal_(1.0 if "norm" in path else 0.0, 0.2)
    return model


def _logits(path: Path, tokens: torch.Tensor) -> torch.Tensor:
    model = load_model(open_source(path), Mesh(1, 1, 1, torch.device("cpu")), torch.float32)
    positions = torch.arange(tokens.shape[1])[None]
    with torch.no_grad():
        return model.logits(model.hidden(tokens, positions, None))


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_has_their_logits_and_their_loss(kind: str, tmp_path: Path) -> None:
    """Experts in another order, gate and up exchanged, weights that do not add up to 1; a balance loss over each layer
    where theirs is over all of them."""
    model = theirs(kind)
    model.save_pretrained(tmp_path / "hf")
    with torch.no_grad():
        wanted = model(TOKENS).logits
    (ours,) = run_ranks(1, _logits, tmp_path / "hf", TOKENS)
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=2e-5)

    # The loss of a training step, with the balance loss, and its gradient.
    import_hf(tmp_path / "hf", tmp_path / "ours")
    meta = json.loads((tmp_path / "ours" / "state.json").read_text())
    plain: Any = MoE(architectures.from_json("moe", meta["model"]))
    _fill(plain, tmp_path / "hf")
    context = plain.context(torch.empty(0).expand(3, 16, 0))
    logits = plain(TOKENS[:, :-1], context=context)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten())
    loss = loss + plain.auxiliary_loss(context, 48, plain.auxiliary_sums(context))
    mask = torch.ones_like(TOKENS)
    mask[:, -1] = 0  # theirs shifts the labels itself, and counts the last token for the balance, which has no label
    out = model(TOKENS, labels=TOKENS, attention_mask=mask, output_router_logits=True)
    torch.testing.assert_close(loss, out.loss, rtol=1e-5, atol=1e-5)
    loss.backward()
    out.loss.backward()
    name = "layers.0.feed_forward.router.weight"
    gate = "model.layers.0.mlp.gate.weight"
    torch.testing.assert_close(plain.get_parameter(name).grad, model.get_parameter(gate).grad, rtol=1e-3, atol=1e-5)


def _fill(plain: Any, folder: Path) -> None:
    from titanlike.checkpoint.hf import HfFolder
    from titanlike.checkpoint.hf_config import from_hf_config, hf_parts

    with HfFolder(folder) as source, torch.no_grad():
        form = from_hf_config(source.config, folder / "config.json").form
        for name, value in plain.named_parameters():
            source.read_parts(hf_parts(form, name, tuple(value.shape)), (0,) * value.dim(), value)


@pytest.mark.parametrize("kind", [pytest.param("Mixtral", marks=pytest.mark.slow), "Qwen3Moe"])
def test_there_and_back_over_training_steps(kind: str, tmp_path: Path) -> None:
    """Started from their folder on ep 2, trained, exported: transformers reads it, and has the checkpoint's logits."""
    theirs(kind).save_pretrained(tmp_path / "hf")
    lines = import_hf(tmp_path / "hf", tmp_path / "weights")
    model = {f"model.{key}": value for key, value in tomli.loads("\n".join(lines[1:]))["model"].items()}
    config = load_config(
        None,
        {
            **{**model, "run.dir": str(tmp_path), "run.name": "run", "run.device": "cpu", "data.source": "text"},
            **{"data.paths": [str(text_file(tmp_path))], "metrics.tensorboard": False, "train.steps": 2},
            **{"train.seq_len": 16, "train.global_batch_size": 4, "mesh.ep": 2, "validation.samples": 4},
            **{"checkpoint.init_from": str(tmp_path / "hf"), "compile.enable": False},
        },
    )
    for seen in run_ranks(2, run, config):
        assert seen.error is None, seen.error
    tools.export(checkpoint(tmp_path / "run", 2), tmp_path / "back", "float32")
    back = getattr(transformers, f"{kind}ForCausalLM").from_pretrained(tmp_path / "back")
    with torch.no_grad():
        wanted = back(TOKENS).logits
    (ours,) = run_ranks(1, _logits, checkpoint(tmp_path / "run", 2), TOKENS)
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=2e-5)


def test_what_neither_of_theirs_can_be_is_not_exported() -> None:
    """Symptom: an export without the shared expert, which transformers reads without a word."""
    from titanlike.checkpoint.hf_config import form_for

    shape = dataclasses.asdict(MoEConfig(vocab_size=8, n_shared_experts=1))
    with pytest.raises(UserError, match="shared experts"):
        form_for("moe", shape)
