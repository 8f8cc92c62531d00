"""The loss of a checkpoint's weights on any text, on any mesh: what scripts/evaluate.py does.

Numbers are sums over all tokens of a set, so the mesh, the batch and the padding cannot change them: loss is the sum of
the token losses / number of tokens, perplexity exp(loss), bits per byte the sum / ln 2 / bytes of the text that the
tokens stand for. The last one alone compares models with different tokenizers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from titanlike import cli
from titanlike.config import Config, config_keys, load_config
from titanlike.config_errors import no_effect
from titanlike.errors import UserError
from titanlike.printable import printable

if TYPE_CHECKING:
    from titanlike.generate.model import InferenceModel
    from titanlike.generate.source import Source
    from titanlike.mesh import Mesh
    from titanlike.tokenizer import Tokenizer

DESCRIPTION = """The loss of a checkpoint on text, on one process or under torchrun on any mesh.

    python scripts/evaluate.py --checkpoint runs/llama                     what the run held out, with its settings
    python scripts/evaluate.py --checkpoint runs/llama --validation.samples 0 \\
        --validation.sets '[{name = "book", source = "text", paths = ["book.txt"]}]'
    python scripts/evaluate.py --checkpoint runs/llama --tasks my_task --include-path tasks/    lm-eval's tasks

