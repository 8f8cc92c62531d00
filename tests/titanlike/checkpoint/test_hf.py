"""To and from Hugging Face: logits equal transformers' both ways, weights round-trip exactly, nothing is dropped."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from models.llama import Llama, LlamaConfig, RopeScaling
from parallelize.llama import HF
from tests.ranks import run_ranks
from tests.titanlike.checkpoint.states import cut
from titanlike.checkpoint import CheckpointConfig, Checkpointer, Shard, hf, tools
from titanlike.checkpoint.hf_config import from_hf_config, hf_parts, to_hf_config
from titanlike.checkpoint.hf_import import import_hf
from titanlike.errors import UserError

FORM = HF[0]
SIZES: dict[str, Any] = {"vocab_size": 257, "dim": 32, "n_layers": 2, "n_heads": 4, "ffn_dim": 40, "max_seq_len": 64}
SCALING = RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gqa": {"n_kv_heads": 2},
    "tied": {"tie_embeddings": True, "n_kv_heads": 1},
    "scaled rope": {"rope_theta": 500.0, "rope_scaling": SCALING},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "wide heads": {"head_dim": 16, "norm_eps": 1e-3},
}


def model_of(kind: str) -> Llama:
    """A Llama with weights at which no part of it can hide."""
    torch.manual_seed(1)
    model = Llama(LlamaConfig(**SIZES, **MODELS[kind]))
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model


def tokens() -> torch.Tensor:
    return torch.randint(0, 257, (2, 40), generator=torch.Generator().manual_seed(5))


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        out = model(tokens())
    return getattr(out, "logits", out)


def meta_of(model: Llama) -> dict[str, Any]:
    return {"model": dataclasses.asdict(model.config), "tokenizer": "bytes", "config": {"data": {"tokenizer": "bytes"}}}


def weights(model: Llama) -> dict[str, Shard]:
    held = {f"model.{name}": Shard.whole(value.detach()) for name, value in model.named_parameters()}
    return held | {"optimizer.exp_avg.norm.weight": Shard.whole(torch.ones(32))}


def _save_on_ranks(folder: str, kind: str) -> None:
    """As tp cuts: rows of each weight over the ranks; wo and w2 by columns."""
    model = model_of(kind)
    held = {}
    for name, shard in weights(model).items():
        dim = 1 if ".wo.weight" in name or ".w2.weight" in name else 0
        start, size = cut(shard.global_shape[dim], dist.get_world_size(), dist.get_rank())
        offset = [0] * len(shard.global_shape)
        offset[dim] = start
        part = shard.tensor.narrow(dim, start, size).clone(memory_format=torch.contiguous_format)
        held[name] = Shard(part, shard.global_shape, tuple(offset))
    checkpointer = Checkpointer(CheckpointConfig(), folder)
    checkpointer.save(5, held, meta_of(model))
    checkpointer.close()


def save(folder: Path, kind: str, ranks: int = 1) -> Llama:
    model = model_of(kind)
    if ranks > 1:
        run_ranks(ranks, _save_on_ranks, str(folder), kind)
    else:
        checkpointer = Checkpointer(CheckpointConfig(mode="sync"), folder)
        checkpointer.save(5, weights(model), meta_of(model))
    return model


def transformers_model(folder: Path) -> Any:
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed (pip install -e '.[test]')"
    )
    model, told = transformers.LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"], told
    return model


@pytest.mark.parametrize("kind", MODELS)
def test_an_export_has_the_logits_of_the_model(kind: str, tmp_path: Path) -> None:
    """nanotron #241, torchtitan #335: rotary layout permuted wrongly; DeepSpeed #8168: tp shards dropped."""
    model = save(tmp_path / "run", kind, ranks=3)
    tools.export(tmp_path / "run", tmp_path / "out", "float32")
    theirs = transformers_model(tmp_path / "out")
    assert theirs.config.bos_token_id == theirs.config.eos_token_id == 256
    torch.testing.assert_close(logits(theirs), logits(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "train", "data", "says"),
    [
        ("plain", {"seq_len": 24}, {}, 24),
        (
            "plain",
            {"seq_len": 24},
            {"stages": [{"start_step": 5, "seq_len": 32}, {"start_step": 6, "seq_len": 48}]},
            32,
        ),
        ("scaled rope", {"seq_len": 24}, {}, None),
        ("plain", None, {}, None),
    ],
    ids=["shorter", "stages", "scaled", "weights alone"],
)
def test_an_export_claims_the_length_of_the_training(
    kind: str, train: dict | None, data: dict, says: int | None, tmp_path: Path
) -> None:
    """Symptom: a model that saw 256 tokens at a time says that it takes 2048, and others believe it."""
    model = model_of(kind)
    meta = meta_of(model) | {"step": 5}
    meta["config"] = {"data": {"tokenizer": "bytes", **data}, **({"train": train} if train else {})}
    Checkpointer(CheckpointConfig(mode="sync"), tmp_path / "run").save(5, weights(model), meta)
    told = tools.export(tmp_path / "run", tmp_path / "out", "float32")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["max_position_embeddings"] == (says or model.config.max_seq_len)
    assert any("max_position_embeddings" in line for line in told) == (says is not None)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("sharded", [False, True])
