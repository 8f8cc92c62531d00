"""What a real run logs: the listed names and no others, rates that add up, FLOPs as torch counts them, on any mesh."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tests.ranks import RankError, run_ranks
from titanlike.config import Config, load_config
from titanlike.metrics import files, names
from titanlike.metrics.flops import flops_per_token
from titanlike.metrics.startup_times import PARTS

# Names that only some runs have; each is covered by a test of its own.
DATASHEET = {"mfu/palm", "mfu/matmul", "mfu/causal"}
SOMETIMES = {"skipped", "val_loss", "val_loss/<set>", "time/checkpoint_s", "time/validation_s", "time/health_s"}
OTHER_AXES = {entry.name for entry in names.SECTIONS["Waiting for other ranks"]} - {"comm/dp_s"}
EXPERTS = {entry.name for entry in names.SECTIONS["Mixture of experts (only those)"]}
COMPILED = {"compile/graphs", "compile/graph_breaks"}
HEALTH = {entry.name for entry in names.SECTIONS["Health of the model"]}


def tiny(run_dir: Path, **overrides: Any) -> Config:
    """A run of seconds on a text of its own."""
    text = run_dir.parent / "text.txt"
    if not text.exists():
        text.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(3000)))
    return load_config(
        None,
        {
            "run.dir": str(run_dir.parent),
            "run.name": run_dir.name,
            "run.device": "cpu",
            **{"model.dim": 16, "model.n_layers": 2, "model.n_heads": 4, "model.n_kv_heads": 2, "model.ffn_dim": 24},
            **{"train.steps": 4, "train.global_batch_size": 4, "train.seq_len": 16},
            **{"data.source": "text", "data.paths": [str(text)], "validation.interval": 2},
            **{"metrics.tensorboard": False, "compile.enable": False},
            **overrides,
        },
    )


def run(config: Config) -> None:
    import titanlike.run

    titanlike.run.SAMPLE_TOKENS = 2  # the sample at the end is not the subject here, and slow
    titanlike.run.train(config)


def test_a_run_logs_the_listed_names_and_no_others(tmp_path: Path) -> None:
    """A list that is kept by hand says one thing and the files another."""
    overrides = {
        "metrics.matmul_peak": True,
        "metrics.health_interval": 4,
        "checkpoint.interval": 2,
        "optimizer.groups": [{"match": "norm", "lr_scale": 0.5}],
    }
    run_ranks(2, run, tiny(tmp_path / "run", **overrides))
    rows = files.read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    logged = {name for row in rows for name in row}
    assert names.unknown(logged) == []
    listed = {entry.name for entries in names.SECTIONS.values() for entry in entries} - EXPERTS - COMPILED
    assert listed - {names.find(name).name for name in logged} == DATASHEET | OTHER_AXES | {"val_loss/<set>", "skipped"}
    for row in rows:
        assert listed - {names.find(name).name for name in row} <= DATASHEET | SOMETIMES | HEALTH | OTHER_AXES
        assert row["tokens"] == row["step"] * 4 * 16
        phases = sum(value for name, value in row.items() if name.startswith("time/"))
        assert phases == pytest.approx(row["step_time_s"] + row.get("time/validation_s", 0.0))
        assert row["tokens_per_s"] * row["step_time_s"] == pytest.approx(4 * 16)
        assert row["tokens_per_s_per_rank"] == row["tokens_per_s"] / 2
        assert row["lr/0"] == row["lr"] / 2
    assert [("val_loss" in row, "time/checkpoint_s" in row) for row in rows] == [
        (False, False), (True, False), (False, True), (True, False),
    ]  # fmt: skip
    start, startup, *saves = files.read_events(tmp_path / "run")
    assert (startup["event"], startup["step"]) == ("startup", 1)
    assert startup["total_s"] == pytest.approx(sum(startup[f"{part}_s"] for part in PARTS if part != "launcher"))
    assert [(event["event"], event["step"]) for event in saves] == [("checkpoint", 2), ("checkpoint", 4)]
    assert (start["event"], start["mesh"], start["world_size"]) == ("start", {"pp": 1, "dp": 2, "tp": 1}, 2)


def test_resume_on_another_mesh_continues_the_same_file(tmp_path: Path) -> None:
    """Tokens overcounted after a resume, and steps twice in the log (reports against several trainers)."""
    run_ranks(2, run, tiny(tmp_path / "run", **{"checkpoint.interval": 2}))
    with open(tmp_path / "run" / files.METRICS_FILE, "a") as file:
        file.write('{"step": 5, "loss": 1.0}\n{"step": 6, "lo')  # what a run that went further before it died leaves
    config = tiny(tmp_path / "run", **{"checkpoint.interval": 2, "mesh.tp": 2, "train.steps": 6})
    run_ranks(2, run, config)
    rows = files.read_lines(tmp_path / "run" / files.METRICS_FILE)
    assert [(row["step"], row["tokens"]) for row in rows] == [(step, step * 64) for step in range(1, 7)]
    (resume,) = [event for event in files.read_events(tmp_path / "run") if event["event"] == "resume"]
    assert (resume["event"], resume["step"], resume["mesh"]) == ("resume", 4, {"pp": 1, "dp": 1, "tp": 2})
    assert resume["dropped_steps"] == 1


def test_the_step_that_is_not_finite_is_in_the_log(tmp_path: Path) -> None:
    """The one line that explains the end of the run must not be the one that is missing."""
    diverging = {"optimizer.name": "sgd", "optimizer.lr": 1e30, "train.max_grad_norm": 0.0, "train.steps": 9}
    with pytest.raises(RankError, match="NonFinite"):
        run_ranks(1, run, tiny(tmp_path / "run", **diverging))
    last = files.read_metrics(tmp_path / "run")[-1]
    assert last["step"] < 9 and not (math.isfinite(last["loss"]) and math.isfinite(last["grad_norm"]))


class LocalFlops(TorchDispatchMode):
    """torch's own counts, of what this rank computes.

    FlopCounterMode itself counts a DTensor's op in its global shape: each tp rank would count the work of all.
    """

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensor goes first, and comes back with local tensors
        out = func(*args, **(kwargs or {}))
        counter = flop_registry.get(func._overloadpacket)
        self.total += counter(*args, **(kwargs or {}), out_val=out) if counter else 0
        return out


def count(config: Config, dp: int) -> tuple[int, float]:
    """(FLOPs that torch counts for one training step on this rank, FLOPs by formula for the whole global batch)"""
    from titanlike.data import open_data
    from titanlike.mesh import Mesh
    from titanlike.startup import config_shape
    from titanlike.trainer import Trainer

    mesh = Mesh(config.mesh.pp, dp, config.mesh.tp, torch.device("cpu"))
    data = open_data(config, mesh.coordinate("dp"), dp)
    trainer = Trainer(config, mesh, data.tokenizer.vocab_size)
    batch = next(data.train_batches(None))
    trainer.train_step(batch)  # a pipeline tries its shapes in the first step
    with sdpa_kernel(SDPBackend.MATH), LocalFlops() as counter:
        trainer.train_step(next(data.train_batches(batch.cursor)))
    per_token = flops_per_token(config_shape(trainer), config.train.seq_len)
    return counter.total, per_token.matmul * config.train.global_batch_size * config.train.seq_len


INTERLEAVED = {
    **{"mesh.pp": 2, "pipeline.schedule": "interleaved_1f1b"},
    **{"model.n_layers": 4, "model.tie_embeddings": True},
}


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (1, {}),
        (2, {}),
        (2, {"mesh.pp": 2}),
        (2, {"mesh.tp": 2}),
        (2, {"mesh.tp": 2, "mesh.sequence_parallel": False}),
        (4, {"mesh.pp": 2, "mesh.tp": 2}),
        (2, INTERLEAVED),
    ],
    ids=["one", "dp2", "pp2", "tp2", "tp2 without sequence parallel", "pp2tp2", "pp2 interleaved, tied"],
)
def test_flops_of_all_ranks_equal_the_formula(ranks: int, overrides: dict[str, Any], tmp_path: Path) -> None:
    """MFU wrong by pipeline stages or accumulation: the formula of one device must hold for the sum over any mesh."""
    config = tiny(tmp_path / "run", **overrides)
    results = run_ranks(ranks, count, config, config.resolved_dp(ranks))
    assert sum(counted for counted, _ in results) == results[0][1]
