"""The log-probability of given tokens, on any mesh."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from parallelize.pipeline import run_forward
from titanlike.generate.model import InferenceModel


@torch.no_grad()
def score(
    model: InferenceModel, rows: Sequence[tuple[Sequence[int], int]], batch_size: int
) -> list[tuple[float, bool]]:
    """For each row (tokens, n): the log-probability in nats of its last n tokens after those before them, and whether
    each of them is the likeliest one. All ranks call it and get all answers.

    A dp coordinate works on `batch_size` rows at a time. Each row has more than n tokens, and n is 1 or more.
    """
    dp, mine = model.mesh.dp, model.mesh.coordinate("dp")
    # Rows of like length together, the longest first: little padding, and memory runs out at once or never.
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))
    taken = order[mine::dp]
    model.lay_out(1024)
    found: dict[int, tuple[float, bool]] = {}
    for begin in range(0, len(taken), batch_size * model.mesh.pp):
        batch = taken[begin : begin + batch_size * model.mesh.pp]
        found.update(zip(batch, _score_batch(model, [rows[i] for i in batch], batch_size), strict=True))
    if dp > 1:
        parts: list[dict[int, tuple[float, bool]]] = [{}] * dp
        dist.all_gather_object(parts, found, group=model.mesh.group("dp"))
        found = {i: answer for part in parts for i, answer in part.items()}
    return [found[i] for i in range(len(rows))]


def _score_batch(
    model: InferenceModel, rows: list[tuple[Sequence[int], int]], batch_size: int
) -> list[tuple[float, bool]]:
    """The rows of one dp coordinate, under pp in microbatches of `batch_size`."""
    device = model.mesh.device
    chunks = [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
    answers = torch.zeros(len(rows), 2, dtype=torch.float64, device=device)  # log-probability, whether greedy

    def width(chunk: list[tuple[Sequence[int], int]]) -> int:
        return max(len(ids) for ids, _ in chunk) - 1  # the last token is not looked at

    def run(_stage: int, microbatch: int, hidden: Tensor | None) -> Tensor | None:
        chunk = chunks[microbatch]
        if hidden is None:
            # Padding is at the right, where no token looks.
            padded = [[*ids[:-1], *[0] * (width(chunk) - len(ids) + 1)] for ids, _ in chunk]
            hidden = torch.tensor(padded, device=device)
        out = model.hidden(hidden, torch.arange(hidden.shape[1], device=device)[None], None)
        if not model.stage.last:
            return model.stage.border(out)
        logits = model.logits(out)  # [rows, seq, vocab]
        for row, (ids, n) in enumerate(chunk):
            end = len(ids) - 1
            wanted = torch.tensor(ids[-n:], device=device)
            part = logits[row, end - n : end]
            part = part if part.dtype == torch.float64 else part.float()
            log_probabilities = torch.log_softmax(part, -1).gather(-1, wanted[:, None])
            answers[microbatch * batch_size + row, 0] = log_probabilities.double().sum()
            answers[microbatch * batch_size + row, 1] = (part.argmax(-1) == wanted).all()
        return None

    def border(microbatch: int) -> Tensor:
        return model.border(len(chunks[microbatch]), width(chunks[microbatch]))

    run_forward(run, model.stage_ranks, len(chunks), model.mesh.group("pp"), border)
    if model.mesh.pp > 1:  # the last stage has the answers
        dist.broadcast(answers, group=model.mesh.group("pp"), group_src=model.mesh.pp - 1)
    return [(value, bool(greedy)) for value, greedy in answers.tolist()]
