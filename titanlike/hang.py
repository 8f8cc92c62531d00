"""Which rank a hanging job waits for: what each rank reports of itself, and one sentence from all the reports.

Properties:
- A report says where its rank is: the step, the phase and since when, the line of code of its main thread, and the last
  collectives of each process group where torch's flight recorder has them.
- The sentence is a function of the reports alone, so every rank that reads them comes to the same one.
"""

from __future__ import annotations

import functools
import os
import pickle
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

LAST_COLLECTIVES = 20

# What torch wraps around a function is not what a reader looks for.
_WRAPPERS = {"wrapper", "_fn", "inner", "decorate_context", "__call__", "_call_impl", "_wrapped_call_impl"}

# All ranks of a group must give tensors of one size to these; to the others sizes may differ by rank.
_SAME_SIZES = ("all_reduce", "allreduce", "broadcast")


@dataclass(frozen=True)
class Place:
    """Where a rank lives."""

    host: str
    pid: int
    parent: int
    """the process that started it"""


# --- what a rank says of itself ---


def code_position(frame: FrameType | None) -> str:
    """The innermost line of a stack that is not torch's nor Python's own, and what it called:
    "finish (titanlike/zero.py:207), in all_reduce"."""
    called = None
    entries = [(entry.f_code, line) for entry, line in traceback.walk_stack(frame)]
    for code, line in entries:
        if not _foreign(code.co_filename):
            folder, name = os.path.split(code.co_filename)
            within = f", in {called}" if called else ""
            return f"{code.co_name} ({os.path.basename(folder)}/{name}:{line}){within}"
        if code.co_name not in _WRAPPERS and not code.co_name.startswith("<"):
            called = code.co_name
    return called or "unknown code"


@functools.cache
def _foreign(file: str) -> bool:
    import torch

    library = sysconfig.get_paths()["stdlib"]
    torch_own = os.path.dirname(torch.__file__) + os.sep
    python_own = file.startswith(library + os.sep) and "site-packages" not in file and "dist-packages" not in file
    return file.startswith(("<", torch_own)) or python_own


def main_thread_position() -> str:
    """Where the main thread of this process is."""
    return code_position(sys._current_frames().get(threading.main_thread().ident or 0))


def collectives() -> dict[str, dict[str, Any]]:
    """Of each process group, what torch's flight recorder knows: {"called": number of the last collective that this
    rank called, "done": of the last that is complete, "last": its last few, oldest first}.

    Empty where torch has no recorder. Point-to-point messages of gloo are not recorded.
    """
    try:
        # Private: the recorder has no public reader in Python but the files of a job that NCCL has already given up.
        # The pickle was made in this process.
        from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[missing-module-attribute]

        dump = pickle.loads(_dump_fr_trace())
        groups: dict[str, dict[str, Any]] = {}
        for entry in dump.get("entries", []):
            name, description = entry["process_group"]
            group = groups.setdefault(f"{name}/{description}", {"called": 0, "done": 0, "last": []})
            done = bool(entry.get("retired")) or entry.get("state") == "completed"
            number = entry["p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id"]
            if not entry.get("is_p2p"):
                group["called"] = max(group["called"], number)
                group["done"] = max(group["done"], number if done else 0)
            group["last"].append(
                {
                    "number": number,
                    "operation": entry["profiling_name"].partition(":")[2] or entry["profiling_name"],
                    "sizes": entry["input_sizes"],
                    "done": done,
                    "where": _called_from(entry.get("frames", [])),
                    **({"point_to_point": True} if entry.get("is_p2p") else {}),
                }
            )
            del group["last"][:-LAST_COLLECTIVES]
        return groups
    except Exception:  # another version of torch: the rest of the report is worth having without it
        return {}


def _called_from(frames: Sequence[Mapping[str, Any]]) -> str:
    for frame in frames:
        if not _foreign(frame["filename"]):
            folder, name = os.path.split(frame["filename"])
            return f"{frame['name']} ({os.path.basename(folder)}/{name}:{frame['line']})"
    return ""


# --- what follows from the reports of all ranks ---


