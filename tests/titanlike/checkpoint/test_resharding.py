"""What any mesh saved, any mesh loads: exactly, and each rank reads only what it needs."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.titanlike.checkpoint.states import blank, equal, full_state, shards, whole
from titanlike.checkpoint import CheckpointConfig, Checkpointer, CheckpointError, Shard

Mesh = tuple[int, int, int]  # pp, dp, tp

FOUR: list[Mesh] = [(1, 1, 1), (1, 4, 1), (1, 1, 4), (1, 2, 2), (2, 1, 2)]
ALL: list[Mesh] = [
    *((1, 1, 1), (1, 2, 1), (1, 4, 1), (1, 1, 2), (2, 1, 1), (1, 2, 2)),
    *((2, 1, 2), (2, 2, 1), (1, 1, 4), (4, 1, 1), (2, 2, 2)),
]


def _save_and_load_pairs(meshes: list[Mesh], folder: str) -> list[str]:
    """Save with each mesh on its first ranks, load every one with each; the pairs that came back exactly, on rank 0."""
    state = full_state(3)
    groups = {}
    for pp, dp, tp in meshes:
        ranks = list(range(pp * dp * tp))
        groups[pp, dp, tp] = dist.new_group(ranks), dist.new_group(ranks)
    rank, good, digests = dist.get_rank(), [], set()
    for saved in meshes:
        size = saved[0] * saved[1] * saved[2]
        if rank < size:
            mode = CheckpointConfig(mode="async" if len(good) % 2 else "sync")
            checkpointer = Checkpointer(mode, Path(folder) / str(saved), groups=groups[saved])
            checkpointer.save(7, shards(state, saved, rank), {"mesh": list(saved)})
            checkpointer.close()
        dist.barrier()
        for loaded in meshes:
            if rank < loaded[0] * loaded[1] * loaded[2]:
                wanted = shards(state, loaded, rank)
                into = blank(wanted)
                checkpointer = Checkpointer(CheckpointConfig(), Path(folder) / str(saved), groups=groups[loaded])
                found = checkpointer.load(into)
                assert found is not None and found.step == 7 and found.meta == {"mesh": list(saved)}
                assert equal(into, wanted), (saved, loaded, rank)
                digests.add(found.summary.split("digest ")[1])
                good.append(f"{saved} -> {loaded}")
            dist.barrier()
    assert len(digests) <= 1, digests
    return good


def test_meshes_of_four_ranks_load_each_other(tmp_path: Path) -> None:
    """DeepSpeed #7599, nanotron #263: optimizer state can't be loaded at another dp."""
    assert len(run_ranks(4, _save_and_load_pairs, FOUR, str(tmp_path))[0]) == len(FOUR) ** 2


@pytest.mark.slow
def test_all_pairs_of_meshes_load_each_other(tmp_path: Path) -> None:
    assert len(run_ranks(8, _save_and_load_pairs, ALL, str(tmp_path), timeout=500.0)[0]) == len(ALL) ** 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32], ids=str)
def test_one_process_without_a_group_keeps_dtype_and_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    """nanotron #245, DeepSpeed #7786: optimizer state came back in another dtype."""
    held = whole(full_state(1, dtype))
    held["model.norm.weight"].tensor.fill_(float("nan"))
    checkpointer = Checkpointer(CheckpointConfig(), tmp_path)
    assert checkpointer.load(held) is None
    checkpointer.save(0, held, {"lr": 0.1 + 0.2, "text": "ü"})
    checkpointer.close()
    into = blank(held)
    found = checkpointer.load(into)
    assert found is not None and found.meta == {"lr": 0.1 + 0.2, "text": "ü"} and found.step == 0
    for name, shard in into.items():
        bits = [s.tensor.reshape(-1).view(torch.uint8) for s in (shard, held[name])]
        assert shard.tensor.dtype == held[name].tensor.dtype and torch.equal(*bits)


def test_every_box_is_stored_once_and_readable_by_the_safetensors_library(tmp_path: Path) -> None:
    run_ranks(4, _save_and_load_pairs, [(1, 2, 2)], str(tmp_path))
    from safetensors import safe_open

    folder = tmp_path / "(1, 2, 2)" / "checkpoints" / "step-00000007"
    assert sorted(p.name for p in folder.iterdir()) == [
        *("COMMIT", "manifest.json"),
        *(f"rank-0000{rank}.safetensors" for rank in range(4)),
        *("state.json", "tensors.json"),
    ]
    state = full_state(3)
    index = json.loads((folder / "tensors.json").read_text())
    assert index.keys() == state.keys()
    for name, entry in index.items():
        back = torch.full_like(state[name], -1)
        for box in entry["boxes"]:
            with safe_open(folder / box["file"], framework="pt") as file:
                part = file.get_tensor(box["key"])
            place = tuple(slice(o, o + s) for o, s in zip(box["offset"], box["shape"], strict=True))
            back[place] = part
        assert torch.equal(back, state[name])
    stored = sum(torch.Size(box["shape"]).numel() for entry in index.values() for box in entry["boxes"])
    assert stored == sum(tensor.numel() for tensor in state.values())


