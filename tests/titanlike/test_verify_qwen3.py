"""Qwen3 on every kind of mesh is the same run: the weights of QK-norm see a part of the heads on each tp rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from titanlike.config import load_config
from titanlike.verify import verify

ROOT = Path(__file__).resolve().parent.parent.parent
MESHES: dict[str, dict[str, Any]] = {
    "all axes": {"mesh.pp": 2, "mesh.dp": 2, "mesh.tp": 2},
    "tp 4, kv heads repeated, sequence whole": {"mesh.tp": 4, "mesh.sequence_parallel": False},
}
SLOW: dict[str, dict[str, Any]] = {
    "pp 2": {"mesh.pp": 2},
    "dp 2": {"mesh.dp": 2},
    "tp 2": {"mesh.tp": 2},
    "tp 2, sequence whole": {"mesh.tp": 2, "mesh.sequence_parallel": False},
    "tp 4, kv heads repeated": {"mesh.tp": 4},
    "biases, untied": {"mesh.tp": 2, "mesh.pp": 2, "model.attention_bias": True, "model.tie_embeddings": False},
    "full recomputation": {"mesh.tp": 2, "activation_checkpoint.mode": "full"},
    "selective recomputation": {"mesh.tp": 2, "activation_checkpoint.mode": "selective"},
    "compiled by block": {"mesh.tp": 2, "compile.enable": True, "compile.scope": "block"},
    "compiled by stage": {"mesh.tp": 2, "mesh.pp": 2, "compile.enable": True, "compile.scope": "stage"},
    "compiled, kv heads repeated, sequence whole": {
        **{"mesh.tp": 4, "mesh.sequence_parallel": False, "compile.enable": True, "compile.scope": "block"},
    },
}


@pytest.mark.parametrize("name", [*MESHES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_a_mesh_is_the_same_run(name: str) -> None:
    report = verify(load_config(ROOT / "configs" / "qwen3.toml", (MESHES | SLOW)[name]))
    assert report.same, report.reading
    assert dict(report.about)["model"].startswith("qwen3: ")
    assert not any("norm" in note for note in report.notes)  # gradients that are too small to judge by


@pytest.mark.slow
def test_a_gradient_of_the_norms_that_is_not_summed_over_heads_is_found() -> None:
    """Symptom: each tp rank's weight of QK-norm learns from its own heads alone."""
    report = verify(load_config(ROOT / "configs" / "qwen3.toml", {"mesh.tp": 2}), plant=forget_the_sum)
    assert report.first is not None
    assert any(".q_norm." in d.name or ".k_norm." in d.name for check in report.checks for d in check.differing)


def forget_the_sum(trainer: Any) -> None:
    """In every rank's trainer: the buckets that are whole on each tp rank are not summed."""
    for bucket in trainer.zero.buckets:
        if bucket.replicated_over_tp:
            reduce = bucket.finish_reduce
            bucket.finish_reduce = lambda _tp_group, waiting, reduce=reduce: reduce(None, waiting)
