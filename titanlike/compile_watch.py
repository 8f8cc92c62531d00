"""Counts what torch.compile compiles, and tells why it compiled again when it should not have.

A training step compiles in its first call, and perhaps in the second (a schedule's first microbatch may differ from the
later ones). After that a compilation is a surprise that costs seconds to minutes: a shape or a flag that the graphs
depend on has changed. The guard that failed names it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator

WARM_UP_STEPS = 2


class CompileWatch(logging.Handler):
    """Watches the compiler of this process. `close` ends it."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        import torch._dynamo.utils
        from torch._logging import _internal  # private: set_logs would replace what the user asked for in TORCH_LOGS

        self._counters = torch._dynamo.utils.counters
        self._steps = 0
        self._reasons: list[str] = []
        self._surprise = False
        self._logger = logging.getLogger("torch._dynamo.guards.__recompiles")
        if not _internal.log_state.is_artifact_enabled("recompiles"):
            _internal.log_state.enable_artifact("recompiles")
            self._logger.propagate = False  # only to here
        self._logger.setLevel(logging.DEBUG)
        self._logger.addHandler(self)

    @property
    def graphs(self) -> int:
        """Graphs compiled so far by this process."""
        return self._counters["stats"]["unique_graphs"]

    @property
    def graph_breaks(self) -> int:
        """Places where a function could not be compiled whole. A stage that has one is an error."""
        return sum(self._counters["graph_break"].values())

    @contextlib.contextmanager
    def training_step(self) -> Generator[None]:
        """Around a training step."""
        before = self.graphs
        self._reasons.clear()
        yield
        self._steps += 1
        self._surprise = self._steps > WARM_UP_STEPS and self.graphs > before

    def warning(self, step: int) -> str | None:
        """What to say about the last training step: None, or that it compiled again, and why."""
        if not self._surprise:
            return None
        reason = "; ".join(self._reasons) or "of a function that it had not called before"
        return f"warning: step {step} was compiled again, after {self._steps - 1} steps: {reason}"

    def values(self) -> dict[str, float]:
        """For the log."""
        return {"compile/graphs": self.graphs, "compile/graph_breaks": self.graph_breaks}

    def emit(self, record: logging.LogRecord) -> None:
        """What the compiler says when a guard fails: the function, then a line for each compiled form of it."""
        function, *guards = [line.strip() for line in record.getMessage().splitlines()]
        name = function.removeprefix("Recompiling function ").split(" in ")[0]
        failed = [line.removeprefix("- ") for line in guards if line.startswith("- ")]
        self._reasons.append(f"{name}: {failed[0] if failed else 'no guard was named'}")

    def close(self) -> None:
        """Stop watching."""
        self._logger.removeHandler(self)
        super().close()
