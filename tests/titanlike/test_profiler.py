"""`[profile]`: traces of the steps and ranks that were asked for, a summary beside them, and the same run."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.titanlike.runs import columns, runs, tiny
from titanlike.config import load_config
from titanlike.errors import UserError
from titanlike.metrics.timers import Timers
from titanlike.profiler import Op, ProfileConfig, Profiler, blocked_inside, kernel_seconds, summary


def folder(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "profile").iterdir())


def test_steps_and_ranks_asked_for_are_traced_and_the_run_is_the_same(tmp_path: Path) -> None:
    """Symptom: the loss of a profiled run is another one; every rank writes the same file; the trace does not open."""
    mesh = {"mesh.pp": 2, "train.steps": 4}
    on = {"profile.steps": [2, 3], "profile.ranks": [0, 1]}
    (first, *_), _ = run_ranks(2, runs, [tiny(tmp_path / "on", **mesh, **on), tiny(tmp_path / "off", **mesh)])
    assert columns(tmp_path / "on") == columns(tmp_path / "off")
    assert not (tmp_path / "off" / "profile").exists()
    stems = [f"steps-2-3-rank-{rank}" for rank in (0, 1)]
    assert folder(tmp_path / "on") == sorted(f"{stem}.{end}" for stem in stems for end in ("json.gz", "txt"))
    assert any(text.startswith("profile of steps 2 to 3: ") for text in first.said)
    for stem in stems:
        with gzip.open(tmp_path / "on" / "profile" / f"{stem}.json.gz", "rt") as file:
            events = json.load(file)["traceEvents"]
        seen = {event.get("name") for event in events}
        assert seen >= {"step 2", "step 3", "data", "forward_backward", "pipeline/busy", "optimizer", "aten::mm"}
        assert "step 1" not in seen and "step 4" not in seen
        text = (tmp_path / "on" / "profile" / f"{stem}.txt").read_text()
        assert re.search(r"^  aten::mm +\d+ +\d", text, re.MULTILINE), text
        assert re.search(r"^  comm/pp_s +[\d.]+ +[\d.]+% of the step", text, re.MULTILINE), text
        assert re.search(r"^  bubble/1 +[\d.]+%", text, re.MULTILINE), text
        assert not re.search(r"^  (pipeline|optimizer|step 2) ", text, re.MULTILINE), text


def test_writing_a_trace_counts_to_no_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Symptom: the step after a profile is seconds slower than all others, and so are its tokens/s."""
    now = [0.0]
    timers = Timers("cpu", clock=lambda: now[0])
    profiler = Profiler(ProfileConfig(steps=[1, 1]), tmp_path, 0, {"dp": 1}, "cpu", timers)

    def slow(*_: object) -> None:
        now[0] += 60.0

    monkeypatch.setattr("torch.profiler.profile.start", slow)
    monkeypatch.setattr(Profiler, "_write", slow)
    times = []
    for step in (1, 2):
        profiler.before_step(step)
        with timers.phase("data"):
            now[0] += 1.0
        times.append(timers.end_step())
        profiler.after_step(step, {})
        profiler._profile = None
    assert times == [{"step_time_s": 1.0, "time/data_s": 1.0, "time/other_s": 0.0}] * 2


def test_a_run_that_ends_early_leaves_what_there_is(tmp_path: Path) -> None:
    """Symptom: stopped within the steps of the trace, and nothing is there; or a resume within them is not traced."""
    keys = {"profile.steps": [2, 5], "checkpoint.interval": 3, "train.steps": 5, "validation.samples": 2}
    run_ranks(1, runs, [tiny(tmp_path / "run", **keys)], _stop_after_3)
    assert folder(tmp_path / "run") == ["steps-2-3-rank-0.json.gz", "steps-2-3-rank-0.txt"]
    run_ranks(1, runs, [tiny(tmp_path / "run", **keys)])
    assert folder(tmp_path / "run")[2:] == ["steps-4-5-rank-0.json.gz", "steps-4-5-rank-0.txt"]


