"""Weights & Biases, an optional package: the lines of metrics.jsonl under the same names.

- A run folder is one run there: its id is kept in the folder, so a resume goes on with the same curves.
- The x axis is the name `step`, not the package's own count, which may not go back: steps that are run again after a
  resume or a rollback are shown again.
"""

from __future__ import annotations

import importlib
import importlib.util
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from titanlike.errors import UserError

ID_FILE = "wandb-id.txt"


def check_installed() -> None:
    """Raise UserError if the package is not there. Imports nothing, and takes no folder of that name for it."""
    spec = importlib.util.find_spec("wandb")
    if spec is None or spec.origin is None:
        raise UserError(
            "metrics.wandb needs the package wandb, which is not installed: pip install 'titanlike[wandb]', or set "
            "metrics.wandb = false"
        )


class WeightsAndBiases:
    """One run. `offline` writes to the run folder's wandb/ alone, for `wandb sync` later.

    Raises UserError if it cannot be started: not logged in, no network.
    """

    def __init__(self, run_dir: Path, project: str, offline: bool) -> None:
        check_installed()
        wandb = importlib.import_module("wandb")
        id_file = run_dir / ID_FILE
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex[:12] + "\n", encoding="utf-8")
        try:
            self._run = wandb.init(
                project=project,
                name=run_dir.name,
                id=id_file.read_text(encoding="utf-8").strip(),
                resume="allow",
                dir=str(run_dir),
                config=_config(run_dir / "config.toml"),
                mode="offline" if offline else None,  # None: as its own environment variables say, else online
                settings={"console": "off"},  # it would capture the progress bar
            )
            self._run.define_metric("*", step_metric="step")
        except Exception as error:
            raise UserError(
                f"metrics.wandb: Weights & Biases could not be started ({type(error).__name__}: {error}): log in with "
                "wandb login, or set metrics.wandb_offline = true"
            ) from error

    def log(self, row: Mapping[str, float]) -> None:
        """Log a line of metrics.jsonl."""
        self._run.log(dict(row))

    def close(self) -> None:
        """Hand over what is waiting."""
        self._run.finish()


def _config(path: Path) -> dict[str, Any]:
    """The resolved config as tables, or nothing where there is none."""
    import tomli

    return tomli.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
