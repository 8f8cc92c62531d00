"""A run that is killed at random moments, over and over, on meshes that change each time, against the same run left
alone.

    python benchmarks/soak.py [--kills 20] [--seed 0] [--steps 240] [--same-mesh]

Each start of the run is killed with SIGKILL: all of it with its launcher, or one random rank, during start-up or after
a random number of steps. The last start finishes it. Then:
- its losses and gradient norms are those of the uninterrupted run, to 1e-10; with --same-mesh bitwise, and so is the
  digest of weights and moments;
- each step was trained on the samples of that run, and the samples of all steps are unique: no data was lost or read
  twice;
- what was lost is steps that had to be taken again: at most those since the last save, one of which may still have been
  in the background (2 * interval + 1).

Ends with code 1 if any of this does not hold. Float64, one thread per rank; needs Linux (/proc) and the checkout.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.ranks import Launched, launching  # noqa: E402
from titanlike.metrics import files  # noqa: E402

MESHES: list[tuple[int, dict[str, Any]]] = [
    (2, {"mesh.dp": 2}),
    (2, {"mesh.tp": 2}),
    (2, {"mesh.pp": 2}),
    (4, {"mesh.dp": 4}),
    (4, {"mesh.pp": 2, "mesh.dp": 2}),
    (4, {"mesh.dp": 2, "mesh.tp": 2}),
    (4, {"mesh.pp": 2, "mesh.tp": 2}),
    (3, {"mesh.pp": 3, "train.microbatch_size": 2}),
]
INTERVAL = 6


class SampleIds:
    """A hook that writes down which samples each step was trained on, one file per start and rank."""

    def before_step(self, run: Any, step: int, batch: Any) -> None:
        self.ids = batch.sample_ids

    def after_step(self, run: Any, step: int, values: dict[str, float]) -> None:
        mesh = run.mesh
        if mesh.coordinate("pp") == 0 and mesh.coordinate("tp") == 0:
            folder = run.config.run_dir / "samples"
            folder.mkdir(exist_ok=True)
            with open(folder / f"{os.environ['SOAK_START']}-{mesh.coordinate('dp')}.jsonl", "a") as file:
                file.write(json.dumps([step, self.ids]) + "\n")


def command(run_dir: Path, steps: int, mesh: dict[str, Any]) -> list[str]:
    """scripts/train.py for a tiny model in float64."""
    keys = {
        **{"run.dir": run_dir.parent, "run.name": run_dir.name, "run.device": "cpu"},
        "run.hooks": '["benchmarks.soak:SampleIds"]',
        **{"model.dim": 32, "model.n_layers": 4, "model.n_heads": 4, "model.n_kv_heads": 2, "model.ffn_dim": 48},
        **{"train.steps": steps, "train.global_batch_size": 8, "train.seq_len": 32, "train.dtype": "float64"},
        **{"data.source": "text", "data.paths": json.dumps([str(run_dir.parent / "text.txt")])},
        **{"validation.samples": 8, "metrics.tensorboard": "false", "checkpoint.interval": INTERVAL},
        **mesh,
    }
    words = ["scripts/train.py", "--config", "configs/debug.toml"]
    return words + [word for key, value in keys.items() for word in (f"--{key}", str(value))]


def last_step(run_dir: Path) -> int:
    return max((row["step"] for row in files.read_metrics(run_dir)), default=0)


def starts(run_dir: Path) -> list[int]:
    """The steps from which the starts of the run that came so far went on."""
    return [event["step"] for event in files.read_events(run_dir) if event["event"] in ("start", "resume")]


def samples(run_dir: Path) -> dict[int, list[str]]:
    """The samples of each step, in the order of the global batch, as the last start that took the step had them."""
    taken: dict[tuple[int, int], dict[int, list[str]]] = {}
    for path in (run_dir / "samples").glob("*.jsonl"):
        start, dp = map(int, path.stem.split("-"))
        for line in path.read_text().splitlines():
            if line.endswith("]]"):  # else the kill has torn it, and the step was taken again
                step, ids = json.loads(line)
                taken.setdefault((step, start), {})[dp] = ids
    last = {step: start for step, start in sorted(taken)}
    return {
        step: [name for dp in sorted(taken[step, start]) for name in taken[step, start][dp]]
        for step, start in last.items()
    }


def kill_at_random(run: Launched, run_dir: Path, draw: random.Random, most_steps: float, start_up_s: float) -> str:
    """Wait for a random moment, and kill. Returns what was killed and when, in words."""
    began, before = time.monotonic(), len(starts(run_dir))
    in_start_up = draw.random() < 0.25
    patience, further, moment = draw.uniform(0, start_up_s), draw.uniform(1, most_steps), draw.uniform(0, 0.1)
    if in_start_up:
        time.sleep(patience)
    else:
        while len(starts(run_dir)) == before and run.process.poll() is None:
            time.sleep(0.02)
        target = starts(run_dir)[-1] + further if len(starts(run_dir)) > before else 0
        while last_step(run_dir) < target and run.process.poll() is None:
            time.sleep(0.01)
        time.sleep(moment)
    if run.process.poll() is not None:
        raise SystemExit(f"the run ended by itself:\n{run.stdout[-2000:]}\n{run.stderr[-2000:]}")
    ranks = run.rank_pids()
    when = f"{time.monotonic() - began:.1f} s after its start, at step {last_step(run_dir)}"
    if not ranks or draw.random() < 0.5:
        run.kill()
        return f"all of it, {when}"
    rank = draw.choice(sorted(ranks))
    os.kill(ranks[rank], 9)
    if run.wait(120.0).returncode == 0:
        raise SystemExit("the launcher ended with 0 though a rank was killed")
    return f"rank {rank}, {when}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument(
        "--same-mesh", action="store_true", help="dp 2 at every start: then the end is bitwise the same"
    )
    options = parser.parse_args()
    draw = random.Random(options.seed)
    environment = {"PYTHONPATH": str(ROOT), "RICH_PROGRESS": "0"}
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        (folder / "text.txt").write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(9000)))
        whole, killed = folder / "whole", folder / "killed"
        with launching(command(whole, options.steps, MESHES[0][1]), 2, environment | {"SOAK_START": "0"}) as run:
            began = time.monotonic()
            while not starts(whole) and run.process.poll() is None:
                time.sleep(0.05)
            start_up_s = time.monotonic() - began
            done = run.wait(600.0)
        if done.returncode:
            raise SystemExit(done.stderr)
        print(f"the run left alone: {options.steps} steps, loss {loss(whole)[options.steps][0]:.6f}", flush=True)

        lost: list[int] = []
        for kill in range(options.kills + 1):
            final = kill == options.kills
            ranks, mesh = MESHES[0] if final or options.same_mesh else draw.choice(MESHES)
            reached, before = last_step(killed), len(starts(killed))
            text = " x ".join(f"{key.removeprefix('mesh.')} {value}" for key, value in mesh.items() if "mesh" in key)
            environment["SOAK_START"] = str(kill)
            with launching(command(killed, options.steps, mesh), ranks, environment) as run:
                if final:
                    done = run.wait(600.0)
                    if done.returncode:
                        raise SystemExit(done.stderr)
                    what = "to the end"
                else:
                    most = 1.8 * (options.steps - reached) / (options.kills - kill)
                    what = "killed: " + kill_at_random(run, killed, draw, max(most, 1.5), start_up_s)
            began_at = starts(killed)[-1] if len(starts(killed)) > before else None
            if began_at is not None:
                lost.append(reached - began_at)
            where = "before it was resumed" if began_at is None else f"from step {began_at}"
            print(f"{kill + 1:3d}. {text}, {where}: {what}", flush=True)
        return verdict(whole, killed, options, lost)


def loss(run_dir: Path) -> dict[int, tuple[float, float]]:
    return {row["step"]: (row["loss"], row["grad_norm"]) for row in files.read_metrics(run_dir)}


def digest(run_dir: Path, steps: int) -> str:
    return json.loads((run_dir / "checkpoints" / f"step-{steps:08d}" / "manifest.json").read_text())["digest"]


def verdict(whole: Path, killed: Path, options: argparse.Namespace, lost: list[int]) -> int:
    """Print what came of it. Returns the exit code."""
    expected, ours = loss(whole), loss(killed)
    differences = [
        abs(a - b) / abs(a)
        for step in expected
        for a, b in zip(expected[step], ours.get(step, (0.0, 0.0)), strict=True)
    ]
    ids, reference = samples(killed), samples(whole)
    flat = [name for step in sorted(ids) for name in ids[step]]
    checks = {
        f"every step is logged once, 1 to {options.steps}": list(ours) == list(range(1, options.steps + 1)),
        f"losses and gradient norms agree, to {max(differences):.1e}": max(differences) < 1e-10,
        f"{len(flat)} samples, those of the run left alone at each step": ids == reference,
        "no sample twice": len(set(flat)) == len(flat) == 8 * options.steps,
        f"steps taken again: {sum(lost)} in all, at most {max(lost)} at a time": max(lost) <= 2 * INTERVAL + 1,
    }
    if options.same_mesh:
        equal = digest(whole, options.steps) == digest(killed, options.steps)
        checks[f"the digest of weights and moments is {digest(whole, options.steps)}"] = equal
        checks["losses and gradient norms are bitwise the same"] = ours == expected
    print(f"{options.kills} kills, a checkpoint every {INTERVAL} steps")
    for text, good in checks.items():
        print(f"{'yes' if good else 'NO '}  {text}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
