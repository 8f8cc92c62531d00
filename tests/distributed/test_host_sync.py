"""A step on an accelerator never makes the host wait for the device, but where docs/running.md says so.

A wait drains the device's queue: the device then idles until the host has queued the next operations. There is no
accelerator here. So the trainer is built on torch's meta device, which is another one than the CPU, as an accelerator
is: code takes the accelerator's branches, and what needs the value of a tensor on the host has to ask for it. `Watch`
hears that, notes it, and answers with ones. Collectives of the ranks that are not there do nothing.

What it cannot see: waits inside torch's own kernels, for they do not run.
"""

from __future__ import annotations

import contextlib
import importlib
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils._traceback import CapturedTraceback

import titanlike.build
from models import grouped
from parallelize import exchange
from tests.distributed import compare
from tests.distributed.compare import Case, batches, rows_of
from titanlike.guard import Guard
from titanlike.mesh import Mesh
from titanlike.metrics import timers
from titanlike.run import Run
from titanlike.trainer import Trainer

DEVICE = torch.device("meta")

OWN_OPERATIONS = {
    operation._opoverload: operation._init_fn  # private: on meta tensors torch runs the shapes alone
    for operation in (
        *(grouped.grouped_product, grouped.grouped_outer),
        *(exchange.spread_experts, exchange.spread_experts_backward),
    )
}

aten = torch.ops.aten
# Operations whose result has a size that depends on values: the host waits for it. A test must not have them at all.
SIZES_FROM_VALUES = (
    *(aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.bincount),
    *(aten.repeat_interleave, aten.equal, aten.is_nonzero, aten.multinomial),
)


class Watch(TorchDispatchMode):
    """Notes in `waits` what makes the host wait: the operation, and the line of this code base that asks for it."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []

    def note(self, what: str) -> None:
        own = [
            f"{frame.filename.rpartition('/')[2]}, {frame.name}"
            for frame in CapturedTraceback.extract().summary()
            if any(f"/{package}/" in frame.filename for package in ("titanlike", "parallelize", "models"))
            and "site-packages" not in frame.filename
        ]
        self.waits.append(f"{what} in {own[-1] if own else 'torch'}")

    def __torch_dispatch__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in kinds):
            return NotImplemented  # DTensor goes first; its operations on local tensors come here afterwards
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return _nothing_sent(func, args)
        if func in OWN_OPERATIONS:
            with self:
                return OWN_OPERATIONS[func](*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        here = [tensor for tensor in tensors if tensor.device == DEVICE]
        packet, name = func.overloadpacket, str(func.overloadpacket)
        if packet is aten._local_scalar_dense and here:
            self.note(name)
            return 1
        if packet in (aten._to_copy, aten.to) and here and kwargs.get("device", DEVICE).type == "cpu":
            self.note("copy to the host")
            return torch.ones(here[0].shape, dtype=kwargs.get("dtype") or here[0].dtype)
        if packet in SIZES_FROM_VALUES and here and kwargs.get("output_size") is None:
            raise AssertionError(f"{name} of a tensor on the device: its size, or its answer, is known there alone")
        if packet in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_) and here:
            indices = [index for index in args[1] if index is not None]
            masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
            if masks and not (len(args) > 2 and args[2].numel() == 1):  # one number is filled in without a look
                raise AssertionError(f"{name} by a mask on the device: its size is known there alone")
            if any(index.device.type == "cpu" and index.dim() for index in indices):
                self.note(f"{name} by an index of the host's")
        if packet is aten.copy_ and len({tensor.device for tensor in args[:2]}) == 2:
            if args[0].device.type == "cpu" or not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)):
                self.note("blocking copy")
        result = func(*args, **kwargs)
        if packet is aten._to_copy and not here and result.device == DEVICE and not kwargs.get("non_blocking"):
            self.note("blocking copy to the device")
        return result


class Factories(TorchFunctionMode):
    """Tells `watch` of tensors on the device that are made of numbers of the host's: a copy that waits."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and result.device == DEVICE:
            if not (isinstance(args[0], Tensor) and args[0].device == DEVICE):
                self.watch.note(func.__name__)
        return result


def _nothing_sent(func: Any, args: Any) -> Any:
    from torch._C._distributed_c10d import FakeWork

    work = FakeWork().boxed()
    return work if len(func._schema.returns) == 1 else (args[0], work)


