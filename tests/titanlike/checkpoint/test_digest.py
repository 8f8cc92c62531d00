"""The digest says one number for one state, however it is cut, and another number for anything else."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.titanlike.checkpoint.states import full_state, shards, whole
from titanlike.checkpoint import CheckpointConfig, Checkpointer, CheckpointError, Shard
from titanlike.checkpoint.digest import add, box_digest, reference_digest, sum_on_cpu, sum_words
from titanlike.checkpoint.state_digest import StateDigest, shard_digests

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool)


def digest(state: dict[str, torch.Tensor]) -> int:
    held = whole(state)
    return StateDigest(held, None).compute(shard_digests(held))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (5, 3), (2, 3, 4), (3, 1)], ids=str)
def test_vector_code_computes_the_definition(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 100).to(dtype)
    value = box_digest("a.b", tensor, shape, (0,) * len(shape))
    assert add(int(value)) == reference_digest("a.b", tensor)


@pytest.mark.parametrize("shape", [(70_001,), (3, 70_001), (70_001, 3)], ids=str)
def test_blocks_do_not_show(shape: tuple[int, ...]) -> None:
    """A tensor larger than a working block, in rows or in columns."""
    tensor = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)
    assert add(int(box_digest("a", tensor, shape, (0,) * len(shape)))) == reference_digest("a", tensor)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32], ids=str)
def test_the_form_for_accelerators_is_the_form_for_cpus(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    words = torch.randint(info.min, info.max, (300, 700), dtype=dtype)
    rows, columns = torch.randint(-(2**62), 2**62, (300,)) | 1, torch.randint(-(2**62), 2**62, (700,)) | 1
    for rows_at_once in (1, 7, 1000):
        on_cpu = sum_on_cpu(words.numpy(), rows.numpy(), columns.numpy(), rows_at_once)
        assert int(sum_words(words, rows, columns, rows_at_once)) == on_cpu


def test_the_definition_has_not_changed() -> None:
    """Old checkpoints hold digests: a change of the definition needs a new format version."""
    values = torch.tensor([[1.0, -2.0, 3.5], [0.0, -0.0, 1e-3]])
    assert reference_digest("layers.0.attention.wq.weight", values) == 0x6ADF9633E26972ED


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_any_cut_adds_up(dtype: torch.dtype) -> None:
    tensor = torch.randn(6, 5, 7).to(dtype)
    wanted = reference_digest("a", tensor)
    for dim in range(3):
        for size in (1, 2, 4):
            parts, start = [], 0
            for part in tensor.split(size, dim):
                offset = [0, 0, 0]
                offset[dim] = start
                parts.append(int(box_digest("a", part.contiguous(), (6, 5, 7), tuple(offset))))
                start += part.shape[dim]
            assert add(*parts) == wanted


def _mesh_digest(mesh: tuple[int, int, int], folder: str) -> str:
    checkpointer = Checkpointer(CheckpointConfig(), folder)
    held = shards(full_state(), mesh, dist.get_rank())
    first = checkpointer.digest(held)
    assert checkpointer.digest(held) == first
    return first


@pytest.mark.parametrize("mesh", [(1, 4, 1), (1, 1, 4), (2, 2, 1), (2, 1, 2), (1, 2, 2)], ids=str)
def test_every_mesh_has_the_digest_of_one_device(mesh: tuple[int, int, int], tmp_path) -> None:
    alone = Checkpointer(CheckpointConfig(), tmp_path).digest(whole(full_state()))
    assert set(run_ranks(4, _mesh_digest, mesh, str(tmp_path))) == {alone}


def test_one_flipped_bit_shows() -> None:
    state = full_state()
    before = digest(state)
    for name in ("model.norm.weight", "optimizer.exp_avg.output.weight", "optimizer.count"):
        words = state[name].reshape(-1).view(torch.uint8)
        for byte in range(min(8, len(words))):
            for bit in range(8):
                words[byte] ^= 1 << bit
                assert digest(state) != before, (name, byte, bit)
                words[byte] ^= 1 << bit
    assert digest(state) == before


def test_swapped_slices_show() -> None:
    """Two rows, two columns, or two equal-shaped parts of ranks, exchanged."""
    for dim in (0, 1):
        state = full_state()
        before = digest(state)
        state["model.output.weight"] = state["model.output.weight"].flip(dim)
        assert digest(state) != before


def test_a_moment_in_the_wrong_parameter_shows() -> None:
    state = full_state()
    before = digest(state)
    one, other = "optimizer.exp_avg.tok_embeddings.weight", "optimizer.exp_avg.output.weight"
    state[one], state[other] = state[other], state[one]
    assert digest(state) != before


def test_a_stale_shard_shows() -> None:
    """A part that still holds the values of the step before."""
    state = full_state()
    before = digest(state)
    state["model.layers.0.attention.wq.weight"][8:] += 1e-7
    assert digest(state) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_sign_flips_do_not_cancel(dtype: torch.dtype) -> None:
    """A plain sum of multiples loses pairs of flipped top bits: the change is 2^63 twice."""
    state = {"a": torch.ones(4, 4, dtype=dtype)}
    before = digest(state)
    for rows in (slice(0, 1), slice(0, 2), slice(0, 4)):
        for columns in (slice(0, 2), slice(0, 4)):
            state["a"].fill_(1.0)
            state["a"][rows, columns] = -1.0
            assert digest(state) != before


def test_name_dtype_and_shape_count() -> None:
    zeros = torch.zeros(4, 6)
    values = {
        digest({"a": zeros}),
        digest({"b": zeros}),
        digest({"a": zeros.double()}),
        digest({"a": zeros.view(6, 4)}),
        digest({"a": zeros.view(torch.int32)}),
        digest({"a": -zeros}),
    }
    assert len(values) == 6


def test_memory_is_bounded() -> None:
    """A digest of a large tensor must not make a copy of it."""
    import tracemalloc

    tensor = torch.zeros(16384, 1024)
    tracemalloc.start()  # counts NumPy's arrays
    box_digest("a", tensor, (16384, 1024), (0, 0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20 < tensor.nbytes


def _drifted(folder: str) -> str:
    checkpointer = Checkpointer(CheckpointConfig(), folder)
    held = shards(full_state(), (1, 1, 3), dist.get_rank())
    checkpointer.digest(held)
    # Opposite drifts on two copies: a check that only adds up would let them cancel.
    held["model.norm.weight"].tensor.add_({0: 0.0, 1: 0.5, 2: -0.5}[dist.get_rank()])
    try:
        checkpointer.digest(held)
    except CheckpointError as error:
        return str(error)
    return "nothing"


def test_drifted_replicas_are_named(tmp_path) -> None:
    for message in run_ranks(3, _drifted, str(tmp_path)):
        assert "copies of model.norm.weight on ranks 0 and 1 differ" in message


def test_replicas_count_once() -> None:
    held = {"a": Shard.whole(torch.ones(3))}
    assert StateDigest(held, None).compute(shard_digests(held)) == reference_digest("a", torch.ones(3))
