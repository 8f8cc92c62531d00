"""Which source each sample of a mixture comes from, with exact shares.

After any n samples, a source of share w has given w n samples, less or more than one. That is the chairman assignment
problem (Tijdeman 1980), solved here as unit jobs with deadlines: to keep its error under one, the sample c + 1 of a
source must not be given before c < w n, nor after w n >= c + 1; of the sources that may give one, the one that must
first, does. All of it is in integers, so that it is the same on every machine and has no drift.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction


def integer_weights(weights: Mapping[str, float]) -> dict[str, int]:
    """The smallest integers in the proportions of `weights`, which are taken as the decimals they were written as."""
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    scale = math.lcm(*(weight.denominator for weight in exact.values()))
    integers = {name: int(weight * scale) for name, weight in exact.items()}
    divisor = math.gcd(*integers.values()) or 1
    return {name: weight // divisor for name, weight in integers.items()}


def draw(weights: Sequence[int], drawn: list[int], count: int) -> list[int]:
    """The sources of the next `count` samples, as indices into `weights`. `drawn`, the number of samples that each has
    given before, is brought up to date; it must come from earlier calls with these weights, or be all zero."""
    total = sum(weights)
    positive = [i for i, weight in enumerate(weights) if weight]
    if len(positive) == 1:
        drawn[positive[0]] += count
        return positive * count

    def first_time(i: int) -> int:
        return drawn[i] * total // weights[i] + 1

    def last_time(i: int) -> int:
        return -(-(drawn[i] + 1) * total // weights[i])

    time = sum(drawn)
    waiting = [(first_time(i), i) for i in positive]
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