def sentence(reports: Mapping[int, Mapping[str, Any]], places: Sequence[Place], silent_s: float, folder: str) -> str:
    """Why the job hangs. `reports` are those of the ranks that answered; `places` has all ranks; `silent_s`: for how
    long there was no progress.

    The first that holds: a rank does not answer; ranks of a group call different collectives; a rank is in an earlier
    phase than the others; a rank has called fewer collectives of a group than the others; none of these.
    """
    missing = [rank for rank in range(len(places)) if rank not in reports]
    begin = f"no rank has made progress for {silent_s:.0f} s"
    end = f"; stacks, phases and last collectives of each rank are in {folder}"
    if missing:
        who = ", ".join(f"process {places[rank].pid} on {places[rank].host}" for rank in missing[:4])
        more = f" and {len(missing) - 4} more" if len(missing) > 4 else ""
        what = f"{ranks_text(missing)} ({who}{more}) {_verb(missing, 'does not answer', 'do not answer')}"
        return (
            f"{begin}, and {what}: stopped, dead, stuck in code that holds Python's lock, or on a machine that is "
            f"gone{_others(reports)}{end}"
        )
    if len(reports) == 1:
        (report,) = reports.values()
        return f"{begin}: rank 0 is {_state(report)}{end}"
    different = mismatch(reports)
    if different is not None:
        return f"{begin}: {different}{end}"
    first = min(_border(report) for report in reports.values())
    behind = [rank for rank, report in reports.items() if _border(report) == first]
    if len(behind) < len(reports):
        ahead = {rank: report for rank, report in reports.items() if rank not in behind}
        return f"{begin}: {_who(behind, 'is', 'are')} behind, {_state(reports[behind[0]])}{_others(ahead)}{end}"
    fewer = _fewer_calls(reports)
    if fewer is not None:
        return f"{begin}: {fewer}{end}"
    where = sorted({report["where"] for report in reports.values()})
    return f"{begin}: all ranks are in {_phase(reports[min(reports)])}, at {' and '.join(where[:3])}{end}"


def mismatch(reports: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Whether two ranks of a group called different operations, or sizes, under one number: said in a sentence."""
    for group in sorted({name for report in reports.values() for name in report["collectives"]}):
        calls: dict[int, tuple[int, Mapping[str, Any]]] = {}
        for rank in sorted(reports):
            for call in reports[rank]["collectives"].get(group, {"last": []})["last"]:
                if call.get("point_to_point"):
                    continue
                other, known = calls.setdefault(call["number"], (rank, call))
                operation = call["operation"]
                same_size = known["sizes"] == call["sizes"] or not any(name in operation for name in _SAME_SIZES)
                if known["operation"] != operation or not same_size:
                    return (
                        f"ranks call different collectives on the group {_group(group)}: as number {call['number']} "
                        f"rank {other} called {_call(known)}, and rank {rank} {_call(call)}"
                    )
    return None


def _fewer_calls(reports: Mapping[int, Mapping[str, Any]]) -> str | None:
    for group in sorted({name for report in reports.values() for name in report["collectives"]}):
        called = {r: report["collectives"][group] for r, report in reports.items() if group in report["collectives"]}
        most = max(one["called"] for one in called.values())
        fewer = [rank for rank, one in called.items() if one["called"] < most]
        waiting = [rank for rank, one in called.items() if one["called"] == most and one["done"] < most]
        if fewer and waiting:
            (call,) = [call for call in called[waiting[0]]["last"] if call["number"] == most][:1] or [None]
            named = "" if call is None else f", {_call(call)}"
            return (
                f"{_who(waiting, 'waits', 'wait')} in collective number {most} of the group {_group(group)}{named}, "
                f"which {_who(fewer, 'has', 'have')} not called, {_state(reports[fewer[0]])}"
            )
    return None


def ranks_text(ranks: Iterable[int]) -> str:
    """[3] "rank 3", [0, 1, 2, 5] "ranks 0-2 and 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    many = len(runs) > 1 or len(runs[0]) > 1
    joined = ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else parts[0]
    return f"rank{'s' if many else ''} {joined}"


def _who(ranks: Sequence[int], one: str, many: str) -> str:
    return f"{ranks_text(ranks)} {_verb(ranks, one, many)}"


def _verb(ranks: Sequence[int], one: str, many: str) -> str:
    return one if len(ranks) == 1 else many


def _border(report: Mapping[str, Any]) -> int:
    return report["borders"]


def _phase(report: Mapping[str, Any]) -> str:
    return f"{report['phase']} of step {report['step']}" if report["step"] else str(report["phase"])


def _state(report: Mapping[str, Any]) -> str:
    return f"for {report['silent_s']:.0f} s in {_phase(report)}, at {report['where']}"


def _others(reports: Mapping[int, Mapping[str, Any]]) -> str:
    """What the ranks that wait do, for the first two kinds of them."""
    kinds: dict[str, list[int]] = {}
    for rank in sorted(reports):
        kinds.setdefault(f"{_phase(reports[rank])}, at {reports[rank]['where']}", []).append(rank)
    told = [f"{_who(ranks, 'waits', 'wait')} in {kind}" for kind, ranks in list(kinds.items())[:2]]
    return "; " + " and ".join(told) if told else ""


def _call(call: Mapping[str, Any]) -> str:
    sizes = " and ".join("x".join(map(str, size)) or "one number" for size in call["sizes"][:2])
    where = f" in {call['where']}" if call["where"] else ""
    return f"{call['operation']} of {sizes}{where}" if sizes else f"{call['operation']}{where}"


def _group(name: str) -> str:
    description = name.partition("/")[2]
    known = {"default_pg": "of all ranks", "undefined": f"number {name.partition('/')[0]}"}
    return known.get(description, description.removeprefix("mesh_"))
