"""Text from a model that is being trained, on the mesh that trains it: short samples without a cache."""

from __future__ import annotations

import torch

from titanlike.trainer import Trainer


@torch.no_grad()
def sample(trainer: Trainer, prompt: list[int], count: int, temperature: float = 0.8, seed: int = 0) -> list[int]:
    """`count` token ids after `prompt`, drawn at `temperature` (0: the likeliest). All ranks call it and get the same
    ids.

    The context is the last seq_len tokens. Every step computes the whole window again: right for a few lines.
    """
    window = trainer.config.train.seq_len
    rows = trainer.config.train.microbatch_size if trainer.mesh.pp > 1 else 1
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    for _ in range(count):
        recent = ids[-window:]
        tokens = torch.zeros(rows, window, dtype=torch.int64)
        tokens[:, : len(recent)] = torch.tensor(recent)  # what is right of the last token cannot be attended to
        logits = trainer.next_token_logits(tokens, len(recent) - 1)[0].double().cpu()
        if temperature == 0:
            ids.append(int(logits.argmax()))
        else:
            # The inverse of the cumulative distribution at one uniform number: ranks that differ in the last bit of a
            # logit still agree, which torch.multinomial does not promise.
            cumulative = torch.softmax(logits / temperature, dim=-1).cumsum(-1)
            draw = torch.rand((), generator=generator, dtype=torch.float64) * cumulative[-1]
            ids.append(min(int(torch.searchsorted(cumulative, draw)), logits.numel() - 1))
    return ids[len(prompt) :]
