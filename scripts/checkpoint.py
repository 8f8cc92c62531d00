#!/usr/bin/env python
"""Look at checkpoints, prove what they hold, delete them, carry them to and from Hugging Face.

PATH is a checkpoint folder (.../step-00000010), or a run folder, which stands for its newest good checkpoint.

    checkpoint.py ls runs/llama                 the checkpoints of a run, or the one that a path is
    checkpoint.py show PATH                     what one holds
    checkpoint.py digest PATH                   the digest of its state, computed from the files
    checkpoint.py verify PATH                   every checksum and every digest
    checkpoint.py rm runs/llama 10 20           delete steps 10 and 20
    checkpoint.py export PATH OUT               weights as a Hugging Face folder
    checkpoint.py import HF_FOLDER OUT          a Hugging Face folder as weights for checkpoint.init_from
    checkpoint.py average PATH PATH ... OUT     the average of their weights, as weights alone
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from titanlike.errors import run_main
from titanlike.printable import printable


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, help: str, *positional: tuple[str, str]) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        for argument, text in positional:
            sub.add_argument(argument, help=text)
        sub.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
        return sub

    path = ("path", "a checkpoint folder, or a run folder for its newest good checkpoint")
    command(
        "ls", "List the checkpoints of a run, newest first.", ("path", "the run folder, or a checkpoint for it alone")
    )
    command("show", "Show what a checkpoint holds: when, where, every tensor.", path)
    command("digest", "Compute the digest of the state from the files: equal states have equal digests.", path)
    command("verify", "Check every file's checksum and every tensor's digest; exit code 1 if one is wrong.", path)
    sub = command("rm", "Delete checkpoints of a run.", ("path", "the run folder"))
    sub.add_argument("steps", nargs="+", type=int, help="the steps to delete")
    sub.add_argument("--force", action="store_true", help="also the newest good one")
    sub = command("export", "Write the weights as a Hugging Face folder.", path, ("out", "the folder to make"))
    sub.add_argument("--format", choices=["hf"], default="hf", help="what to write (default: hf)")
    sub.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="default: float32")
    sub = command(
        "import",
        "Make a checkpoint of weights alone, for checkpoint.init_from, from a Hugging Face folder.",
        ("path", "the Hugging Face folder, of safetensors"),
        ("out", "the folder to make"),
    )
    sub = command(
        "average",
        "Average the weights of checkpoints, saved by any mesh; the oldest first. Makes a checkpoint of weights alone.",
    )
    sub.add_argument("paths", nargs="+", help="checkpoint folders, or run folders for their newest good ones")
    sub.add_argument("out", help="the folder to make")
    sub.add_argument(
        "--ema", type=float, metavar="D", help="instead of equal shares: at each next one keep D of the average so far"
    )
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = parse(arguments)
    from titanlike.checkpoint import tools

    if args.command == "ls":
        return show_list(tools.list_run(args.path), args)
    if args.command == "show":
        return show_one(tools.open_checkpoint(args.path), args)
    if args.command == "digest":
        return show_digests(tools.open_checkpoint(args.path), args)
    if args.command == "verify":
        return show_verification(list(tools.verify(args.path)), args)
    if args.command == "rm":
        removed = [str(folder) for folder in tools.remove(args.path, args.steps, args.force)]
        return show_lines({"removed": removed}, [f"removed {folder}" for folder in removed], args)
    if args.command == "average":
        from titanlike.checkpoint.average import average

        lines = average(args.paths, args.out, args.ema)
    elif args.command == "export":
        lines = tools.export(args.path, args.out, args.dtype)
    else:
        from titanlike.checkpoint.hf_import import import_hf

        lines = import_hf(args.path, args.out)
    return show_lines({"out": args.out, "messages": lines}, lines, args)


def show_lines(value: dict[str, Any], lines: list[str], args: argparse.Namespace) -> int:
    print(json.dumps(value) if args.json else printable("\n".join(lines)))
    return 0


def size(count: int) -> str:
    """A number of bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000  # type: ignore[assignment]
    return f"{count:.3g} TB"


def print_table(columns: list[str], rows: list[list[str]], title: str | None = None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        table.add_column(
            column, justify="right" if column in ("step", "size", "files", "boxes") else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*map(printable, row))
    # A pipe has no width: nothing is cut there.
    Console(width=None if sys.stdout.isatty() else 200, highlight=False, markup=False).print(table)


def show_list(rows: list[dict[str, Any]], args: argparse.Namespace) -> int:
    if args.json:
        print(json.dumps({"checkpoints": rows}))
    elif not rows:
        print(f"no checkpoints in {printable(args.path)}")
    else:
        print_table(
            ["step", "saved", "size", "files", "digest", ""],
            [
                [str(row["step"]), "", "", "", "", f"damaged: {row['problem']}"]
                if row["problem"]
                else [
                    *(str(row["step"]), row["created"], size(row["bytes"]), str(row["files"]), row["digest"]),
                    "newest" if row["newest"] else "",
                ]
                for row in rows
            ],
        )
    return 0


def show_one(checkpoint: tuple[Any, ...], args: argparse.Namespace) -> int:
    folder, manifest, index, state = checkpoint
    if args.json:
        print(json.dumps({"folder": str(folder), "manifest": manifest.raw, "state": state, "tensors": index.tensors}))
        return 0
    facts = [
        ["folder", str(folder)],
        ["step", str(manifest.step)],
        [
            "saved",
            f"{manifest.created} by titanlike {manifest.raw.get('titanlike')}, torch {manifest.raw.get('torch')}",
        ],
        ["size", f"{size(manifest.bytes)} in {len(manifest.files)} files"],
        ["digest", manifest.digest],
    ]
    facts += [[key, str(state[key])] for key in ("tokens", "mesh", "tokenizer") if key in state]
    print_table(["", ""], facts)
    print_table(
        ["tensor", "dtype", "shape", "boxes", "digest"],
        [
            [name, entry["dtype"], "x".join(map(str, entry["shape"])), str(len(entry["boxes"])), entry["digest"]]
            for name, entry in index.tensors.items()
        ],
    )
    return 0


def show_digests(checkpoint: tuple[Any, ...], args: argparse.Namespace) -> int:
    """The state's digest, and those of weights and optimizer, which other checkpoints can be compared with."""
    from titanlike.checkpoint.digest import add, digest_text
    from titanlike.checkpoint.tools import compute_digests

    folder, manifest, index, _ = checkpoint
    values = compute_digests(index)
    parts = {
        part: digest_text(add(*(value for name, value in values.items() if name.startswith(prefix))))
        for part, prefix in (("state", ""), ("weights", "model."), ("optimizer", "optimizer."))
    }
    same = parts["state"] == manifest.digest
    if args.json:
        print(
            json.dumps(
                {"folder": str(folder), "step": manifest.step, **parts, "stored": manifest.digest, "equal": same}
            )
        )
    else:
        print_table(["", ""], [[part, value] for part, value in parts.items()])
        print(f"stored {manifest.digest}: {'equal' if same else 'NOT EQUAL'}")
    return 0 if same else 1


def show_verification(results: list[tuple[str, str | None]], args: argparse.Namespace) -> int:
    problems = [problem for _, problem in results if problem]
    if args.json:
        print(json.dumps({"checked": len(results), "problems": problems}))
    else:
        for problem in problems:
            print(printable(problem))
        print(f"{len(results)} checks, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    run_main(main)
