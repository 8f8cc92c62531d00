"""What a rank says that ran out of memory: the changes that are named follow from the config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.titanlike.runs import tiny
from titanlike import out_of_memory
from titanlike.hooks import HookError


def told(run_dir: Path, error: BaseException, world_size: int = 2, **more: Any) -> str:
    error = out_of_memory.told(error, tiny(run_dir, **more), world_size, 257, "forward_backward of step 3")
    assert error is None or "\n" not in str(error)
    return str(error)


def helpful(run_dir: Path, world_size: int = 2, **more: Any) -> list[str]:
    text = told(run_dir, torch.OutOfMemoryError("CUDA out of memory."), world_size, **more)
    return text.partition("what would help most: ")[2].split(" and ")


def test_a_real_allocation_that_no_machine_can_make(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55)
    text = told(tmp_path / "run", caught.value, **{"train.microbatch_size": 2, "train.seq_len": 512})
    assert text.startswith("out of memory in forward_backward of step 3 (DefaultCPUAllocator: can't allocate memory: ")
    assert "you tried to allocate 144115188075855872 bytes" in text
    assert "train.dtype = float32, train.microbatch_size = 2, train.seq_len = 512, mesh pp 1 x dp 2 x tp 1" in text
    assert "with 50,400 parameters, " in text
    assert text.endswith('what would help most: activation_checkpoint.mode = "full" and train.microbatch_size = 1')


def test_the_changes_follow_from_what_takes_the_memory(tmp_path: Path) -> None:
    run = tmp_path / "run"
    large = {"train.seq_len": 2048, "train.microbatch_size": 4}
    assert helpful(run, **large) == ['activation_checkpoint.mode = "full"', "train.microbatch_size = 2"]
    # Many parameters and a short batch: what is kept of each parameter has to be cut.
    wide = {"model.dim": 1024, "model.ffn_dim": 4096, "model.n_heads": 8, "train.seq_len": 8}
    assert helpful(run, **wide) == ["mesh.tp = 2 (on the same ranks, dp 1)", "twice as many ranks for dp (4)"]
    assert helpful(run, 1, **wide)[0] == "mesh.tp = 2 (on twice as many ranks)"


def test_nothing_is_proposed_that_the_config_has_already_or_forbids(tmp_path: Path) -> None:
    both = helpful(tmp_path / "run", **{"train.seq_len": 2048, "activation_checkpoint.mode": "full"})
    assert not any("microbatch" in change or "checkpoint" in change for change in both) and len(both) == 2
    compiled = {
        "compile.enable": True,
        "compile.scope": "stage",
        "mesh.tp": 2,
        "train.seq_len": 4096,
        "model.n_layers": 24,
    }
    assert 'activation_checkpoint.mode = "selective"' in helpful(tmp_path / "run", **compiled)
    assert "mesh.tp = 8 (on twice as many ranks)" not in helpful(tmp_path / "run", 4, **{"mesh.tp": 4})  # 4 heads


def test_cuda_says_it_in_one_line_and_through_what_torch_wraps_around_it(tmp_path: Path) -> None:
    """Symptom: a paragraph about fragmentation and environment variables."""
    cause = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.20 GiB is "
        "free. Process 1 has 77.9 GiB memory in use. Of the allocated memory 70 GiB is allocated by PyTorch ..."
    )
    wrapped = RuntimeError("a stage failed")
    wrapped.__cause__ = cause
    text = told(tmp_path / "run", wrapped)
    assert "of which 1.20 GiB is free) with" in text


def test_other_errors_and_those_of_hooks_stay_what_they_are(tmp_path: Path) -> None:
    assert told(tmp_path / "run", RuntimeError("shapes do not match")) == "None"
    hook = HookError("the hook x failed")
    hook.__cause__ = MemoryError()
    assert told(tmp_path / "run", hook) == "None"


def test_experts_are_shared_out_where_they_take_the_memory(tmp_path: Path) -> None:
    moe = {"model.preset": None, "model.architecture": "moe", "model.n_experts": 64, "model.dim": 256, "mesh.dp": 2}
    moe |= {"model.ffn_dim": 512, "model.vocab_size": 300, "model.n_heads": 4, "model.n_layers": 2}
    assert helpful(tmp_path / "run", **moe)[0] == "mesh.ep = 2"
    assert not any("ep" in change for change in helpful(tmp_path / "run", **moe, **{"mesh.ep": 2}))


def test_an_architecture_without_the_usual_sizes_is_told_of_too(tmp_path: Path) -> None:
    bigram = {"model.preset": None, "model.architecture": "tests.unusual_models:FailingLlama"}
    assert helpful(tmp_path / "run", **bigram)
