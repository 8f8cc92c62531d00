"""The tensor-parallel plan: checked against the model, and applied with all tp ranks in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from models.llama import Llama, LlamaConfig
from parallelize.llama import tensor_plan
from parallelize.tensor import Replicated, TensorPlan, check_plan, covered_by

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


def test_a_plan_that_misses_a_parameter_is_refused() -> None:
    """Symptom: a layer that a table forgot is replicated without a word, and its gradient is wrong."""
    without = plan()
    del without["layers.*.feed_forward.w3"]
    with pytest.raises(ValueError) as caught:
        check_plan(plain(), without)
    assert "no entry covers layers.0.feed_forward.w3.weight" in str(caught.value)
    assert "no entry covers layers.1.feed_forward.w3.weight" in str(caught.value)


def test_a_plan_for_what_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="layers.*.attention.wz matches no module"):
        check_plan(plain(), plan(**{"layers.*.attention.wz": ColwiseParallel()}))


def test_a_module_that_two_entries_match_is_refused() -> None:
    """Symptom: which of two styles is applied depends on the order of a dict."""
    with pytest.raises(ValueError) as caught:
        check_plan(plain(), plan(**{"layers.0.ffn_norm": Replicated()}))
    assert "layers.0.ffn_norm is matched by layers.*.ffn_norm, layers.0.ffn_norm" in str(caught.value)


def test_a_star_is_one_part_of_a_name() -> None:
    """Symptom: `layers.*` matches everything below a layer, for fnmatch knows no dots."""
    entries: TensorPlan = {"layers.*": Replicated(), "*": Replicated(), "layers.*.attention.w?": Replicated()}
    assert covered_by(entries, "layers.3") == ["layers.*"]
    assert covered_by(entries, "layers.3.attention.wq") == ["layers.*.attention.w?"]
    assert covered_by(entries, "norm") == ["*"]
