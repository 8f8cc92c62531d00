"""A user's own code at fixed points of a run: classes named in `run.hooks` by import path. docs/hooks.md tells how.

Properties:
- Hooks are called on every rank, in the order of the list, after the run's own work at that point.
- What a hook raises ends the run, and the message names the hook, the point and the step.
- The run's own log is a hook too, the last one: what the user's hooks add to a step is in its line.
- A method that looks like one of the points and is none (`on_saved`) is an error before the run starts.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from titanlike.config_keys import nearest
from titanlike.errors import UserError

if TYPE_CHECKING:
    from titanlike.config import Config
    from titanlike.run import Run
    from titanlike.trainer import StepResult


class Hook:
    """The points of a run. A hook class need not derive this one: it has those of the methods that it wants.

    It is made with the run's config. All ranks call each point together, so a hook may use collectives, if it does so
    on all ranks. `run` is titanlike.run.Run: run.trainer, run.mesh, run.data, run.metrics, run.config.
    """

    def __init__(self, config: Config) -> None:
        """Called before a process group exists."""

    def on_start(self, run: Run) -> None:
        """The state is loaded; run.trainer.step_count steps are done. Once a run, and once after each rollback."""

    def before_step(self, run: Run, step: int, batch: Any) -> None:
        """`batch` (titanlike.data.Batch, this dp coordinate's rows) is about to be trained on as step `step`."""

    def before_optimizer(self, run: Run, step: int, result: StepResult) -> None:
        """Gradients are reduced, weights and moments are those of the step before. `result` has the global loss and
        gradient norm as tensors: reading them makes an accelerator's host wait. Also called for a step that
        `[guard]` will leave out."""

    def after_step(self, run: Run, step: int, values: dict[str, float]) -> None:
        """`values` is what is about to be logged as the line of the step. What a hook adds, under a name with a slash
        of its own (`my/number`), is logged too; rank 0's counts."""

    def on_validation(self, run: Run, step: int, values: dict[str, float]) -> None:
        """`values` has val_loss, and val_loss/<set> if there are several sets."""

    def on_save(self, run: Run, step: int, meta: dict[str, Any]) -> None:
        """A checkpoint of the state after `step` is about to be saved. `meta` is its state.json; what a hook adds
        under a name of its own (JSON; rank 0's counts) is stored there too."""

    def on_end(self, run: Run) -> None:
        """The last step is done, or the run was asked to stop. Not called when it ends by an error."""


POINTS = tuple(name for name, value in vars(Hook).items() if inspect.isfunction(value) and not name.startswith("_"))


class HookError(RuntimeError):
    """A user's hook raised. The message names the hook, the point and the step; the cause has the traceback."""


class Hooks:
    """The hooks of a run."""

    def __init__(self, config: Config) -> None:
        """Import and make all hooks of `run.hooks`. Raises UserError for one that cannot be."""
        self._hooks: list[tuple[str | None, Any]] = [(path, _make(path, config)) for path in config.run.hooks]

    @property
    def users(self) -> bool:
        """Whether there are hooks of the user's."""
        return any(path is not None for path, _ in self._hooks)

    def add(self, hook: Hook) -> None:
        """Add one of the run's own, called after those that are there. What it raises is raised as it is."""
        self._hooks.append((None, hook))

    def __call__(self, point: str, run: Run, step: int | None = None, *arguments: Any) -> None:
        """Call one point of every hook that has it. Raises HookError, or UserError if that is what a hook raised."""
        for path, hook in self._hooks:
            method = getattr(hook, point, None)
            if method is None:
                continue
            if path is None:
                method(run, *(() if step is None else (step,)), *arguments)
                continue
            where = f"the hook {path} failed in {point}" + ("" if step is None else f" of step {step}")
            run.watch.phase(f"the hook {path} {point}")
            try:
                method(run, *(() if step is None else (step,)), *arguments)
            except UserError as error:
                raise type(error)(f"{where}: {error}") from error
            except Exception as error:
                raise HookError(f"{where} on rank {run.mesh.rank}: {type(error).__name__}: {error}") from error
            run.watch.phase("other")


def _make(path: str, config: Config) -> Any:
    module_name, _, class_name = path.partition(":")
    if not re.fullmatch(r"\w+(\.\w+)*:\w+", path):
        raise UserError(f"run.hooks: {path!r} is not an import path: a hook is given as 'package.module:Class'")
    try:
        made = getattr(importlib.import_module(module_name), class_name, None)
    except ImportError as error:
        raise UserError(f"run.hooks: the module of {path!r} cannot be imported: {error}") from error
    if not isinstance(made, type):
        raise UserError(f"run.hooks: the module {module_name!r} has no class {class_name!r}")
    _check_points(path, made)
    try:
        return made() if made.__init__ is object.__init__ else made(config)
    except UserError as error:
        raise UserError(f"the hook {path}: {error}") from error
    except Exception as error:
        raise HookError(f"the hook {path} could not be made: {type(error).__name__}: {error}") from error


def _check_points(path: str, made: type) -> None:
    """A misspelt point would never be called, and nobody would know."""
    mine = [name for name in dir(made) if callable(getattr(made, name))]
    for name in mine:
        if name.startswith(("before_", "after_", "on_")) and name not in POINTS:
            found = nearest(name, POINTS)
            hint = f"the points are {_listed(POINTS)}" if found is None else f"the nearest point is {found}"
            raise UserError(
                f"run.hooks: {path} has the method {name}, which is never called: {hint} (begin the name of a method "
                "of your own with an underscore)"
            )
    if not any(name in POINTS for name in mine):
        raise UserError(f"run.hooks: {path} has none of the methods of a hook: {_listed(POINTS)}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)
