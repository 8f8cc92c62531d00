"""What scripts/generate.py does, from its command line to its last line."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from titanlike import cli
from titanlike.config import Config, config_keys, load_config
from titanlike.config_errors import no_effect
from titanlike.config_input import from_text
from titanlike.errors import UserError
from titanlike.generate.text import Decode, StopStrings, TextStream
from titanlike.printable import printable, printable_json

if TYPE_CHECKING:
    from titanlike.generate.generator import Completion, Timing

DESCRIPTION = """Continue prompts with the weights of a checkpoint, on one process or under torchrun on any mesh.

    python scripts/generate.py --checkpoint runs/llama --prompt "def "
    torchrun --nproc-per-node 2 scripts/generate.py --checkpoint runs/llama --mesh.tp 2 --prompts-file p.txt --json
"""
KEYS = ("mesh.pp", "mesh.dp", "mesh.tp", "run.device")
ROPE = "model.rope_scaling."
DTYPES = ("float32", "bfloat16", "float64")
DEFAULT_NEW_TOKENS = 128


class _Parser(argparse.ArgumentParser):
    """argparse, but what it complains about is a `UserError`."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Config, dict[str, Any]]:
    """(options, a config of which mesh and run.device count, changes to the model's RoPE scaling).

    Raises:
        UserError: an argument is unknown or has no meaning.
    """
    rest, overrides = cli.split(argv)
    parser = _Parser(description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--checkpoint", metavar="PATH", required=True, help="a checkpoint, a run folder, or a Hugging Face folder")
    add("--prompt", action="append", default=[], metavar="TEXT", help="may be given several times")
    add("--prompts-file", metavar="PATH", help='a prompt on each line; .jsonl: a string or {"prompt": ...} on each')
    add("--max-new-tokens", type=int, metavar="N", help=f"default: {DEFAULT_NEW_TOKENS}, or what the context leaves")
    add("--temperature", type=float, default=0.0, metavar="T", help="default: 0, the likeliest token (greedy)")
    add("--top-k", type=int, metavar="K", help="draw among the K likeliest tokens")
    add("--top-p", type=float, metavar="P", help="draw among the likeliest tokens that have P of the probability")
    add("--repetition-penalty", type=float, default=1.0, metavar="R", help="above 1: tokens that were there count less")
    add("--seed", type=int, default=0, metavar="N", help="of the draws; the same text on every mesh. Default: 0")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times")
    add("--dtype", choices=DTYPES, default="float32", help="what the model computes in. Default: float32")
    add("--tokenizer", metavar="PATH", help="where the tokenizer.json lies, if not where the checkpoint says")
    add("--batch-size", type=int, default=32, metavar="N", help="prompts at a time per dp rank. Default: 32")
    add("--json", action="store_true", help="print one JSON object")
    for key in (*KEYS, f"{ROPE}factor"):
        doc = " ".join(config_keys()[key].doc.split()).replace("%", "%%")
        parser.add_argument(f"--{key}", metavar="VALUE", help=doc, dest=key)
    cli.check_no_positional(rest, "--checkpoint")
    options = parser.parse_args(rest)
    for key in overrides:
        valid = [*KEYS, *(k for k in config_keys() if k.startswith(ROPE))]
        if key not in valid:
            raise no_effect(key, valid)
    config = load_config(None, {key: value for key, value in overrides.items() if key in KEYS})
    keys = config_keys()
    scaling = {
        key.removeprefix(ROPE): from_text(value, keys.get(key)) if isinstance(value, str) else value
        for key, value in overrides.items()
        if key.startswith(ROPE)
    }
    return options, config, scaling


def read_prompts(options: argparse.Namespace) -> list[str]:
    """All prompts, those of the command line first.

    Raises:
        UserError: there are none, or the file cannot be read.
    """
    prompts = list(options.prompt)
    if options.prompts_file is not None:
        path = Path(options.prompts_file).expanduser()
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise UserError(f"--prompts-file {path} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise UserError(f"--prompts-file {path} is not UTF-8 text") from None
        for number, line in enumerate(lines, start=1):
            prompts.append(_json_prompt(line, f"{path}, line {number}") if path.suffix == ".jsonl" else line)
    if not prompts:
        raise UserError("there is no prompt: give --prompt TEXT or --prompts-file PATH")
    return prompts


def _json_prompt(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str):
        raise UserError(f'{where} is neither a JSON string nor an object with a "prompt"')
    return prompt


def new_tokens(options: argparse.Namespace, prompts: Sequence[Sequence[int]], longest: int) -> int:
    """How many tokens to make: what was asked for, or what the longest prompt leaves of the context."""
    if options.max_new_tokens is not None:
        return options.max_new_tokens
    return max(1, min(DEFAULT_NEW_TOKENS, longest - max(map(len, prompts))))


class Printer:
    """Prints completions in the order of the prompts, each as it grows. Control characters are made visible."""

    def __init__(self, prompts: Sequence[str], decode: Decode, stop: StopStrings, out: TextIO) -> None:
        self._prompts, self._decode, self._stop, self._out = prompts, decode, stop, out
        self._ids: list[list[int]] = [[] for _ in prompts]
        self._streams = [TextStream(decode) for _ in prompts]
        self._texts = ["" for _ in prompts]  # as far as known
        self._whole = [False for _ in prompts]
        self._at = 0  # the prompt whose completion is being printed
        self._shown = -1  # characters of it that have been; -1: not its prompt either

    def tokens(self, number: int, ids: Sequence[int], finished: bool) -> None:
        """Hear of new tokens of a prompt; see generator.OnTokens."""
        if self._whole[number]:
            return
        self._ids[number] += ids
        self._whole[number] = finished
        if finished:
            self._texts[number] = self._stop.cut(self._decode(self._ids[number]))
        else:
            self._texts[number] += self._streams[number].push(ids)
        while self._at < len(self._prompts) and self._advance():
            self._at, self._shown = self._at + 1, -1
        self._out.flush()

    def _advance(self) -> bool:
        """Print what is new of the current completion. Returns whether it is complete."""
        if self._shown < 0:
            if len(self._prompts) > 1:
                self._out.write(f"--- prompt {self._at + 1}\n")
            self._out.write(printable(self._prompts[self._at]))
            self._shown = 0
        text, whole = self._texts[self._at], self._whole[self._at]
        # The end of an unfinished text may be the beginning of a stop string.
        safe = len(text) if whole else max(self._shown, len(text) - max(0, self._stop.longest - 1))
        self._out.write(printable(text[self._shown : safe]))
        self._shown = safe
        if whole:
            self._out.write("\n")
        return whole


def main(argv: Sequence[str], out: TextIO | None = None) -> None:
    """Do what the command line says; rank 0 prints. All ranks call it.

    Raises:
        UserError: the arguments, the checkpoint or the prompts are wrong.
    """
    out = out or sys.stdout
    options, config, scaling = parse(argv)
    prompts = read_prompts(options)
    # torch is imported after the arguments have been found good.
    import torch

    from titanlike.generate.generator import Generator, check_prompts
    from titanlike.generate.model import check_mesh
    from titanlike.generate.sampling import Sampling
    from titanlike.generate.source import (
        agree,
        encoder_for,
        load_model,
        open_source,
        tokenizer_for,
        with_rope_scaling,
    )
    from titanlike.mesh import Mesh, init_distributed, pick_device, world_size

    sampling = Sampling(
        options.temperature, options.top_k, options.top_p, options.repetition_penalty, seed=options.seed
    )
    if options.batch_size < 1:
        raise UserError(f"--batch-size must be 1 or more, not {options.batch_size}")
    dp = config.resolved_dp(world_size())
    source = open_source(options.checkpoint)
    check_mesh(source.model_config, config.mesh.pp, config.mesh.tp)
    device = pick_device(config.run.device)
    init_distributed(device)
    source = with_rope_scaling(agree(source), scaling)
    tokenizer = tokenizer_for(source, options.tokenizer)
    encode = encoder_for(source, tokenizer)
    ids = [encode(prompt) for prompt in prompts]
    count = new_tokens(options, ids, source.longest)

    check_prompts(ids, count, source.model_config.vocab_size, source.longest, source.limit)  # before it takes time

    mesh = Mesh(config.mesh.pp, dp, config.mesh.tp, device)
    model = load_model(source, mesh, getattr(torch, options.dtype))
    end_ids = source.end_ids or (tokenizer.end_id,)
    generator = Generator(model, tokenizer.decode, end_ids, source.longest, source.limit)
    stop = StopStrings(options.stop, tokenizer.decode)
    printer = Printer(prompts, tokenizer.decode, stop, out)
    live = mesh.is_main and out.isatty() and not options.json
    completions, timing = generator.generate(
        ids, count, sampling, options.stop, options.batch_size, printer.tokens if live else None
    )
    if not mesh.is_main:
        return
    if options.json:
        texts = [stop.cut(tokenizer.decode(completion.ids)) for completion in completions]
        said = json.dumps(as_json(source.what, prompts, texts, completions, timing), ensure_ascii=False)
        out.write(printable_json(said) + "\n")
        return
    for number, completion in enumerate(completions):
        printer.tokens(number, completion.ids, True)
    print(printable(f"{source.what}; {summary(timing)}"), file=sys.stderr)


def summary(timing: Timing) -> str:
    """How fast it was, in one line."""
    return (
        f"prefill {timing.prefill_tokens:,} tokens, {timing.prefill_rate:,.1f} tokens/s; decode "
        f"{timing.decode_tokens:,} tokens, {timing.decode_rate:,.1f} tokens/s"
    )


def as_json(
    what: str, prompts: Sequence[str], texts: Sequence[str], completions: Sequence[Completion], timing: Timing
) -> dict[str, Any]:
    """What --json prints."""
    rows = zip(prompts, texts, completions, strict=True)
    return {
        "source": what,
        "completions": [
            {"prompt": prompt, "text": text, "ids": made.ids, "finish": made.finish} for prompt, text, made in rows
        ],
        "prefill": {"tokens": timing.prefill_tokens, "seconds": timing.prefill_s, "tokens_per_s": timing.prefill_rate},
        "decode": {"tokens": timing.decode_tokens, "seconds": timing.decode_s, "tokens_per_s": timing.decode_rate},
    }
