"""The HTML report: whatever state a run is in there is a page, and a real browser draws it without a network."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from titanlike.errors import UserError
from titanlike.metrics import files
from titanlike.metrics.report import MAX_POINTS, load_runs, render

ROOT = Path(__file__).resolve().parents[3]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium or chrome on this machine")

MESH_A, MESH_B = {"pp": 1, "dp": 2, "tp": 1}, {"pp": 1, "dp": 1, "tp": 2}


def row(step: int, **values: Any) -> dict[str, Any]:
    return {
        "step": step,
        "loss": 2 + 3 * math.exp(-step / 30),
        "grad_norm": 1 + math.exp(-step / 5),
        "lr": 3e-4 * min(1, step / 10),
        "tokens": step * 2048,
        "step_time_s": 0.5,
        "tokens_per_s": 4096.0,
        "time/data_s": 0.1,
        "time/forward_backward_s": 0.35,
        "time/other_s": 0.05,
        "memory/peak_max_bytes": 10**9,
        "memory/current_max_bytes": 9 * 10**8,
        "wall_time": 1.8e9 + step * 0.5,
        **values,
    }


def event(kind: str, step: int, **fields: Any) -> dict[str, Any]:
    return {"event": kind, "step": step, "wall_time": 1.8e9 + step * 0.5, **fields}


def write(run_dir: Path, rows: list[dict[str, Any]], events: list[dict[str, Any]] | None = None, end: str = "") -> Path:
    run_dir.mkdir(parents=True)
    for name, objects in ((files.METRICS_FILE, rows), (files.EVENTS_FILE, events or [event("start", 0, mesh=MESH_A)])):
        (run_dir / name).write_text("".join(files.encode(values) + "\n" for values in objects))
    if end:
        with open(run_dir / files.METRICS_FILE, "a") as file:
            file.write(end)
    return run_dir


def resumed(run_dir: Path) -> Path:
    """A run of 60 steps that died after 45 steps, went on from step 40 on another mesh, and had a NaN."""
    rows = [row(step, **({"val_loss": 3.0 - step / 60} if step % 10 == 0 else {})) for step in range(1, 61)]
    rows[49]["loss"] = math.nan
    write(run_dir, rows, [event("start", 0, mesh=MESH_A), event("resume", 40, mesh=MESH_B, dropped_steps=5)])
    dropped = [files.encode(row(step)) + "\n" for step in range(41, 46)]
    (run_dir / files.DROPPED_FILE).write_text("".join(dropped))
    (run_dir / "config.toml").write_text("[train]\nsteps = 60\n")
    return run_dir


def data_of(*run_dirs: Path) -> dict[str, Any]:
    """The data inside the page."""
    text = re.search(r'id="data">(.*?)</script>', render(load_runs(run_dirs)), re.DOTALL).group(1)
    return json.loads(text, parse_constant=pytest.fail)


def test_page_loads_nothing_from_anywhere(tmp_path: Path) -> None:
    """A page with a script from a CDN is blank on a cluster's login node."""
    page = render(load_runs([resumed(tmp_path / "run")]))
    assert set(re.findall(r"https?://[^\s\"'`]+", page)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"<link|<img|<iframe|\bsrc=|@import|url\((?!#)|fetch\(|XMLHttpRequest|\bimport\(", page)


def test_numbers_of_the_run_are_in_the_page(tmp_path: Path) -> None:
    (run,) = data_of(resumed(tmp_path / "run"))["runs"]
    assert run["steps"] == list(range(1, 61))
    assert run["columns"]["val_loss"]["i"] == [9, 19, 29, 39, 49, 59]
    assert run["columns"]["loss"]["v"][49] is None
    assert run["nonfinite"] == [[50, "loss", "nan"]]
    assert run["dropped"] == [[[step, pytest.approx(row(step)["loss"], rel=1e-5)] for step in range(41, 46)]]
    summary = run["summary"]
    assert (summary["step"], summary["tokens"], summary["resumes"], summary["mesh"]) == (60, 60 * 2048, 1, MESH_B)
    assert summary["best_val_loss"] == 2.0
    assert summary["seconds"] == pytest.approx(30.0)


def test_time_between_death_and_resume_is_not_training(tmp_path: Path) -> None:
    """A night in the queue would press the whole curve against the axis."""
    rows = [row(step, wall_time=1.8e9 + step * 0.5 + (step > 5) * 36000) for step in range(1, 11)]
    events = [event("start", 0), event("resume", 5)]
    (run,) = data_of(write(tmp_path / "run", rows, events))["runs"]
    assert run["elapsed"] == pytest.approx([0.5 * step for step in range(1, 11)])


