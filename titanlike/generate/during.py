"""Text from a model that is being trained, on the mesh that trains it, for `[validation.generate]`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from titanlike.errors import UserError
from titanlike.generate.generator import Generator
from titanlike.generate.model import InferenceModel
from titanlike.generate.sampling import Sampling
from titanlike.tokenizer import Tokenizer

if TYPE_CHECKING:
    from titanlike.trainer import Trainer


class Samples:
    """Continues fixed prompts with the weights of the moment. All ranks make one and call `texts` together.

    The weights are the trainer's own tensors: what is added is a cache, for as long as it takes. A pipeline with
    several stages on a rank, and an architecture whose attention keeps no cache, compute the whole window for each
    token instead.
    """

    def __init__(self, trainer: Trainer, tokenizer: Tokenizer) -> None:
        """Raises UserError for prompts that, with what is to follow, are longer than train.seq_len."""
        self.trainer = trainer
        self.tokenizer = tokenizer
        self.config = trainer.config.validation.generate
        self.prompts = [tokenizer.encode(prompt) or [tokenizer.end_id] for prompt in self.config.prompts]
        self._generator: Generator | None = None
        seq_len, count = trainer.config.train.seq_len, self.config.max_new_tokens
        for number, prompt in enumerate(self.prompts, start=1):
            if len(prompt) + count > seq_len:
                raise UserError(
                    f"validation.generate.prompts: prompt {number} has {len(prompt)} tokens, which with "
                    f"max_new_tokens = {count} is more than train.seq_len ({seq_len})"
                )

    def due(self, step: int) -> bool:
        """Whether there is to be text after `step`."""
        return self.config.interval > 0 and step % self.config.interval == 0

    def texts(self) -> list[str]:
        """Each prompt with its continuation, the same on all ranks and for every mesh."""
        self.trainer.zero.finish_gather()
        count = self.config.max_new_tokens
        sampling = Sampling(self.config.temperature, seed=self.trainer.config.run.seed)
        if self._generator is None and InferenceModel.can_share(self.trainer):
            model = InferenceModel.sharing(self.trainer)
            self._generator = Generator(
                model, self.tokenizer.decode, [self.tokenizer.end_id], self.trainer.config.train.seq_len
            )
        if self._generator is None:
            made = [self._without_cache(number, count, sampling) for number in range(len(self.prompts))]
        else:
            completions, _ = self._generator.generate(self.prompts, count, sampling)
            made = [completion.ids for completion in completions]
        end = self.tokenizer.end_id
        made = [ids[: ids.index(end)] if end in ids else ids for ids in made]
        return [self.tokenizer.decode([*prompt, *ids]) for prompt, ids in zip(self.prompts, made, strict=True)]

    def _without_cache(self, number: int, count: int, sampling: Sampling) -> list[int]:
        config = self.trainer.config.train
        ids = list(self.prompts[number])
        rows = config.microbatch_size if self.trainer.mesh.pp > 1 else 1
        for step in range(count):
            tokens = torch.zeros(rows, config.seq_len, dtype=torch.int64)
            tokens[:, : len(ids)] = torch.tensor(ids)  # what is right of the last token cannot be attended to
            logits = self.trainer.next_token_logits(tokens, len(ids) - 1)[:1]
            ids.append(int(sampling.choose(logits, None, [number], step)))
            if ids[-1] == self.tokenizer.end_id:
                break
        return ids[len(self.prompts[number]) :]
