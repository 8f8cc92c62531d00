"""The benchmark beside torchtitan, which is no dependency: what is told where it is missing, and that it would train
the same model. The test that runs torchtitan itself needs it installed, and is skipped elsewhere."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from models.llama import LlamaConfig, make_context, rotate


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """benchmarks/mesh.py"""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import mesh

    return mesh


@pytest.mark.parametrize("installed", [None, "0.2.1"])
def test_that_torchtitan_is_missing_is_told_in_one_sentence(
    mesh: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    installed: str | None,
) -> None:
    """Symptom: a traceback from the import of a package that is no dependency, on every rank."""

    def version(name: str) -> str:
        if installed is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(sys, "argv", ["mesh.py", "--contenders", "titan-one", "titan-tp"])
    with pytest.raises(SystemExit) as end:
        mesh.main()
    assert end.value.code == 2
    why = {
        None: "torchtitan is not installed (pip install torchtitan==0.2.2)",
        "0.2.1": "torchtitan 0.2.1 is installed, and only 0.2.2 can be run here",
    }[installed]
    assert capsys.readouterr().err == f"titan-one, titan-tp: {why}, so it is left out.\n"


def test_what_cannot_be_compiled_is_left_out_alone(mesh: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _name: "0.2.2")
    assert list(mesh.left_out(mesh.DEFAULT, True)) == ["titan-tp"]
    assert mesh.left_out(mesh.DEFAULT, False) == {}


def test_rows_of_projections_change_places_for_interleaved_rotary_embeddings(mesh: ModuleType) -> None:
    """Symptom: losses of the two frameworks part though their weights are said to be the same."""
    from torchtitan_steps import interleaved

    config = LlamaConfig(vocab_size=8, dim=24, n_heads=3, n_layers=1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 24, generator=generator, dtype=torch.float64)
    weights = [torch.randn(24, 24, generator=generator, dtype=torch.float64) for _ in range(2)]
    context = make_context(config, x, None, None)

    def turned(heads: torch.Tensor) -> torch.Tensor:
        """element 2 i as the real part, 2 i + 1 as the imaginary part"""
        turns = torch.complex(context.cos, context.sin)[..., : config.head_dim // 2]
        return torch.view_as_real(torch.view_as_complex(heads.unflatten(-1, (-1, 2))) * turns).flatten(-2)

    q, k = (rotate((x @ weight.T).unflatten(-1, (3, 8)), context) for weight in weights)
    q_theirs, k_theirs = (turned((x @ interleaved(weight, 8).T).unflatten(-1, (3, 8))) for weight in weights)
    torch.testing.assert_close(
        torch.einsum("bqhd,bkhd->bhqk", q_theirs, k_theirs), torch.einsum("bqhd,bkhd->bhqk", q, k), rtol=0, atol=1e-12
    )


@pytest.mark.slow
@pytest.mark.parametrize("style", ["one", "ddp", "fsdp", "tp", "pp"])
def test_torchtitan_has_our_loss(mesh: ModuleType, style: str) -> None:
    """Symptom: a comparison of speeds of two models that are not the same. Two steps, so that an optimizer's step and
    gradients are part of it."""
    from contenders import Contender
    from steps import titanlike_steps
    from torchtitan_steps import missing, torchtitan_steps

    if (why := missing()) is not None:
        pytest.skip(why)

    keys = {"model.preset": "debug", "model.vocab_size": 512, "train.seq_len": 32, "train.global_batch_size": 4}
    keys |= {"train.steps": 10, "optimizer.weight_decay": 0.0, "compile.enable": False}
    micro = {"one": 4, "tp": 4, "ddp": 2, "fsdp": 2, "pp": 1}[style]
    ours = Contender("ours", 1, titanlike_steps, keys | {"train.microbatch_size": 4})
    theirs = Contender(
        style, 1 if style == "one" else 2, torchtitan_steps, keys | {"train.microbatch_size": micro, "style": style}
    )
    try:
        losses = []
        for contender in (ours, theirs):
            contender.ready()
            contender.seconds(steps=2)
            losses.append(contender.loss())
    finally:
        ours.end()
        theirs.end()
    # Clipping differs where a framework scales gradients otherwise; Adam's step does not.
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
