"""A compilation after the warm-up is told, with the guard that failed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from titanlike.compile_watch import CompileWatch


@pytest.fixture
def watch() -> Iterator[CompileWatch]:
    torch._dynamo.reset()
    made = CompileWatch()
    yield made
    made.close()
    torch._dynamo.reset()


def test_a_compilation_after_the_warm_up_names_its_guard(watch: CompileWatch) -> None:
    """Symptom: the run is slow from some step on, and nothing says that it compiles again and again."""

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    step = torch.compile(double, fullgraph=True, dynamic=False, backend="eager")
    before = watch.graphs
    said = []
    for number, size in enumerate((4, 4, 4, 5, 5, 4), 1):
        with watch.training_step():
            step(torch.ones(size))
        said.append(watch.warning(number))
    assert watch.graphs == before + 2
    assert said[:3] == [None] * 3 and said[4:] == [None] * 2
    assert said[3] is not None
    assert said[3].startswith("warning: step 4 was compiled again, after 3 steps: double: ")
    assert "expected 4, actual 5" in said[3]


def test_graph_breaks_are_counted(watch: CompileWatch) -> None:
    """Symptom: a model is compiled in pieces, and nobody knows."""

    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    before = watch.values()
    torch.compile(breaks, backend="eager")(torch.ones(2))
    assert watch.values()["compile/graph_breaks"] == before["compile/graph_breaks"] + 1


def test_compilation_outside_of_training_steps_is_no_surprise(watch: CompileWatch) -> None:
    """Symptom: the first validation, which needs graphs of its own, is a warning."""
    step = torch.compile(torch.neg, dynamic=False, backend="eager")
    for number in range(1, 5):
        with watch.training_step():
            step(torch.ones(3))
        step(torch.ones(number + 5))
        assert watch.warning(number) is None
