"""Saves in the background, and saves that fail: state and older checkpoints are untouched, and the error arrives."""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.titanlike.checkpoint.states import blank, equal, full_state, shards, whole
from titanlike.checkpoint import CheckpointConfig, Checkpointer, CheckpointError, Shard, files


@pytest.fixture(autouse=True)
def _no_hook_is_left() -> Iterator[None]:
    yield
    files.hook = None


def hold(at: str) -> threading.Event:
    """Stop the writer before its first operation of a kind, until the event is set."""
    event = threading.Event()

    def hook(operation: str, path: str) -> None:
        if operation == at:
            assert event.wait(30)

    files.hook = hook
    return event


def test_changes_after_the_call_do_not_reach_the_file(tmp_path: Path) -> None:
    """torchtitan #930: async save not staged when the call returns."""
    held = whole(full_state(1))
    checkpointer = Checkpointer(CheckpointConfig(), tmp_path)
    go = hold("create")
    checkpointer.save(1, held, {})
    for shard in held.values():
        shard.tensor.fill_(0)
    assert checkpointer.latest_step() is None
    go.set()
    checkpointer.close()
    checkpointer.load(held)
    assert equal(held, whole(full_state(1)))


def test_meta_is_as_it_was_at_the_call(tmp_path: Path) -> None:
    meta = {"cursor": {"sample": 1}}
    checkpointer = Checkpointer(CheckpointConfig(), tmp_path)
    go = hold("create")
    checkpointer.save(1, whole(full_state()), meta)
    meta["cursor"]["sample"] = 2
    go.set()
    checkpointer.close()
    found = checkpointer.load(whole(full_state()))
    assert found is not None and found.meta == {"cursor": {"sample": 1}}


def test_the_call_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    checkpointer = Checkpointer(CheckpointConfig(), tmp_path)
    go = hold("create")
    checkpointer.save(1, whole(full_state()), {})
    checkpointer.poll()
    assert checkpointer.saved_step is None
    go.set()
    checkpointer.wait()
    assert checkpointer.saved_step == checkpointer.latest_step() == 1


def test_a_second_save_waits_for_the_first_and_says_so(tmp_path: Path) -> None:
    said: list[str] = []
    checkpointer = Checkpointer(CheckpointConfig(), tmp_path, say=said.append)
    go = hold("create")
    checkpointer.save(1, whole(full_state(1)), {})
    threading.Timer(0.2, go.set).start()
    checkpointer.save(2, whole(full_state(2)), {})
    assert said == ["step 2: waiting for the checkpoint of step 1, which is still being written"]
    assert checkpointer.saved_step == 1
    checkpointer.close()
    into = whole(full_state())
    assert checkpointer.load(into).step == 2 and equal(into, whole(full_state(2)))  # type: ignore[union-attr]


def test_close_waits_for_the_writer(tmp_path: Path) -> None:
    checkpointer = Checkpointer(CheckpointConfig(), tmp_path)
    go = hold("fsync")
    checkpointer.save(1, whole(full_state()), {})
    threading.Timer(0.2, go.set).start()
    checkpointer.close()
    assert checkpointer.latest_step() == 1


def test_buffers_are_used_again(tmp_path: Path) -> None:
    """Host memory of an asynchronous save: once the size of the shards, however many saves."""
    held = whole(full_state())
    checkpointer = Checkpointer(CheckpointConfig(), tmp_path)
    checkpointer.prepare(held)
    before = {name: buffer.data_ptr() for name, buffer in checkpointer._stage._buffers.items()}
    for step in (1, 2):
        checkpointer.save(step, held, {})
    checkpointer.close()
    assert before == {name: buffer.data_ptr() for name, buffer in checkpointer._stage._buffers.items()}
    assert checkpointer._stage.bytes == sum(s.tensor.numel() * s.tensor.element_size() for s in held.values())


def test_synchronous_mode_holds_no_copy(tmp_path: Path) -> None:
    held = whole(full_state())
    checkpointer = Checkpointer(CheckpointConfig(mode="sync"), tmp_path)
    checkpointer.prepare(held)
    checkpointer.save(1, held, {})
    assert checkpointer._stage.bytes == 0 and checkpointer.latest_step() == 1


# Saves that fail