def test_an_import_has_the_logits_of_transformers(kind: str, sharded: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed (pip install -e '.[test]')"
    )
    config = dataclasses.asdict(model_of(kind).config)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**to_hf_config(FORM, config, "float32", 256)))
    with torch.no_grad():
        for name, value in theirs.named_parameters():
            value.normal_(1.0 if "norm" in name else 0.0, 0.3)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="20KB" if sharded else "5GB")
    assert (tmp_path / "hf" / hf.INDEX).exists() == sharded

    ours = Llama(LlamaConfig(**SIZES, **MODELS[kind]))  # init_from, straight from the folder
    checkpointer = Checkpointer(CheckpointConfig(), tmp_path)
    notes = checkpointer.load_weights(str(tmp_path / "hf"), weights(ours), "llama", dataclasses.asdict(ours.config))
    assert len(notes) == 1, notes
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-5, atol=1e-5)

    import_hf(tmp_path / "hf", tmp_path / "imported")  # and by way of a checkpoint
    again = Llama(LlamaConfig(**SIZES, **MODELS[kind]))
    checkpointer.load_weights(str(tmp_path / "imported"), weights(again), "llama", dataclasses.asdict(ours.config))
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("kind", MODELS)
def test_export_and_import_round_trip_to_the_same_digest(kind: str, tmp_path: Path) -> None:
    """OLMo-core #677, NeMo #3260: export does not round-trip, empty config.json."""
    model = save(tmp_path / "run", kind)
    tools.export(tmp_path / "run", tmp_path / "out", "float32")
    import_hf(tmp_path / "out", tmp_path / "back")
    before = {
        n: v for n, v in tools.compute_digests(tools.open_checkpoint(tmp_path / "run")[2]).items() if "model." in n
    }
    _, _, index, state = tools.open_checkpoint(tmp_path / "back")
    assert tools.compute_digests(index) == before
    assert state["model"] == json.loads(json.dumps(dataclasses.asdict(model.config)))
    assert all(problem is None for _, problem in tools.verify(tmp_path / "back"))


def test_a_tied_export_is_whole(tmp_path: Path) -> None:
    """torchtitan #3764: tied export wrote an empty shard and an unreadable folder."""
    from safetensors.torch import load_file

    save(tmp_path / "run", "tied")
    tools.export(tmp_path / "run", tmp_path / "out", "float32")
    names = load_file(tmp_path / "out" / hf.SINGLE)
    assert "lm_head.weight" not in names and names["model.embed_tokens.weight"].shape == (257, 32)


