"""Batches to compare a mesh with one rank on: random tokens, uneven labels.

They come from a seed and not from the user's data. What a mesh can get wrong does not depend on the text, but real text
can hide it: rows whose labels all count have equal token counts, so that a mean over the local tokens is the right one
by chance. And verifying a config needs no file of it.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from titanlike.config import Config
from titanlike.loss import IGNORE

SEED = 20_250_101


@dataclasses.dataclass
class RandomBatch:
    """A global batch, or one dp coordinate's rows of it; as titanlike.data.Batch."""

    tokens: Tensor
    """int64 [rows, seq]"""
    labels: Tensor
    """int64 [rows, seq], IGNORE where there is no loss"""
    positions: Tensor | None
    """int64 [rows, seq], with document masks"""
    document_ids: Tensor | None
    """int32 [rows, seq], with document masks"""

    def rows(self, first: int, count: int) -> RandomBatch:
        """Some of the rows."""
        whole = (self.tokens, self.labels, self.positions, self.document_ids)
        return RandomBatch(*(None if t is None else t[first : first + count] for t in whole))  # type: ignore[arg-type]

    @property
    def masks(self) -> dict[str, Tensor | None]:
        """The keyword arguments of a plain model's forward beside the tokens."""
        return {} if self.document_ids is None else {"positions": self.positions, "document_ids": self.document_ids}

    @property
    def valid(self) -> int:
        """Labels that count."""
        return int((self.labels != IGNORE).sum())


def make_batch(config: Config, vocab_size: int, document_mask: bool, step: int) -> RandomBatch:
    """The global batch of a step, the same in every process.

    Row r has its first r % seq labels masked and some more at random, so that microbatches and dp ranks have different
    numbers of valid labels; each row keeps one.
    """
    rows, seq = config.train.global_batch_size, config.train.seq_len
    generator = torch.Generator().manual_seed(SEED + step)
    tokens = torch.randint(0, vocab_size, (rows, seq + 1), generator=generator)
    tokens[0, 0], tokens[0, -1] = 0, vocab_size - 1  # both ends of a vocabulary that is cut unevenly
    labels = tokens[:, 1:].clone()
    position = torch.arange(seq)
    for row in range(rows):
        hidden = (position < row % seq) | (torch.rand(seq, generator=generator) < 0.2)
        hidden[-1] = False
        labels[row, hidden] = IGNORE
    positions = document_ids = None
    if document_mask:
        starts = torch.rand(rows, seq, generator=generator) < 0.2  # a new document begins here
        starts[:, 0] = False
        document_ids = starts.cumsum(1).int()
        first = torch.where(starts, position, 0).cummax(1).values
        positions = position - first
    return RandomBatch(tokens[:, :-1].contiguous(), labels, positions, document_ids)
