"""A digest of tensors that does not depend on how they are cut.

Each tensor is seen as a matrix of words: one column per element of the last dim (two per 8-byte element, low half
first), one row per combination of the leading dims. With the element's bits sign-extended to 64, all arithmetic modulo
2^64,

    digest(tensor) = sum over all words of (word XOR key) * key,        key = row_key * column_key
    row_key    = mix(seed + row * G) | 1        seed from the tensor's name, dtype and global shape
    column_key = mix(SALT + column * G) | 1     mix: the finaliser of SplitMix64, G: its increment
    digest(state) = sum of the digests of its tensors

A sum has no order, so the boxes of any sharding add up to the same number, and ranks combine by one small all-reduce.
Keys are odd, so a single changed word always changes the sum; because each position has its own pseudo-random key that
is also XORed in, moved, swapped or sign-flipped values do not cancel (for a few chosen sign flips the chance of a miss
is about 2^-33; otherwise about 2^-64). It is no protection against someone who wants a collision. SplitMix64: Steele,
Lea and Flood, OOPSLA 2014.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch

from titanlike.checkpoint.tensorfile import DTYPE_NAMES

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_COLUMN_SALT = 0x7469_7461_6E6C_696B  # "titanlik"
_MASK = (1 << 64) - 1

# Words worked on at once. On a CPU two int64 buffers of this many fit in a core's cache; a GPU wants few launches.
_BLOCK_CPU = 1 << 16
_BLOCK_ACCELERATOR = 1 << 24

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}


def _signed(value: int) -> int:
    """A number modulo 2^64 as the int64 that has its bits."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _keys(seed: int, positions: torch.Tensor) -> torch.Tensor:
    """mix(seed + position * G) | 1, elementwise on int64 `positions`."""
    x = positions * _signed(_GOLDEN) + _signed(seed)
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _signed(_MULTIPLIER_1)
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _signed(_MULTIPLIER_2)
    x = x ^ ((x >> 31) & ((1 << 33) - 1))
    return x | 1


def seed_of(name: str, dtype: torch.dtype, global_shape: tuple[int, ...]) -> int:
    """The number that a tensor's row keys start from: a hash of what the tensor is."""
    text = f"{name}\n{DTYPE_NAMES[dtype]}\n{','.join(map(str, global_shape))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def box_digest(name: str, tensor: torch.Tensor, global_shape: tuple[int, ...], offset: tuple[int, ...]) -> torch.Tensor:
    """The part of a tensor's digest that one box of it gives, as a 0-d int64 tensor on the box's device.

    `tensor` is the contiguous box at `offset`. Memory beyond it is bounded by a few blocks, whatever its size.
    """
    device = tensor.device
    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=device)
    shape = tuple(tensor.shape) or (1,)
    offset = tuple(offset) or (0,)
    whole = tuple(global_shape) or (1,)
    words = tensor.detach().reshape(-1, shape[-1])
    if words.dtype == torch.bool:
        words = words.view(torch.uint8)
    words = words.view(_WORDS[words.element_size()])  # [rows, columns]
    halves = words.shape[1] // shape[-1]

    rows = torch.zeros(1, dtype=torch.int64, device=device)  # the row numbers of the box within the whole tensor
    for size, start, extent in zip(shape[:-1], offset[:-1], whole[:-1], strict=True):
        here = torch.arange(start, start + size, device=device)
        rows = (rows[:, None] * extent + here[None, :]).reshape(-1)
    row_keys = _keys(seed_of(name, tensor.dtype, global_shape), rows)
    total = torch.zeros((), dtype=torch.int64, device=device)
    block = _BLOCK_CPU if device.type == "cpu" else _BLOCK_ACCELERATOR
    width = min(words.shape[1], block)
    for left in range(0, words.shape[1], width):
        columns = torch.arange(left, min(left + width, words.shape[1]), device=device) + offset[-1] * halves
        part, column_keys = words[:, left : left + width], _keys(_COLUMN_SALT, columns)
        if device.type == "cpu":
            total += sum_on_cpu(part.numpy(), row_keys.numpy(), column_keys.numpy(), block // width)
        else:
            total += sum_words(part, row_keys, column_keys, block // width)
    return total


def sum_words(
    words: torch.Tensor, row_keys: torch.Tensor, column_keys: torch.Tensor, rows_at_once: int
) -> torch.Tensor:
    """sum of (word XOR key) * key over `words` [rows, columns], as a 0-d int64 tensor on their device."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for top in range(0, words.shape[0], rows_at_once):
        key = row_keys[top : top + rows_at_once, None] * column_keys
        total += ((key ^ words[top : top + rows_at_once]) * key).sum()
    return total


def sum_on_cpu(words: np.ndarray, row_keys: np.ndarray, column_keys: np.ndarray, rows_at_once: int) -> int:
    """The same by NumPy, which is 1.5 times as fast as torch here and leaves torch's threads to the training."""
    total = 0
    keys, mixed = np.empty((2, min(rows_at_once, words.shape[0]), words.shape[1]), np.int64)
    for top in range(0, words.shape[0], rows_at_once):
        part = words[top : top + rows_at_once]
        k, x = keys[: part.shape[0]], mixed[: part.shape[0]]
        np.multiply(row_keys[top : top + rows_at_once, None], column_keys, out=k)
        np.bitwise_xor(k, part, out=x)
        np.multiply(x, k, out=x)
        total += int(x.sum())
    return _signed(total)


def add(*parts: int) -> int:
    """Sum modulo 2^64 of digests given as ints of either sign."""
    return sum(parts) & _MASK


def digest_text(value: int) -> str:
    return f"{value & _MASK:016x}"


def parse_digest(text: str) -> int:
    return int(text, 16)


def reference_digest(name: str, tensor: torch.Tensor) -> int:
    """The digest of a whole tensor, word by word in Python integers: the definition, for tests. Small tensors only."""

    def key(seed: int, position: int) -> int:
        x = (seed + position * _GOLDEN) & _MASK
        x = ((x ^ (x >> 30)) * _MULTIPLIER_1) & _MASK
        x = ((x ^ (x >> 27)) * _MULTIPLIER_2) & _MASK
        return (x ^ (x >> 31)) | 1

    columns = tensor.shape[-1] if tensor.dim() else 1
    rows = math.prod(tensor.shape[:-1])
    flat = tensor.detach().reshape(rows, columns)
    words = (flat.view(torch.uint8) if flat.dtype == torch.bool else flat).view(_WORDS[tensor.element_size()]).tolist()
    seed = seed_of(name, tensor.dtype, tuple(tensor.shape))
    total = 0
    for row, values in enumerate(words):
        row_key = key(seed, row)
        for column, value in enumerate(values):
            k = row_key * key(_COLUMN_SALT, column)
            total += ((value ^ k) & _MASK) * k
    return total & _MASK
