"""The run folder: held by one job at a time, and left as it was by one that did not start."""

from __future__ import annotations

import fcntl
import resource
from pathlib import Path
from typing import Any

import pytest

from tests.titanlike.runs import run_on
from titanlike import run_folder as subject
from titanlike.errors import UserError
from titanlike.run_folder import run_folder


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"data.paths": ["nothing-here/*.txt"]}, "nothing-here"),
        ({"checkpoint.init_from": "nowhere"}, "nowhere"),
        ({"validation.generate.prompts": ["x" * 99], "validation.generate.interval": 1}, "validation.generate"),
    ],
    ids=["data", "weights", "prompts"],
)
def test_a_refused_start_leaves_no_folder(tmp_path: Path, wrong: dict[str, Any], said: str) -> None:
    """A start that found no data, or no weights, left a new folder with a .lock in it, which looked like a run."""
    for seen in run_on(2, tmp_path / "run", **wrong):
        assert seen.error is not None and said in seen.error[1]
    assert not (tmp_path / "run").exists(), sorted((tmp_path / "run").rglob("*"))


def test_a_run_leaves_no_lock(tmp_path: Path) -> None:
    (seen,) = run_on(1, tmp_path / "run", **{"train.steps": 1})
    assert seen.error is None and (tmp_path / "run" / "metrics.jsonl").exists()
    assert not (tmp_path / "run" / ".lock").exists()


def test_a_full_disk_is_told_at_the_start(tmp_path: Path) -> None:
    """A full disk takes a new file, but no word in it: the start ended in a traceback from the lock."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        said = r"the run folder .*run \(run.dir/run.name\): cannot use"
        with pytest.raises(UserError, match=said), run_folder(tmp_path / "run", 0):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_not_empty_stays(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="refused"), run_folder(tmp_path, 0):
        raise ValueError("refused")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_lock_of_a_file_that_was_removed_meanwhile_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that ends removes its lock's file; one that opened it just before would hold a lock that nobody sees."""
    lockf, tries = fcntl.lockf, []

    def lock(file: Any, flags: int) -> None:
        if not tries:
            (tmp_path / "run" / ".lock").unlink()
            (tmp_path / "run").rmdir()
        tries.append(file)
        lockf(file, flags)

    monkeypatch.setattr(subject.fcntl, "lockf", lock)
    with run_folder(tmp_path / "run", 0):
        assert len(tries) == 2
        assert (tmp_path / "run" / ".lock").read_text().startswith("process ")
    assert not (tmp_path / "run").exists()


def test_the_lock_of_another_job_is_left_where_it_is(tmp_path: Path) -> None:
    """A run folder that was deleted under a job, and used for a new one: the old job's end must not free it."""
    with run_folder(tmp_path / "run", 0):
        (tmp_path / "run" / ".lock").unlink()
        (tmp_path / "run" / ".lock").write_text("process 1 on elsewhere\n")
    assert (tmp_path / "run" / ".lock").read_text() == "process 1 on elsewhere\n"
