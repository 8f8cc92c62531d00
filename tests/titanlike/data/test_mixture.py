"""Shares of a mixture."""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from titanlike.data.mixture import draw, integer_weights


def mixtures() -> list[list[int]]:
    generator = random.Random(0)
    found = [[1, 1], [1, 9], [999, 1], [7, 2, 1], [1] * 7, [10**15 + 1, 3 * 10**14, 7], [5, 0, 3]]
    for _ in range(30):
        found.append(
            [
                generator.choice((1, 2, 30, 1000, generator.randrange(1, 10**6)))
                for _ in range(generator.randrange(2, 12))
            ]
        )
    return found


@pytest.mark.parametrize("weights", mixtures())
def test_counts_are_exact_at_every_prefix(weights: list[int]) -> None:
    """OC #316: mixture rounding repeats samples; shares that are right in the long run and wrong in a short stage."""
    total, counts = sum(weights), [0] * len(weights)
    for n, source in enumerate(draw(weights, counts, 3000).tolist(), start=1):
        counts[source] += 1
        assert all(abs(Fraction(weight * n, total) - count) < 1 for weight, count in zip(weights, counts))


@pytest.mark.parametrize("weights", [[501, 77, 300, 1], [10**7, 3, 6 * 10**6, 7], [1]])
def test_drawing_in_parts_is_drawing_at_once(weights: list[int]) -> None:
    at_once = draw(weights, [0] * len(weights), 5000).tolist()
    parts: list[int] = []
    generator = random.Random(1)
    while len(parts) < 5000:
        drawn = [parts.count(i) for i in range(len(weights))]
        parts += draw(weights, drawn, min(generator.randrange(1, 100), 5000 - len(parts))).tolist()
    assert parts == at_once


def test_weights_are_the_decimals_that_were_written() -> None:
    assert integer_weights({"a": 0.7, "b": 0.2, "c": 0.1}) == {"a": 7, "b": 2, "c": 1}
    assert integer_weights({"a": 1e-3, "b": 2}) == {"a": 1, "b": 2000}
    assert integer_weights({"a": 0.25}) == {"a": 1}