class Event:
    """In the place of a timing event."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        raise AssertionError("a step waits for an event")


@contextlib.contextmanager
def pretended(asked: Case, rank: int) -> Iterator[tuple[Trainer, Watch]]:
    """The case's trainer on the pretended device, and the watch that listens inside the block. The other ranks do not
    exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    module = types.SimpleNamespace(
        device_count=lambda: 8, is_initialized=lambda: True, current_device=lambda: 0, set_device=lambda index: None
    )
    optimizer = importlib.import_module("torch.optim.optimizer")
    fused = optimizer._get_fused_kernels_supported_devices
    watch = Watch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, DEVICE.type, module, raising=False)
        patch.setattr(optimizer, "_get_fused_kernels_supported_devices", lambda: [*fused(), DEVICE.type])
        patch.setattr(titanlike.build, "generator_for", lambda seed, name, device: torch.Generator())
        patch.setattr(timers, "_timing_event", lambda device_type: Event())
        patch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # does not know this device
        dist.init_process_group(
            f"cpu:fake,{DEVICE.type}:fake", store=FakeStore(), rank=rank, world_size=asked.world_size
        )
        try:
            with Factories(watch), watch:
                yield Trainer(asked.config(), Mesh(asked.pp, asked.dp, asked.tp, DEVICE, asked.ep), asked.vocab), watch
        finally:
            dist.destroy_process_group()


def as_in_a_run(trainer: Trainer) -> Callable[[Any], bool]:
    """What a run without hooks puts between gradients and update."""
    run = object.__new__(Run)
    run.config, run.trainer, run.mesh = trainer.config, trainer, trainer.mesh
    run.guard, run.health, run.verdict = Guard(trainer.config.guard), None, None
    run.hooks = lambda *_: None  # type: ignore[assignment]
    return run.before_update


def waits(asked: Case, rank: int = 0, evaluate: bool = False, spoil: Callable[[Trainer], object] = id) -> list[str]:
    """What the host waited for in the second step, or in a validation. (torch sets up pipelines in the first.)"""
    with pretended(asked, rank) as (trainer, watch):
        trainer.before_update = as_in_a_run(trainer)
        spoil(trainer)
        coordinate = trainer.mesh.coordinate("dp")
        first, second, *_ = (rows_of(batch, asked.dp, coordinate) for batch in batches(asked, trainer.config))
        assert trainer.train_step(first, finish=False).updated
        watch.waits.clear()
        if evaluate:
            trainer.evaluate(iter([second, second]))
        else:
            assert trainer.train_step(second, finish=False).updated
        return watch.waits


# DTensor keeps what it found out for a mesh, and rank 1 here would take rank 0's sizes: so the vocabulary is even.
case = partial(compare.case, vocab=68, train__dtype="bfloat16", compile__enable=False)
MOE = {
    **{"model__architecture": "moe", "model__n_experts": 4, "model__top_k": 2, "model__balance_loss": 0.01},
    **{"model__z_loss": 0.001, "model__bias_rate": 0.01, "model__n_shared_experts": 1, "model__qk_norm": True},
}

