"""A model on any mesh as a model of lm-eval (EleutherAI's lm-evaluation-harness), and its tasks run with it.

Every rank runs the same tasks on the same documents, in step: lm-eval is told that it is alone. What lm-eval's own
transformers backend would do with the exported weights is done here too: the prefix of an empty context, truncation
from the left, where a continuation begins. So the numbers are the same.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from titanlike.config_keys import nearest
from titanlike.errors import UserError
from titanlike.generate.generator import Generator
from titanlike.generate.sampling import Sampling
from titanlike.generate.scoring import score
from titanlike.generate.source import Source, encoder_for, load_model
from titanlike.generate.text import StopStrings
from titanlike.mesh import Mesh
from titanlike.tokenizer import Tokenizer

try:
    from lm_eval.api.model import TemplateLM
except ImportError:  # an optional package: run_tasks says so
    TemplateLM = None

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

DEFAULT_NEW_TOKENS = 256
"""What lm-eval takes where a task does not say."""


_Base: Any = TemplateLM or object


class MeshLM(_Base):
    """The model of a source, in lm-eval's terms. All ranks of the mesh make one and ask it the same."""

    def __init__(self, source: Source, mesh: Mesh, dtype: torch.dtype, tokenizer: Tokenizer, batch_size: int) -> None:
        super().__init__()
        self._model = load_model(source, mesh, dtype)
        end_ids = source.end_ids or (tokenizer.end_id,)
        self._generator = Generator(self._model, tokenizer.decode, end_ids, source.longest, source.limit)
        self._tokenizer = tokenizer
        self._encode = encoder_for(source, tokenizer)
        self._batch_size = batch_size
        self.max_length = source.longest

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.end_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The ids of a text; False: without special tokens, else as prompts are encoded."""
        if add_special_tokens is False:
            return self._tokenizer.encode(string)
        return self._encode(string) if string else []

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        rows = []
        for _, context, continuation in requests:
            rows.append(((context + continuation)[-(self.max_length + 1) :], len(continuation)))
            if len(continuation) > self.max_length:
                raise UserError(
                    f"a continuation of {len(continuation)} tokens is longer than the {self.max_length} of the model"
                )
        return score(self._model, rows, self._batch_size)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each whole text, in windows that don't overlap, the first after the end token."""
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        rows, owners = [], []
        for number, request in enumerate(requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, windows):
                rows.append(([*context, *continuation], len(continuation)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, score(self._model, rows, self._batch_size), strict=True):
            totals[owner] += value
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text that follows each context, up to a stop string of its request."""
        texts = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        arguments: list[Any] = [request.args for request in requests]  # (context, settings)
        for number, (_, settings) in enumerate(arguments):
            groups.setdefault(json.dumps(settings, sort_keys=True, default=str), []).append(number)
        for numbers in groups.values():
            stop, count, sampling = _settings(arguments[numbers[0]][1])
            room = self.max_length - count
            if room < 1:
                raise UserError(f"a task asks for {count} new tokens, but the model takes {self.max_length} in all")
            prompts = [self.tok_encode(arguments[n][0])[-room:] or [self.prefix_token_id] for n in numbers]
            made, _ = self._generator.generate(prompts, count, sampling, stop, self._batch_size)
            stops = StopStrings(stop, self._tokenizer.decode)
            for number, completion in zip(numbers, made, strict=True):
                texts[number] = stops.cut(self._tokenizer.decode(completion.ids))
        return texts


def _settings(given: dict[str, Any]) -> tuple[list[str], int, Sampling]:
    """(stop strings, new tokens, sampling) of a request's generation arguments."""
    until = given.get("until") or []
    count = given.get("max_gen_toks") or given.get("max_new_tokens") or given.get("max_tokens") or DEFAULT_NEW_TOKENS
    temperature = float(given.get("temperature") or 0.0)
    if given.get("do_sample") is False or temperature == 0:
        sampling = Sampling()
    else:
        top_k, top_p = given.get("top_k"), given.get("top_p")
        sampling = Sampling(temperature, int(top_k) if top_k else None, float(top_p) if top_p else None)
    return [until] if isinstance(until, str) else list(until), int(count), sampling


def run_tasks(
    source: Source,
    mesh: Mesh,
    dtype: torch.dtype,
    tokenizer: Tokenizer,
    *,
    tasks: Sequence[str],
    include_path: str | None,
    limit: int | None,
    batch_size: int,
) -> dict[str, dict[str, Any]]:
    """Metric -> value of each task, as lm-eval names them. All ranks call it and get the same.

    Raises:
        UserError: lm-eval is not installed, or does not know a task.
    """
    if TemplateLM is None:
        raise UserError("--tasks needs lm-eval, which is not installed: pip install 'titanlike[eval]'")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    if not mesh.is_main:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
    # Only where it is needed: there are thousands of definitions to read.
    manager = TaskManager(include_path=include_path, include_defaults=False) if include_path else None
    if manager is None or any(task not in manager.all_tasks for task in tasks):
        manager = TaskManager(include_path=include_path)
    for task in tasks:
        if task not in manager.all_tasks:
            found = nearest(task, manager.all_tasks)
            hint = "" if found is None else f": the nearest is {found!r}"
            raise UserError(f"--tasks: lm-eval knows no task {task!r}{hint}")
    lm = MeshLM(source, mesh, dtype, tokenizer, batch_size)
    random.seed(0)
    found = simple_evaluate(
        model=lm,
        tasks=list(tasks),
        limit=limit,
        task_manager=manager,
        log_samples=False,
        bootstrap_iters=0,
        verbosity=None,
    )
    return {
        task: {
            name.removesuffix(",none"): value
            for name, value in values.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and not name.startswith("sample_len")
        }
        for task, values in (found or {}).get("results", {}).items()
    }
