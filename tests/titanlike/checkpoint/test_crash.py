"""Whenever a process dies during a save, the next start has the last committed step, bit for bit."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import ROOT
from tests.titanlike.checkpoint import crash_harness
from tests.titanlike.checkpoint.crash_harness import full_state
from tests.titanlike.checkpoint.states import whole
from titanlike.checkpoint import Checkpointer, files


class Killed(BaseException):
    """Stands for the death of the process: from here on no file operation happens."""


@pytest.fixture(autouse=True)
def _no_hook_is_left() -> Iterator[None]:
    yield
    files.hook = None


@pytest.fixture
def memory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="crash-", dir=crash_harness.MEMORY) as name:
        yield Path(name)


def kill_before(k: int) -> list[str]:
    """From the k-th file operation on, nothing happens any more. Returns the list of the operations that did."""
    done: list[str] = []

    def hook(operation: str, path: str) -> None:
        if len(done) == k:
            raise Killed
        done.append(f"{operation} {Path(path).name}")

    files.hook = hook
    return done


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("scenario", crash_harness.SCENARIOS)
def test_every_file_operation_of_one_process(scenario: str, mode: str, memory: Path) -> None:
    """In this process, so that every operation is tried in little time. The real kills are below."""
    crash_harness.prepare(memory / "before", scenario)
    held = whole(full_state(2))
    k = 0
    while True:
        folder = memory / "run"
        shutil.copytree(memory / "before", folder)
        done = kill_before(k)
        checkpointer = Checkpointer(crash_harness.config(scenario, mode), folder)
        died = False
        try:
            checkpointer.save(2, held, {"seed": 2})
            checkpointer.close()
        except BaseException:
            died = True
        files.hook = None
        crash_harness.check(folder, scenario, finished=not died)
        shutil.rmtree(folder)
        if not died:
            break
        k += 1
    assert len(done) == k >= 25, done
    print(f"{scenario}, {mode}: {k} crash points in one process, 0 lost")


def run_harness(*arguments: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.titanlike.checkpoint.crash_harness", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    print(done.stdout)
    return done.stdout


def test_some_real_kills_of_either_rank() -> None:
    assert "4 crash points, 0 lost" in run_harness("--every", "14", "--scenario", "same step", "--mode", "async")


@pytest.mark.slow
@pytest.mark.parametrize("scenario", crash_harness.SCENARIOS)
def test_a_real_kill_at_every_file_operation_of_either_rank(scenario: str) -> None:
    assert ", 0 lost" in run_harness("--scenario", scenario)
