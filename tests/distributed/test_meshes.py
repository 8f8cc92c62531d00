"""Every mesh is the same run as one rank. Each has a setting of its own, so that features meet each other."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.compare import assert_same_run, case

TIED = {"model__tie_embeddings": True}
BIAS = {"model__attention_bias": True, "model__mlp_bias": True}
SGD = {"optimizer__name": "sgd", "optimizer__momentum": 0.9}
ALL_REDUCE = {"mesh__sequence_parallel": False}
ONE_KV = {"model__n_kv_heads": 1}
ODD = {"model__ffn_dim": 26, "model__head_dim": 6, "model__n_layers": 3}
GROUPS = {"optimizer__groups": [{"match": "w[k1]|norm", "lr_scale": 0.5, "weight_decay": 0.2}]}
SMALL_BUCKETS = {"optimizer__bucket_mb": 0.002}


def schedule(name: str, layers: int) -> dict[str, Any]:
    return {"pipeline__schedule": name, "model__n_layers": layers}


def checkpointed(mode: str) -> dict[str, Any]:
    return {"activation_checkpoint__mode": mode}


SETTINGS: dict[tuple[int, int, int], dict[str, Any]] = {
    (1, 1, 1): BIAS | checkpointed("full") | {"documents": True},
    (1, 1, 2): TIED | BIAS | ONE_KV | {"labels": "one"},
    (1, 2, 1): TIED | GROUPS | SMALL_BUCKETS | checkpointed("selective"),
    (2, 1, 1): TIED | schedule("1f1b", 3) | {"labels": "one"},
    (1, 1, 4): ODD | {"labels": "one", "documents": True},
    (1, 4, 1): ODD | TIED | BIAS | {"train__microbatch_size": 2},
    (4, 1, 1): TIED | schedule("interleaved_1f1b", 9) | GROUPS,
    (1, 2, 2): TIED | ALL_REDUCE | SMALL_BUCKETS | {"train__microbatch_size": 4},
    (2, 1, 2): BIAS | ODD | schedule("1f1b", 5) | checkpointed("full") | {"documents": True},
    (2, 2, 1): schedule("zbv", 5) | SGD | SMALL_BUCKETS,
    (2, 2, 2): TIED | GROUPS | schedule("interleaved_1f1b", 5) | {"labels": "one", "train__global_batch_size": 8},
    (1, 2, 4): ALL_REDUCE | BIAS | SGD,
    (1, 4, 2): ODD | TIED | SMALL_BUCKETS | checkpointed("full"),
    (2, 1, 4): TIED | BIAS | schedule("interleaved_zero_bubble", 5),
    (2, 4, 1): BIAS | schedule("dualpipev", 4) | {"train__global_batch_size": 16},
    (4, 1, 2): TIED | ONE_KV | schedule("zbv", 8) | {"documents": True},
    (4, 2, 1): TIED | schedule("1f1b", 5) | checkpointed("selective") | GROUPS,
}

# One with 8 ranks, on which all axes meet; the others of 8 take their time.
DEFAULT = [mesh for mesh in SETTINGS if mesh[0] * mesh[1] * mesh[2] <= 4] + [(2, 2, 2)]


def test_the_list_is_complete() -> None:
    degrees = (1, 2, 4)
    meshes = {(pp, dp, tp) for pp in degrees for dp in degrees for tp in degrees if pp * dp * tp <= 8}
    assert set(SETTINGS) == meshes


@pytest.mark.parametrize("mesh", DEFAULT, ids=str)
def test_a_mesh_is_the_same_run(mesh: tuple[int, int, int]) -> None:
    """Symptom: parameters missing from the clip norm, or wrong gradients, in some composition (MG #7452)."""
    assert_same_run(case(*mesh, **SETTINGS[mesh]))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [mesh for mesh in SETTINGS if mesh not in DEFAULT], ids=str)
def test_a_mesh_of_eight_is_the_same_run(mesh: tuple[int, int, int]) -> None:
    """Symptom: parameters missing from the clip norm, or wrong gradients, in some composition (MG #7452)."""
    assert_same_run(case(*mesh, **SETTINGS[mesh]), timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", SETTINGS, ids=str)
def test_a_mesh_with_the_plain_settings_is_the_same_run(mesh: tuple[int, int, int]) -> None:
    """Symptom: two settings hide each other's fault."""
    assert_same_run(case(*mesh, model__n_layers=4), timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [(8, 1, 1), (1, 8, 1), (1, 1, 8)], ids=str)
def test_one_axis_of_eight_is_the_same_run(mesh: tuple[int, int, int]) -> None:
    """Symptom: the last of many ranks gets an empty or a short part. tp 8 has 2 kv heads, each on 4 ranks, and 4 of the
    67 ids on its last rank; dp 8 has ranks that own nothing of a bias."""
    sizes = {"model__n_heads": 8, "model__head_dim": 2, "model__ffn_dim": 31, "model__n_layers": 9}
    assert_same_run(case(*mesh, steps=2, **sizes | BIAS | TIED), timeout=300)
