"""From logits to the next token.

Properties:
- A draw is a function of (seed, number of the prompt, number of the token) and of the logits alone: not of the mesh,
  the batch or what other prompts there are. It inverts the cumulative distribution at one uniform number, so logits
  that differ in their last bit give the same token but for one chance in a million.
- Order of the steps and their meaning: repetition penalty, temperature, top-k, top-p, as in transformers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math

import torch
from torch import Tensor

from titanlike.errors import UserError


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Raises UserError for values without a meaning."""

    temperature: float = 0.0
    """Logits are divided by this before a draw; 0: no draw, the likeliest token (greedy)"""
    top_k: int | None = None
    """draw among this many likeliest tokens"""
    top_p: float | None = None
    """draw among the likeliest tokens that together have at least this probability (arXiv:1904.09751)"""
    repetition_penalty: float = 1.0
    """positive logits of tokens that the row has had are divided by this, negative ones multiplied
    (arXiv:1909.05858)"""
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise UserError(f"temperature must be 0 (greedy) or more, not {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top-k must be 1 or more, not {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top-p must be more than 0 and at most 1, not {self.top_p}")
        if not (self.repetition_penalty > 0 and math.isfinite(self.repetition_penalty)):
            raise UserError(f"repetition-penalty must be more than 0, not {self.repetition_penalty}")
        if self.temperature == 0:
            for name, value in (("top-k", self.top_k), ("top-p", self.top_p)):
                if value is not None:
                    raise UserError(f"{name} has no effect without a temperature: give one, or take {name} out")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def choose(self, logits: Tensor, seen: Tensor | None, prompts: list[int], count: int) -> Tensor:
        """The next token of each row, int64 [rows].

        logits [rows, vocab]; `seen` [rows, vocab] bool: tokens that the row has had, needed with a repetition penalty;
        `prompts` the number of each row's prompt; `count` how many tokens were made before this one.
        """
        if self.repetition_penalty != 1:
            assert seen is not None
            logits = logits if logits.dtype == torch.float64 else logits.float()
            lowered = torch.where(logits > 0, logits / self.repetition_penalty, logits * self.repetition_penalty)
            logits = torch.where(seen, lowered, logits)
        if self.greedy:
            return logits.argmax(-1)
        probabilities = self.probabilities(logits)
        cumulative = probabilities.cumsum(-1)  # [rows, vocab], in the order of the ids: no ties that a sort could swap
        draws = [uniform(self.seed, prompt, count) for prompt in prompts]
        at = torch.tensor(draws, dtype=torch.float64, device=logits.device)[:, None] * cumulative[:, -1:]
        token = torch.searchsorted(cumulative, at, right=True)[:, 0]
        # right=True passes over tokens of probability 0, except at the very end.
        last = probabilities.shape[-1] - 1 - (probabilities.flip(-1) > 0).int().argmax(-1)
        return torch.minimum(token, last)

    def probabilities(self, logits: Tensor) -> Tensor:
        """What is drawn from, float64 [rows, vocab], after temperature, top-k and top-p."""
        scores = logits.double() / self.temperature
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            least = scores.topk(self.top_k, dim=-1).values[:, -1:]
            scores = scores.masked_fill(scores < least, -math.inf)
        probabilities = torch.softmax(scores, dim=-1)
        if self.top_p is not None and self.top_p < 1:
            ordered, ids = probabilities.sort(dim=-1, descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered  # the likeliest token has 0 before it, so it always stays
            out = torch.zeros_like(probabilities, dtype=torch.bool).scatter(-1, ids, before >= self.top_p)
            probabilities = probabilities.masked_fill(out, 0.0)
        return probabilities


def uniform(seed: int, prompt: int, count: int) -> float:
    """The number in [0, 1) that token `count` of prompt number `prompt` is drawn with."""
    digest = hashlib.sha256(f"{seed}/{prompt}/{count}".encode()).digest()
    return (int.from_bytes(digest[:8], "little") >> 11) * 2.0**-53
