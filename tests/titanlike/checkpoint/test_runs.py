"""Whole runs: the trained state of any mesh goes on with any other, and a run starts from weights alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.titanlike.runs import (
    FLOAT64,
    checkpoint,
    checkpoints,
    columns,
    digest,
    meta,
    run_on,
    runs,
    tiny,
    with_checkpoint,
)
from titanlike.checkpoint import tools

# pp, dp, tp
TWO_RANKS = [(1, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 1)]
ALL = [*TWO_RANKS, (1, 4, 1), (1, 2, 2), (2, 1, 2), (2, 2, 1), (1, 1, 4), (4, 1, 1), (2, 2, 2)]
FOUR_LAYERS = {**FLOAT64, "model.n_layers": 4, "checkpoint.keep_last": 0}


def degrees(mesh: tuple[int, int, int]) -> dict[str, int]:
    return dict(zip(("mesh.pp", "mesh.dp", "mesh.tp"), mesh, strict=True))


def name_of(mesh: tuple[int, int, int]) -> str:
    return "-".join(map(str, mesh))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[int, int, int]], Path]:
    """The run folder of a mesh that has trained two steps (each made once), and "whole": three steps on one rank."""
    folder = tmp_path_factory.mktemp("trained")

    def make(mesh: tuple[int, int, int]) -> Path:
        if not (folder / "whole").exists():
            (seen,) = run_on(1, folder / "whole", **FOUR_LAYERS, **{"train.steps": 3})
            assert seen.error is None
        if not (folder / name_of(mesh)).exists():
            ranks = mesh[0] * mesh[1] * mesh[2]
            seen = run_on(ranks, folder / name_of(mesh), **FOUR_LAYERS, **degrees(mesh), **{"train.steps": 2})[0]
            assert seen.error is None, (mesh, seen.error)
        return folder / name_of(mesh)

    return make


def go_on(sources: list[Path], target: tuple[int, int, int], folder: Path) -> None:
    """One more step on the target mesh from each source: loaded to the last bit, and the step that one rank takes."""
    reference = columns(sources[0].parent / "whole")[3]
    parts = [with_checkpoint(source, 2, folder / f"{source.name}-to-{name_of(target)}") for source in sources]
    more = {**FOUR_LAYERS, **degrees(target), "train.steps": 3}
    ranks = target[0] * target[1] * target[2]
    (main, *_) = run_ranks(ranks, runs, [tiny(part, **more) for part in parts], timeout=500.0)
    for part, seen in zip(parts, main, strict=True):
        assert seen.error is None, (part.name, seen.error)
        # The digest of what was loaded, weights and moments, is that of what was saved.
        verified = f"step 2, digest {digest(part, 2)} verified"
        assert any(verified in line for line in seen.said), (part.name, seen.said)
        assert columns(part)[3] == pytest.approx(reference, rel=1e-10, abs=0), part.name


@pytest.mark.parametrize("target", TWO_RANKS, ids=name_of)
def test_trained_state_goes_on_with_any_mesh_of_two_ranks(
    target: tuple[int, int, int], trained: Callable[[tuple[int, int, int]], Path], tmp_path: Path
) -> None:
    """nanotron #263, DeepSpeed #7599, torchtitan #848."""
    go_on([trained(mesh) for mesh in TWO_RANKS], target, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("target", ALL, ids=name_of)
def test_trained_state_goes_on_with_any_mesh(
    target: tuple[int, int, int], trained: Callable[[tuple[int, int, int]], Path], tmp_path: Path
) -> None:
    """All pairs of the eleven meshes, over the targets."""
    go_on([trained(mesh) for mesh in ALL], target, tmp_path)


def weights_digest(folder: Path) -> int:
    values = tools.compute_digests(tools.open_checkpoint(folder)[2])
    return sum(value for name, value in values.items() if name.startswith("model.")) % 2**64


@pytest.mark.parametrize("source", ["run", "step", "hugging face", "imported"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_run_starts_from_weights_alone(tied: bool, source: str, tmp_path: Path) -> None:
    """Step 0 has the source's weights to the bit, and new moments; pp 2, so that there are two copies of a tied one."""
    from titanlike.checkpoint.hf_import import import_hf

    more: dict[str, Any] = {"model.tie_embeddings": tied, "train.steps": 2}
    run_on(2, tmp_path / "source", **{"mesh.tp": 2}, **more)
    paths = {
        "run": tmp_path / "source",
        "step": checkpoint(tmp_path / "source", 2),
        "hugging face": tmp_path / "hf",
        "imported": tmp_path / "imported",
    }
    if source in ("hugging face", "imported"):
        tools.export(tmp_path / "source", tmp_path / "hf", "float32")
    if source == "imported":
        import_hf(tmp_path / "hf", tmp_path / "imported")
    new = {"checkpoint.init_from": str(paths[source]), "checkpoint.save_initial": True, "mesh.pp": 2}
    (main, _) = run_on(2, tmp_path / "new", **more, **new)
    assert main.error is None and any("weights from" in line and "fresh optimizer" in line for line in main.said)
    assert meta(tmp_path / "new", 0)["tokens"] == 0
    assert weights_digest(checkpoint(tmp_path / "new", 0)) == weights_digest(checkpoint(tmp_path / "source", 2))
    index = tools.open_checkpoint(checkpoint(tmp_path / "new", 0))[2]
    assert not any(index.read_tensor(name).any() for name in index.tensors if name.startswith("optimizer."))
    assert columns(tmp_path / "new")[1][0] < columns(tmp_path / "source")[1][0], "it does not start where that ended"


def test_a_resume_is_preferred_to_init_from_and_says_so(tmp_path: Path) -> None:
    run_on(1, tmp_path / "source", **{"train.steps": 1})
    run_on(1, tmp_path / "run", **{"train.steps": 2})
    (seen,) = run_on(1, tmp_path / "run", **{"train.steps": 3, "checkpoint.init_from": str(tmp_path / "source")})
    assert seen.error is None and list(columns(tmp_path / "run")) == [1, 2, 3]
    said = "\n".join(seen.said)
    assert "resumed from" in said and "was not used, because" in said


def test_init_from_something_else_is_one_sentence(tmp_path: Path) -> None:
    for path, said in (("nowhere", "does not exist"), (".", "neither a checkpoint folder")):
        (seen,) = run_on(1, tmp_path / "run", **{"checkpoint.init_from": str(tmp_path / path)})
        assert seen.error is not None and said in seen.error[1], seen.error


def test_a_damaged_newest_checkpoint_is_named_and_the_run_goes_on_from_the_one_before(tmp_path: Path) -> None:
    every = {"checkpoint.interval": 1, "checkpoint.keep_last": 0}
    run_on(2, tmp_path / "whole", **every, **{"train.steps": 3})
    run_on(2, tmp_path / "run", **every, **{"train.steps": 2})
    path = checkpoint(tmp_path / "run", 2) / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 16
    path.write_bytes(data)
    (main, _) = run_on(2, tmp_path / "run", **every, **{"train.steps": 3})
    said = "\n".join(main.said)
    assert "damaged checkpoint" in said and str(path) in said and "step 1, digest" in said
    assert columns(tmp_path / "run") == columns(tmp_path / "whole")
    assert digest(tmp_path / "run", 3) == digest(tmp_path / "whole", 3)
    assert checkpoints(tmp_path / "run") == ["step-00000001", "step-00000002", "step-00000003"]
