"""What a wrong loss, gradient norm or count looks like."""

from __future__ import annotations

import math
from collections.abc import Iterable

from titanlike.verify.compare import Check, Difference
from titanlike.verify.pieces import GRADIENT_NORM, GRADIENTS, LOSS, MICROBATCH_LOSSES, VALIDATION, Key, RankRecord
from titanlike.verify.ratios import Facts, close, scale, where_is

SCALARS = (LOSS, GRADIENT_NORM, MICROBATCH_LOSSES, VALIDATION)


def read_scalar(check: Check, first: Difference, facts: Facts) -> list[str]:
    """Sentences about the numbers that differ, each with the ranks that it is about."""
    sentences: dict[str, list[RankRecord]] = {}
    for each in first.placed:
        if each.wrong:
            sentence = _one_scalar(check, float(each.value), float(each.wanted), each.record, first.name, facts)
            sentences.setdefault(sentence, []).append(each.record)
    everywhere = len(sentences) == 1 and sum(map(len, sentences.values())) == len(first.placed)
    return [s if everywhere else f"{where_is(found)}: {s}" for s, found in sentences.items()]


def _one_scalar(check: Check, value: float, wanted: float, record: RankRecord, name: str, facts: Facts) -> str:
    step, kind = check.key.step, check.key.check
    ratio = value / wanted if wanted else math.nan
    if kind == GRADIENT_NORM:
        part = _norm_of_a_part(value, facts, step)
        if part:
            return f"{ratio:.4f}x: {part}"
    counts = facts.tokens(step)
    own = facts.tokens_of_dp(step)
    if kind == MICROBATCH_LOSSES:
        count = counts[int(name.split()[1])] if name.split()[1].isdigit() else 0
        if count and close(ratio, 1 / count):
            mean = f"a mean over {count} tokens where the sum is wanted"
            return f"{ratio:.4f}x: normalised by the local token count ({mean})"
    if kind == LOSS and name == "valid labels" and close(value, own[record.dp]):
        return f"{ratio:.4f}x: the local token count ({own[record.dp]} of {sum(counts)})"
    if kind == LOSS and name == "loss":
        sums = [float(loss) for loss in facts.oracle.expected[Key(MICROBATCH_LOSSES, step)].values()]
        n, total = facts.accumulation, sum(counts)
        of_dp = [sum(sums[r * n : (r + 1) * n]) for r in range(facts.dp)]
        means = [s / max(c, 1) for s, c in zip(sums, counts)]
        means_of_dp = [s / max(c, 1) for s, c in zip(of_dp, own)]
        for candidate, what in (
            (sum(means) / len(means), "a mean of the microbatches' means instead of the mean over all tokens"),
            (sum(means_of_dp) / len(means_of_dp), "a mean of the dp ranks' means instead of the mean over all tokens"),
            (means_of_dp[record.dp], "this dp rank's own mean: not added up over dp"),
            (of_dp[record.dp] / total, "this dp rank's part alone: not added up over dp"),
            (sum(of_dp) / max(own[record.dp], 1), "normalised by the local token count"),
            (means[-1], "the last microbatch's mean alone"),
            (sum(sums), "a sum over the tokens instead of their mean"),
        ):
            if close(value, candidate) and not close(value, wanted):
                return f"{ratio:.4f}x: {what}"
    return scale(ratio, facts, step)


def _norm_of_a_part(value: float, facts: Facts, step: int) -> str | None:
    """Which parameters' gradients have this norm together."""
    squares = {n: float(g.double().square().sum()) for n, g in facts.oracle.expected[Key(GRADIENTS, step)].items()}

    def total(names: Iterable[str]) -> float:
        return sum(squares[name] for name in names)

    tied = {name for name, stage in facts.stage_of.items() if stage == -1}
    sets: list[tuple[float, str]] = []
    for stage in range(facts.stages):
        mine = {n for n in squares if facts.stage_of.get(n) == stage}
        for also in (set(), tied) if tied else (set(),):
            sets.append((total(mine | also), f"the norm of pipeline stage {stage} alone: not added up over pp"))
    for rank in range(facts.pp):
        names = {n for record in facts.records if record.pp == rank for n in record.stage_of}
        sets.append((total(names), f"the norm of pipeline rank {rank}'s stages alone: not added up over pp"))
    replicated, every = facts.replicated & set(squares), total(squares)
    if replicated:
        sets.append((every - total(replicated), "without the parameters that each tp rank holds whole"))
        extra = (facts.tp - 1) * total(replicated)
        sets.append((every + extra, "the parameters that each tp rank holds whole count once per tp rank"))
    if tied:
        sets.append((every + total(tied), "the tied weight counts twice"))
        sets.append((every - total(tied), "without the tied weight"))
    for squared, what in sets:
        if squared and close(value, math.sqrt(squared)) and not close(squared, every):
            return what
    return None
