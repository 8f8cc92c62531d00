"""Generated text: the same on every mesh, with and without the cache, alone and in a batch."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from models.llama import LlamaConfig, RopeScaling
from tests.ranks import run_ranks
from tests.titanlike.generate.helpers import (
    CONFIG,
    PROMPTS,
    QWEN3,
    generate,
    greedy_without_cache,
    model_on,
    plain_model,
)
from titanlike.errors import UserError
from titanlike.generate.generator import Completion, Generator
from titanlike.generate.sampling import Sampling
from titanlike.mesh import Mesh

DRAWN = Sampling(temperature=0.9, top_k=40, top_p=0.95, repetition_penalty=1.3, seed=5)


def _runs(meshes: list[tuple[int, int, int]], settings: list[dict[str, Any]]) -> list[list[Completion]]:
    return [generate(mesh, **each) for mesh in meshes for each in settings]


def test_greedy_equals_the_plain_model_without_a_cache() -> None:
    """Padded rows attend to padding, positions are off by the padding, or the cache is read at the wrong place: text
    goes wrong after the first token, or only in a batch."""
    model = plain_model()
    wanted = [greedy_without_cache(prompt, 12, model) for prompt in PROMPTS]
    assert len({tuple(ids) for ids in wanted}) == len(PROMPTS)  # the model does listen to its prompt
    (made,) = run_ranks(1, _runs, [(1, 1, 1)], [{}, {"dtype": torch.float32}, {"batch_size": 2}, {"count": 1}])
    for run in made:
        assert all(completion.finish == "length" for completion in run)
    assert [each.ids for each in made[0]] == wanted
    assert [each.ids for each in made[1]] == wanted
    assert [each.ids for each in made[2]] == wanted
    assert [each.ids for each in made[3]] == [ids[:1] for ids in wanted]


@pytest.mark.parametrize("config", ["tied", "scaled", "one kv head", "qwen3"])
def test_greedy_equals_the_plain_model_for_variants(config: str) -> None:
    scaling = RopeScaling(factor=4.0, original_max_position_embeddings=8)
    changes: dict[str, dict[str, Any]] = {
        "tied": {"tie_embeddings": True, "attention_bias": True, "mlp_bias": True},
        "scaled": {"rope_scaling": scaling},
        "one kv head": {"n_kv_heads": 1, "head_dim": 12},
    }
    variant = QWEN3 if config == "qwen3" else dataclasses.replace(CONFIG, **changes[config])
    model = plain_model(variant)
    wanted = [greedy_without_cache(prompt, 12, model) for prompt in PROMPTS]
    # With one prompt, float32 takes the layout for single rows.
    settings = [{"config": variant, "dtype": torch.float32}]
    settings += [{"config": variant, "dtype": torch.float32, "batch_size": 1}]
    for made in run_ranks(1, _runs, [(1, 1, 1)], settings)[0]:
        assert [each.ids for each in made] == wanted


# A vocabulary and a feed-forward that tp does not divide.
ODD = dataclasses.replace(
    CONFIG, tie_embeddings=True, vocab_size=101, ffn_dim=50, attention_bias=True, mlp_bias=True
)  # fmt: skip

SETTINGS: list[dict[str, Any]] = [
    {},
    {"sampling": DRAWN},
    {"prompts": PROMPTS[:1], "sampling": DRAWN},  # fewer prompts than pp or dp has ranks
    {"end_ids": [3, 10, 20, 30, 60, 77], "stop": ["AB", "Q", "ZX"], "count": 30},
    {"config": ODD, "batch_size": 2},
]


def _same_on(world: int, meshes: list[tuple[int, int, int]]) -> None:
    wanted = run_ranks(1, _runs, [(1, 1, 1)], SETTINGS)[0]
    assert wanted[0] != wanted[1]
    finishes = {each.finish for each in wanted[3]}
    assert len(finishes) > 1, "rows should end at different times"
    for rank in run_ranks(world, _runs, meshes, SETTINGS):
        assert rank == wanted * len(meshes)


def test_text_is_the_same_on_two_ranks() -> None:
    """Sampling with a seed gives another text on another mesh, or a rank that has its own idea of which rows are
    finished hangs."""
    _same_on(2, [(1, 1, 2), (2, 1, 1), (1, 2, 1)])


def test_text_is_the_same_on_four_ranks() -> None:
    """More tp ranks than kv heads; a pipeline with more stages than prompts."""
    _same_on(4, [(1, 1, 4), (4, 1, 1), (2, 1, 2)])


@pytest.mark.slow
def test_text_is_the_same_on_eight_ranks() -> None:
    _same_on(8, [(2, 2, 2), (4, 2, 1), (2, 1, 4)])


def _cache_shapes() -> list[tuple[int, ...]]:
    model = model_on(Mesh(1, 1, 2, torch.device("cpu")))
    caches = model.new_caches(10)
    with torch.no_grad():
        model.hidden(torch.tensor([[1, 2, 3]]), torch.arange(3)[None], None, caches)
    return [tuple(cache.keys.shape) for cache in caches if cache.keys is not None]


def test_the_cache_is_split_by_kv_head() -> None:
    assert run_ranks(2, _cache_shapes) == [[(1, 1, 10, 8)] * 4] * 2


def _logits_both_ways(tp: int, config: LlamaConfig) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(with DTensors, with local tensors, those of the plain model)"""
    model = model_on(Mesh(1, 1, tp, torch.device("cpu")), config)
    tokens = torch.tensor([[1, 2, 3, 96]])

    def logits() -> torch.Tensor:
        with torch.no_grad():
            return model.logits(model.hidden(tokens, torch.arange(4)[None], None))

    before = logits()
    model.go_local()
    assert not any(isinstance(parameter, DTensor) for parameter in model.stage.parameters())
    return before, logits(), plain_model(config)(tokens)