STEPS: dict[str, tuple[Case, int]] = {
    "float32": (case(train__dtype="float32"), 0),
    "documents": (case(documents=True), 0),
    "no clipping": (case(train__max_grad_norm=0), 0),
    "sgd, recomputed": (case(optimizer__name="sgd", optimizer__momentum=0.9, activation_checkpoint__mode="full"), 0),
    "loss in chunks": (case(train__loss_chunk=3, activation_checkpoint__mode="selective"), 0),
    "dp 2": (case(dp=2), 0),
    "dp 2, gradients in bfloat16": (case(dp=2, train__dtype="float32", optimizer__grad_comm_dtype="bfloat16"), 1),
    "tp 2": (case(tp=2, documents=True), 0),
    "tp 2, second rank": (case(tp=2), 1),
    "tp 4, all-reduce": (case(tp=4, mesh__sequence_parallel=False), 0),
    "pp 2": (case(pp=2, documents=True), 0),
    "pp 2, last rank": (case(pp=2, documents=True, model__tie_embeddings=True), 1),
    "pp 2, zero bubble": (case(pp=2, model__n_layers=4, pipeline__schedule="interleaved_zero_bubble"), 1),
    "pp 2, dp 2, tp 2": (case(pp=2, dp=2, tp=2), 7),
    "experts": (case(**MOE), 0),
    "experts, sequences": (case(**MOE, model__balance_over="sequence", model__router_scores="sigmoid"), 0),
    "experts, capacity": (case(dp=2, **MOE, model__capacity_factor=1.0, train__microbatch_size=4), 0),
    "experts, tp 2": (case(tp=2, **MOE | {"model__ffn_dim": 32}), 0),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_does_not_wait_for_the_device(name: str) -> None:
    """Symptom: a GPU idles a little in each step, because a number is looked at before the update is queued."""
    asked, rank = STEPS[name]
    assert waits(asked, rank) == []


@pytest.mark.parametrize(("changes", "rank"), [({}, 0), ({"tp": 2}, 0), ({"pp": 2, "documents": True}, 1)])
def test_a_validation_waits_once_at_its_end(changes: dict[str, Any], rank: int) -> None:
    """Symptom: each batch of a validation waits for the one before."""
    assert waits(case(**changes), rank, evaluate=True) == ["copy to the host in trainer.py, evaluate"]


# -- where it has to ---------------------------------------------------------------------------------------------------


def test_a_guard_that_must_know_looks_before_the_update() -> None:
    """And no other: the sentence is in docs/guard.md."""
    found = waits(case(guard__nonfinite="skip"))
    assert found == ["aten._local_scalar_dense in run.py, before_update"] * 2


def test_experts_over_ranks_wait_once_in_each_exchange() -> None:
    """How many rows to send must be known on the host: once per layer, microbatch and direction that plans."""
    found = waits(case(dp=2, ep=2, **MOE, train__microbatch_size=2))
    layers = microbatches = 2
    assert set(found) == {"copy to the host in exchange.py, _plan"}
    # Each microbatch goes forward twice: the loss over the batch wants the loads first.
    assert len(found) == layers * microbatches * 2


def test_products_of_experts_that_torch_has_no_kernel_for_wait() -> None:
    """In float32 they are one product for each expert, whose rows the host has to know."""
    assert {place for place in waits(case(**MOE, train__dtype="float32"))} == {
        "copy to the host in grouped.py, grouped_product",
        "copy to the host in grouped.py, grouped_outer",
    }


# -- the watch itself --------------------------------------------------------------------------------------------------


def _item(loss: Tensor) -> None:
    loss.item()


def _decision(loss: Tensor) -> None:
    if loss > 0:
        loss.neg_()


def _number_of_the_host(loss: Tensor) -> None:
    loss.mul_(torch.tensor(2.0, device=loss.device))


def _copied_from_the_host(loss: Tensor) -> None:
    loss.copy_(torch.ones(()))


def _copied_to_the_host(loss: Tensor) -> None:
    torch.ones_like(loss, device="cpu").copy_(loss, non_blocking=True)


def _listed(loss: Tensor) -> None:
    loss[None].tolist()


def _masked(loss: Tensor) -> None:
    loss[None][loss[None] > 0].sum()


def _counted(loss: Tensor) -> None:
    loss[None].nonzero()


@pytest.mark.parametrize("planted", [_item, _decision, _number_of_the_host, _copied_from_the_host, _listed])
def test_a_planted_wait_is_found(planted: Callable[[Tensor], None]) -> None:
    """The tests above are not blind."""
    assert len(waits(case(), spoil=lambda trainer: _plant(trainer, planted))) == 1


@pytest.mark.parametrize("planted", [_copied_to_the_host, _masked, _counted])
def test_a_planted_wait_without_an_answer_is_an_error(planted: Callable[[Tensor], None]) -> None:
    """What has no value to go on with ends the step."""
    with pytest.raises((AssertionError, NotImplementedError)):
        waits(case(), spoil=lambda trainer: _plant(trainer, planted))


def _plant(trainer: Trainer, planted: Callable[[Tensor], None]) -> None:
    step = trainer.zero.step

    def spoilt(grad_factor: Tensor, lr: float) -> None:
        planted(grad_factor)
        step(grad_factor, lr)

    trainer.zero.step = spoilt  # type: ignore[method-assign]
