"""Turn text into token files for `[data] source = "tokens"`.

    python scripts/prepare_data.py --out tokens/web --tokenizer tokenizer.json --paths 'web/*.jsonl.gz'
    python scripts/prepare_data.py --out tokens/wiki --tokenizer llama/ --source huggingface --dataset wikitext

Run again after a kill, it makes only the shards that are missing. docs/data.md describes the files.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from titanlike.config_errors import validate
from titanlike.data.config import RECORDS, SourceConfig
from titanlike.data.prepare import Progress, prepare
from titanlike.data.source_errors import section_errors
from titanlike.errors import UserError, run_main

NAMES = ("dataset", "subset", "split", *RECORDS)  # keys of [data] that are options here
PLAIN_INTERVAL = 10.0  # seconds between lines where there is no terminal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, metavar="FOLDER", help="where the token files go")
    parser.add_argument("--tokenizer", default="bytes", help="bytes, a tokenizer.json, or a folder that has one")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: one per core)")
    parser.add_argument(
        "--shard-mb", type=float, default=256.0, help="megabytes of input per shard (default: %(default)s)"
    )
    parser.add_argument("--paths", nargs="+", default=[], metavar="PATH", help="files or globs")
    parser.add_argument("--source", default="text", help="text, huggingface or python-stdlib (default: %(default)s)")
    for name in NAMES:
        field = SourceConfig.model_fields[name]
        help_text = (field.description or "").replace("%", "%%")
        parser.add_argument(f"--{name.replace('_', '-')}", default=field.default, help=help_text)
    options = parser.parse_args()
    if options.workers < 1 or options.shard_mb <= 0:
        raise UserError("--workers and --shard-mb must be more than 0")
    if options.source not in ("text", "huggingface", "python-stdlib"):
        raise UserError(f"--source must be text, huggingface or python-stdlib, got {options.source!r}")
    given = {name: getattr(options, name) for name in ("source", "paths", *NAMES)}
    source = validate(SourceConfig, given)
    start = time.monotonic()
    with section_errors("--"), _Bar() as bar:
        metadata = prepare(
            source,
            options.tokenizer,
            Path(options.out),
            workers=options.workers,
            shard_bytes=max(1, int(options.shard_mb * 1e6)),
            progress=bar,
        )
    print(
        f"{options.out}: {metadata['documents']:,} documents, {metadata['tokens']:,} tokens as {metadata['dtype']} in "
        f"{len(metadata['shards'])} shards, {time.monotonic() - start:.1f} s"
    )


class _Bar:
    """A bar on a terminal, a line now and then elsewhere."""

    def __enter__(self) -> Progress:
        self._begun = self._last = time.monotonic()
        self._bar = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("tokenising"), BarColumn(), TextColumn("{task.fields[said]}"), TimeRemainingColumn())
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task("", total=None, said="")
            self._bar.start()
        return self._update

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _update(self, done: int, total: int, tokens: int) -> None:
        now = time.monotonic()
        rate = tokens / max(now - self._begun, 1e-9)
        said = f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB, {tokens:,} tokens, {rate:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total, said=said)
        elif now - self._last >= PLAIN_INTERVAL:
            self._last = now
            print(said, file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_main(main)
