"""A config made small keeps what a mesh can get wrong."""

from __future__ import annotations

import pytest

from titanlike.config import load_config
from titanlike.errors import UserError
from titanlike.verify.shrink import shrink


@pytest.mark.parametrize("preset", ["debug", "26m", "1b", "3b", "8b", "70b"])
@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
def test_the_small_model_is_cut_over_tp_as_the_users(preset: str, tp: int) -> None:
    """Symptom: verify passes, and the run fails where a size does not divide."""
    loaded = load_config(None, {"model.preset": preset, "mesh.tp": tp, "mesh.dp": 1, "train.seq_len": 512})
    try:
        loaded.validate_for(tp)
    except UserError:
        return
    small = shrink(loaded, 1000)
    before, after = loaded.model, small.config.model
    assert after.n_heads // after.n_kv_heads == before.n_heads // before.n_kv_heads
    assert (after.n_kv_heads >= tp) == (before.n_kv_heads >= tp)
    assert small.vocab_size % tp == 1000 % tp
    assert after.ffn_dim % tp == before.ffn_dim % tp
    assert after.tie_embeddings == before.tie_embeddings and after.rope_scaling == before.rope_scaling
    assert after.dim <= before.dim and after.n_layers <= 4 and after.dim <= 600
    assert small.config.train.seq_len <= 32
    assert small.config.model_config_for(small.vocab_size).vocab_size == small.vocab_size


@pytest.mark.parametrize(
    "schedule", ["afab", "1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv", "dualpipev"]
)
@pytest.mark.parametrize(("pp", "layers", "microbatches"), [(2, 32, 64), (2, 5, 4), (4, 33, 8), (4, 16, 64), (2, 4, 2)])
def test_the_small_pipeline_has_the_users_stages(schedule: str, pp: int, layers: int, microbatches: int) -> None:
    """Symptom: verify runs a schedule with too few microbatches for it, or with stages that are all alike."""
    batch = {"train.global_batch_size": 2 * microbatches, "mesh.dp": 2, "mesh.pp": pp}
    loaded = load_config(None, batch | {"model.n_layers": layers, "pipeline.schedule": schedule})
    try:
        loaded.validate_for(2 * pp)
    except UserError:
        return
    small = shrink(loaded, 257).config
    stages, own, few = loaded.n_stages, loaded.accumulation(2), small.accumulation(2)
    assert small.n_stages == stages
    assert (small.model.n_layers % stages == 0) == (layers % stages == 0)
    assert (few > stages, few == stages) == (own > stages, own == stages)
    assert few <= own and few <= 2 * stages + 1


def test_sizes_that_do_not_fit_are_the_architectures_to_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: a model with sizes of its own cannot be verified. Its tables module can say how to make it small."""
    import parallelize.llama

    loaded = load_config(None, {"mesh.tp": 2, "mesh.dp": 1, "model.dim": 64})
    assert shrink(loaded, 257).config.model.ffn_dim == 24
    monkeypatch.setattr(
        parallelize.llama, "shrink", lambda model, tp: {"ffn_dim": model["ffn_dim"] + 8 * tp}, raising=False
    )
    assert shrink(loaded, 257).config.model.ffn_dim == 40
    monkeypatch.setattr(parallelize.llama, "shrink", lambda model, tp: {"n_heads": 3, "n_kv_heads": 3}, raising=False)
    with pytest.raises(UserError, match=r"cannot be made small as parallelize.llama.shrink says: model.n_heads \(3\)"):
        shrink(loaded, 257)
