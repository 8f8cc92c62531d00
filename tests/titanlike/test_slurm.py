"""scripts/slurm.sh, with stubs of Slurm's commands: what it starts on each node, and what it does with signals."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.ranks import ROOT

STUBS = {
    # Runs the command of a node, as node 1 of 2, with the options of srun written down.
    "srun": """
printf '%s\\n' "$@" > "$LOG/srun"
while [ "$1" != bash ]; do shift; done
SLURM_NODEID=1 SLURMD_NODENAME=node2 exec "$@"
""",
    "scontrol": """
if [ "$1" = requeue ]; then echo "$@" > "$LOG/requeue"; else printf 'node1\\nnode2\\n'; fi
""",
    # As Slurm does, gives the signal to the processes of the step alone.
    "scancel": """
echo "$@" > "$LOG/scancel"
kill -USR1 "$(cat "$LOG/rank")"
""",
    # Its "rank" ends well when it gets USR1, as ours do; it ignores USR1 itself if its parent did.
    "torchrun": """
printf '%s\\n' "$@" > "$LOG/torchrun"
if [ -n "${STAYS:-}" ]; then
  python3 -c '
import os, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
open(os.environ["LOG"] + "/rank", "w").write(str(os.getpid()))
signal.pause()
'
  exit $?
fi
exit "${CODE:-0}"
""",
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    for name, text in STUBS.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("#!/usr/bin/env bash\n" + text)
        path.chmod(0o755)
    job = {
        "SLURM_JOB_ID": "41234", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_ON_NODE": "64", "SLURM_SUBMIT_DIR": str(tmp_path),
    }  # fmt: skip
    clean = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    return clean | job | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "LOG": str(tmp_path)}


def script(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(ROOT / "scripts/slurm.sh"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def test_each_node_runs_torchrun_with_the_rendezvous_on_the_first_host(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    done = script(environment, "configs/my run.toml", "--mesh.tp", "8", "--run.name", "a name")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "torchrun").read_text().splitlines() == [
        "--nnodes", "2:2", "--nproc-per-node", "8", "--max-restarts", "3",
        "--rdzv-id", "41234.0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node1:21234", "--rdzv-conf", "is_host=0",
        "--local-addr", "node2",
        "scripts/train.py", "--config", "configs/my run.toml", "--mesh.tp", "8", "--run.name", "a name",
    ]  # fmt: skip
    srun = (tmp_path / "srun").read_text().splitlines()
    assert "--nodes=2" in srun and "--ntasks-per-node=1" in srun and "--kill-on-bad-exit=1" in srun
    assert not (tmp_path / "requeue").exists()


def test_torchrun_knows_every_option_that_it_is_given(tmp_path: Path, environment: dict[str, str]) -> None:
    from torch.distributed.run import parse_args

    script(environment, "c.toml", "--mesh.tp", "8")
    given = parse_args((tmp_path / "torchrun").read_text().splitlines())
    assert (given.nnodes, given.nproc_per_node, given.rdzv_conf) == ("2:2", "8", "is_host=0")
    assert given.training_script == "scripts/train.py" and given.training_script_args[-2:] == ["--mesh.tp", "8"]


def test_fewer_nodes_will_do_when_the_user_says_so(tmp_path: Path, environment: dict[str, str]) -> None:
    script(environment | {"MIN_NODES": "1", "NPROC": "4", "MAX_RESTARTS": "9"}, "c.toml")
    assert (tmp_path / "torchrun").read_text().splitlines()[:6] == [
        "--nnodes", "1:2", "--nproc-per-node", "4", "--max-restarts", "9",
    ]  # fmt: skip
    assert "--kill-on-bad-exit=0" in (tmp_path / "srun").read_text()


def test_a_failure_is_the_jobs_and_is_not_queued_again(tmp_path: Path, environment: dict[str, str]) -> None:
    assert script(environment | {"CODE": "3"}, "c.toml").returncode == 3
    assert not (tmp_path / "requeue").exists()


def test_near_the_time_limit_the_ranks_save_and_the_job_is_queued_again(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """Symptom: the signal ends the launcher, or the shell alone, and the time since the last save is lost."""
    command = [str(ROOT / "scripts/slurm.sh"), "c.toml"]
    with subprocess.Popen(command, env=environment | {"STAYS": "1"}, stdout=subprocess.PIPE, text=True) as process:
        for _ in range(1200):
            if (tmp_path / "rank").exists() and (tmp_path / "rank").read_text():
                break
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGUSR1)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert (tmp_path / "scancel").read_text() == "--signal=USR1 41234\n"
    assert (tmp_path / "requeue").read_text() == "requeue 41234\n"
    assert "the time limit is near" in out


@pytest.mark.parametrize(("arguments", "job"), [([], "1"), (["c.toml"], "")])
def test_a_wrong_start_is_one_line(environment: dict[str, str], arguments: list[str], job: str) -> None:
    done = script(environment | {"SLURM_JOB_ID": job}, *arguments)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "sbatch" in done.stderr


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say() -> None:
    done = subprocess.run(["shellcheck", str(ROOT / "scripts/slurm.sh")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