Config keys that count here are those of [data] and [validation], mesh.pp, mesh.dp, mesh.tp, run.device, run.seed,
train.seq_len, train.microbatch_size and train.dtype. They come from the checkpoint's own run, or from --config.
"""
SECTIONS = ("data", "validation")
KEYS = (
    *("mesh.pp", "mesh.dp", "mesh.tp", "run.device", "run.seed"),
    *("train.seq_len", "train.microbatch_size", "train.dtype"),
)


@dataclasses.dataclass(frozen=True)
class Score:
    """The sums over one set."""

    nats: float
    tokens: int
    bytes: int

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / max(self.tokens, 1)

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float | None:
        """None for a set without text."""
        return self.nats / math.log(2) / self.bytes if self.bytes else None

    def __add__(self, other: Score) -> Score:
        return Score(self.nats + other.nats, self.tokens + other.tokens, self.bytes + other.bytes)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """(options, config keys of the command line).

    Raises:
        UserError: an argument is unknown or has no effect.
    """
    rest, overrides = cli.split(argv)
    parser = _Parser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--checkpoint", metavar="PATH", required=True, help="a checkpoint, a run folder, or a Hugging Face folder")
    add("--config", metavar="PATH", help="take the data from this TOML file instead of the checkpoint's run")
    add("--tokenizer", metavar="PATH", help="where the tokenizer.json lies, if not where the checkpoint says")
    add("--tasks", metavar="A,B", help="tasks of lm-eval instead of the data (pip install 'titanlike[eval]')")
    add("--include-path", metavar="FOLDER", help="with --tasks: where definitions of tasks of one's own lie")
    add("--limit", type=int, metavar="N", help="with --tasks: the first N documents of each")
    add("--batch-size", type=int, default=16, metavar="N", help="with --tasks: rows at a time per dp rank. Default: 16")
    add("--json", action="store_true", help="print one JSON object")
    cli.check_no_positional(rest, "--checkpoint")
    options = parser.parse_args(rest)
    for key in overrides:
        if key not in KEYS and key.partition(".")[0] not in SECTIONS:
            valid = [k for k in config_keys() if k in KEYS or k.partition(".")[0] in SECTIONS]
            raise no_effect(key, valid)
    if options.tasks is None:
        for name in ("include_path", "limit"):
            if getattr(options, name) is not None:
                raise UserError(f"--{name.replace('_', '-')} has no effect without --tasks")
    return options, overrides


def config_for(source: Source, options: argparse.Namespace, overrides: Mapping[str, Any]) -> Config:
    """The config whose data is evaluated, with the model of the source.

    Raises:
        UserError: a key is wrong.
    """
    keys: dict[str, Any] = {}
    path = options.config
    if path is None and source.config is not None:
        saved = source.config
        keys = {section: without_none(saved[section]) for section in SECTIONS if section in saved}
        keys |= {"run.seed": saved["run"]["seed"], "train.seq_len": saved["train"]["seq_len"]}
        keys["train.dtype"] = saved["train"]["dtype"]
    elif path is None:
        keys["train.seq_len"] = source.trained_length
    given = load_config(path, {**keys, **overrides})
    model = without_none(dataclasses.asdict(source.model_config))
    tokenizer = options.tokenizer or source.tokenizer or given.data.tokenizer
    mesh = {key: overrides[key] for key in KEYS if key.startswith("mesh.") and key in overrides}
    # What a run has besides (optimizer, schedule, hooks ...) stays out: it has no say here.
    kept = {section: given.model_dump(mode="json", exclude_none=True)[section] for section in SECTIONS}
    kept["train"] = {"seq_len": given.train.seq_len, "dtype": given.train.dtype}
    kept["train"]["microbatch_size"] = kept["train"]["global_batch_size"] = given.train.microbatch_size
    kept["run"] = {"seed": given.run.seed, "device": given.run.device}
    kept["mesh"] = {"sequence_parallel": False}  # as the model is cut for inference, so any seq_len will do
    name = {"model.architecture": source.architecture}
    return load_config(None, {**kept, "model": model, **name, "data.tokenizer": tokenizer, **mesh})


def without_none(values: Any) -> Any:
    """A table without the keys that have no value, as TOML would hold it."""
    if isinstance(values, Mapping):
        return {key: without_none(value) for key, value in values.items() if value is not None}
    return [without_none(value) for value in values] if isinstance(values, list | tuple) else values


def evaluate(model: InferenceModel, data: Any, microbatch_size: int) -> dict[str, Score]:
    """The score of each validation set (titanlike.data.Data). All ranks call it and get the same."""
    import torch
    import torch.distributed as dist

    mesh, count_bytes = model.mesh, byte_counter(data.tokenizer)
    model.lay_out(1024)
    scores = {}
    for name, held_out in data.validation.items():
        found = torch.zeros(1, dtype=torch.int64, device=mesh.device)

        def batches(held_out: Any = held_out, found: torch.Tensor = found) -> Iterator[Any]:
            for batch in held_out.batches(microbatch_size * mesh.pp):
                found += count_bytes(batch.tokens, batch.labels)
                yield batch

        nats, tokens = model.loss(batches(), microbatch_size)
        if mesh.coordinate("pp") != 0 or mesh.coordinate("tp") != 0:
            found.zero_()
        dist.all_reduce(found)  # all ranks: each dp coordinate's rows are counted on one of its ranks
        scores[name] = Score(nats, tokens, int(found))
    return scores


def byte_counter(tokenizer: Tokenizer) -> Any:
    """A function of tokens and labels, int64 [rows, seq], that counts the bytes of text that the labels stand for:
    exactly, where the tokenizer says how many a token has, else by decoding each row."""
    import torch

    from titanlike.loss import IGNORE

    known = getattr(tokenizer, "bytes_per_token", None)
    table = None if known is None else torch.tensor(known, dtype=torch.int64)

    def count(tokens: torch.Tensor, labels: torch.Tensor) -> int:
        if table is not None:
            return int(table[labels[labels != IGNORE]].sum())
        total = 0
        for row, ids in zip(tokens, labels, strict=True):
            chosen = ids[ids != IGNORE].tolist()
            if chosen:  # after the token before them, for a decoder may drop the space at a beginning
                before = [int(row[0])]
                total += len(tokenizer.decode(before + chosen).encode()) - len(tokenizer.decode(before).encode())
        return total

    return count


def main(argv: Sequence[str], out: TextIO | None = None) -> None:
    """Do what the command line says; rank 0 prints. All ranks call it.

    Raises:
        UserError: the arguments, the checkpoint or the data are wrong.
    """
    out = out or sys.stdout
    options, overrides = parse(argv)
    # torch is imported after the arguments have been found good.
    import torch

    from titanlike.data import open_data
    from titanlike.generate.model import check_mesh
    from titanlike.generate.source import agree, load_model, open_source, tokenizer_for
    from titanlike.mesh import Mesh, init_distributed, pick_device, world_size

    source = open_source(options.checkpoint)
    config = config_for(source, options, overrides)
    dp = config.resolved_dp(world_size())
    check_mesh(source.model_config, config.mesh.pp, config.mesh.tp)
    check_length(config, source)
    device = pick_device(config.run.device)
    init_distributed(device)
    source = agree(source)
    tokenizer = tokenizer_for(source, config.data.tokenizer)

    mesh = Mesh(config.mesh.pp, dp, config.mesh.tp, device)
    dtype = getattr(torch, config.train.dtype)
    if options.tasks is not None:
        evaluate_tasks(source, mesh, dtype, tokenizer, options, out)
        return
    size = config.train.microbatch_size
    whole = config.model_copy(update={"train": config.train.model_copy(update={"global_batch_size": size * dp})})
    data = open_data(whole, mesh.coordinate("dp"), dp)
    if not data.validation:
        raise UserError(
            "there is no text to evaluate on: give validation.sets, or a data.validation_fraction of more than 0"
        )
    scores = evaluate(load_model(source, mesh, dtype), data, size)
    if mesh.is_main:
        report(source.what, scores, options.json, out)


def check_length(config: Config, source: Source) -> None:
    """Raise `UserError` if the sequences are longer than the model takes."""
    if config.train.seq_len > source.longest:
        raise UserError(
            f"train.seq_len ({config.train.seq_len}) is more than the {source.longest} tokens that a text may have, "
            f"{source.limit}"
        )


def report(what: str, scores: dict[str, Score], as_json: bool, out: TextIO) -> None:
    """Print a row for each set, and one for all of them together."""
    if len(scores) > 1:
        total = Score(0.0, 0, 0)
        for score in scores.values():
            total += score
        scores = {**scores, "all": total}
    if as_json:
        sets = {
            name: {
                **{"loss": score.loss, "perplexity": score.perplexity, "bits_per_byte": score.bits_per_byte},
                **{"tokens": score.tokens, "bytes": score.bytes},
            }
            for name, score in scores.items()
        }
        print(json.dumps({"source": what, "sets": sets}), file=out)
        return
    print(printable(what), file=out)
    width = max(4, *map(len, scores))
    print(f"{'set':{width}}  {'loss':>10}  {'perplexity':>12}  {'bits/byte':>10}  {'tokens':>13}", file=out)
    for name, score in scores.items():
        bits = "" if score.bits_per_byte is None else f"{score.bits_per_byte:.5f}"
        row = f"{name:{width}}  {score.loss:10.6f}  {score.perplexity:12.4f}  {bits:>10}  {score.tokens:13,}"
        print(printable(row), file=out)


def evaluate_tasks(
    source: Source, mesh: Mesh, dtype: Any, tokenizer: Tokenizer, options: argparse.Namespace, out: TextIO
) -> None:
    """Run tasks of lm-eval, and print its results on rank 0. All ranks call it."""
    from titanlike.lm_eval_tasks import run_tasks

    results = run_tasks(
        source,
        mesh,
        dtype,
        tokenizer,
        tasks=options.tasks.split(","),
        include_path=options.include_path,
        limit=options.limit,
        batch_size=options.batch_size,
    )
    if not mesh.is_main:
        return
    if options.json:
        print(json.dumps({"source": source.what, "tasks": results}), file=out)
        return
    print(printable(source.what), file=out)
    for task, values in results.items():
        for name, value in values.items():
            shown = f"{value:.6f}" if isinstance(value, float) else value
            print(printable(f"{task}  {name}  {shown}"), file=out)
