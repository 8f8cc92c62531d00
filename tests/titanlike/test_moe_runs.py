"""Whole runs of a mixture of experts: saved on one mesh, gone on with on another; text of its checkpoints; refusals."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from models.moe import PRESETS
from tests.ranks import run_ranks
from tests.titanlike.runs import checkpoint, columns, run_on, tiny
from titanlike.config import load_config
from titanlike.config_combinations import check
from titanlike.errors import UserError
from titanlike.generate.command import main
from titanlike.metrics import files
from titanlike.metrics.names import unknown
from titanlike.verify import verify

MOE: dict[str, Any] = {
    **{"model.architecture": "moe", "model.n_experts": 8, "model.ffn_dim": 16, "model.bias_rate": 0.01},
    **{"model.balance_loss": 0.05, "model.n_shared_experts": 1, "train.dtype": "float64", "train.seq_len": 16},
    **{"checkpoint.interval": 2, "checkpoint.digest_interval": 2},
}
EP4 = {"mesh.ep": 4, "mesh.dp": 4}
COLUMNS = ("loss", "grad_norm", "moe/auxiliary_loss", "moe/load_cv", "moe/load_max/1")


def test_saved_on_ep_4_and_gone_on_with_on_tp_2(tmp_path: Path) -> None:
    """Experts of ranks put together in another order, biases that start anew: the loss jumps at the resume."""
    run_on(1, tmp_path / "one", **MOE, **{"train.steps": 4})
    run_on(4, tmp_path / "moved", **MOE, **EP4, **{"train.steps": 2})
    seen = run_on(2, tmp_path / "moved", **MOE, **{"train.steps": 4, "mesh.tp": 2})
    assert all(each.error is None for each in seen)
    assert any("ep 4" in text and "tp 2" in text for text in seen[0].said), seen[0].said
    mine, wanted = columns(tmp_path / "moved", *COLUMNS), columns(tmp_path / "one", *COLUMNS)
    assert mine.keys() == wanted.keys() == {1, 2, 3, 4}
    for step, values in wanted.items():
        for name, value, right in zip(COLUMNS, mine[step], values):
            assert abs(value - right) <= 1e-10 * max(1.0, abs(right)), f"step {step}: {name} is {value}, not {right}"
    names = {name for row in files.read_metrics(tmp_path / "moved") for name in row}
    assert not unknown(names), unknown(names)


def test_the_same_state_has_the_same_digest_on_every_mesh(tmp_path: Path) -> None:
    """A step of size 0, and the biases move by the loads alone, so the bits are the same."""
    for name, ranks, mesh in (("tp", 2, {"mesh.tp": 2}), ("ep", 4, EP4)):
        run_on(ranks, tmp_path / name, **MOE | mesh | {"train.steps": 1, "optimizer.lr": 0.0})
    assert weights_digest(tmp_path / "ep") == weights_digest(tmp_path / "tp")


def weights_digest(run_dir: Path) -> str:
    """Of the weights and biases of step 1: moments differ by rounding."""
    content = json.loads((checkpoint(run_dir, 1) / "tensors.json").read_text())
    return json.dumps({n: t["digest"] for n, t in content.items() if n.startswith("model.")}, sort_keys=True)


def _text(path: Path, *more: str) -> list[list[int]]:
    out = io.StringIO()
    main(["--checkpoint", str(path), "--prompt", "3 times", "--max-new-tokens", "8", "--json", *more], out)
    return [each["ids"] for each in json.loads(out.getvalue())["completions"]] if out.getvalue() else []


def test_text_from_a_checkpoint_of_ep_is_the_same_on_every_mesh(tmp_path: Path) -> None:
    """Buffers that generation leaves at zero, experts that are not all there."""
    run_on(2, tmp_path / "run", **MOE, **{"train.steps": 4, "mesh.ep": 2, "optimizer.lr": 0.01})
    (alone,) = run_ranks(1, _text, tmp_path / "run")
    assert len(alone[0]) == 8
    assert run_ranks(2, _text, tmp_path / "run", "--mesh.tp", "2")[0] == alone
    assert run_ranks(2, _text, tmp_path / "run", "--mesh.pp", "2")[0] == alone


@pytest.mark.parametrize(
    ("keys", "ranks", "says"),
    [
        ({"mesh.ep": 2, "mesh.tp": 2}, 2, r"mesh.ep \(2\) must be a factor of mesh.dp \(1\)"),
        ({"mesh.ep": 3}, 6, r"mesh.ep \(3\) must divide model.n_experts \(8\)"),
        ({"mesh.ep": 2, "model.architecture": "llama"}, 2, "mesh.ep has no effect"),
    ],
)
def test_what_cannot_be_is_refused(keys: dict[str, Any], ranks: int, says: str) -> None:
    config = {"model.architecture": "moe", "model.n_layers": 2, "train.global_batch_size": 12} | keys
    with pytest.raises(UserError, match=says):
        check(load_config(None, config), ranks)


def test_verify_tells_a_mesh_of_experts_is_the_same_run(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", **MOE | {"mesh.dp": 2, "mesh.ep": 2})
    report = verify(config)
    assert report.same, report
    assert report.mesh == {"pp": 1, "dp": 2, "tp": 1, "ep": 2}


MESHES: dict[str, dict[str, int]] = {
    "pp 2": {"mesh.pp": 2},
    "dp 2": {"mesh.dp": 2},
    "tp 2": {"mesh.tp": 2},
    "ep 2": {"mesh.dp": 2, "mesh.ep": 2},
    "ep 4": {"mesh.dp": 4, "mesh.ep": 4},
    "pp 2, dp 2, ep 2, tp 2": {"mesh.pp": 2, "mesh.dp": 2, "mesh.ep": 2, "mesh.tp": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("preset", list(PRESETS))
def test_every_preset_is_the_same_run_on_every_mesh(preset: str, mesh: str) -> None:
    keys = {"model.architecture": "moe", "model.preset": preset, "train.global_batch_size": 16}
    report = verify(load_config(None, keys | MESHES[mesh]))
    assert report.same, [(check.key, check.error) for check in report.checks if not check.same]


def _drop_an_expert(trainer: Any) -> None:
    """A fault: the rank with the second half of the experts takes no gradient of its last one."""
    if trainer.mesh.coordinate("dp") == 1:
        slot = next(s for n, (_, s) in trainer.zero.slots.items() if n.endswith("experts.w2"))
        slot.parameter.register_hook(lambda grad: grad * 0)


@pytest.mark.slow
def test_verify_finds_an_expert_without_gradient(tmp_path: Path) -> None:
    report = verify(tiny(tmp_path / "run", **MOE | {"mesh.dp": 2, "mesh.ep": 2}), plant=_drop_an_expert)
    assert not report.same
