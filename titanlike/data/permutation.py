"""A shuffle that needs no memory: a keyed permutation of [0, n), any part of which is computed on its own.

It is a Feistel network over pairs (a, b) of the smallest rectangle about a square that holds n, with cycle walking: a
pair that stands for a number outside [0, n) is permuted again until it falls inside (Black and Rogaway 2002, "Ciphers
with arbitrary finite domains"). At most one row of the rectangle is outside, so walking is rare. It shuffles; it is no
cipher.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

ROUNDS = 6
_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93))  # odd, with about half of the bits set


def key_of(*parts: object) -> bytes:
    """A key from values such as a seed, a name and an epoch. Equal values give equal keys, on every machine."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8 * ROUNDS).digest()


def permute(indices: np.ndarray, n: int, key: bytes) -> np.ndarray:
    """The images of `indices` (integers in [0, n), n < 2**62) under the permutation of [0, n) that `key` names,
    int64."""
    values = np.array(indices, dtype=np.uint64, ndmin=1)
    width = math.isqrt(n - 1) + 1 if n > 1 else 1
    height = -(-n // width)
    keys = np.frombuffer(key, dtype="<u8")
    values = _feistel(values, np.uint64(height), np.uint64(width), keys)
    outside = np.flatnonzero(values >= n)
    while outside.size:
        values[outside] = _feistel(values[outside], np.uint64(height), np.uint64(width), keys)
        outside = outside[values[outside] >= n]
    return values.astype(np.int64).reshape(np.shape(indices))


def _feistel(values: np.ndarray, height: np.uint64, width: np.uint64, keys: np.ndarray) -> np.ndarray:
    """A permutation of [0, height * width). The two halves are of different size, so they keep their places: rounds
    change one, then the other."""
    high, low = np.divmod(values, width)
    for i, key in enumerate(keys):
        if i % 2:
            low = (low + _hash(high, key)) % width
        else:
            high = (high + _hash(low, key)) % height
    return high * width + low


def _hash(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """63 bits, so that a number below 2**32 can be added."""
    mixed = (values ^ key) * _MIX[0]
    mixed ^= mixed >> np.uint64(32)
    mixed *= _MIX[1]
    mixed ^= mixed >> np.uint64(29)
    return mixed >> np.uint64(1)
