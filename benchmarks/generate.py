"""Generation beside transformers' generate: the same random weights, the same prompts, in turns in one process.

    python benchmarks/generate.py [--preset 26m] [--batch 1 8] [--prompt 128] [--new 65] [--repeats 7] [--threads 1]

Prints, for each batch size, tokens per second of prefill (all prompt tokens until the first new one) and of decode (the
tokens after that), medians over the repeats, and the ratio ours / theirs, the median of the ratios of neighbouring
measurements, which load on the machine hits alike. The new tokens of both are compared, each time. Needs transformers.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from models.llama import PRESETS, LlamaConfig
from parallelize.llama import HF
from titanlike.build import draw_parameter
from titanlike.checkpoint.hf_config import hf_parts, to_hf_config
from titanlike.generate.generator import Generator
from titanlike.generate.model import InferenceModel
from titanlike.mesh import Mesh, init_distributed, pick_device


def both_models(config: LlamaConfig, dtype: torch.dtype) -> tuple[InferenceModel, Any]:
    """Ours and transformers' with the same random weights."""
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM

    device = pick_device("cpu")
    init_distributed(device)
    ours = InferenceModel("llama", config, Mesh(1, 1, 1, device), dtype, 512)
    theirs: Any = LlamaForCausalLM(TheirConfig(**to_hf_config(HF[0], dataclasses.asdict(config), str(dtype)[6:], None)))
    theirs = theirs.to(dtype).eval().requires_grad_(False)
    into = dict(theirs.named_parameters())
    for name, shard in ours.shards().items():
        shard.tensor.copy_(draw_parameter(ours.plain, 0, name, shard.global_shape, device))
        into.pop(hf_parts(HF[0], name, shard.global_shape)[0][0]).copy_(shard.tensor)
    assert not into, list(into)
    return ours, theirs


def measured(generate: Callable[[int], list[list[int]]], new: int) -> tuple[float, float, list[list[int]]]:
    """(seconds to the first token, seconds of the others, the tokens)."""
    begin = time.perf_counter()
    generate(1)
    first = time.perf_counter()
    tokens = generate(new)
    end = time.perf_counter()
    return first - begin, (end - first) - (first - begin), tokens


def compare(ours: InferenceModel, theirs: Any, batch: int, prompt: int, new: int, repeats: int) -> dict[str, list[Any]]:
    """Seconds of each, by repeat."""
    torch.manual_seed(0)
    ids = torch.randint(0, ours.config.vocab_size, (batch, prompt))
    generator = Generator(ours, str, (), ours.config.max_seq_len)

    def our_text(count: int) -> list[list[int]]:
        return [made.ids for made in generator.generate(ids.tolist(), count)[0]]

    def their_text(count: int) -> list[list[int]]:
        with torch.no_grad():
            out = theirs.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return out[:, prompt:].tolist()

    our_text(3), their_text(3)  # warm
    found: dict[str, list[Any]] = {"prefill": [], "decode": [], "equal": []}
    for _ in range(repeats):
        mine, yours = measured(our_text, new), measured(their_text, new)
        found["prefill"].append((mine[0], yours[0]))
        found["decode"].append((mine[1], yours[1]))
        found["equal"].append(mine[2] == yours[2])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="26m", choices=list(PRESETS), help="of llama (default: %(default)s)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--new", type=int, default=65, help="new tokens of each prompt")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ours, theirs = both_models(PRESETS[args.preset], getattr(torch, args.dtype))
    print(f"{args.preset}, {args.dtype}, {args.threads} thread(s), prompts of {args.prompt}, {args.new} new tokens")
    print(
        f"{'batch':>5}  {'phase':8}  {'ours tok/s':>10}  {'theirs tok/s':>12}  {'ratio':>6}  {'least..most':>13}  text"
    )
    for batch in args.batch:
        found = compare(ours, theirs, batch, args.prompt, args.new, args.repeats)
        same = "equal" if all(found["equal"]) else "DIFFERENT"
        for phase, tokens in (("prefill", batch * args.prompt), ("decode", batch * (args.new - 1))):
            mine, yours = (tokens / statistics.median(each[i] for each in found[phase]) for i in (0, 1))
            ratios = sorted(yours_s / mine_s for mine_s, yours_s in found[phase])
            spread = f"{ratios[0]:.2f}..{ratios[-1]:.2f}"
            print(
                f"{batch:5}  {phase:8}  {mine:10,.1f}  {yours:12,.1f}  {statistics.median(ratios):6.2f}  {spread:>13}  "
                f"{same}"
            )


if __name__ == "__main__":
    main()
