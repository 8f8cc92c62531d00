"""What a difference looks like: hypotheses about what a mesh can get wrong, each tried on the numbers.

A hypothesis is only said if the numbers bear it out: a ratio has to hold for all elements of the tensor on a rank,
copies have to add up to the oracle's value, a combination of microbatches has to give the tensor to rounding.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from titanlike.verify.compare import Check, Difference, Placed, errors, worst
from titanlike.verify.pieces import ACTIVATIONS, CLIPPED, COMPUTE_WEIGHTS, GRADIENTS, MOMENTS, WEIGHTS, Key
from titanlike.verify.ratios import (
    LOOSE,
    ROUNDING,
    Facts,
    all_close,
    close,
    common_ratio,
    near,
    ratio_of,
    scale,
    where_is,
)
from titanlike.verify.reading_scalars import SCALARS, read_scalar


def read(check: Check, facts: Facts) -> list[str]:
    """Sentences about the first tensor of `check` that differs, and about which tensors differ."""
    first = check.differing[0]
    if first.problem:
        sentences = [first.problem]
    elif not math.isfinite(first.value):
        sentences = [f"the rank's value is {first.value}, the plain model's is {first.wanted:.6g}"]
    elif check.key.check in SCALARS:
        sentences = read_scalar(check, first, facts)
    else:
        sentences = _tensor(check, first, facts)
    return sentences + which(check, facts)


def _tensor(check: Check, first: Difference, facts: Facts) -> list[str]:
    kind, placed = check.key.check, first.placed
    if kind in (WEIGHTS, COMPUTE_WEIGHTS) and check.key.step > 0:
        placed = _updates(placed, facts.oracle.expected[Key(kind, check.key.step - 1)][first.name])
    sentence = (
        lower_precision(placed)
        or another_part(check, first, facts)
        or copies(placed, check, facts)
        or uniform_ratio(placed, check, first.name, facts)
        or combination_of_microbatches(placed, check, first.name, facts)
    )
    return [sentence or "no constant ratio: the values differ, not only their scale"]


def _updates(placed: list[Placed], before: Tensor) -> list[Placed]:
    """The change of weights in the step, in the place of the weights: it shows a wrong step size as a ratio."""
    made = []
    for each in placed:
        start = before.double()[each.box]
        piece = each.piece._replace(tensor=each.value - start)
        made.append(dataclasses.replace(each, piece=piece, wanted=each.wanted - start))
    return made


# -- hypotheses ------------------------------------------------------------------------------------------------------


def lower_precision(placed: list[Placed]) -> str | None:
    """All that is wrong is small beside the tensor's largest element."""
    wrong = [each for each in placed if each.wrong]
    return ROUNDING if wrong and all(near(each.value, each.wanted) for each in wrong) else None


def another_part(check: Check, first: Difference, facts: Facts) -> str | None:
    """A rank holds the values of another part of the tensor than it should."""
    tensor = facts.oracle.expected[check.key][first.name].double()
    wrong = [each for each in first.placed if each.wrong]
    found: list[tuple[Placed, int, int, int]] = []
    for each in wrong:
        place = _place_of(each, tensor)
        if place is None:
            return None
        found.append((each, *place))
    each, dim, start, size = found[0]
    own = each.box[dim].start
    more = f", and so for {len(found) - 1} more" if len(found) > 1 else ""
    return (
        f"a wrong part: {each.record.place} has what belongs in [{start}:{start + size}] of dim {dim} in the place of "
        f"[{own}:{own + size}]{more}"
    )


def _place_of(placed: Placed, tensor: Tensor) -> tuple[int, int, int] | None:
    """(dim, start, size) of the part of the whole tensor that a rank has the values of, if it is another one."""
    if not worst(placed.value.abs()):
        return None
    for dim, cut in enumerate(placed.box):
        size = cut.stop - cut.start
        if not 0 < size < tensor.shape[dim]:
            continue
        for start in range(0, tensor.shape[dim] - size + 1, size):
            box = (*placed.box[:dim], slice(start, start + size), *placed.box[dim + 1 :])
            if start != cut.start and near(placed.value, tensor[box]):
                return dim, start, size
    return None


