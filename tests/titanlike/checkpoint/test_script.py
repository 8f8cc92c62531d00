"""scripts/checkpoint.py, as a person and as a program use it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts import checkpoint as script
from tests.ranks import ROOT
from tests.titanlike.checkpoint.test_hf import meta_of, model_of, weights
from titanlike.checkpoint import CheckpointConfig, Checkpointer
from titanlike.errors import UserError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    model = model_of("gqa")
    checkpointer = Checkpointer(CheckpointConfig(mode="sync", keep_last=0), tmp_path / "run")
    for step in (5, 10):
        checkpointer.save(step, weights(model), meta_of(model) | {"tokens": step * 100})
    return tmp_path / "run"


def call(capsys: pytest.CaptureFixture, *arguments: Any) -> tuple[int, str]:
    code = script.main([str(argument) for argument in arguments])
    return code, capsys.readouterr().out


def call_json(capsys: pytest.CaptureFixture, *arguments: Any) -> tuple[int, dict]:
    code, out = call(capsys, *arguments, "--json")
    return code, json.loads(out)


def damage(run: Path, step: int) -> None:
    path = run / "checkpoints" / f"step-{step:08d}" / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_ls(run: Path, capsys: pytest.CaptureFixture) -> None:
    code, out = call(capsys, "ls", run)
    assert code == 0 and "newest" in out and "100" not in out
    code, value = call_json(capsys, "ls", run)
    assert [row["step"] for row in value["checkpoints"]] == [10, 5]
    assert [row["newest"] for row in value["checkpoints"]] == [True, False]
    (run / "checkpoints" / "step-00000010" / "COMMIT").unlink()
    _, out = call(capsys, "ls", run)
    assert "damaged" in out and "COMMIT is missing" in out


def test_ls_takes_the_folder_of_checkpoints_and_a_checkpoint_too(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """`ls` on one checkpoint, or on an average, said that there are none."""
    _, whole = call_json(capsys, "ls", run)
    assert call_json(capsys, "ls", run / "checkpoints")[1] == whole
    one = run / "checkpoints" / "step-00000005"
    _, value = call_json(capsys, "ls", one)
    assert value["checkpoints"] == [{**whole["checkpoints"][1], "newest": False}]
    steps = [run / "checkpoints" / f"step-{step:08d}" for step in (5, 10)]
    call(capsys, "average", *steps, tmp_path / "mean")
    _, value = call_json(capsys, "ls", tmp_path / "mean")
    assert [(row["step"], row["folder"]) for row in value["checkpoints"]] == [(10, str(tmp_path / "mean"))]
    (one / "manifest.json").write_text("{}")
    code, out = call(capsys, "ls", one)
    assert code == 0 and "damaged" in out and " 5" in f" {out}"


def test_ls_and_rm_of_another_folder_say_what_to_give(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path} has no checkpoints: it holds the runs run: give one of them"):
        script.main(["ls", str(tmp_path)])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty has no checkpoints: give a run folder, such as runs/llama"):
        script.main(["ls", str(tmp_path / "empty")])
    with pytest.raises(UserError, match="step-00000005 is a checkpoint: give its run folder"):
        script.main(["rm", str(run / "checkpoints" / "step-00000005"), "5"])


def test_show(run: Path, capsys: pytest.CaptureFixture) -> None:
    code, out = call(capsys, "show", run)
    assert code == 0 and "model.layers.0.attention.wq.weight" in out and "1000" in out
    _, value = call_json(capsys, "show", run / "checkpoints" / "step-00000005")
    assert value["state"]["tokens"] == 500 and value["tensors"]["model.norm.weight"]["shape"] == [32]


def test_digest(run: Path, capsys: pytest.CaptureFixture) -> None:
    code, value = call_json(capsys, "digest", run)
    held = weights(model_of("gqa"))
    assert code == 0 and value["equal"]
    assert value["state"] == value["stored"] == Checkpointer(CheckpointConfig(), run).digest(held)
    only = {name: shard for name, shard in held.items() if name.startswith("model.")}
    assert value["weights"] == Checkpointer(CheckpointConfig(), run).digest(only)
    damage(run, 10)
    code, out = call(capsys, "digest", run)
    assert code == 1 and "NOT EQUAL" in out


def test_verify(run: Path, capsys: pytest.CaptureFixture) -> None:
    code, out = call(capsys, "verify", run)
    assert code == 0 and "0 problems" in out
    damage(run, 10)
    code, value = call_json(capsys, "verify", run)
    assert code == 1 and "rank-00000.safetensors is damaged" in value["problems"][0]
    assert call(capsys, "verify", run / "checkpoints" / "step-00000005")[0] == 0


def test_rm(run: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(UserError, match="step 10 is the newest good checkpoint"):
        script.main(["rm", str(run), "5", "10"])
    with pytest.raises(UserError, match="has no step 7; it has: 5, 10"):
        script.main(["rm", str(run), "7"])
    assert call(capsys, "rm", run, 5)[0] == 0
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000010"]
    assert call(capsys, "rm", run, 10, "--force")[0] == 0
    assert not list((run / "checkpoints").iterdir())
    assert "no checkpoints" in call(capsys, "ls", run)[1]


def test_export_and_import(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    code, out = call(capsys, "export", "--format", "hf", run, tmp_path / "hf", "--dtype", "bfloat16")
    assert code == 0 and "checksums verified" in out
    code, out = call(capsys, "import", tmp_path / "hf", tmp_path / "in")
    assert code == 0 and "n_kv_heads = 2" in out and "init_from" in out
    _, value = call_json(capsys, "show", tmp_path / "in")
    assert value["tensors"]["model.norm.weight"]["dtype"] == "BF16"


def test_a_damaged_checkpoint_is_not_exported(run: Path, tmp_path: Path) -> None:
    damage(run, 10)
    with pytest.raises(UserError, match=r"rank-00000\.safetensors is damaged"):
        script.main(["export", str(run), str(tmp_path / "hf")])
    assert not (tmp_path / "hf").exists()


def test_the_imported_model_table_is_a_config(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """What import prints can be pasted."""
    import tomli

    from titanlike.architectures import resolve

    call(capsys, "export", run, tmp_path / "hf")
    _, out = call(capsys, "import", tmp_path / "hf", tmp_path / "in")
    table = tomli.loads(out[out.index("[model]") :])["model"]
    assert resolve(table.pop("architecture")).section(**table).n_kv_heads == 2


@pytest.mark.parametrize("command", ["", "ls", "show", "digest", "verify", "rm", "export", "import"])
def test_help(command: str, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stopped:
        script.main([*([command] if command else []), "--help"])
    assert stopped.value.code == 0 and "usage" in capsys.readouterr().out


def test_a_mistake_is_one_line_and_code_2(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "scripts/checkpoint.py", "show", str(tmp_path / "nowhere")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr == f"error: {tmp_path / 'nowhere'} does not exist\n"