def test_local_tensors_compute_what_dtensors_do() -> None:
    for tp, config in itertools.product((2, 4), (ODD, QWEN3)):
        for dtensors, local, plain in run_ranks(tp, _logits_both_ways, tp, config):
            torch.testing.assert_close(dtensors, plain, rtol=1e-10, atol=1e-10)
            torch.testing.assert_close(local, plain, rtol=1e-10, atol=1e-10)


def _events() -> list[tuple[int, list[int], bool]]:
    heard: list[tuple[int, list[int], bool]] = []
    made = generate((1, 1, 1), count=6, end_ids=[10, 60], on_tokens=lambda *event: heard.append(event))
    for number, completion in enumerate(made):
        mine = [event for event in heard if event[0] == number]
        assert [i for _, ids, _ in mine for i in ids] == completion.ids
        assert [finished for *_, finished in mine] == [False] * (len(mine) - 1) + [True]
    return heard


def test_tokens_are_heard_as_they_are_made() -> None:
    heard = run_ranks(1, _events)[0]
    assert [number for number, *_ in heard[:5]] == [0, 1, 2, 3, 4]  # one token each, not one text after the other


def _timing() -> Any:
    generator = Generator(model_on(Mesh(1, 2, 1, torch.device("cpu"))), str, [], 64)
    return generator.generate(PROMPTS, 5)[1]


def test_tokens_are_counted_over_all_dp_ranks() -> None:
    for timing in run_ranks(2, _timing):
        assert timing.prefill_tokens == sum(map(len, PROMPTS))
        assert timing.decode_tokens == len(PROMPTS) * 4
        assert timing.prefill_s > 0 and timing.decode_s > 0


def _refused(prompts: list[list[int]], count: int) -> str:
    with pytest.raises(UserError) as caught:
        generate((1, 1, 1), prompts=prompts, count=count)
    return str(caught.value)


def test_prompts_that_cannot_be_continued_are_refused_by_number() -> None:
    wrong = [([[1], []], 5), ([[97]], 5), ([[1] * 64], 1), ([[1] * 60], 5), ([[1]], 0)]
    said = [run_ranks(1, _refused, *each)[0] for each in wrong]
    assert said[0] == "prompt 2 has no tokens"
    assert said[1] == "prompt 1 has the token 97, and the model knows ids below 97"
    assert said[2].startswith("prompt 1 has 64 tokens, and a text may have 64")
    assert said[3].endswith("ask for at most 4")
    assert said[4] == "max-new-tokens must be 1 or more, not 0"