def test_a_large_export_is_sharded_and_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory near one piece of one tensor, whatever the model's size."""
    from safetensors import safe_open

    monkeypatch.setattr(hf, "MAX_FILE_BYTES", 20_000)
    monkeypatch.setattr(hf, "_PIECE_BYTES", 1000)
    model = save(tmp_path / "run", "gqa", ranks=2)
    largest, make = 0, torch.empty

    def watch(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal largest
        made = make(*args, **kwargs)
        largest = max(largest, made.numel() * made.element_size())
        return made

    monkeypatch.setattr(torch, "empty", watch)
    tools.export(tmp_path / "run", tmp_path / "out", "bfloat16")
    monkeypatch.undo()
    assert 0 < largest <= 2000
    index = json.loads((tmp_path / "out" / hf.INDEX).read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert index["metadata"]["total_size"] == 2 * sum(p.numel() for p in model.parameters())
    for name, value in model.named_parameters():
        [(key, _)] = hf_parts(FORM, name, tuple(value.shape))
        with safe_open(tmp_path / "out" / index["weight_map"][key], framework="pt") as file:
            assert torch.equal(file.get_tensor(key), value.bfloat16())
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(value.bfloat16())
    torch.testing.assert_close(
        logits(transformers_model(tmp_path / "out").float()), logits(model), rtol=1e-5, atol=1e-5
    )


def test_the_byte_tokenizer_is_exported(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    save(tmp_path / "run", "plain")
    tools.export(tmp_path / "run", tmp_path / "out", "float32")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    for text in ("def f(x):\n\treturn x  # ü€😀 <s>", "", " \r\n\0 ", bytes(range(256)).decode("latin1")):
        ids = tokenizer.encode(text).ids
        assert ids == list(text.encode()), text
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("a<|endoftext|>b").ids == [97, 256, 98]
    assert tokenizer.get_vocab_size() == 257
    transformers = pytest.importorskip(
        "transformers", reason="transformers is not installed (pip install -e '.[test]')"
    )
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert theirs("aü")["input_ids"] == [97, 195, 188] and theirs.eos_token_id == 256


def _load_parts(folder: str, kind: str, world: int) -> dict[str, tuple[tuple[int, ...], torch.Tensor]]:
    held = {}
    for name, shard in weights(model_of(kind)).items():
        start, size = cut(shard.global_shape[0], world, dist.get_rank())
        part = torch.zeros((size, *shard.global_shape[1:]), dtype=torch.float64)
        held[name] = Shard(part, shard.global_shape, (start,) + (0,) * (len(shard.global_shape) - 1))
    checkpointer = Checkpointer(CheckpointConfig(), "unused")
    checkpointer.load_weights(folder, held, "llama", dataclasses.asdict(model_of(kind).config))
    return {name: (shard.offset, shard.tensor) for name, shard in held.items()}


@pytest.mark.parametrize("source", ["run", "run/checkpoints/step-00000005", "out"])
def test_init_from_reads_slices_and_leaves_the_optimizer_alone(source: str, tmp_path: Path) -> None:
    """Into other ranks' slices, into another dtype, from a run folder, a checkpoint and a Hugging Face folder."""
    model = save(tmp_path / "run", "gqa")
    tools.export(tmp_path / "run", tmp_path / "out", "float32")
    for parts in run_ranks(2, _load_parts, str(tmp_path / source), "gqa", 2):
        assert not parts.pop("optimizer.exp_avg.norm.weight")[1].any()
        for name, value in model.named_parameters():
            offset, part = parts[f"model.{name}"]
            assert torch.equal(part, value[offset[0] : offset[0] + part.shape[0]].double())


def load_from(path: Path, kind: str, **changes: Any) -> list[str]:
    config = LlamaConfig(**(SIZES | MODELS[kind] | changes))
    held = weights(Llama(config))
    return Checkpointer(CheckpointConfig(), "unused").load_weights(str(path), held, "llama", dataclasses.asdict(config))


@pytest.mark.parametrize("source", ["run", "out"])
@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("plain", {"n_heads": 8, "n_kv_heads": 8}, "model.n_heads is 8 in this run, but .* has 4"),
        ("plain", {"n_layers": 3}, "model.n_layers is 3 in this run, but .* has 2"),
        ("plain", {"vocab_size": 300}, "model.vocab_size is 300"),
        ("plain", {"mlp_bias": True}, "model.mlp_bias is True in this run"),
        ("plain", {"tie_embeddings": True}, "model.tie_embeddings is true in this run, but .* of its own"),
    ],
)
def test_weights_of_another_model_are_refused(source: str, kind: str, changes: dict, said: str, tmp_path: Path) -> None:
    """Other head counts fit the same shapes, and would train from nonsense."""
    save(tmp_path / "run", kind)
    tools.export(tmp_path / "run", tmp_path / "out", "float32")
    with pytest.raises(UserError, match=said):
        load_from(tmp_path / source, kind, **changes)


def test_an_error_of_init_from_names_the_key_and_a_hubs_name_is_not_looked_for(tmp_path: Path) -> None:
    """Symptom: "meta-llama/Llama-3.2-1B does not exist", and which key of the config said so?"""
    with pytest.raises(UserError, match=r"^checkpoint\.init_from: some-org/some-model does not exist: .* download it"):
        load_from(Path("some-org/some-model"), "plain")
    with pytest.raises(UserError, match=rf"^checkpoint\.init_from: {tmp_path / 'none'} does not exist$"):
        load_from(tmp_path / "none", "plain")
    save(tmp_path / "run", "plain")
    with pytest.raises(UserError, match=r"^checkpoint\.init_from: model\.n_layers is 3 in this run, but .* has 2"):
        load_from(tmp_path / "run", "plain", n_layers=3)


@pytest.mark.parametrize("source", ["run", "out"])
def test_a_changed_rope_is_said(source: str, tmp_path: Path) -> None:
    """Raising theta for a longer context is meant; doing so unknowingly is not."""
    save(tmp_path / "run", "plain")
    tools.export(tmp_path / "run", tmp_path / "out", "float32")
    notes = load_from(tmp_path / source, "plain", rope_theta=500000.0)
    assert any("model.rope_theta is 500000.0 in this run, and was 10000.0" in note for note in notes)


def test_an_untied_run_starts_from_a_tied_folder_with_a_copy(tmp_path: Path) -> None:
    tied = save(tmp_path / "run", "tied")
    tools.export(tmp_path / "run", tmp_path / "out", "float32")
    model = Llama(LlamaConfig(**(SIZES | MODELS["tied"] | {"tie_embeddings": False})))
    notes = Checkpointer(CheckpointConfig(), "unused").load_weights(
        str(tmp_path / "out"), weights(model), "llama", dataclasses.asdict(model.config)
    )
    assert any("output.weight starts as a copy of tok_embeddings.weight" in note for note in notes)
    assert torch.equal(logits(model), logits(tied))


@pytest.mark.parametrize("end", ["missing", "extra", "shape"])
def test_a_folder_that_does_not_fit_is_refused_by_tensor(end: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    save(tmp_path / "run", "plain")
    tools.export(tmp_path / "run", tmp_path / "out", "float32")
    tensors = load_file(tmp_path / "out" / hf.SINGLE)
    key = "model.layers.1.mlp.up_proj.weight"
    if end == "missing":
        del tensors[key]
    elif end == "extra":
        tensors["model.layers.0.self_attn.q_norm.weight"] = torch.ones(8)
    else:
        tensors[key] = tensors[key][:-1]
    save_file(tensors, tmp_path / "out" / hf.SINGLE)
    named = "q_norm" if end == "extra" else key
    with pytest.raises(UserError, match=named):
        load_from(tmp_path / "out", "plain")
    with pytest.raises(UserError, match=named):
        import_hf(tmp_path / "out", tmp_path / "in")
    assert not (tmp_path / "in").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "qwen2"}, "'qwen2' model; only 'llama' "),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "of type 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "of type 'linear'"),
        ({"hidden_size": None}, "lacks what a LlamaForCausalLM needs: .*hidden_size"),
    ],
)
def test_a_config_that_we_can_not_build_is_refused(change: dict, said: str) -> None:
    config = to_hf_config(FORM, dataclasses.asdict(LlamaConfig(**SIZES)), "float32", None) | change
    config = {key: value for key, value in config.items() if value is not None}
    with pytest.raises(UserError, match=said):
        from_hf_config(config, Path("config.json"))


