"""Text during training: the same on every mesh, and the training is none the wiser."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.titanlike.runs import FLOAT64, columns, run, tiny
from titanlike.config import load_config
from titanlike.errors import UserError
from titanlike.metrics import files

GENERATE: dict[str, Any] = {
    "validation.generate.prompts": ["12 times ", "", "Is"],
    "validation.generate.interval": 2,
    "validation.generate.max_new_tokens": 8,
}


def _texts(run_dir: Path) -> dict[int, list[str]]:
    return {each["step"]: each["texts"] for each in files.read_events(run_dir) if each["event"] == "samples"}


def test_texts_are_the_same_on_every_mesh(tmp_path: Path) -> None:
    """The draws depend on the mesh; a pipeline whose ranks hold several stages uses another way than the cache."""
    meshes: dict[str, dict[str, Any]] = {
        "alone": {},
        "tp": {"mesh.tp": 2},
        "pp": {"mesh.pp": 2},
        "dp": {"mesh.dp": 2},
        "interleaved": {"mesh.pp": 2, "pipeline.schedule": "interleaved_1f1b", "model.n_layers": 4},
        "alone of four layers": {"model.n_layers": 4},
    }
    for name, mesh in meshes.items():
        seen = run_ranks(
            1 if name.startswith("alone") else 2, run, tiny(tmp_path / name, **mesh, **FLOAT64, **GENERATE)
        )
        assert all(each.error is None for each in seen), seen[0].error
    told = {name: _texts(tmp_path / name) for name in meshes}
    assert list(told["alone"]) == [2, 4]
    assert told["alone"][2] != told["alone"][4]
    assert [text.startswith(prompt) for text, prompt in zip(told["alone"][4], ("12 times ", "", "Is"), strict=True)]
    assert told["tp"] == told["pp"] == told["dp"] == told["alone"]
    assert told["interleaved"] == told["alone of four layers"]


def test_the_training_does_not_notice(tmp_path: Path) -> None:
    """Weights laid out anew, gradients turned off or a generator moved on by the sampling."""
    more = {"train.microbatch_size": 2, "metrics.tensorboard": True}
    (with_texts,) = run_ranks(1, run, tiny(tmp_path / "with", **more, **GENERATE))
    run_ranks(1, run, tiny(tmp_path / "without", **more))
    assert columns(tmp_path / "with") == columns(tmp_path / "without")
    assert any(line.startswith("text after step 2:\n12 times ") for line in with_texts.said)
    (events,) = (tmp_path / "with" / "tensorboard").iterdir()
    assert b"samples" in events.read_bytes() and b"    12 times " in events.read_bytes()


def test_prompts_that_do_not_fit_are_refused_at_the_start(tmp_path: Path) -> None:
    given = {**GENERATE, "validation.generate.max_new_tokens": 25}
    (seen,) = run_ranks(1, run, tiny(tmp_path / "run", **given))
    assert seen.error is not None and not seen.samples
    assert seen.error[1] == (
        "validation.generate.prompts: prompt 1 has 9 tokens, which with max_new_tokens = 25 is more than "
        "train.seq_len (32)"
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"prompts": ["a"]}, "prompts has no effect without an interval"),
        ({"interval": 5}, "interval has no effect without prompts"),
        ({"temperature": 0.0}, "temperature has no effect without prompts"),
    ],
)
def test_keys_without_effect_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_config(None, {"validation.generate": given})
