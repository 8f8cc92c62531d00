"""The loss computed in chunks is the same loss, on any mesh, and the logits of all positions never exist at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.compare import Case, assert_same_run, batches, case, trainer_of
from tests.ranks import run_ranks
from titanlike.build import LOGITS_BYTES, loss_positions
from titanlike.config import load_config


@pytest.mark.parametrize("chunk", [1, 3, 5])
@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 1, 2), (2, 1, 1), (1, 2, 1)], ids=["one rank", "tp2", "pp2", "dp2"])
def test_chunks_of_the_loss_are_the_same_run(mesh: tuple[int, int, int], chunk: int) -> None:
    """Symptom: loss or gradients differ where the loss is cut, as with chunks that do not divide the sequence."""
    assert_same_run(case(*mesh, steps=2, train__loss_chunk=chunk, model__tie_embeddings=chunk == 3))


def test_chunks_without_sequence_parallelism_are_the_same_run() -> None:
    """Symptom: with all positions on each rank, each rank's part is taken for a part of the sequence."""
    assert_same_run(case(1, 1, 2, steps=2, train__loss_chunk=3, mesh__sequence_parallel=False))


@pytest.mark.parametrize("schedule", ["interleaved_zero_bubble", "zbv"])
def test_chunks_with_a_split_backward_are_the_same_run(schedule: str) -> None:
    """Symptom: a chunk is computed again for one half of the backward and is gone for the other."""
    assert_same_run(case(2, steps=2, train__loss_chunk=3, pipeline__schedule=schedule, model__n_layers=4))


@pytest.mark.slow
@pytest.mark.parametrize(("tp", "scope"), [(1, "stage"), (1, "block"), (2, "block"), (2, "stage")])
def test_chunks_in_compiled_stages_are_the_same_run(tp: int, scope: str) -> None:
    """Symptom: the compiler keeps the logits, or loses the loss's collectives."""
    assert_same_run(case(1, 1, tp, steps=2, train__loss_chunk=3, compile__enable=True, compile__scope=scope))


class _Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple | list) else (out,):
            if isinstance(each, torch.Tensor):
                self.elements = max(self.elements, each.numel())
        return out


@pytest.mark.parametrize(("chunk", "times", "positions"), [(0, 1, 8), (2, 1, 2), (8, 2, 8)])
def test_no_operation_gives_the_logits_of_all_positions(chunk: int, times: int, positions: int) -> None:
    """Symptom: memory as without chunks. With 5000 ids and a model of 16 dims, the logits are the largest
    tensors. A data stage may have sequences longer than train.seq_len."""
    vocab = 5000
    asked = Case(changes=case(steps=1, train__loss_chunk=chunk, train__microbatch_size=2).changes, vocab=vocab)
    assert run_ranks(1, _largest, asked, times) == [max(2 * positions * vocab, vocab * 16)]


def _largest(asked: Case, times: int) -> int:
    """Of a microbatch whose sequences are so many times as long as train.seq_len."""
    trainer = trainer_of(asked)
    batch = next(batches(asked, trainer.config))
    with _Largest() as largest:
        trainer.built.stages[0](batch.tokens[:2].repeat(1, times), batch.labels[:2].repeat(1, times)).backward()
    return largest.elements


def test_large_logits_are_cut_without_being_asked() -> None:
    """Symptom: out of memory at the loss with a large vocabulary."""
    row = 128_256 * 4
    config = load_config(None, {"model.preset": "debug", "train.seq_len": 256})
    assert (loss_positions(config, 259) or 0) > 256
    long = load_config(None, {"model.preset": "debug", "train.seq_len": 4096, "model.max_seq_len": 4096})
    assert loss_positions(long, 128_256) == LOGITS_BYTES // row
    assert LOGITS_BYTES // row < 4096
    whole = load_config(
        None, {"model.preset": "debug", "train.seq_len": 4096, "model.max_seq_len": 4096, "train.loss_chunk": 0}
    )
    assert loss_positions(whole, 128_256) is None
