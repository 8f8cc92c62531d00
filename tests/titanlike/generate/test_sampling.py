"""Choosing a token from logits."""

from __future__ import annotations

import pytest
import torch

from titanlike.errors import UserError
from titanlike.generate.sampling import Sampling, uniform


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0]], dtype=torch.bfloat16)
    assert Sampling().choose(logits, None, [0], 0).tolist() == [1]


def test_draws_have_the_probabilities_of_the_model() -> None:
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0]]).expand(4000, 4)
    sampling = Sampling(temperature=0.7, seed=1)
    tokens = sampling.choose(logits, None, list(range(4000)), 0)
    share = torch.bincount(tokens, minlength=4) / 4000
    assert torch.allclose(share.double(), torch.softmax(logits[0].double() / 0.7, 0), atol=0.03)


def test_a_draw_depends_on_seed_prompt_and_place_alone() -> None:
    """Which rows are in the batch changes what is drawn for the others."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 50, generator=generator)
    sampling = Sampling(temperature=1.0, seed=3)
    whole = sampling.choose(logits, None, [0, 1, 2, 3, 4, 5], 7).tolist()
    assert sampling.choose(logits[2:4], None, [2, 3], 7).tolist() == whole[2:4]
    assert len({uniform(s, p, c) for s in range(3) for p in range(3) for c in range(3)}) == 27
    assert all(0 <= uniform(0, p, 0) < 1 for p in range(100))


def test_a_token_of_probability_0_is_never_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    sampling = Sampling(temperature=1.0)
    for draw, token in ((0.0, 1), (0.25, 1), (0.5, 3), (0.75, 3), (1 - 2.0**-53, 3)):
        monkeypatch.setattr("titanlike.generate.sampling.uniform", lambda *_, draw=draw: draw)
        assert sampling.choose(logits, None, [0], 0).tolist() == [token]


def test_top_k_top_p_and_penalty_keep_what_transformers_keeps() -> None:
    pytest.importorskip("transformers")
    from transformers import (
        LogitsProcessorList,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3
    ids = torch.tensor([[1, 2, 3, 3], [5, 5, 5, 5], [0, 39, 7, 8]])
    seen = torch.zeros(3, 40, dtype=torch.bool).scatter_(1, ids, True)
    for k, p, temperature, penalty in ((None, 0.6, 1.3, 1.2), (5, None, 0.5, 0.8), (7, 0.9, 0.9, 1.5), (99, 1.0, 1, 1)):
        theirs = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(float(penalty))])
        theirs.append(TemperatureLogitsWarper(float(temperature)))
        if k is not None:
            theirs.append(TopKLogitsWarper(k))
        if p is not None:
            theirs.append(TopPLogitsWarper(p))
        wanted = torch.softmax(theirs(ids, logits.clone()), -1)
        sampling = Sampling(temperature, k, p, penalty)
        penalised = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
        ours = sampling.probabilities(penalised)
        assert torch.equal(ours > 0, wanted > 0)
        assert torch.allclose(ours / ours.sum(-1, keepdim=True), wanted, atol=1e-12)
        greedy = Sampling(repetition_penalty=penalty).choose(logits, seen, [0, 1, 2], 0)
        assert torch.equal(greedy, theirs[0](ids, logits.clone()).argmax(-1))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"temperature": -1.0}, "temperature must be 0"),
        ({"temperature": float("nan")}, "temperature must be 0"),
        ({"temperature": 1.0, "top_k": 0}, "top-k must be 1 or more"),
        ({"temperature": 1.0, "top_p": 0.0}, "top-p must be more than 0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top-p must be more than 0 and at most 1"),
        ({"repetition_penalty": 0.0}, "repetition-penalty must be more than 0"),
        ({"top_k": 5}, "top-k has no effect without a temperature"),
        ({"top_p": 0.5}, "top-p has no effect without a temperature"),
    ],
)
def test_values_without_a_meaning_are_refused(values: dict[str, float], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Sampling(**values)  # type: ignore[arg-type]
