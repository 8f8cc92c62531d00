"""A shuffle that needs no memory: a keyed permutation of [0, n), any part of which is computed on its own.

It is a Feistel network over the smallest power of two that holds n, with cycle walking: an output that falls outside
[0, n) is permuted again until it falls inside (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). The
domain is under 2 n, so two rounds of walking are the mean. It shuffles; it is no cipher.
"""

from __future__ import annotations

import hashlib

import numpy as np

ROUNDS = 8
_MIX = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))  # murmur3's 64-bit finalizer


def key_of(*parts: object) -> bytes:
    """A key from values such as a seed, a name and an epoch. Equal values give equal keys, on every machine."""
    return hashlib.blake2b(repr(parts).encode(), digest_size=8 * ROUNDS).digest()


def permute(indices: np.ndarray, n: int, key: bytes) -> np.ndarray:
    """The images of `indices` (integers in [0, n), n < 2**62) under the permutation of [0, n) that `key` names."""
    if n <= 1:
        return np.zeros(np.shape(indices), dtype=np.int64)
    bits = (n - 1).bit_length()
    keys = np.frombuffer(key, dtype="<u8")
    values = np.array(indices, dtype=np.uint64, ndmin=1)
    outside = np.arange(values.size)
    while outside.size:
        walked = _feistel(values[outside], bits, keys)
        values[outside] = walked
        outside = outside[walked >= n]
    return values.astype(np.int64).reshape(np.shape(indices))


def _feistel(values: np.ndarray, bits: int, keys: np.ndarray) -> np.ndarray:
    """A permutation of [0, 2**bits), bits >= 1. The two halves may differ by a bit, so they keep their places: rounds
    change one, then the other."""
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    high, low = values >> low_bits, values & low_mask
    for i, key in enumerate(keys):
        if i % 2:
            low = low ^ (_hash(high, key) & low_mask)
        else:
            high = high ^ (_hash(low, key) & high_mask)
    return (high << low_bits) | low


def _hash(values: np.ndarray, key: np.uint64) -> np.ndarray:
    mixed = values ^ key
    for factor in _MIX:
        mixed = (mixed ^ (mixed >> np.uint64(33))) * factor
    return mixed ^ (mixed >> np.uint64(33))