def copies(placed: list[Placed], check: Check, facts: Facts) -> str | None:
    """Ranks along one axis hold the same box, and their values differ: does their sum, or their mean, fit?"""
    for axis in ("tp", "pp", "dp"):
        groups: dict[Any, list[Placed]] = {}
        for each in placed:
            others = tuple(getattr(each.record, other) for other in ("pp", "dp", "tp") if other != axis)
            groups.setdefault((str(each.box), others), []).append(each)
        unequal = [g for g in groups.values() if any(worst(errors(p.value, g[0].value)) > 1e-14 for p in g)]
        if not unequal:
            continue
        n = len(unequal[0])
        what = f"the {n} {axis} ranks that hold this tensor have different values"
        if check.key.check in (GRADIENTS, CLIPPED):
            totals = [(sum((p.value for p in group), torch.zeros(())), group[0].wanted) for group in unequal]
            if all(near(total, wanted) for total, wanted in totals):
                return f"not added up over {axis}: {what}, which add up to the plain model's"
            if all(near(total / n, wanted) for total, wanted in totals):
                return f"{what}, whose mean is the plain model's"
            ratio = common_ratio(totals)
            if ratio is not None:
                return f"not added up over {axis}: {what}, whose sum is {scale(ratio, facts, check.key.step)}"
        return f"copies drifted apart over {axis}: {what}"
    return None


def uniform_ratio(placed: list[Placed], check: Check, name: str, facts: Facts) -> str | None:
    """All elements of the tensor are the plain model's times one number, on each rank."""
    step = check.key.step
    ratios: list[tuple[float, Placed]] = []
    for each in placed:
        if worst(each.wanted.abs()) <= 1e-13:
            if worst(each.value.abs()) > 1e-13:
                return None
            continue
        ratio = ratio_of(each.value, each.wanted)
        if ratio is None:
            return None
        ratios.append((ratio, each))
    if not ratios:
        return None
    squared = check.key.check == MOMENTS and "_sq." in name
    note = " (of the moment of squares, the root)" if squared else ""
    of = "the step is " if check.key.check in (WEIGHTS, COMPUTE_WEIGHTS) and step else ""

    def reading(ratio: float) -> str:
        return f"{of}{scale(math.sqrt(abs(ratio)) if squared else ratio, facts, step)}{note}"

    if all_close([ratio for ratio, _ in ratios]):
        return reading(ratios[0][0])
    # The ratio depends on the rank: local counts of tokens, or some ranks alone are wrong.
    own = facts.tokens_of_dp(step) if step else []
    total = sum(own)
    if own and all(close(ratio, total / max(own[p.record.dp], 1)) for ratio, p in ratios):
        counts = ", ".join(f"{total / max(n, 1):.4g}x on dp {r} ({n} of {total})" for r, n in enumerate(own))
        return f"normalised by the local token count: {counts}"
    wrong = [(ratio, p) for ratio, p in ratios if not close(ratio, 1.0)]
    if all_close([ratio for ratio, _ in wrong]):
        return f"{reading(wrong[0][0])}, on {where_is(p.record for _, p in wrong)} alone"
    listed = ", ".join(f"{ratio:.4g}x on {p.record.place}" for ratio, p in ratios[:8])
    return f"a ratio of its own on each rank: {listed}"


def combination_of_microbatches(placed: list[Placed], check: Check, name: str, facts: Facts) -> str | None:
    """The gradient is a sum of the microbatches' gradients with wrong weights: lost ones, local means."""
    if check.key.check != GRADIENTS:
        return None
    gradients = facts.oracle.microbatch_gradients(check.key.step)
    fits: list[tuple[list[float], Placed]] = []
    for each in placed:
        parts = torch.stack([g[name].double()[each.box].flatten() for g in gradients], dim=1)
        value = each.value.flatten()  # [elements]; parts: [elements, microbatches]
        if parts.shape[0] < 2 * parts.shape[1] or not torch.isfinite(value).all():
            continue
        weights = torch.linalg.lstsq(parts, value[:, None], driver="gelsd").solution[:, 0]
        if not near(parts @ weights, value):
            return None
        fits.append((weights.tolist(), each))
    return _weights_of_microbatches(fits, facts, check.key.step) if fits else None