@pytest.mark.parametrize("kind", MODELS)
def test_configs_round_trip(kind: str) -> None:
    ours = dataclasses.asdict(LlamaConfig(**SIZES, **MODELS[kind]))
    assert from_hf_config(to_hf_config(FORM, ours, "float32", 3), Path("x")) == ("llama", FORM, ours)


def test_both_spellings_of_rope_are_read() -> None:
    """transformers 5 has one table where 4 had two keys."""
    old = to_hf_config(FORM, dataclasses.asdict(LlamaConfig(**SIZES, **MODELS["scaled rope"])), "float32", None)
    new = dict(old)
    new["rope_parameters"] = new.pop("rope_scaling") | {"rope_theta": new.pop("rope_theta")}
    assert from_hf_config(old, Path("x")) == from_hf_config(new, Path("x"))


def test_every_parameter_has_a_name_there() -> None:
    model = model_of("biases")
    names = [hf_parts(FORM, name, ())[0][0] for name, _ in model.named_parameters()]
    assert len(set(names)) == len(names)
    assert "model.layers.1.self_attn.o_proj.bias" in names
    with pytest.raises(UserError, match=r"layers\.0\.attention\.wx\.weight has no name in a LlamaForCausalLM"):
        hf_parts(FORM, "layers.0.attention.wx.weight", ())


def test_an_existing_folder_is_not_written_into(tmp_path: Path) -> None:
    save(tmp_path / "run", "plain")
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="exists already"):
        tools.export(tmp_path / "run", tmp_path / "out", "float32")
