"""What docs/data.md shows works as it stands there."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import tomli

from tests.titanlike.data.corpora import batches, ids, run_config
from titanlike.config import load_config
from titanlike.data.config import SourceConfig

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "data.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.mark.parametrize("block", blocks("toml"))
def test_its_configs_are_valid(block: str, tmp_path: Path) -> None:
    tomli.loads(block)
    (tmp_path / "run.toml").write_text('[model]\npreset = "debug"\n' + block)
    load_config(tmp_path / "run.toml")


@pytest.mark.parametrize("block", blocks("python"))
def test_its_classes_train(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = types.ModuleType("from_the_docs")
    exec(block, module.__dict__)
    monkeypatch.setitem(sys.modules, "from_the_docs", module)
    name = re.findall(r"class (\w+)", block)[0]
    config = run_config(data__source=f"from_the_docs:{name}")
    steps = batches(config, 5)
    cursor = steps[1][0].cursor
    assert ids(batches(config, 3, dp=2, cursor=cursor)) == ids(steps)[2:]


def test_its_commands_have_the_options_of_the_script() -> None:
    script = (Path(__file__).resolve().parents[3] / "scripts" / "prepare_data.py").read_text(encoding="utf-8")
    for option in re.findall(r"(?<![-|])--([a-z][a-z-]+)", "".join(blocks("sh")) + TEXT):
        assert f'"--{option}"' in script or option.replace("-", "_") in SourceConfig.model_fields, option