def test_no_collective_is_in_flight_when_a_profile_ends(tmp_path: Path) -> None:
    """Symptom: a rank dies by SIGSEGV in gloo's thread, which tells the end of a gather to a profile that is gone."""
    keys = {
        "mesh.dp": 2,
        "profile.steps": [2, 3],
        "profile.ranks": [0, 1],
        "train.steps": 5,
        "optimizer.bucket_mb": 0.01,
    }
    for before_steps, at_the_end in run_ranks(2, _in_flight, tiny(tmp_path / "run", **keys)):
        assert before_steps == [False, True, True, False, True]  # step 4 comes after the end of the profile
        assert at_the_end == [False]


def _in_flight(config: Any) -> tuple[list[bool], list[bool]]:
    """Whether weights are on their way before each step, and when a profile ends."""
    from titanlike.profiler import Profiler

    write, trainers, before_steps, at_the_end = Profiler._write, [], [], []

    def pending() -> bool:
        return any(bucket.gathered is not None for bucket in trainers[-1].zero.buckets)

    def before_step(trainer: Any, _step: int) -> None:
        trainers.append(trainer)
        before_steps.append(pending())

    def noted(profiler: Profiler, last: int) -> None:
        at_the_end.append(pending())
        write(profiler, last)

    Profiler._write = noted
    try:
        assert runs([config], before_step)[0].error is None
    finally:
        Profiler._write = write
    return before_steps, at_the_end


def _stop_after_3(trainer: Any, step: int) -> None:
    import os
    import signal

    if step == 3:
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"profile.steps": [3]}, "profile.steps"),
        ({"profile.steps": [4, 3]}, "the last not before it"),
        ({"profile.steps": [0, 3]}, "must be 1 or more"),
        ({"profile.steps": [3, 9], "train.steps": 8}, "end after train.steps"),
        ({"profile.steps": [1, 2], "profile.ranks": [0, 2]}, "there are 2 ranks"),
        ({"profile.steps": [1, 2], "profile.ranks": [1, 1]}, "named once"),
        ({"profile.ranks": [1]}, "profile.ranks has no effect"),
    ],
)
def test_a_profile_that_cannot_be_is_one_sentence(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(said)):
        load_config(None, keys).validate_for(2)


def test_nccl_time_is_exposed_where_no_other_kernel_runs() -> None:
    def kernel(name: str, begin: float, end: float, cat: str = "kernel") -> dict[str, Any]:
        return {"cat": cat, "name": name, "ts": begin * 1e6, "dur": (end - begin) * 1e6}

    events = [
        kernel("ncclDevKernel_AllGather", 0, 4),
        kernel("ncclDevKernel_ReduceScatter", 3, 6),
        kernel("gemm", 1, 2),
        kernel("gemm", 1.5, 3.5),
        kernel("aten::mm", 0, 9, cat="cpu_op"),
        {"ph": "M", "name": "process_name"},
    ]
    assert kernel_seconds(events) == pytest.approx((6.0, 3.5))
    assert kernel_seconds([]) == (0.0, 0.0)


def test_waits_inside_the_model_are_those_of_forward_and_backward() -> None:
    """Symptom: more than all of the step is waited, for a validation was traced too."""
    wait = "_c10d_functional::wait_tensor"
    spans = [
        ("validation", 0.0, 4e6),
        (wait, 1e6, 3e6),
        ("forward_backward", 5e6, 9e6),
        (wait, 6e6, 7e6),
        (wait, 8e6, 8.5e6),
    ]
    assert blocked_inside(spans) == pytest.approx(1.5)


def test_the_summary_of_a_gpu_sorts_by_the_device() -> None:
    ops = [Op("aten::mm", 10, 0.5, 8.0), Op("aten::copy_", 5, 3.0, 2.0), Op("forward_backward", 1, 99.0, 0.0)]
    text = summary("title", [{"step_time_s": 2.0, "comm/dp_s": 0.5}], ops, kernels=(1.0, 0.25))
    assert text.index("aten::mm") < text.index("aten::copy_") and "80.0%" in text and "99" not in text
    assert re.search(r"comm/dp_s +0\.5000 +25\.0% of the step", text)
    assert re.search(r"with no other kernel +0\.2500", text)
    assert summary("nothing", [], []).startswith("nothing\n")
