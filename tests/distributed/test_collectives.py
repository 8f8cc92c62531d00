"""What is sent, and what is never made: looked up in the operations that ranks run, not in what the code says."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.distributed.compare import Case, batches, case, rows_of, trainer_of
from tests.ranks import run_ranks

Operation = tuple[str, list[tuple[int, ...]]]
"""(name, shapes of the tensors that it returns or, for c10d's own operations, takes)"""


class Recorder(TorchDispatchMode):
    """Notes each operation on local tensors, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor goes first; its operations on local tensors come here afterwards
        result = func(*args, **(kwargs or {}))
        name = str(func.overloadpacket)
        tensors = tree_leaves((args, kwargs) if name.startswith("c10d.") else result)
        self.operations.append((name, [tuple(t.shape) for t in tensors if isinstance(t, Tensor)]))
        return result


def record_step(asked: Case, evaluate: bool = False) -> list[Operation]:
    """The operations of the second step, or of a validation, on this rank."""
    trainer = trainer_of(asked)
    coordinate = trainer.mesh.coordinate("dp")
    first, second, *_ = (rows_of(batch, asked.dp, coordinate) for batch in batches(asked, trainer.config))
    trainer.train_step(first)
    with Recorder() as recorder:
        if evaluate:
            trainer.evaluate(iter([second]))
        else:
            trainer.train_step(second)
    return recorder.operations


def count(operations: list[Operation], *names: str) -> int:
    return sum(any(part in name for part in names) for name, _ in operations)


# On CPU ranks gradients are reduced by an exchange of parts.
REDUCE_SCATTER = ("c10d._reduce_scatter_base_", "c10d.reduce_scatter_", "c10d.alltoall_base_")
ALL_GATHER = ("c10d._allgather_base_", "c10d.allgather_")


# -- loss parallelism ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("evaluate", [False, True], ids=["training", "validation"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_full_logits_are_never_made(tied: bool, evaluate: bool) -> None:
    """Symptom: the logits of the whole vocabulary are gathered on each rank, and are the largest tensor of the step."""
    vocab = 91  # no other size of this model, nor 92, its size with padding
    asked = case(1, 1, 2, vocab=vocab, steps=2, model__tie_embeddings=tied)
    for rank, operations in enumerate(run_ranks(2, record_step, asked, evaluate)):
        sizes = {size for _, shapes in operations for shape in shapes for size in shape}
        assert (46, 45)[rank] in sizes  # the recorder sees the logits of this rank
        assert not sizes & {vocab, vocab + 1}
        # Nothing of the size of a rank's logits is sent: the loss sends a maximum and sums, [tokens] or [tokens, 1].
        logits = 8 * (46, 45)[rank]
        sent = [shape for name, shapes in operations if "c10d" in name for shape in shapes]
        assert sent
        assert all(torch.Size(shape).numel() < logits or shape[-1] == 16 for shape in sent), sent


def test_a_recorder_would_see_full_logits() -> None:
    """The test above is not blind: a head that gathers its logits is seen."""
    operations = run_ranks(2, _gather_logits, case(1, 1, 2, vocab=91))[0]
    assert 91 in {size for _, shapes in operations for shape in shapes for size in shape}


def _gather_logits(asked: Case) -> list[Operation]:
    trainer = trainer_of(asked)
    with Recorder() as recorder:
        trainer.next_token_logits(next(batches(asked, trainer.config)).tokens[:1], 0)
    return recorder.operations


# -- tensor parallelism ----------------------------------------------------------------------------------------------

FUNCTIONAL = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single", "broadcast")


def collectives_per_layer(**changes: Any) -> dict[str, int]:
    """Of one layer and microbatch, forward and backward: the difference between models of 3 and 2 layers."""
    counted = []
    for layers in (2, 3):
        asked = case(1, 1, 2, steps=1, train__global_batch_size=1, model__n_layers=layers, **changes)
        operations = run_ranks(2, record_step, asked)[0]
        names = [name.rpartition(".")[2] for name, _ in operations if name.startswith("_c10d_functional")]
        counted.append(collections.Counter(name for name in names if name in FUNCTIONAL))
    return {name: counted[1][name] - counted[0][name] for name in FUNCTIONAL if counted[1][name] != counted[0][name]}


@pytest.mark.parametrize(("mode", "gathers"), [("none", 4), ("selective", 6)])
def test_a_layer_costs_the_collectives_that_it_should(mode: str, gathers: int) -> None:
    """Symptom: a placement that doesn't fit makes DTensor send more than the two pairs of a layer (arXiv:2205.05198,
    section 4.2.2): with sequence parallelism 2 all-gathers and 2 reduce-scatters forward, the same backward. Selective
    recomputation repeats the two gathers of the forward, whose results it does not keep, and no reduction."""
    costs = {"all_gather_into_tensor": gathers, "reduce_scatter_tensor": 4}
    assert collectives_per_layer(activation_checkpoint__mode=mode) == costs


@pytest.mark.parametrize("mode", ["none", "selective"])
def test_a_layer_in_all_reduce_mode_costs_the_collectives_that_it_should(mode: str) -> None:
    """Symptom: a gradient that is left a partial sum makes DTensor gather whole weights. 2 all-reduces forward and 2
    backward (arXiv:1909.08053, section 3)."""
    costs = collectives_per_layer(mesh__sequence_parallel=False, activation_checkpoint__mode=mode)
    assert costs == {"all_reduce": 4}


# -- data parallelism ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pp", [1, 2])
def test_collectives_over_dp_are_two_per_bucket_whatever_the_microbatches(pp: int) -> None:
    """Symptom: gradients are reduced once per microbatch, so accumulation saves nothing (NT #261)."""
    counted = {}
    for microbatches in (2, 4):
        asked = case(
            pp, 2, 1, steps=1, train__global_batch_size=8, train__microbatch_size=4 // microbatches,
            optimizer__bucket_mb=0.004,
        )  # fmt: skip
        for operations, buckets in run_ranks(2 * pp, _step_and_buckets, asked):
            assert buckets > 1
            assert count(operations, *REDUCE_SCATTER) == buckets
            assert count(operations, *ALL_GATHER) == buckets
            assert count(operations, "c10d.allreduce_") == 1  # loss, tokens and norm together
            counted.setdefault(microbatches, []).append(buckets)
    assert counted[2] == counted[4]


def _step_and_buckets(asked: Case) -> tuple[list[Operation], int]:
    trainer = trainer_of(asked)
    coordinate = trainer.mesh.coordinate("dp")
    batch = rows_of(next(batches(asked, trainer.config)), asked.dp, coordinate)
    with Recorder() as recorder:
        trainer.train_step(batch)
    return recorder.operations, len(trainer.zero.buckets)


def test_a_bucket_is_reduced_while_backward_goes_on() -> None:
    """Symptom: ZeRO-1 loses the overlap of communication with backward (NT #261)."""
    asked = case(1, 2, 1, steps=1, train__microbatch_size=2, optimizer__bucket_mb=0.004, model__n_layers=3)
    for operations, _ in run_ranks(2, _step_and_buckets, asked):
        names = [name for name, _ in operations]
        last_product = max(i for i, name in enumerate(names) if name in ("aten.mm", "aten.bmm"))
        reductions = [i for i, name in enumerate(names) if any(part in name for part in REDUCE_SCATTER)]
        # The embedding's gradient and that of the first norm come after the last product.
        assert sum(i < last_product for i in reductions) >= len(reductions) - 2
        # And not before the last microbatch: half of the products come first.
        products = [i for i, name in enumerate(names) if name in ("aten.mm", "aten.bmm")]
        assert reductions[0] > products[len(products) // 2]