def _weights_of_microbatches(fits: list[tuple[list[float], Placed]], facts: Facts, step: int) -> str:
    """What the microbatches' weights, which should be 1, say."""
    counts, own, n = facts.tokens(step), facts.tokens_of_dp(step), facts.accumulation
    total = sum(counts)
    weights, first = fits[0]
    listed = f"weights {', '.join(f'{weight:.4g}' for weight in weights)} instead of 1 each"

    def are(wanted: list[float], found: list[float]) -> bool:
        return all(close(a, b, LOOSE) for a, b in zip(found, wanted))

    def of_dp(coordinate: int) -> list[float]:
        return [float(i // n == coordinate) for i in range(len(weights))]

    if all(are(of_dp(p.record.dp), found) for found, p in fits):
        return "not added up over dp: each dp rank has its own microbatches' gradients alone"
    if not all(are(weights, found) for found, _ in fits):
        return f"other weights of the microbatches on each rank; on {first.record.place}: {listed}"
    for coordinate in range(facts.dp):
        if facts.dp > 1 and are(of_dp(coordinate), weights):
            return f"not added up over dp: the microbatches of dp {coordinate} alone"
    lost = [i for i, weight in enumerate(weights) if abs(weight) < LOOSE]
    kept = [weight for weight in weights if abs(weight) >= LOOSE]
    if lost and all_close(kept, LOOSE):
        share = f"only {len(kept) / len(weights):.4g} of the microbatches"
        rest = "" if close(kept[0], 1.0, LOOSE) else f"; the others count {kept[0]:.4g}x"
        places = sorted({i % n for i in lost})
        if lost == [r * n + i for r in range(facts.dp) for i in places]:
            return f"{share}: number {', '.join(str(i + 1) for i in places)} of {n} on each rank is lost{rest}"
        return f"{share}: {', '.join(map(str, lost))} of 0 to {len(weights) - 1} in the global batch are lost{rest}"
    for per, what in (
        (counts, "each microbatch is normalised by its own token count"),
        ([own[i // n] for i in range(len(weights))], "each dp rank's part is normalised by its own token count"),
    ):
        means = [weight * count / total for weight, count in zip(weights, per)]  # what each mean counts
        if all_close(means, LOOSE):
            parts = len(counts) if per is counts else facts.dp
            for value, then in (
                (1.0, "and these means are added up"),
                (1 / parts, "and these means are averaged"),
                (1 / total, "and then by the global count too"),
            ):
                if close(means[0] / value, 1.0, LOOSE):
                    what += f", {then}"
            return f"normalised by the local token count: {what} ({listed})"
    return f"a sum of the microbatches' gradients with {listed}"


# -- which tensors ---------------------------------------------------------------------------------------------------


def which(check: Check, facts: Facts) -> list[str]:
    """Which tensors differ: a set that has a name, or how many."""
    if check.key.check in SCALARS or check.key.check == ACTIVATIONS:
        return []

    def parameter(name: str) -> str:
        return name.split(".", 1)[1] if check.key.check == MOMENTS else name

    wrong = {parameter(difference.name) for difference in check.differing}
    names = {parameter(name) for name in check.placed}
    whole = facts.replicated & names
    sets = [
        (names, f"it differs on all {len(names)} tensors"),
        (whole, "it differs on all tensors that each tp rank holds whole, and on no other"),
        (names - whole, "it differs on all tensors that are cut over tp, and on no other"),
        ({n for n in names if facts.stage_of.get(n) == -1}, "it differs on the tied weight alone"),
    ]
    for stage in range(facts.stages):
        members = {n for n in names if facts.stage_of.get(n) == stage}
        sets.append((members, f"it differs on all of pipeline stage {stage}, and on no other"))
    for members, sentence in sets:
        if wrong == members:
            return [sentence]
    if len(wrong) == 1:
        return ["no other tensor differs"]
    last = check.differing[-1].name
    return [f"{len(check.differing)} of {check.tensors} differ, in forward order the last is {last}"]
