"""The comparison of what all ranks noted with what one rank alone computed, tensor by tensor, element by element.

Properties:
- Every rank's copy of a tensor is compared, not one of them; and each element has to be on some rank.
- NaN, and infinity where the other is finite, count as an infinite error. A tensor that only one side has, too.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict

import torch
from torch import Tensor

from titanlike.verify.oracle import Tensors
from titanlike.verify.pieces import ACTIVATIONS, CHECKS, ORDER_IN_STEP, Key, Piece, RankRecord

TOLERANCE = 1e-10


@dataclasses.dataclass
class Placed:
    """A piece, the rank that has it, and the box of the oracle's tensor that it has to equal."""

    record: RankRecord
    piece: Piece
    box: tuple[slice, ...]
    wanted: Tensor

    @property
    def value(self) -> Tensor:
        """What the rank has, float64."""
        return self.piece.tensor.double()

    @property
    def wrong(self) -> bool:
        """Whether the rank's box differs."""
        return worst(errors(self.value, self.wanted)) > TOLERANCE


@dataclasses.dataclass
class Difference:
    """A tensor that differs, and its worst element."""

    name: str
    error: float
    """largest absolute difference of an element"""
    placed: list[Placed] = dataclasses.field(repr=False)
    """all ranks' pieces of the tensor"""
    index: tuple[int, ...] = ()
    """of the worst element, in the plain model's tensor"""
    value: float = math.nan
    """the rank's value of it"""
    wanted: float = math.nan
    """the oracle's"""
    record: RankRecord | None = dataclasses.field(default=None, repr=False)
    """the rank that has it"""
    problem: str = ""
    """what is wrong if no element can be compared"""

    @property
    def ratio(self) -> float:
        """The rank's value over the oracle's; infinite or NaN when that is 0."""
        return float(torch.tensor(self.value).double() / torch.tensor(self.wanted).double())


@dataclasses.dataclass
class Check:
    """One comparison at one step."""

    key: Key
    tensors: int
    """how many were compared"""
    error: float
    """largest absolute difference of all"""
    differing: list[Difference]
    """in execution order"""
    placed: dict[str, list[Placed]] = dataclasses.field(repr=False)
    skipped: int = 0
    """pieces that could not be placed"""

    @property
    def same(self) -> bool:
        """Whether all of it is within the tolerance."""
        return not self.differing


def errors(value: Tensor, wanted: Tensor) -> Tensor:
    """Absolute differences of equal-shaped tensors, float64; infinite for what is not a number on either side."""
    # Equal infinities are equal; their difference would not be a number.
    difference = torch.where(value == wanted, torch.zeros_like(wanted), (value - wanted).abs())
    return difference.nan_to_num(nan=math.inf, posinf=math.inf)


def worst(error: Tensor) -> float:
    """The largest error, 0 for no elements."""
    return float(error.max()) if error.numel() else 0.0


def compare(expected: dict[Key, Tensors], records: list[RankRecord], tp: int) -> list[Check]:
    """All comparisons, in the order in which their values were computed."""
    pieces: dict[Key, dict[str, list[tuple[RankRecord, Piece]]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        for piece in record.pieces:
            pieces[piece.key][piece.name].append((record, piece))

    def order(key: Key) -> tuple[int, int]:
        checks = CHECKS if key.step == 0 else ORDER_IN_STEP
        return key.step, checks.index(key.check)

    checks = []
    for key in sorted({*expected, *pieces}, key=order):
        if key.check == ACTIVATIONS and key not in pieces:
            continue  # not noted in compiled models
        checks.append(_check(key, expected.get(key, {}), pieces.get(key, {}), tp))
    return checks


def _check(key: Key, expected: Tensors, pieces: dict[str, list[tuple[RankRecord, Piece]]], tp: int) -> Check:
    check = Check(key, len(expected), 0.0, [], {})
    for name, tensor in expected.items():
        whole = tensor.detach().double()
        placed: list[Placed] = []
        lost = 0
        for record, piece in pieces.get(name, []):
            box = _box(piece, tuple(whole.shape) or (), record.tp, tp)
            if box is None:
                lost += 1
            else:
                placed.append(Placed(record, piece, box, whole[box]))
        check.placed[name] = placed
        check.skipped += lost
        if lost and not placed and key.check == ACTIVATIONS:
            continue
        difference = _difference(name, placed, whole, key)
        if difference is not None:
            check.differing.append(difference)
    for name, found in pieces.items():
        if name not in expected:
            where = found[0][0].place
            check.differing.append(
                Difference(name, math.inf, [], problem=f"only {where} has it, the plain model does not")
            )
    check.error = max((difference.error for difference in check.differing), default=_largest(check))
    return check


def _largest(check: Check) -> float:
    """The largest error where none is over the tolerance, and so none is infinite."""
    return max((worst(errors(p.value, p.wanted)) for placed in check.placed.values() for p in placed), default=0.0)


def _difference(name: str, placed: list[Placed], whole: Tensor, key: Key) -> Difference | None:
    covered = torch.zeros(whole.shape, dtype=torch.bool)
    found: Difference | None = None
    for each in placed:
        covered[each.box] = True
        error = errors(each.value, each.wanted)
        if error.numel() and worst(error) > max(TOLERANCE, found.error if found else 0.0):
            flat = int(error.argmax())
            local = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), error.shape))
            found = Difference(
                name,
                worst(error),
                placed,
                tuple(i + (cut.start or 0) for i, cut in zip(local, each.box)),
                float(each.value.flatten()[flat]),
                float(each.wanted.flatten()[flat]),
                each.record,
            )
    missing = int((~covered).sum())
    if missing and key.check != ACTIVATIONS:
        problem = "no rank has it" if missing == covered.numel() else f"no rank has {missing:,} of its elements"
        return Difference(name, math.inf, placed, problem=problem)
    return found


def _box(piece: Piece, whole: tuple[int, ...], coordinate: int, tp: int) -> tuple[slice, ...] | None:
    """Where the piece belongs, or None if that cannot be told."""
    shape, offset = tuple(piece.tensor.shape), piece.offset
    if offset is None:
        offset = _offset_of_part(shape, whole, coordinate, tp)
    if offset is None or len(shape) != len(whole) or len(offset) != len(whole):
        return None
    if any(o + n > w for o, n, w in zip(offset, shape, whole)):
        return None
    return tuple(slice(o, o + n) for o, n in zip(offset, shape))


def _offset_of_part(shape: tuple[int, ...], whole: tuple[int, ...], coordinate: int, tp: int) -> tuple[int, ...] | None:
    """The offset of a part that is cut over tp along the one dim in which it is smaller than the whole."""
    if len(shape) != len(whole):
        return None
    cut = [dim for dim in range(len(whole)) if shape[dim] != whole[dim]]
    if not cut:
        return (0,) * len(whole)
    dim = cut[0]
    size, part = whole[dim], shape[dim]
    chunk = -(-size // tp)
    # A cut that leaves a rank nothing is none that we make: heads of which several ranks have the same one look so.
    if chunk * (tp - 1) < size and part == min(chunk, size - chunk * coordinate):
        first = min(chunk * coordinate, size)
    elif part and size % part == 0 and tp % (size // part) == 0:  # fewer parts than ranks: some have the same one
        first = coordinate * (size // part) // tp * part
    else:
        return None
    return None if len(cut) > 1 else tuple(first if d == dim else 0 for d in range(len(whole)))