def test_long_runs_keep_the_spike_of_one_step(tmp_path: Path) -> None:
    """Drawing every tenth step hides the step that matters; a page with all of them doesn't open."""
    steps = 4 * MAX_POINTS + 1
    rows = [{"step": step, "loss": 9.0 if step == 5003 else 1.0} for step in range(1, steps + 1)]
    (run,) = data_of(write(tmp_path / "run", rows))["runs"]
    loss = run["columns"]["loss"]
    assert len(run["steps"]) <= MAX_POINTS and run["steps"][-1] == steps and run["bucket"] == 5
    assert max(loss["hi"]) == 9.0 and max(loss["v"]) == pytest.approx(1 + 8 / 5) and set(loss["lo"]) == {1.0}


def test_runs_are_named_apart(tmp_path: Path) -> None:
    a, b = write(tmp_path / "x" / "llama", [row(1)]), write(tmp_path / "y" / "llama", [row(1)])
    assert [run.name for run in load_runs([a])] == ["llama"]
    assert [run.name for run in load_runs([a, b])] == ["x/llama", "y/llama"]
    with pytest.raises(UserError, match="given twice"):
        load_runs([a, a / ".." / "llama"])


def test_config_differences_are_marked(tmp_path: Path) -> None:
    a, b = write(tmp_path / "a", [row(1)]), write(tmp_path / "b", [row(1)])
    (a / "config.toml").write_text('[optimizer]\nlr = 1e-3\n[data]\nsource = "text"\n')
    (b / "config.toml").write_text('[optimizer]\nlr = 2e-3\n[data]\nsource = "text"\n')
    config = {entry["key"]: entry for entry in data_of(a, b)["config"]}
    assert config["optimizer.lr"] == {"key": "optimizer.lr", "values": ["0.001", "0.002"], "differs": True}
    assert not config["data.source"]["differs"]
    (b / "config.toml").write_text("not toml [")
    assert data_of(a, b)["config"]


def test_folders_that_hold_no_run_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a folder"):
        load_runs([tmp_path / "missing"])
    with pytest.raises(UserError, match=r"holds no metrics\.jsonl"):
        load_runs([tmp_path])


def test_names_from_the_run_stay_text(tmp_path: Path) -> None:
    """A run folder or config value that looks like HTML must not become part of the page."""
    run_dir = write(tmp_path / "<b>x<!--", [row(1, **{"</script><script>alert(1)//": 1.0})])
    (run_dir / "config.toml").write_text('[run]\nname = "</script><img src=x>"\n')
    page = render(load_runs([run_dir]))
    assert page.count("</script>") == 2 and "<b>x" not in page and "<img" not in page


HOSTILE = {
    "no steps": lambda d: write(d, []),
    "half a line only": lambda d: write(d, [], end='{"step": 1, "lo'),
    "torn last line": lambda d: write(d, [row(1), row(2)], end='{"step": 3, "loss": 2.'),
    "one step": lambda d: write(d, [row(1)]),
    "all losses not finite": lambda d: write(d, [row(s, loss=math.nan, grad_norm=math.inf) for s in range(1, 9)]),
    "constant and zero": lambda d: write(d, [row(s, loss=1.0, grad_norm=0.0, lr=0.0) for s in range(1, 9)]),
    "extreme": lambda d: write(d, [row(s, loss=10.0 ** (s * 35 - 170), grad_norm=5e-324) for s in range(1, 9)]),
    "steps alone": lambda d: write(d, [{"step": s} for s in range(1, 5)]),
    "text where numbers belong": lambda d: write(d, [row(1), row(2, loss="low", tokens=None, wall_time="noon")]),
    "clock set back": lambda d: write(d, [row(s, wall_time=1.8e9 - s) for s in range(1, 9)]),
    "twenty resumes": lambda d: write(
        d,
        [row(s) for s in range(1, 41)],
        [event("start", 0)] + [event("resume", 2 * k, mesh=(MESH_A, MESH_B)[k % 2]) for k in range(20)],
    ),
    "metric of a hook": lambda d: write(d, [row(s, **{"<i>mine</i>": s % 3}) for s in range(1, 9)]),
}


@pytest.mark.parametrize("make", HOSTILE.values(), ids=HOSTILE.keys())
def test_every_state_of_a_run_has_a_page(make: Any, tmp_path: Path) -> None:
    """A report that fails on a broken run fails when it is needed."""
    assert data_of(make(tmp_path / "run"))["runs"]


def test_command_writes_the_page_into_the_run(tmp_path: Path) -> None:
    run_dir = resumed(tmp_path / "run")
    command = [sys.executable, str(ROOT / "scripts" / "report.py")]
    environment = {"PYTHONPATH": str(ROOT)}

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, env=environment)

    assert run(run_dir).returncode == 0
    assert (run_dir / "report.html").read_text().startswith("<!doctype html>")
    unwritable = run(run_dir, "--output", tmp_path / "no" / "folder.html")
    assert unwritable.returncode == 2 and unwritable.stderr.startswith("error: cannot write")
    assert unwritable.stderr.count("\n") == 1


