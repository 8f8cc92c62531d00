"""Sampling from a model in training: what the numbers of the model make of a prompt. That all meshes give the same text
is shown by whole runs (test_run_meshes.py)."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from titanlike.sample import sample


class Fixed:
    """A trainer whose model gives each last token its own distribution, and that notes what it is asked."""

    def __init__(self, probabilities: list[list[float]], seq_len: int = 8, pp: int = 1) -> None:
        self.config = SimpleNamespace(train=SimpleNamespace(seq_len=seq_len, microbatch_size=3))
        self.mesh = SimpleNamespace(pp=pp)
        self.logits = torch.tensor(probabilities, dtype=torch.float64).log()
        self.asked: list[list[int]] = []

    def next_token_logits(self, tokens: Tensor, index: int) -> Tensor:
        assert tokens.shape == (3 if self.mesh.pp > 1 else 1, self.config.train.seq_len)
        self.asked.append(tokens[0, : index + 1].tolist())
        return self.logits[tokens[:, index]]


def ids(trainer: Any, *args: Any, **kwargs: Any) -> list[int]:
    return sample(trainer, *args, **kwargs)


def test_at_temperature_zero_the_likeliest_token_is_taken() -> None:
    chain = Fixed([[0.1, 0.7, 0.2], [0.3, 0.3, 0.4], [0.9, 0.05, 0.05]])
    assert ids(chain, [0], 7, temperature=0) == [1, 2, 0, 1, 2, 0, 1]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_tokens_come_as_often_as_the_model_says(temperature: float) -> None:
    """Symptom: an off-by-one in the search of the cumulative sum shifts all tokens, or never gives the last one."""
    wanted = torch.tensor([0.5, 0.0, 0.2, 0.3]) ** (1 / temperature)
    wanted = wanted / wanted.sum()
    found = Counter(ids(Fixed([[0.5, 0.0, 0.2, 0.3]] * 4), [0], 4000, temperature=temperature))
    assert found[1] == 0, "a token of probability 0 came"
    for token, share in enumerate(wanted.tolist()):
        assert found[token] / 4000 == pytest.approx(share, abs=0.03)


def test_a_seed_repeats_and_another_one_does_not() -> None:
    model = Fixed([[0.25] * 4] * 4)
    torch.manual_seed(1)
    first = ids(model, [0], 50, seed=3)
    torch.manual_seed(2)
    assert ids(model, [0], 50, seed=3) == first, "the global generator was used"
    assert ids(model, [0], 50, seed=4) != first
    assert torch.equal(torch.rand(3), (torch.manual_seed(2), torch.rand(3))[1]), "the global generator was touched"


def test_the_context_is_the_end_of_what_there_is() -> None:
    """Symptom: a prompt as long as the window is cut at the wrong end, or fails."""
    model = Fixed([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]], seq_len=4)
    assert ids(model, [2, 2, 0, 1, 2], 3) == [0, 1, 2]
    assert model.asked == [[2, 0, 1, 2], [0, 1, 2, 0], [1, 2, 0, 1]]
    model.asked.clear()
    assert ids(model, [0], 2) == [1, 2]
    assert model.asked == [[0], [0, 1]]


def test_a_pipeline_is_given_a_whole_microbatch() -> None:
    """Its stages were built for one shape."""
    assert ids(Fixed([[0.0, 1.0], [1.0, 0.0]], pp=2), [0], 3) == [1, 0, 1]


def test_no_tokens_are_no_work() -> None:
    model = Fixed([[1.0]])
    assert ids(model, [0], 0) == [] and model.asked == []
