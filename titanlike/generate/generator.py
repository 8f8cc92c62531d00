"""Text from prompts, on any mesh: prompts are split over dp, layers over pp, heads over tp.

Under pp the prompts of a batch are cut into pp microbatches that follow each other round the ring of stages: while one
stage works on a microbatch, the others work on the other ones, and a token that the last stage has made is back at the
first stage before its microbatch's next turn. At time t, rank r of the pipeline does turn t - r; turn w is microbatch
w mod pp, and its (w div pp)-th pass, of which the first one is the prompt. So no stage waits, but at the start and the
end.

Properties:
- Prompts of different length are padded at the left: all rows of a batch make their next token at the same place.
  Positions count from each prompt's first token, and no token attends to padding.
- All pp ranks get each token, and decide alike which rows are finished.
- Nothing but hidden states and tokens crosses ranks of the pipeline; logits stay on the last stage.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from titanlike.errors import UserError
from titanlike.generate.model import InferenceModel, keeps_cache
from titanlike.generate.sampling import Sampling
from titanlike.generate.text import Decode, StopStrings


@dataclasses.dataclass(frozen=True)
class Completion:
    """What was made of one prompt."""

    ids: list[int]
    """the new tokens; an end token is the last of them, if one was made"""
    finish: str
    """end: an end token; stop: a stop string; length: max_new_tokens"""


@dataclasses.dataclass
class Timing:
    """Work and time of all dp coordinates together."""

    prefill_tokens: int = 0
    """tokens of the prompts, without padding"""
    prefill_s: float = 0.0
    """seconds until each prompt had its first token"""
    decode_tokens: int = 0
    """new tokens after the first of each prompt"""
    decode_s: float = 0.0

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self.prefill_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_rate(self) -> float:
        """New tokens per second."""
        return self.decode_tokens / self.decode_s if self.decode_s else 0.0


OnTokens = Callable[[int, list[int], bool], None]
"""Called with (number of the prompt, its new tokens, whether it is finished)."""


class Generator:
    """Makes text with a model. All ranks of the mesh call `generate` together with the same arguments."""

    def __init__(
        self, model: InferenceModel, decode: Decode, end_ids: Sequence[int], longest: int, limit: str = "no more"
    ) -> None:
        """`decode` turns ids into text, for stop strings; a row ends at one of `end_ids`; `longest` is how many tokens
        a prompt and what follows may have together, and `limit` says why in an error."""
        if not keeps_cache(model.plain):
            raise UserError(
                f"the architecture {type(model.plain).__name__} cannot generate: its context has no field `cache` that "
                "its attention could use (see docs/generate.md)"
            )
        model.go_local()
        self.model = model
        self.mesh = model.mesh
        self.decode = decode
        self.end_ids = frozenset(end_ids)
        self.longest, self.limit = longest, limit

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        sampling: Sampling = Sampling(),  # noqa: B008 - frozen
        stop: Sequence[str] = (),
        batch_size: int = 32,
        on_tokens: OnTokens | None = None,
    ) -> tuple[list[Completion], Timing]:
        """Continue each prompt by up to `max_new_tokens` tokens. All ranks get all completions.

        A dp coordinate works on `batch_size` prompts at a time. `on_tokens` hears, on this rank, of the prompts of its
        own dp coordinate. Raises UserError for prompts that are empty, hold ids that the model has not, or leave no
        room.
        """
        check_prompts(prompts, max_new_tokens, self.model.config.vocab_size, self.longest, self.limit)
        dp, mine = self.mesh.dp, self.mesh.coordinate("dp")
        first, end = len(prompts) * mine // dp, len(prompts) * (mine + 1) // dp
        completions: list[Completion] = []
        timing = Timing()
        for begin in range(first, end, batch_size):
            numbers = range(begin, min(begin + batch_size, end))
            job = _Job(self, {n: list(prompts[n]) for n in numbers}, max_new_tokens, sampling, stop, on_tokens)
            completions += job.run(timing)
        if dp > 1:
            parts: list[tuple[list[Completion], Timing]] = [([], timing)] * dp
            dist.all_gather_object(parts, (completions, timing), group=self.mesh.group("dp"))
            completions = [completion for part, _ in parts for completion in part]
            timing = Timing(
                sum(each.prefill_tokens for _, each in parts),
                max(each.prefill_s for _, each in parts),
                sum(each.decode_tokens for _, each in parts),
                max(each.decode_s for _, each in parts),
            )
        return completions, timing


def check_prompts(
    prompts: Sequence[Sequence[int]], max_new_tokens: int, vocab_size: int, longest: int, limit: str
) -> None:
    """Raise `UserError` for the first prompt that cannot be continued by so many tokens; `limit` says why a text may
    have `longest` tokens and no more."""
    if max_new_tokens < 1:
        raise UserError(f"max-new-tokens must be 1 or more, not {max_new_tokens}")
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise UserError(f"prompt {number} has no tokens")
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise UserError(f"prompt {number} has the token {max(prompt)}, and the model knows ids below {vocab_size}")
        room = longest - len(prompt)
        if room < 1:
            raise UserError(f"prompt {number} has {len(prompt)} tokens, and a text may have {longest}, {limit}")
        if max_new_tokens > room:
            raise UserError(
                f"prompt {number} has {len(prompt)} tokens, so {max_new_tokens} new ones go past the {longest} that a "
                f"text may have, {limit}; ask for at most {room}"
            )


class _Microbatch:
    """Rows that go through the stages together, and what this rank keeps of them."""

    def __init__(self, prompts: dict[int, list[int]], max_new_tokens: int, model: InferenceModel, seen: bool) -> None:
        device, rows = model.mesh.device, len(prompts)
        self.numbers = list(prompts)
        self.outputs: list[list[int]] = [[] for _ in prompts]
        self.finish: list[str | None] = [None] * rows
        self.width = max(map(len, prompts.values()))
        pads = [self.width - len(prompt) for prompt in prompts.values()]
        ids = [[0] * pad + prompt for pad, prompt in zip(pads, prompts.values(), strict=True)]
        self.tokens = torch.tensor(ids, device=device)  # [rows, width], then [rows, 1]: the newest
        self.caches = model.new_caches(self.width + max_new_tokens - 1)
        places = torch.arange(self.width + max_new_tokens, device=device)[None]  # [1, places]
        self.positions, self.real = places, None
        if any(pads):
            start = torch.tensor(pads, device=device)[:, None]
            self.positions = (places - start).clamp(min=0)  # [rows, places]
            self.real = places >= start  # [rows, places]: not padding
        self.seen: Tensor | None = None
        if seen:
            self.seen = torch.zeros(rows, model.config.vocab_size, dtype=torch.bool, device=device)
            for row, prompt in enumerate(prompts.values()):
                self.seen[row, prompt] = True

    @property
    def done(self) -> bool:
        return all(self.finish)

    def place(self, step: int) -> tuple[int, int]:
        """The places [begin, end) of the tokens that pass number `step` works on."""
        return (0, self.width) if step == 0 else (self.width + step - 1, self.width + step)

    def mask(self, step: int) -> Tensor | None:
        """What those tokens may attend to, [rows, 1, seq, end] bool; None without padding: all that came before."""
        if self.real is None:
            return None
        _, end = self.place(step)
        keys = self.real[:, None, None, :end]
        if step > 0:
            return keys
        # A padding token attends to itself, or its softmax would have nothing to divide by.
        square = torch.ones(end, end, dtype=torch.bool, device=keys.device)
        return (keys & square.tril()) | square.tril().triu()


class _Job:
    """One batch of prompts of one dp coordinate."""

    def __init__(
        self,
        generator: Generator,
        prompts: dict[int, list[int]],
        max_new_tokens: int,
        sampling: Sampling,
        stop: Sequence[str],
        on_tokens: OnTokens | None,
    ) -> None:
        self.model = generator.model
        self.end_ids = generator.end_ids
        self.sampling = sampling
        self.stop = StopStrings(stop, generator.decode)
        self.on_tokens = on_tokens
        self.max_new_tokens = max_new_tokens
        self.prompts = prompts
        self.pp, self.rank = self.model.mesh.pp, self.model.mesh.coordinate("pp")
        self.group = self.model.mesh.group("pp")
        numbers = list(prompts)
        self.microbatches: list[_Microbatch | None] = []
        for i in range(self.pp):
            part = {n: prompts[n] for n in numbers[len(numbers) * i // self.pp : len(numbers) * (i + 1) // self.pp]}
            penalised = sampling.repetition_penalty != 1 and self.model.stage.last
            self.microbatches.append(_Microbatch(part, max_new_tokens, self.model, penalised) if part else None)

    def run(self, timing: Timing) -> list[Completion]:
        """Make all completions; adds to `timing`."""
        self.model.lay_out(max(len(each.numbers) for each in self.microbatches if each is not None))
        began = self._now()
        prefilled = began
        hidden: Tensor | None = None
        for t in range(self.pp * self.max_new_tokens + self.pp - 1):
            hidden = self._step(t, hidden)
            if t == 2 * self.pp - 2:
                prefilled = self._now()
            if all(microbatch is None or microbatch.done for microbatch in self.microbatches):
                break
        ended = self._now()
        made = [microbatch for microbatch in self.microbatches if microbatch is not None]
        timing.prefill_tokens += sum(map(len, self.prompts.values()))
        timing.prefill_s += prefilled - began
        timing.decode_tokens += sum(len(ids) - 1 for microbatch in made for ids in microbatch.outputs)
        timing.decode_s += ended - prefilled
        return [
            Completion(ids, finish or "length")
            for microbatch in made
            for ids, finish in zip(microbatch.outputs, microbatch.finish, strict=True)
        ]

    def _turn(self, t: int, rank: int) -> tuple[_Microbatch, int] | None:
        """The microbatch and the number of its pass that a pipeline rank works on at time t, if any."""
        turn = t - rank
        if not 0 <= turn < self.pp * self.max_new_tokens:
            return None
        microbatch = self.microbatches[turn % self.pp]
        return None if microbatch is None or microbatch.done else (microbatch, turn // self.pp)

    def _step(self, t: int, hidden: Tensor | None) -> Tensor | None:
        """This rank's turn at time t, on the hidden states that it got at the end of time t - 1; returns the next
        ones."""
        model, stage = self.model, self.model.stage
        mine, out, tokens = self._turn(t, self.rank), None, None
        if mine is not None:
            microbatch, step = mine
            begin, end = microbatch.place(step)
            x = microbatch.tokens if stage.first else hidden
            assert x is not None
            out = model.hidden(x, microbatch.positions[:, begin:end], microbatch.mask(step), microbatch.caches)
            assert microbatch.caches[0].filled == end, "the attention of this architecture did not use its cache"
            if stage.last:
                # All rows end at the same place, so the head sees one position.
                logits = model.logits(out[:, -1:])[:, 0]
                tokens = self.sampling.choose(logits, microbatch.seen, microbatch.numbers, step)
        if self.pp == 1:
            if mine is not None and tokens is not None:
                self._take(mine[0], tokens, mine[1])
            return None
        arrived = self._exchange(t, out)
        # The last stage tells all pp ranks the tokens that it made.
        made = self._turn(t, self.pp - 1)
        if made is not None:
            microbatch, step = made
            if tokens is None:
                tokens = torch.empty(len(microbatch.numbers), dtype=torch.int64, device=model.mesh.device)
            dist.broadcast(tokens, group=self.group, group_src=self.pp - 1)
            self._take(microbatch, tokens, step)
        return arrived

    def _exchange(self, t: int, out: Tensor | None) -> Tensor | None:
        """Send `out` to the next stage, and receive what the one before has made, in one go."""
        ops: list[dist.P2POp] = []
        if out is not None and not self.model.stage.last:
            sent = self.model.stage.border(out).contiguous()
            ops.append(dist.P2POp(dist.isend, sent, group=self.group, group_peer=self.rank + 1))
        arrived = None
        coming = self._turn(t, self.rank - 1) if self.rank > 0 else None
        if coming is not None:
            microbatch, step = coming
            begin, end = microbatch.place(step)
            arrived = self.model.border(len(microbatch.numbers), end - begin)
            ops.append(dist.P2POp(dist.irecv, arrived, group=self.group, group_peer=self.rank - 1))
        if ops:
            for work in dist.batch_isend_irecv(ops):
                work.wait()
        return arrived

    def _take(self, microbatch: _Microbatch, tokens: Tensor, step: int) -> None:
        """Add a token to each row that is not finished."""
        microbatch.tokens = tokens[:, None]
        if microbatch.seen is not None:
            microbatch.seen.scatter_(1, microbatch.tokens, True)
        for row, token in enumerate(tokens.tolist()):
            if microbatch.finish[row] is not None:
                continue
            ids = microbatch.outputs[row]
            ids.append(token)
            if token in self.end_ids:
                microbatch.finish[row] = "end"
            elif self.stop.reached(ids):
                microbatch.finish[row] = "stop"
            elif step + 1 == self.max_new_tokens:
                microbatch.finish[row] = "length"
            if self.on_tokens is not None:
                self.on_tokens(microbatch.numbers[row], [token], microbatch.finish[row] is not None)

    def _now(self) -> float:
        if self.model.mesh.device.type != "cpu":
            torch.accelerator.synchronize(self.model.mesh.device)
        return time.perf_counter()
