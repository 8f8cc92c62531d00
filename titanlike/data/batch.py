"""Rows of tokens, and the batch that they become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from titanlike.errors import UserError

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


def collate(
    rows: Sequence[Row | None], seq_len: int, cursor: dict[str, Any], *, document_mask: bool, vocab_size: int
) -> Batch:
    """A batch of rows, padded at their ends. None is a row without labels.

    With `document_mask`, positions count from the start of each document, the token that starts a document is not a
    label, and what is padded is a document of its own.

    Raises:
        UserError: an id that is not in the vocabulary; names the row.
    """
    lengths = [0 if row is None else len(row.tokens) - 1 for row in rows]
    if all(row is not None and n == seq_len and row.learnt is None for row, n in zip(rows, lengths)):
        together = np.stack([row.tokens for row in rows if row is not None])
        largest = together.max()
        tokens, labels = together[:, :-1].astype(np.int64), together[:, 1:].astype(np.int64)
    else:
        largest = max((row.tokens.max() for row in rows if row is not None), default=0)
        tokens, labels = _padded(rows, lengths, seq_len)
    if largest >= vocab_size:
        names = (row.sample_id for row in rows if row is not None and row.tokens.max() == largest)
        raise UserError(
            f"sample {next(names)} (source:pass:row) has the id {largest}, and the vocabulary has {vocab_size} ids"
        )
    positions = document_ids = None
    if document_mask:
        starts = [np.empty(0, dtype=np.int64) if row is None else row.starts for row in rows]
        positions, document_ids = _documents(starts, lengths, labels)
    names = [row.sample_id for row in rows if row is not None]
    return Batch(torch.from_numpy(tokens), torch.from_numpy(labels), positions, document_ids, names, cursor)


def _padded(rows: Sequence[Row | None], lengths: Sequence[int], seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and labels of rows that are not full, or of which not all is learnt."""
    tokens = np.zeros((len(rows), seq_len), dtype=np.int64)
    labels = np.full((len(rows), seq_len), IGNORE, dtype=np.int64)
    for i, (row, n) in enumerate(zip(rows, lengths)):
        if row is not None:
            tokens[i, :n] = row.tokens[:-1]
            labels[i, :n] = row.tokens[1:]
            if row.learnt is not None:
                labels[i, :n][~row.learnt[1:]] = IGNORE
    return tokens, labels


def _documents(
    starts: Sequence[np.ndarray | None], lengths: Sequence[int], labels: np.ndarray
) -> tuple[Tensor, Tensor]:
    """Positions and document ids of rows in which documents start at `starts`, and padding at `lengths`. Takes the
    tokens that start documents out of the labels."""
    n_rows, seq_len = labels.shape
    begins, numbers = [], []
    for i, (row_starts, n) in enumerate(zip(starts, lengths)):
        assert row_starts is not None
        bounds = [0, *row_starts.tolist()]
        if bounds[-1] == seq_len:  # the last label would start a document
            bounds.pop()
        if bounds[-1] < n < seq_len:
            bounds.append(n)
        begins += [i * seq_len + bound for bound in bounds]
        numbers += range(len(bounds))
        labels[i, row_starts - 1] = IGNORE
    begin = np.array(begins)
    counts = np.diff(begin, append=n_rows * seq_len)
    positions = np.arange(n_rows * seq_len) - np.repeat(begin, counts)
    document_ids = np.repeat(np.array(numbers, dtype=np.int32), counts)
    return torch.from_numpy(positions.reshape(labels.shape)), torch.from_numpy(document_ids.reshape(labels.shape))