def failing(operation: str, code: int) -> Callable[[str, str], None]:
    def hook(name: str, path: str) -> None:
        if name == operation:
            raise OSError(code, os.strerror(code))

    return hook


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(
    ("operation", "code", "said"),
    [
        ("write", errno.ENOSPC, "No space left on device"),
        ("mkdir", errno.EROFS, "Read-only file system"),
        ("mkdir", errno.EACCES, "Permission denied"),
        ("create", errno.ENOENT, "No such file or directory"),
        ("fsync", errno.EIO, "Input/output error"),
        ("rename", errno.ENOENT, "No such file or directory"),
    ],
)
def test_a_failed_save_is_one_clear_error(operation: str, code: int, said: str, mode: str, tmp_path: Path) -> None:
    """Disk full, read-only folder, folder that disappears: and training could go on, and save again."""
    checkpointer = Checkpointer(CheckpointConfig(mode=mode), tmp_path)
    checkpointer.save(1, whole(full_state(1)), {"step": 1})
    checkpointer.wait()
    held = whole(full_state(2))
    files.hook = failing(operation, code)
    with pytest.raises(
        CheckpointError, match=f"the checkpoint of step 2 was not written: rank 0: {said}: .*checkpoints"
    ):
        checkpointer.save(2, held, {"step": 2})
        checkpointer.wait()
    files.hook = None
    assert equal(held, whole(full_state(2))), "the state of the run was touched"
    assert [path.name for path in checkpointer.root.iterdir()] == ["step-00000001"]
    checkpointer.save(2, held, {"step": 2})
    checkpointer.wait()
    into = blank(held)
    assert checkpointer.load(into).step == 2 and equal(into, held)  # type: ignore[union-attr]


def test_an_error_in_the_background_reaches_the_next_step(tmp_path: Path) -> None:
    """Not never, and not at the end of the run."""
    checkpointer = Checkpointer(CheckpointConfig(interval=0, save_last=False), tmp_path)
    files.hook = failing("write", errno.ENOSPC)
    checkpointer.save(1, whole(full_state()), {})
    deadline = time.monotonic() + 30
    with pytest.raises(CheckpointError, match="No space left on device"):
        while time.monotonic() < deadline:
            checkpointer.decide(2)
            time.sleep(0.01)
    checkpointer.decide(3)  # said once


def test_a_real_full_disk(tmp_path: Path) -> None:
    """A file system of 64 kB, if this machine lets us mount one."""
    import subprocess

    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs needs more rights")
    try:
        checkpointer = Checkpointer(CheckpointConfig(mode="sync"), disk)
        small = {"a": Shard.whole(torch.arange(1000.0))}
        checkpointer.save(1, small, {})
        with pytest.raises(CheckpointError, match="No space left on device: .*step-00000002"):
            checkpointer.save(2, {"a": Shard.whole(torch.zeros(100_000))}, {})
        assert [path.name for path in checkpointer.root.iterdir()] == ["step-00000001"]
        checkpointer.save(3, small, {})  # the failed save gave its space back
        into = blank(small)
        assert checkpointer.load(into).step == 3 and equal(into, small)  # type: ignore[union-attr]
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_folder_that_disappears(tmp_path: Path) -> None:
    checkpointer = Checkpointer(CheckpointConfig(), tmp_path / "run")
    go = hold("create")
    checkpointer.save(1, whole(full_state()), {})
    deadline = time.monotonic() + 30
    while not list((tmp_path / "run").glob("checkpoints/.tmp-*")) and time.monotonic() < deadline:
        time.sleep(0.005)
    shutil.rmtree(tmp_path / "run")
    go.set()
    with pytest.raises(CheckpointError, match="No such file or directory"):
        checkpointer.close()
    checkpointer.save(2, whole(full_state()), {})  # and it is made anew
    checkpointer.close()
    assert checkpointer.latest_step() == 2


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("not a folder")
    checkpointer = Checkpointer(CheckpointConfig(mode="sync"), tmp_path)
    with pytest.raises(CheckpointError, match="File exists: .*checkpoints"):
        checkpointer.save(1, whole(full_state()), {})


def test_clean_up_that_fails_is_a_warning(tmp_path: Path) -> None:
    said: list[str] = []
    checkpointer = Checkpointer(CheckpointConfig(mode="sync", keep_last=1), tmp_path, say=said.append)
    checkpointer.save(1, whole(full_state(1)), {})
    files.hook = failing("remove", errno.EACCES)
    checkpointer.save(2, whole(full_state(2)), {})
    files.hook = None
    assert len(said) == 1 and "could not delete old checkpoints" in said[0]
    assert checkpointer.latest_step() == 2


