"""Which source each sample of a mixture comes from, with exact shares.

After any n samples, a source of share w has given w n samples, less or more than one. That is the chairman assignment
problem (Tijdeman 1980), solved here as unit jobs with deadlines: to keep its error under one, the sample c + 1 of a
source must not be given before c < w n, nor after w n >= c + 1; of the sources that may give one, the one that must
first, does. All of it is in integers, so that it is the same on every machine and has no drift.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np

LONGEST_PERIOD = 2**16  # samples


def integer_weights(weights: Mapping[str, float]) -> dict[str, int]:
    """The smallest integers in the proportions of `weights`, which are taken as the decimals they were written as."""
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    scale = math.lcm(*(weight.denominator for weight in exact.values()))
    integers = {name: int(weight * scale) for name, weight in exact.items()}
    divisor = math.gcd(*integers.values()) or 1
    return {name: weight // divisor for name, weight in integers.items()}


def draw(weights: Sequence[int], drawn: Sequence[int], count: int) -> np.ndarray:
    """The sources of the next `count` samples, as indices into `weights`. `drawn` is the number of samples that each
    has given before: from earlier calls with these weights, or all zero."""
    total = sum(weights)
    if total > LONGEST_PERIOD:
        return np.array(_draw(weights, drawn, count))
    # After `total` samples each source has given just its weight, and all begins anew.
    return _period(tuple(weights))[(sum(drawn) + np.arange(count)) % total]


@functools.lru_cache(maxsize=16)
def _period(weights: tuple[int, ...]) -> np.ndarray:
    return np.array(_draw(weights, [0] * len(weights), sum(weights)))


def _draw(weights: Sequence[int], before: Sequence[int], count: int) -> list[int]:
    total, drawn = sum(weights), list(before)

    def first_time(i: int) -> int:
        return drawn[i] * total // weights[i] + 1

    def last_time(i: int) -> int:
        return -(-(drawn[i] + 1) * total // weights[i])

    time = sum(drawn)
    waiting = [(first_time(i), i) for i, weight in enumerate(weights) if weight]
    heapq.heapify(waiting)
    ready: list[tuple[int, int]] = []
    sources = []
    for now in range(time + 1, time + count + 1):
        while waiting and waiting[0][0] <= now:
            i = heapq.heappop(waiting)[1]
            heapq.heappush(ready, (last_time(i), i))
        i = heapq.heappop(ready)[1]
        sources.append(i)
        drawn[i] += 1
        heapq.heappush(waiting, (first_time(i), i))
    return sources
