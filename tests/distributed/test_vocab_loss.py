"""The cross-entropy of logits that are split over the vocabulary is that of whole ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from parallelize.vocab_loss import vocab_parallel_cross_entropy_sum
from tests.ranks import run_ranks

IGNORE = -100


def case_of(tokens: int, vocab: int, scale: float, ignored: int) -> tuple[Tensor, Tensor]:
    """(logits, labels), the first `ignored` of which have no loss"""
    generator = torch.Generator().manual_seed(tokens * vocab)
    logits = torch.randn(tokens, vocab, generator=generator, dtype=torch.float64) * scale
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[:ignored] = IGNORE
    return logits, labels


def split(tokens: int, vocab: int, scale: float, ignored: int) -> tuple[Tensor, Tensor]:
    """(loss, this rank's part of the gradient of 3 times it)"""
    logits, labels = case_of(tokens, vocab, scale, ignored)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    own = distribute_tensor(logits, mesh, [Shard(1)]).to_local().detach().requires_grad_()  # type: ignore[attr-defined]
    parts = DTensor.from_local(
        own, mesh, [Shard(1)], run_check=False, shape=logits.shape, stride=logits.stride()
    )  # fmt: skip
    loss = vocab_parallel_cross_entropy_sum(parts, labels, IGNORE)
    (loss * 3).backward()
    assert own.grad is not None
    return loss.detach(), own.grad


@pytest.mark.parametrize(
    ("ranks", "tokens", "vocab", "scale", "ignored"),
    [(2, 6, 10, 1.0, 2), (2, 5, 7, 1e3, 0), (3, 4, 7, 1.0, 1), (2, 3, 4, 1.0, 3), (2, 4, 2, 30.0, 0)],
    ids=["even", "large logits, uneven", "three ranks, uneven", "no label at all", "one id a rank"],
)
def test_loss_and_gradient_are_those_of_whole_logits(
    ranks: int, tokens: int, vocab: int, scale: float, ignored: int
) -> None:
    """Symptom: exp overflows, a label of another rank counts twice, or a row without a label gets a gradient."""
    logits, labels = case_of(tokens, vocab, scale, ignored)
    logits.requires_grad_()
    expected = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
    (expected * 3).backward()
    assert logits.grad is not None
    found = run_ranks(ranks, split, tokens, vocab, scale, ignored)
    for loss, _ in found:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-13, atol=1e-13)
        assert torch.equal(loss, found[0][0])
    torch.testing.assert_close(torch.cat([grad for _, grad in found], 1), logits.grad, rtol=1e-12, atol=1e-13)
