"""Keys that are for CUDA alone: what they set, and where they are refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from titanlike.config import Config, load_config
from titanlike.errors import UserError
from titanlike.mesh import set_tf32
from titanlike.verify.shrink import shrink

TP = {"mesh.tp": 2, "mesh.dp": 1, "compile.enable": True}


@pytest.fixture(autouse=True)
def _precision_as_it_was() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def config(**changes: Any) -> Config:
    return load_config(None, {key.replace("__", "."): value for key, value in changes.items()})


def refusal(world_size: int, keys: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        load_config(None, keys).validate_for(world_size)
    return str(caught.value)


# -- TF32 --------------------------------------------------------------------------------------------------------------


def test_float32_products_are_float32_unless_tf32_is_asked_for() -> None:
    """Symptom: a container's environment variable turns TF32 on, and the run differs from that on another machine."""
    assert not config().train.tf32
    torch.set_float32_matmul_precision("high")  # as the variable does
    set_tf32(torch.device("cuda", 0), False)
    assert torch.get_float32_matmul_precision() == "highest"
    set_tf32(torch.device("cuda", 0), True)
    assert torch.get_float32_matmul_precision() == "high"
    assert torch.backends.cuda.matmul.allow_tf32


def test_on_cpu_the_precision_stays_what_it_is() -> None:
    """On some CPUs "high" means TF32 too."""
    for before in ("highest", "high"):
        torch.set_float32_matmul_precision(before)
        set_tf32(torch.device("cpu"), before == "highest")
        assert torch.get_float32_matmul_precision() == before


def test_tf32_is_refused_where_it_changes_nothing() -> None:
    """Symptom: a setting is believed to have an effect."""
    assert refusal(1, {"train.tf32": True, "run.device": "cpu"}) == (
        "train.tf32 = true needs CUDA, and the ranks of this run compute on CPU: take it out"
    )
    sentence = refusal(1, {"train.tf32": True, "train.dtype": "bfloat16", "run.device": "cuda"})
    assert sentence.startswith('train.tf32 has no effect with train.dtype = "bfloat16"')
    load_config(None, {"train.tf32": True, "run.device": "cuda"}).validate_for(1)


# -- asynchronous tensor parallelism -----------------------------------------------------------------------------------


def test_async_tp_is_refused_where_it_changes_nothing() -> None:
    """Symptom: the same."""
    cuda = {"compile.async_tp": True, "run.device": "cuda"}
    for keys, reason in (
        ({"mesh.tp": 1, "compile.enable": True}, "mesh.tp = 1"),
        ({**TP, "mesh.sequence_parallel": False}, "mesh.sequence_parallel = false"),
        ({**TP, "compile.enable": False}, "compile.enable = false"),
    ):
        assert refusal(keys["mesh.tp"], cuda | keys).startswith(f"compile.async_tp has no effect with {reason}: take")


def test_async_tp_is_refused_without_devices_that_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: the run starts, and nothing is asynchronous, or it fails in the middle of a compilation."""
    keys = TP | {"compile.async_tp": True}
    needs = "compile.async_tp = true needs CUDA devices that reach each other's memory, and "
    assert refusal(2, keys | {"run.device": "cpu"}) == f"{needs}the ranks of this run compute on CPU: take it out"
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert refusal(2, keys | {"run.device": "cuda"}) == f"{needs}torch {torch.__version__} has no NCCL: take it out"
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    load_config(None, keys | {"run.device": "cuda"}).validate_for(2)


def test_a_config_for_gpus_can_be_verified_on_cpu_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: verify refuses the config that it has just made, for its ranks are on CPU."""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    for keys in ({"train.tf32": True}, TP | {"compile.async_tp": True}):
        asked = load_config(None, {"run.device": "cuda", "mesh.dp": 1, "train.tf32": False} | keys)
        small = shrink(asked, 256).config
        assert not small.train.tf32 and not small.compile.async_tp
        assert small.run.device == "cpu"
