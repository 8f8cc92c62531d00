"""docs/new-architecture.md as written: its files in a package outside the repository, its commands, its error."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.ranks import run_ranks
from tests.titanlike.generate.helpers import PROMPTS, greedy_without_cache
from titanlike.build import generator_for
from titanlike.generate.generator import Generator
from titanlike.generate.model import InferenceModel
from titanlike.mesh import Mesh

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "new-architecture.md").read_text(encoding="utf-8")


def files() -> dict[str, str]:
    """The files that the page shows: a block of code after a line that is a name in backquotes."""
    return dict(re.findall(r"^`([\w/.]+)`:\n\n```\w+\n(.*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE))


def commands() -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE)


def shown_error() -> str:
    [text] = re.findall(r"^```\n(error: .*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE)
    return text


def write(folder: Path) -> None:
    for name, content in files().items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content, encoding="utf-8")


def shell(commands: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """As a reader would type them, in the folder that has the package."""
    environment = os.environ | {
        "TITANLIKE": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f".{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
    }
    script = ["bash", "-e", "-c", commands]
    return subprocess.run(script, cwd=folder, env=environment, capture_output=True, text=True, timeout=400)


def test_the_page_shows_three_files() -> None:
    assert list(files()) == ["my_package/neox.py", "my_package/neox_tables.py", "neox.toml"]
    assert len(commands()) == 2


def test_the_example_trains(tmp_path: Path) -> None:
    """Symptom: an architecture of one's own needs a change in titanlike/, or the page shows what does not run."""
    write(tmp_path)
    done = shell(commands()[0], tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "model.rotary_dim = 8  (an integer)" in done.stdout
    assert "Elements of each head that RoPE turns." in done.stdout
    assert (tmp_path / "runs" / "neox" / "checkpoints" / "step-00000003" / "COMMIT").exists()


FLAVOURS = (
    "--mesh.tp 2 --mesh.sequence_parallel false",
    "--mesh.tp 2 --compile.enable --compile.scope block",
    "--mesh.tp 2 --compile.enable --compile.scope stage",
    "--mesh.tp 2 --activation_checkpoint.mode selective",
    "--mesh.tp 4 --mesh.sequence_parallel false --model.ffn_dim 500",
)


@pytest.mark.parametrize("more", ["", *(pytest.param(flavour, marks=pytest.mark.slow) for flavour in FLAVOURS)])
def test_the_example_is_the_same_run_on_every_mesh(more: str, tmp_path: Path) -> None:
    """Symptom: the plan that the page teaches is wrong."""
    write(tmp_path)
    mesh = "--mesh.pp 2 --mesh.dp 2 --mesh.tp 2"
    assert mesh in commands()[1]
    done = shell(commands()[1].replace(mesh, more or mesh), tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout


def test_an_incomplete_plan_is_the_error_that_the_page_shows(tmp_path: Path) -> None:
    write(tmp_path)
    tables = tmp_path / "my_package" / "neox_tables.py"
    text = tables.read_text()
    for right, wrong in (('        "layers.*.ffn_norm": norm,\n', ""), ("feed_forward.w2", "feed_forward.out")):
        assert right in text
        text = text.replace(right, wrong)
    tables.write_text(text)
    done = shell(commands()[1], tmp_path)
    assert (done.returncode, done.stderr, done.stdout) == (2, shown_error(), "")


def texts(folder: str, tp: int) -> list[list[list[int]]]:
    """What the example says on a mesh, with a cache and local tensors, and what the plain model says without."""
    sys.path.insert(0, folder)
    try:
        from my_package.neox import NeoX, NeoXConfig  # type: ignore[import-not-found]

        config = NeoXConfig(vocab_size=97, dim=32, n_layers=2, rotary_dim=4, ffn_dim=48)
        cpu = torch.device("cpu")
        model = InferenceModel("my_package.neox:NeoX", config, Mesh(1, 1, tp, cpu), torch.float64, 64)
        plain = NeoX(config).double().requires_grad_(False)
        for name, parameter in plain.named_parameters():
            parameter.normal_(1.0 if "norm.weight" in name else 0.0, 0.3, generator=generator_for(0, name, cpu))
        for name, shard in model.shards().items():
            box = tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.tensor.shape))
            shard.tensor.copy_(plain.get_parameter(name)[box])
        model.go_local()
        said = [each.ids for each in Generator(model, str, [], 64).generate(PROMPTS, 12)[0]]
        return [said, [greedy_without_cache(prompt, 12, plain) for prompt in PROMPTS]]
    finally:
        sys.path.remove(folder)
        for name in [name for name in sys.modules if name.startswith("my_package")]:
            del sys.modules[name]


def test_the_example_generates_with_a_cache_and_over_tp(tmp_path: Path) -> None:
    """Symptom: the field `cache` of its context is not all that it takes."""
    write(tmp_path)
    for said, wanted in run_ranks(2, texts, str(tmp_path), 2):
        assert said == wanted
        assert len({tuple(ids) for ids in wanted}) == len(PROMPTS)
