"""Rows of tokens, and the batch that they become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

IGNORE = -100
"""The label of a position that has no loss; as in titanlike.loss."""


class Row(NamedTuple):
    """A sample before it is a row of tensors."""

    tokens: np.ndarray
    """at most seq_len + 1 ids: inputs are all but the last, labels all but the first"""
    starts: np.ndarray | None
    """where in `tokens` documents start, but for the one that is there at 0; None if nobody asks"""
    sample_id: str
    learnt: np.ndarray | None = None
    """which of `tokens` are labels, bool; None: all"""


@dataclass
class Batch:
    """One dp coordinate's rows of a global batch."""

    tokens: Tensor
    """int64 [rows, seq]"""
    labels: Tensor
    """int64 [rows, seq]: the token after each position, IGNORE where there is none"""
    positions: Tensor | None
    """int64 [rows, seq]: position within the document; None: the position within the row"""
    document_ids: Tensor | None
    """int32 [rows, seq]: equal where positions may attend to each other; None: everywhere in the row"""
    sample_ids: list[str]
    """the name of each row: source:epoch:number of the row in the source"""
    cursor: dict[str, Any]
    """JSON: where the global order stands after this batch, the same on all ranks and for every mesh"""

    def pin_memory(self) -> Batch:
        """In page-locked memory, for copies to an accelerator that need no waiting."""
        self.tokens, self.labels = self.tokens.pin_memory(), self.labels.pin_memory()
        self.positions = None if self.positions is None else self.positions.pin_memory()
        self.document_ids = None if self.document_ids is None else self.document_ids.pin_memory()
        return self


def collate(rows: Sequence[Row | None], seq_len: int, cursor: dict[str, Any], document_mask: bool) -> Batch:
    """A batch of rows, padded at their ends. None is a row without labels.

    With `document_mask`, positions count from the start of each document, the token that starts a document is not a
    label, and what is padded is a document of its own.
    """
    shape = (len(rows), seq_len)
    tokens, labels = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORE, dtype=np.int64)
    positions = document_ids = None
    if document_mask:
        positions = np.broadcast_to(np.arange(seq_len), shape).copy()
        document_ids = np.zeros(shape, dtype=np.int32)
    for i, row in enumerate(rows):
        if row is None:
            continue
        n = len(row.tokens) - 1
        tokens[i, :n] = row.tokens[:-1]
        labels[i, :n] = row.tokens[1:]
        if row.learnt is not None:
            labels[i, :n][~row.learnt[1:]] = IGNORE
        if document_mask:
            assert row.starts is not None and positions is not None and document_ids is not None
            labels[i, row.starts - 1] = IGNORE
            for start in [*row.starts.tolist(), n]:
                if start < seq_len:
                    document_ids[i, start:] += 1
                    positions[i, start:] = np.arange(seq_len - start)
    names = [row.sample_id for row in rows if row is not None]
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(labels),
        None if positions is None else torch.from_numpy(positions),
        None if document_ids is None else torch.from_numpy(document_ids),
        names,
        cursor,
    )