def _one_rank_fails(folder: str, victim: int, mode: str) -> tuple[str, list[str]]:
    checkpointer = Checkpointer(CheckpointConfig(mode=mode), folder)
    rank = dist.get_rank()
    held = shards(full_state(1), (1, 3, 1), rank)
    checkpointer.save(1, held, {})
    checkpointer.wait()
    if rank == victim:
        files.hook = failing("write", errno.ENOSPC)
    message = "committed"
    try:
        checkpointer.save(2, held, {})
        checkpointer.wait()
    except CheckpointError as error:
        message = str(error)
    files.hook = None
    dist.barrier()
    return message, sorted(path.name for path in (Path(folder) / "checkpoints").iterdir())


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("victim", [0, 2])
def test_one_failing_rank_stops_the_commit_on_all(victim: int, mode: str, tmp_path: Path) -> None:
    """DCP: a save in which one rank fails leaves a mixture that loads without a word."""
    for message, names in run_ranks(3, _one_rank_fails, str(tmp_path), victim, mode):
        assert f"rank {victim}: No space left on device" in message, message
        assert names == ["step-00000001"]


def _train_while_writing(folder: str) -> bool:
    """Collectives of the training go on over their own group while a save is in the background."""
    checkpointer = Checkpointer(CheckpointConfig(interval_minutes=1e9), folder)
    rank = dist.get_rank()
    held = shards(full_state(1), (1, 2, 1), rank)
    for step in range(1, 4):
        checkpointer.save(step, held, {})
        for _ in range(50):
            total = torch.ones(1000)
            dist.all_reduce(total)
            assert total[0] == 2
            checkpointer.decide(step)
    checkpointer.close()
    into = blank(held)
    return checkpointer.load(into).step == 3 and equal(into, held)  # type: ignore[union-attr]


def test_background_saves_do_not_mix_with_collectives_of_the_training(tmp_path: Path) -> None:
    assert run_ranks(2, _train_while_writing, str(tmp_path)) == [True, True]


def _change_what_is_held(folder: str) -> list[int]:
    """The bytes of this rank's plans in three saves: the first, the same boxes again, and others on one rank."""
    checkpointer = Checkpointer(CheckpointConfig(mode="sync"), folder)
    rank, sent = dist.get_rank(), []
    import titanlike.checkpoint.planners as planners

    local = planners.ShardSavePlanner.create_local_plan

    def watch(planner):
        sent.append(len((plan := local(planner)).items))
        return plan

    planners.ShardSavePlanner.create_local_plan = watch  # type: ignore[method-assign]
    try:
        for seed in (1, 2, 3, 4, 5):
            held = shards(full_state(seed), (1, 2, 1), rank)
            if seed == 3 and rank == 1:
                held["only.here"] = Shard.whole(torch.arange(3.0))
            if seed == 5:
                held["a.copy"] = Shard.whole(torch.zeros(4))
            checkpointer.save(seed, held, {})
            into = blank(held)
            assert checkpointer.load(into) is not None and equal(into, held)
    finally:
        planners.ShardSavePlanner.create_local_plan = local  # type: ignore[method-assign]
    return sent


def test_the_plan_is_exchanged_once_and_again_when_boxes_change(tmp_path: Path) -> None:
    """Planning for many ranks costs the first one seconds; a stale plan would drop a tensor."""
    first, second = run_ranks(2, _change_what_is_held, str(tmp_path))
    number = len(full_state())
    assert first[:2] == [first[0], 0] and second[:2] == [second[0], 0] and first[0] <= number
    assert first[2:] == [0, 0, first[0] + 1]
    assert second[2:] == [second[0] + 1, second[0], second[0] + 1]


def test_after_a_failed_save_the_plan_is_made_anew(tmp_path: Path) -> None:
    held = whole(full_state(2))
    for operation in ("mkdir", "write", "rename"):
        checkpointer = Checkpointer(CheckpointConfig(mode="sync"), tmp_path / operation)
        for step in (1, 2):
            files.hook = failing(operation, errno.ENOSPC)
            with pytest.raises(CheckpointError):
                checkpointer.save(step, held, {})
            files.hook = None
            checkpointer.save(step, held, {})
            into = blank(held)
            assert checkpointer.load(into).step == step and equal(into, held)  # type: ignore[union-attr]
