"""Weights & Biases: what it is told is metrics.jsonl; a stub in the package's place notes the calls."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.titanlike.runs import run, tiny
from titanlike.errors import UserError
from titanlike.metrics import files
from titanlike.metrics import weights_and_biases as subject

STUB = """
import json
from pathlib import Path

CALLS = Path(__file__).with_name("calls.jsonl")


def note(*call):
    with CALLS.open("a") as file:
        file.write(json.dumps(call) + "\\n")


class Run:
    def define_metric(self, name, step_metric):
        note("define_metric", name, step_metric)

    def log(self, row):
        note("log", row)

    def finish(self):
        note("finish")


def init(**settings):
    if settings["project"] == "forbidden":
        raise PermissionError("no such project")
    note("init", settings)
    return Run()
"""


def with_stub(folder: str, config: Any) -> Any:
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        return run(config)
    finally:
        sys.path.remove(folder)
        sys.modules.pop("wandb", None)


def test_it_is_told_what_is_in_the_file_and_a_resume_is_the_same_run(tmp_path: Path) -> None:
    """Symptom: other names there than in the log; a resume begins a second run; every rank logs."""
    (tmp_path / "wandb.py").write_text(STUB)
    keys = {"metrics.wandb": True, "metrics.wandb_project": "mine", "metrics.wandb_offline": True}
    for steps in (2, 3):
        seen = run_ranks(2, with_stub, str(tmp_path), tiny(tmp_path / "run", **keys, **{"train.steps": steps}))
        assert [each.error for each in seen] == [None, None]
    calls = [json.loads(line) for line in (tmp_path / "calls.jsonl").read_text().splitlines()]
    assert [call[0] for call in calls] == [
        "init", "define_metric", "log", "log", "finish", "init", "define_metric", "log", "finish",
    ]  # fmt: skip
    logged = [call[1] for call in calls if call[0] == "log"]
    assert logged == files.read_metrics(tmp_path / "run")
    first, second = (call[1] for call in calls if call[0] == "init")
    assert first["id"] == second["id"] == (tmp_path / "run" / subject.ID_FILE).read_text().strip()
    assert (first["project"], first["name"], first["mode"]) == ("mine", "run", "offline")
    assert (first["resume"], first["dir"]) == ("allow", str(tmp_path / "run"))
    assert first["config"]["train"]["global_batch_size"] == 8
    assert calls[1] == ["define_metric", "*", "step"]


def test_what_it_refuses_is_one_sentence_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text(STUB)
    keys = {"metrics.wandb": True, "metrics.wandb_project": "forbidden"}
    for seen in run_ranks(2, with_stub, str(tmp_path), tiny(tmp_path / "run", **keys)):
        assert seen.error is not None and "could not be started (PermissionError: no such project)" in seen.error[1]


def test_without_the_package_the_config_says_so_before_any_process_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symptom: an ImportError after the model was built; or a folder wandb/ taken for the package."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setattr(subject.importlib.util, "find_spec", lambda _name: None)
    config = tiny(tmp_path / "run", **{"metrics.wandb": True})
    said = re.escape("metrics.wandb needs the package wandb, which is not installed")
    with pytest.raises(UserError, match=said):
        config.validate_for(2)

    class Folder:
        origin = None

    monkeypatch.setattr(subject.importlib.util, "find_spec", lambda _name: Folder())
    with pytest.raises(UserError, match=said):
        config.validate_for(2)
    with pytest.raises(UserError, match=r"metrics\.wandb_offline has no effect"):
        tiny(tmp_path / "run", **{"metrics.wandb_offline": True}).validate_for(1)