def browse(page: Path, *options: str) -> str:
    """Open a page in headless chromium without a network and return the document that came of it."""
    result = subprocess.run(
        [
            *(
                BROWSER,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                "--disable-dev-shm-usage",
            ),
            *("--host-resolver-rules=MAP * ~NOTFOUND", "--window-size=1320,1900", "--virtual-time-budget=5000"),
            *(f"--user-data-dir={page.parent / 'browser'}", "--enable-logging=stderr", *options, page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert "Uncaught" not in result.stderr, result.stderr
    return result.stdout


def chart(document: str, name: str) -> str:
    """The section of one chart."""
    return re.search(rf'<section [^>]*data-chart="{re.escape(name)}".*?</section>', document, re.DOTALL).group(0)


@needs_browser
def test_browser_draws_two_runs_with_a_resume_on_another_mesh(tmp_path: Path) -> None:
    a = resumed(tmp_path / "first")
    b = write(tmp_path / "second", [row(step, loss=4 - step / 30) for step in range(1, 41)])
    page = tmp_path / "report.html"
    page.write_text(render(load_runs([a, b])), encoding="utf-8")
    document = browse(page, "--dump-dom")
    assert 'data-ready="true"' in document
    loss = chart(document, "loss")
    assert loss.count('stroke-width="2"') > 2 and "dp 2 → 1, tp 1 → 2" in loss and "NaN" in loss and "dropped" in loss
    for name in ("grad_norm", "lr", "throughput", "memory"):
        drawn = chart(document, name)
        assert len(re.findall(r'<path d="M[^"]+" fill="none"', drawn)) >= 2, name
        assert drawn.count('class="event"') == 1, name
    for number in (0, 1):
        assert chart(document, f"time-{number}").count('class="part"') > 20
    assert "NaN" not in "".join(re.findall(r'\b(?:d|x|y|cx|cy|width|height)="[^"]*"', document))


@needs_browser
def test_browser_draws_every_hostile_run_in_one_page(tmp_path: Path) -> None:
    """Overlaid with good runs, a broken one must not take their curves away."""
    run_dirs = [make(tmp_path / name.replace(" ", "-")) for name, make in HOSTILE.items()]
    page = tmp_path / "report.html"
    page.write_text(render(load_runs(run_dirs)), encoding="utf-8")
    document = browse(page, "--dump-dom")
    assert 'data-ready="true"' in document
    assert "NaN" not in "".join(re.findall(r'\b(?:d|x|y|cx|cy|width|height)="[^"]*"', document))
    assert "<i>mine" not in document


@needs_browser
def test_browser_draws_the_layers_of_a_deep_model_in_one_chart(tmp_path: Path) -> None:
    """Symptom: eighty layers are eighty charts for each of nine numbers, and the page stops at the first eighty."""
    rows = [row(s, **{f"activation_rms/layers.{n}": 1.0 + n + s for n in range(80)}) for s in range(1, 30)]
    page = tmp_path / "report.html"
    page.write_text(render(load_runs([write(tmp_path / "run", rows)])), encoding="utf-8")
    document = browse(page, "--dump-dom")
    drawn = chart(document, "activation_rms/")
    assert 'data-chart="activation_rms/layers' not in document
    for layer in ("layers.0", "layers.11", "layers.79"):
        assert f"{layer}</span>" in drawn
    assert "root mean square of what the block hands on" in drawn
    assert len(re.findall(r'<path d="M[^"]+" fill="none"', drawn)) == 8


@needs_browser
def test_browser_says_that_a_run_has_no_steps_yet(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(render(load_runs([write(tmp_path / "run", [])])), encoding="utf-8")
    document = browse(page, "--dump-dom")
    assert 'data-ready="true"' in document and "No step has been logged yet" in document


@needs_browser
def test_screenshot_shows_the_curve_in_the_colour_of_its_run(tmp_path: Path) -> None:
    """The document can be right and the picture empty: a style that hides, a chart of no height."""
    image = pytest.importorskip("PIL.Image")
    page, picture = tmp_path / "report.html", tmp_path / "report.png"
    page.write_text(render(load_runs([resumed(tmp_path / "run")])), encoding="utf-8")
    browse(page, f"--screenshot={picture}")
    pixels = image.open(picture).convert("RGB")
    assert pixels.size == (1320, 1900)
    colours = {colour: count for count, colour in pixels.getcolors(maxcolors=2**24)}
    blue = sum(count for (r, g, b), count in colours.items() if abs(r - 42) + abs(g - 120) + abs(b - 214) < 30)
    red = sum(count for (r, g, b), count in colours.items() if abs(r - 194) + abs(g - 47) + abs(b - 47) < 30)
    assert blue > 2000 and red > 10
