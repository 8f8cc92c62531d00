"""A test on several ranks fails with the cause, hangs never, and leaves no process behind."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import CALLS_PER_POOL, ROOT, RankError, launch, launching, run_ranks


def wait_until_gone(pids: list[int]) -> list[int]:
    """Those of `pids` that are still alive after a time that is generous on a busy machine."""
    deadline = time.monotonic() + 30.0
    while pids and time.monotonic() < deadline:
        pids = [pid for pid in pids if alive(pid)]
        time.sleep(0.05)
    return pids


def alive(pid: int) -> bool:
    try:
        # The state follows the name, which stands in parentheses. A zombie has ended; who reaps it is not our subject.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- run_ranks ---


def scaled_sum(factor: torch.Tensor) -> tuple[int, torch.Tensor]:
    total = factor * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return dist.get_rank(), total


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_back_by_rank_and_tensors_by_value(world_size: int) -> None:
    results = run_ranks(world_size, scaled_sum, torch.tensor([2.0], dtype=torch.float64))
    expected = torch.tensor([2.0 * sum(range(1, world_size + 1))], dtype=torch.float64)
    assert [rank for rank, _ in results] == list(range(world_size))
    for _, total in results:
        torch.testing.assert_close(total, expected, rtol=0, atol=0)


def large(number: int) -> torch.Tensor:
    return torch.full((number,), dist.get_rank())


def test_results_larger_than_a_pipe_come_back() -> None:
    assert [int(result.sum()) for result in run_ranks(2, large, 1_000_000)] == [0, 1_000_000]


def test_ranks_are_reused_until_they_have_done_many_calls() -> None:
    run_ranks(3, os.getpid)
    pids = [run_ranks(3, os.getpid) for _ in range(CALLS_PER_POOL)]
    assert 1 < len({tuple(group) for group in pids}) + 1 <= 3
    assert pids[0] == pids[1]
    assert not wait_until_gone([pid for pid in pids[0] if pid not in pids[-1]])


def environment_of_rank() -> dict[str, str | None]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")
    return {name: os.environ.get(name) for name in names}


def test_ranks_see_the_environment_that_torchrun_gives() -> None:
    for rank, environment in enumerate(run_ranks(2, environment_of_rank)):
        assert environment["RANK"] == environment["LOCAL_RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "2"
        assert environment["MASTER_ADDR"] == "127.0.0.1"
        assert environment["MASTER_PORT"] is not None
        assert environment["OMP_NUM_THREADS"] == "1"


def untidy() -> None:
    torch.manual_seed(dist.get_rank() + 7)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(2)
    random.seed(7)
    os.environ["UNTIDY"] = "1"
    os.environ["RANK"] = "wrong"
    os.chdir("/")


def tidy() -> tuple[object, ...]:
    return (
        torch.rand(1).item(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        random.random(),
        os.environ.get("UNTIDY"),
        int(os.environ["RANK"]) == dist.get_rank(),
        os.getcwd(),
    )


def test_a_call_does_not_see_what_an_earlier_one_left() -> None:
    before = run_ranks(2, tidy)
    run_ranks(2, untidy)
    assert run_ranks(2, tidy) == before
    assert before[0] == before[1]


def raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"the cause on rank {rank}")
    dist.barrier()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_raises_while_others_wait_fails_with_its_traceback(rank: int) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, raise_on, rank)
    first, *rest = str(caught.value).splitlines()
    assert caught.value.rank == rank
    assert first.startswith(f"rank {rank} of 2 failed first: Traceback")
    assert "in raise_on" in str(caught.value)
    assert f"ValueError: the cause on rank {rank}" in rest
    assert f"rank {1 - rank} had not finished and was killed" in rest
    # The next call finds a pool that works.
    assert len(run_ranks(2, scaled_sum, torch.ones(1))) == 2


def lose_connection_to_failing_rank() -> None:
    if dist.get_rank() == 0:
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:1234")
    time.sleep(1.0)
    raise ValueError("the cause")


def test_the_cause_is_shown_before_the_lost_connections() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(3, lose_connection_to_failing_rank)
    assert caught.value.rank in (1, 2)
    assert "failed first: Traceback" in str(caught.value).splitlines()[0]
    assert "then rank 0: RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed" in str(caught.value)
    assert set(caught.value.reports) == {0, 1, 2}


def die(number: int) -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), number)
    dist.barrier()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_rank_that_dies_is_named_with_its_cause_of_death(number: signal.Signals) -> None:
    with pytest.raises(RankError, match=f"^rank 1 of 2 failed first: died: killed by {number.name}"):
        run_ranks(2, die, number)
    assert len(run_ranks(2, os.getpid)) == 2


def leave_with(code: int) -> None:
    if dist.get_rank() == 0:
        os._exit(code)


def test_a_rank_that_exits_is_named_with_its_exit_code() -> None:
    with pytest.raises(RankError, match="rank 0 of 2 failed first: died: exit code 5\nrank 1 had finished"):
        run_ranks(2, leave_with, 5)


def exit_with(code: int) -> None:
    sys.exit(code)


def test_sys_exit_in_a_rank_is_a_failure() -> None:
    with pytest.raises(RankError, match="SystemExit: 0"):
        run_ranks(2, exit_with, 0)


def hang_here() -> int:
    if dist.get_rank() == 1:
        time.sleep(1000)
    dist.barrier()
    return os.getpid()


def test_ranks_that_hang_are_shown_with_their_stacks_and_killed() -> None:
    pids = run_ranks(2, os.getpid)
    with pytest.raises(RankError) as caught:
        run_ranks(2, hang_here, timeout=1.0)
    message = str(caught.value)
    assert message.startswith("rank 0 and 1 of 2 did not finish in 1 s")
    assert "in hang_here" in caught.value.reports[1]
    assert "in barrier" in caught.value.reports[0]
    assert not wait_until_gone(pids)
    assert len(run_ranks(2, os.getpid)) == 2


def local_function():
    return lambda: None


def test_what_can_not_be_pickled_is_an_error_that_says_so() -> None:
    with pytest.raises((AttributeError, TypeError, RankError), match="pickle|local"):
        run_ranks(2, lambda: None)
    with pytest.raises(RankError, match="pickle"):
        run_ranks(2, local_function)
    assert len(run_ranks(2, os.getpid)) == 2


PARENT = """
    import os, signal, subprocess, sys, time
    from tests.ranks import run_ranks

    def start(folder, hang):
        child = subprocess.Popen(["sleep", "1000"])
        with open(os.path.join(folder, f"{os.environ['RANK']}.part"), "w") as file:
            print(os.getpid(), child.pid, file=file)
        os.rename(file.name, file.name[:-5])
        if hang:
            time.sleep(1000)

    if __name__ == "__main__":
        end, folder = sys.argv[1:]
        run_ranks(2, start, folder, end.startswith("hang"))
        if end == "return":
            print("done")
        elif end == "raise":
            raise ValueError("on purpose")
        else:
            time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("end", "number", "code"),
    [
        ("return", None, 0),
        ("idle", signal.SIGTERM, -signal.SIGTERM),
        ("hang", signal.SIGKILL, -signal.SIGKILL),
        pytest.param("raise", None, 1, marks=pytest.mark.slow),
        pytest.param("idle", signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("hang", signal.SIGINT, None, marks=pytest.mark.slow),
    ],
)
def test_no_rank_outlives_its_parent(tmp_path: Path, end: str, number: int | None, code: int | None) -> None:
    """Symptom: ranks of an aborted test session go on for ever, at full load in a collective."""
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    command = [sys.executable, script, end, tmp_path]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    reports = [tmp_path / "0", tmp_path / "1"]
    while not all(report.exists() for report in reports) and process.poll() is None:
        time.sleep(0.02)
    pids = [int(pid) for report in reports for pid in report.read_text().split()]
    try:
        if number is not None:
            process.send_signal(number)
        out, err = process.communicate(timeout=60)  # the pipes end with the last process that has them
        assert code in (None, process.returncode), (out, err)
        assert len(pids) == 4
        assert not wait_until_gone(pids)
    except BaseException:
        process.kill()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise


# --- launch ---


def test_launch_returns_the_whole_output_and_the_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys; print('x' * 200_000); print('rank', os.environ['RANK'], sys.argv[1], flush=True)"
    )
    done = launch([script, "--flag"], nproc=2)
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("rank")) == [
        "rank 0 --flag",
        "rank 1 --flag",
    ]
    assert len(done.stdout) > 400_000


def test_launch_returns_a_failure_with_the_traceback(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\nif os.environ['RANK'] == os.environ['BAD']: raise ValueError('on purpose')")
    done = launch([script], nproc=2, env={"BAD": "1"})
    assert done.returncode != 0
    assert "ValueError: on purpose" in done.stderr


HANGING = """
    import os, pathlib, subprocess, sys, time
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    def hang_here():
        pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(f"{os.getpid()} {child.pid}")
        time.sleep(1000)
    hang_here()
"""


def test_launch_kills_what_hangs_and_shows_where_it_was(tmp_path: Path) -> None:
    """Symptom: killing torchrun leaves its ranks, which have sessions of their own, and their children."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(HANGING))
    with launching([script, tmp_path], nproc=2) as launched:
        while not all((tmp_path / rank).exists() for rank in "01"):
            time.sleep(0.02)
        with pytest.raises(RankError, match="did not finish in 0.5 s") as caught:
            launched.wait(timeout=0.5)
    assert "in hang_here" in str(caught.value)  # torchrun may end the second rank before its stack is out
    pids = [int(pid) for rank in "01" for pid in (tmp_path / rank).read_text().split()]
    assert len(pids) == 4
    assert not wait_until_gone(pids)


def test_launch_has_a_time_out(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time; time.sleep(1000)")
    with pytest.raises(RankError, match="script.py\ndid not finish in 0.1 s"):
        launch([script], nproc=2, timeout=0.1)


def test_launching_gives_the_ranks_to_kill_and_leaves_nothing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(HANGING))
    with launching([script, tmp_path], nproc=2) as launched:
        while not all((tmp_path / rank).exists() for rank in "01"):
            time.sleep(0.05)
        ranks = launched.rank_pids()
        pids = [int((tmp_path / rank).read_text().split()[0]) for rank in "01"]
        assert [ranks[0], ranks[1]] == pids
        children = [int((tmp_path / rank).read_text().split()[1]) for rank in "01"]
        os.kill(ranks[1], signal.SIGKILL)
        done = launched.wait(timeout=60)
        assert done.returncode != 0
        assert "SIGKILL" in done.stderr or "-9" in done.stderr
    assert not wait_until_gone([*pids, *children])


def test_an_exception_inside_launching_leaves_nothing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(HANGING))
    with pytest.raises(ValueError, match="in the test"), launching([script, tmp_path], nproc=2) as launched:
        while len(pids := list(launched.rank_pids().values())) < 2:
            time.sleep(0.05)
        raise ValueError("in the test")
    assert not wait_until_gone(pids)