def test_a_large_rank_writes_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from titanlike.checkpoint import writer

    monkeypatch.setattr(writer, "MAX_FILE_BYTES", 1000)
    held = whole(full_state())
    checkpointer = Checkpointer(CheckpointConfig(mode="sync"), tmp_path)
    checkpointer.save(1, held, {})
    assert len(list((tmp_path / "checkpoints" / "step-00000001").glob("*.safetensors"))) > 3
    into = blank(held)
    checkpointer.load(into)
    assert equal(into, held)


def test_a_rank_reads_only_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 64 dp ranks must not read the whole tensor."""
    from titanlike.checkpoint.folder import find_checkpoints
    from titanlike.checkpoint.planners import ShardLoadPlanner
    from titanlike.checkpoint.reader import ShardReader, TensorIndex

    tensor = torch.arange(64 * 1000, dtype=torch.float32).view(64, 1000)
    checkpointer = Checkpointer(CheckpointConfig(mode="sync"), tmp_path)
    checkpointer.save(1, {"a": Shard.whole(tensor)}, {})
    (found,) = find_checkpoints(checkpointer.root)
    assert found.manifest is not None
    total = 0
    preadv = os.preadv

    def count(descriptor, buffers, offset):
        nonlocal total
        total += (size := preadv(descriptor, buffers, offset))
        return size

    monkeypatch.setattr(os, "preadv", count)
    from titanlike.checkpoint.loading import run_load

    part = Shard(torch.zeros(1, 1000), (64, 1000), (5, 0))
    planner = ShardLoadPlanner(found.folder, partial=True)
    run_load({"a": part}, ShardReader(TensorIndex(found.folder, found.manifest)), planner, None)
    planner.close()
    assert torch.equal(part.tensor, tensor[5:6]) and total == 4000


def _load_mismatched(folder: str, change: str) -> str:
    state = full_state(3)
    held = shards(state, (2, 1, 1), dist.get_rank())
    if dist.get_rank() == 1:  # only one stage is wrong: all ranks must hear of it
        name = "model.output.weight"
        if change == "shape":
            held[name] = Shard.whole(torch.zeros(13, 9))
        elif change == "dtype":
            held[name] = Shard.whole(torch.zeros(13, 8, dtype=torch.float64))
        elif change == "missing":
            held["model.layers.2.extra"] = Shard.whole(torch.zeros(2))
        else:
            del held[name]
    try:
        Checkpointer(CheckpointConfig(), folder).load(held)
    except CheckpointError as error:
        return str(error)
    return "loaded"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("shape", r"model.output.weight has shape \(13, 8\) in .*, but \(13, 9\) in this run"),
        ("dtype", "model.output.weight is torch.float32 in .*, but torch.float64 in this run"),
        ("missing", "has no tensor 'model.layers.2.extra'"),
        ("extra", "holds 'model.output.weight', which this run lacks"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_on_all_ranks(change: str, said: str, tmp_path: Path) -> None:
    """DCP loads another dtype, and leaves tensors behind, without a word."""
    checkpointer = Checkpointer(CheckpointConfig(mode="sync"), tmp_path)
    checkpointer.save(1, whole(full_state(3)), {})
    import re

    for message in run_ranks(2, _load_mismatched, str(tmp_path), change):
        assert re.search(said, message), message


def test_shards_that_do_not_cover_a_tensor_are_not_saved(tmp_path: Path) -> None:
    """DeepSpeed #8168: parts are dropped without a word."""
    checkpointer = Checkpointer(CheckpointConfig(mode="sync"), tmp_path)
    with pytest.raises(CheckpointError, match="a has 20 elements, but the ranks hold 10 of them"):
        checkpointer.save(1, {"a": Shard(torch.zeros(2, 5), (4, 5), (0, 0))}, {})
    assert checkpointer.latest_step() is None


def _save_badly(folder: str, how: str) -> str:
    rank = dist.get_rank()
    start = {"overlap": (0, 3), "gap": (0, 6)}[how][rank]
    shard = Shard(torch.zeros(5, 2)[: 10 - start if how == "gap" and rank else 5], (10, 2), (start, 0))
    try:
        Checkpointer(CheckpointConfig(mode="sync"), folder).save(1, {"a": shard}, {})
    except CheckpointError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize("how", ["overlap", "gap"])
def test_boxes_that_overlap_or_leave_gaps_are_not_saved(how: str, tmp_path: Path) -> None:
    for message in run_ranks(2, _save_badly, str(tmp_path), how):
        assert "what the ranks hold does not make up the state" in message, message
    assert not list((tmp_path / "checkpoints").glob("*") if (tmp_path / "checkpoints").exists() else [])
