"""The tensor-parallel plan: checked against the model, and applied with all tp ranks in one process."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from models.llama import Llama, LlamaConfig
from parallelize.llama import tensor_plan
from parallelize.local import is_known
from parallelize.tensor import Replicated, TensorPlan, VocabParallelEmbedding, check_plan, covered_by

CONFIG = LlamaConfig(vocab_size=67, dim=16, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=24)


def plain(config: LlamaConfig = CONFIG) -> nn.Module:
    with torch.device("meta"):
        return Llama(config)


def plan(**changes: Any) -> TensorPlan:
    return tensor_plan(CONFIG, 2, True) | changes


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("tp", [2, 4, 8])
def test_the_plan_of_llama_covers_llama(tp: int, sequence_parallel: bool) -> None:
    config = LlamaConfig(vocab_size=67, dim=32, n_layers=12, n_heads=8, n_kv_heads=2, ffn_dim=24, attention_bias=True)
    check_plan(plain(config), tensor_plan(config, tp, sequence_parallel))


def problems(plan: TensorPlan, config: LlamaConfig = CONFIG) -> str:
    with pytest.raises(ValueError) as caught:
        check_plan(plain(config), plan)
    return str(caught.value)


def test_a_plan_that_misses_parameters_is_refused_with_all_of_them() -> None:
    """Symptom: a layer that a table forgot is replicated without a word, and its gradient is wrong."""
    without = plan()
    for name in ("layers.*.feed_forward.w3", "norm"):
        del without[name]
    assert problems(without) == ("no entry covers layers.*.feed_forward.w3.weight; no entry covers norm.weight")
    only_one_layer = plan(**{"layers.1.feed_forward.w3": without["layers.*.feed_forward.w1"]})
    del only_one_layer["layers.*.feed_forward.w3"]
    assert problems(only_one_layer) == "no entry covers layers.0.feed_forward.w3.weight"
    biased = dataclasses.replace(CONFIG, mlp_bias=True)
    assert "layers.*.feed_forward.w3.weight, layers.*.feed_forward.w3.bias" in problems(without, biased)


def test_a_plan_for_what_is_not_there_is_refused() -> None:
    """Symptom: a misspelt name is passed over, and the module that was meant is not cut."""
    more = {"layers.*.attention.wz": ColwiseParallel(), "layers.9.ffn_norm": Replicated()}
    assert problems(plan(**more)) == "layers.*.attention.wz matches no module; layers.9.ffn_norm matches no module"


def test_a_module_that_two_entries_match_is_refused() -> None:
    """Symptom: which of two styles is applied depends on the order of a dict."""
    assert problems(plan(**{"layers.0.ffn_norm": Replicated()})) == (
        "layers.0.ffn_norm is matched by layers.*.ffn_norm, layers.0.ffn_norm"
    )


def test_an_entry_for_parts_of_what_another_makes_whole_is_refused() -> None:
    """Symptom: a parameter that is sharded twice fails deep in DTensor, or not at all."""
    said = problems(plan(**{"layers.*.feed_forward": Replicated()}))
    assert said.count("layers.*.feed_forward, all of which Replicated makes whole") == 3
    assert "layers.*.feed_forward.w2 is matched by layers.*.feed_forward.w2, and is part of" in said


def test_a_style_that_cannot_cut_its_module_is_refused() -> None:
    """Symptom: NotImplementedError, or an assertion, out of torch on each rank."""
    said = problems(plan(**{"layers.*.attention": ColwiseParallel(), "norm": VocabParallelEmbedding(Replicate())}))
    assert "layers.*.attention is a Attention, and ColwiseParallel cuts a Linear or Embedding" in said
    assert "norm is a RMSNorm, and VocabParallelEmbedding cuts a Embedding" in said
    wrong: Any = {"norm": None}
    assert problems(plan(**wrong)) == "norm has None, which is no ParallelStyle"


def test_a_tied_weight_that_is_cut_in_two_ways_is_refused() -> None:
    """Symptom: the embedding's gradient is added to other rows than its own."""
    tied = dataclasses.replace(CONFIG, tie_embeddings=True)
    check_plan(plain(tied), plan())
    assert problems(plan(output=RowwiseParallel()), tied) == (
        "tok_embeddings and output share a weight, but are cut along dim 0 and 1 of it"
    )


@pytest.mark.parametrize(
    "style",
    [
        ColwiseParallel(output_layouts=Replicate()),
        ColwiseParallel(input_layouts=Shard(-1)),
        RowwiseParallel(input_layouts=Replicate()),
        RowwiseParallel(output_layouts=Shard(1)),
        PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        PrepareModuleInput(input_kwarg_layouts={"x": Shard(1)}, desired_input_kwarg_layouts={"x": Replicate()}),
    ],
)
def test_a_plan_with_layouts_of_its_own_is_not_written_out_for_inference(style: Any) -> None:
    """Symptom: another architecture generates text of parts that were never gathered."""
    usual = tensor_plan(CONFIG, 2, False)
    assert is_known(usual)
    assert not is_known(usual | {"layers.*.attention.wq": style})
    assert not is_known(tensor_plan(CONFIG, 2, True))


def test_a_star_is_one_part_of_a_name() -> None:
    """Symptom: `layers.*` matches everything below a layer, for fnmatch knows no dots."""
    entries: TensorPlan = {"layers.*": Replicated(), "*": Replicated(), "layers.*.attention.w?": Replicated()}
    assert covered_by(entries, "layers.3") == ["layers.*"]
    assert covered_by(entries, "layers.3.attention.wq") == ["layers.*.attention.w?"]
    assert covered_by(entries, "norm") == ["*"]
