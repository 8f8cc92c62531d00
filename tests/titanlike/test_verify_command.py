"""scripts/verify.py as a command: nothing is left behind, and whatever goes wrong is said."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from titanlike.config import load_config
from titanlike.verify import verify
from titanlike.verify.compare import Check, Difference
from titanlike.verify.launch import RankFailed, Ranks
from titanlike.verify.pieces import Key, RankRecord
from titanlike.verify.report import Report

ROOT = Path(__file__).resolve().parent.parent.parent


def raises_on_rank_1(trainer: Any) -> None:
    if trainer.mesh.rank == 1:
        raise OSError("the disk of rank 1 is full")


def test_a_rank_that_raises_is_quoted() -> None:
    """Symptom: an error on one rank hangs the others, or only a lost connection is reported."""
    with pytest.raises(RankFailed, match=r"(?s)rank 1 of 2 failed.*OSError: the disk of rank 1 is full"):
        verify(load_config(None, {"mesh.dp": 2, "model.n_layers": 1}), plant=raises_on_rank_1)


def hang(path: Path) -> None:
    if dist.get_rank() == 1:
        path.touch()
        time.sleep(600)


def test_a_rank_that_hangs_is_told_with_its_stack(tmp_path: Path) -> None:
    """Symptom: a mesh that locks up makes the tool that should say so wait for ever."""
    with (
        pytest.raises(RankFailed, match=r"(?s)^rank (0, )?1 of 2 not done in 0.5 s.* in hang"),
        Ranks(2, hang, tmp_path / "here") as ranks,
    ):
        while not (tmp_path / "here").exists():
            time.sleep(0.02)
        ranks.results(0.5)
    assert not any(process.is_alive() for process in ranks.processes)


def test_results_come_by_rank() -> None:
    """Symptom: coordinates are mixed up."""
    with Ranks(3, dist.get_rank) as ranks:
        assert ranks.results(300.0) == [0, 1, 2]


def marked(mark: str) -> list[int]:
    """The live processes that a command with VERIFY_MARK in its environment started, itself included."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"VERIFY_MARK={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks at /proc")
@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGTERM, signal.SIGKILL))],
)
def test_no_rank_outlives_the_command(number: int, tmp_path: Path) -> None:
    """Symptom: after Ctrl-C, or when the command is killed, ranks go on and keep the machine busy."""
    mark = f"{os.getpid()}-{number}"
    command = [sys.executable, "scripts/verify.py", "--config", "configs/debug.toml", "--mesh.dp", "2"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=os.environ | {"VERIFY_MARK": mark, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 400
        while len(marked(mark)) < 5 and time.monotonic() < deadline:  # command, two helpers of Python, two ranks
            assert process.poll() is None, "done before it could be interrupted"
            time.sleep(0.02)
        process.send_signal(number)
        code = process.wait(200)
        assert code == {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}[number]  # type: ignore[index]
        while marked(mark) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert marked(mark) == []
        assert number == signal.SIGKILL or list(tmp_path.glob("verify-*")) == []
        if number == signal.SIGINT:
            assert process.stderr is not None
            assert process.stderr.read().decode().strip() == "interrupted; the ranks are ended"
    finally:
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    """scripts/verify.py without a launcher."""
    command = [sys.executable, "scripts/verify.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)


def test_the_command_prints_json_for_machines() -> None:
    """Symptom: what ranks print, or a table, is between the braces."""
    done = run_script("--config", "configs/debug.toml", "--json", "--mesh.dp", "2")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["same"] is True and told["mesh"] == {"pp": 1, "dp": 2, "tp": 1} and told["first_difference"] is None
    assert {check["step"] for check in told["checks"]} == {0, 1, 2, 3}
    assert all(check["max_abs_error"] < 1e-10 for check in told["checks"])


def test_a_config_that_cannot_run_is_one_sentence() -> None:
    """Symptom: a mesh that does not fit is found by a traceback on each rank."""
    done = run_script("--config", "configs/debug.toml", "--mesh.tp", "4")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == "error: model.n_heads (6) must be a multiple of mesh.tp (4)\n"


def test_one_rank_is_nothing_to_compare() -> None:
    """Symptom: without a mesh, one rank is compared with itself for a while and found to be the same."""
    done = run_script("--config", "configs/debug.toml")
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: there is nothing to compare: ") and "--mesh.dp 2" in done.stderr


def test_a_difference_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Symptom: a script that runs verify goes on although the mesh is another run."""
    import runpy

    import titanlike.verify

    record = RankRecord(1, 1, 0, 0, [], {}, set(), {}, [])
    difference = Difference("layers.1.ffn_norm.weight", math.inf, [], (3,), 2.0, 1.0, record)
    checks = [
        Check(Key("weights", 0), 21, 0.0, [], {}),
        Check(Key("gradients", 1), 21, math.inf, [difference], {}),
    ]
    mesh = {"pp": 2, "dp": 1, "tp": 1}
    report = Report(mesh, [("mesh", "pp 2")], [("model.dim", 64, 16)], ["a note"], checks, ["read [so]"], 1.0)
    monkeypatch.setattr(titanlike.verify, "verify", lambda *_: report)
    threads = torch.get_num_threads()
    for arguments in ([], ["--json"]):
        monkeypatch.setattr(sys, "argv", ["verify.py", "--mesh.pp", "2", *arguments])
        assert runpy.run_path(str(ROOT / "scripts/verify.py"), run_name="imported")["main"]() == 1
    torch.set_num_threads(threads)
    text, _, rest = capsys.readouterr().out.partition("\nNot the same run.")
    assert "note: a note\nfirst difference: gradients in step 1: layers.1.ffn_norm.weight\n" in text
    assert "  worst element: [3] is 2 on rank 1 (pp 1, dp 0, tp 0), 1 on one rank\n  ratio: 2x\n" in text
    assert text.endswith("  reading: read [so]")
    told = json.loads(rest[rest.index("{") :])
    assert told["same"] is False and told["checks"][1]["max_abs_error"] == "inf"
    first_difference = told["first_difference"]
    assert (first_difference["tensor"], first_difference["ratio"]) == ("layers.1.ffn_norm.weight", 2.0)
