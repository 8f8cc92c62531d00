"""The one list of names that a run logs, with unit and meaning. docs/metrics.md is made from it:

    python -m titanlike.metrics.names > docs/metrics.md

A name with a part in angle brackets stands for a family: `val_loss/<set>` for `val_loss/python`, and so on.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Name:
    """One logged name. `when` says when it is there, and is empty if it is on every line."""

    name: str
    unit: str
    meaning: str
    when: str = ""

    def matches(self, name: str) -> bool:
        """Whether the concrete name belongs to this entry."""
        return re.fullmatch(re.sub(r"<\w+>", "[^/]+", self.name), name) is not None


_PROGRESS = (
    Name("step", "steps", "optimizer steps done, counted from 1 over all resumes"),
    Name("tokens", "tokens", "tokens seen since the run began: `step × global_batch_size × seq_len`, on every mesh"),
    Name("passes/<source>", "passes", "how often each source has been read so far; of a stream, whole passes"),
    Name("wall_time", "s", "when the line was written, seconds since the epoch; not in TensorBoard, which has its own"),
)
_LEARNING = (
    Name(
        "loss",
        "nats/token",
        "training loss of the global batch before the update: "
        "`sum of the token losses / number of valid label tokens`, over all ranks and microbatches",
    ),
    Name("val_loss", "nats/token", "the same over the whole validation set, after the update", "validation steps"),
    Name("val_loss/<set>", "nats/token", "`val_loss` of each set", "validation steps, several sets"),
    Name("skipped", "1", "1 where `[guard]` left the update of the step out (docs/guard.md)", "such steps"),
    Name("grad_norm", "1", "global L2 norm of the gradient of `loss`, all parameters, before clipping"),
    Name("lr", "1", "learning rate of the update of this step, for parameters that no group scales"),
    Name(
        "lr/<n>", "1", "learning rate of `optimizer.groups[n]`, counted from 0: `lr × lr_scale`", "`optimizer.groups`"
    ),
)
_EXPERTS = (
    Name("moe/balance_loss", "1", "load-balancing loss of the global batch, mean of the layers, not weighted"),
    Name("moe/z_loss", "1", "router z-loss, likewise: `mean of logsumexp(router logits)²`"),
    Name(
        "moe/auxiliary_loss",
        "1",
        "what they add to the training loss: `balance_loss × moe/balance_loss + z_loss × moe/z_loss`. Not in `loss`, "
        "which stays the cross-entropy, but in `grad_norm`",
    ),
    Name("moe/load_max", "1", "tokens of the busiest expert over the mean of its layer, in the worst layer"),
    Name("moe/load_cv", "1", "standard deviation of the experts' tokens over their mean, mean of the layers"),
    Name("moe/entropy", "nats", "entropy of the router's scores of a token, mean over tokens and layers"),
    Name("moe/dropped", "share", "choices that an expert had no room for, of all", "`model.capacity_factor`"),
    Name("moe/<name>/<layer>", "", "the same of each layer"),
)
_COMPILER = (
    Name("compile/graphs", "graphs", "graphs that torch.compile has compiled so far in this process", "`[compile]`"),
    Name("compile/graph_breaks", "places", "where it had to give up a whole graph; an error in a stage", "`[compile]`"),
)
_SPEED = (
    Name("step_time_s", "s", "wall time since the end of the previous step, saving included, less `time/validation_s`"),
    Name("tokens_per_s", "tokens/s", "`global_batch_size × seq_len / step_time_s`"),
    Name("tokens_per_s_per_rank", "tokens/s", "`tokens_per_s / world size`"),
    Name(
        "tflops_per_rank",
        "TFLOP/s",
        "`tokens_per_s_per_rank × F / 10¹²`, with `F = 6 × matmul weights + 12 × layers × heads × head_dim × seq_len`",
    ),
    Name(
        "mfu/palm",
        "share",
        "`tokens_per_s_per_rank × (6 × all parameters + 12 × layers × heads × head_dim × seq_len) / datasheet peak`",
        "devices whose peak is known",
    ),
    Name(
        "mfu/matmul",
        "share",
        "`tokens_per_s_per_rank × F / datasheet peak`: without the input embedding, norms and biases",
        "devices whose peak is known",
    ),
    Name(
        "mfu/causal",
        "share",
        "the same with half the attention, `F − 6 × layers × heads × head_dim × seq_len`",
        "devices whose peak is known",
    ),
    Name(
        "mfu/measured",
        "share",
        "`tokens_per_s_per_rank × F / matmul peak`, the peak measured at start on the same device in the same dtype",
        "`metrics.matmul_peak`",
    ),
)
_TIME = (
    Name("time/data_s", "s", "waiting for the next batch"),
    Name("time/forward_backward_s", "s", "all microbatches forward and backward, pipeline waits included"),
    Name("time/grad_reduce_s", "s", "reduce-scatter of the gradients over dp, as far as it was waited for"),
    Name("time/clip_s", "s", "the gradient norm and the clipping"),
    Name("time/optimizer_s", "s", "the update of this rank's shard"),
    Name(
        "time/param_gather_s",
        "s",
        "all-gather of the updated weights over dp, as far as the next forward waited for it",
    ),
    Name(
        "time/checkpoint_s", "s", "how long saving after the previous step held up the training", "steps after a save"
    ),
    Name("time/validation_s", "s", "validation after this step", "validation steps"),
    Name("time/health_s", "s", "the forward that looks at activations and attention", "health steps"),
    Name("time/other_s", "s", "the rest of `step_time_s`: logging, the loop itself"),
)
_WAITS = (
    Name("bubble", "share", "idle share of the pipeline that rank 0 is in: the mean of `bubble/<n>`", "`mesh.pp` > 1"),
    Name(
        "bubble/<n>",
        "share",
        "idle share of pipeline rank n, `1 − busy / T`: `busy` is the time in which it runs forwards and backwards of "
        "its stages, `T` the longest time of all pipeline ranks from the begin of the step to the end of their last "
        "backward",
        "`mesh.pp` > 1",
    ),
    Name(
        "comm/dp_s",
        "s",
        "blocked until gradients are reduce-scattered and new weights all-gathered over dp",
        "`mesh.dp` > 1",
    ),
    Name(
        "comm/tp_s",
        "s",
        "sums over tp of the gradients of parameters that every tp rank holds; those inside the blocks are not in it",
        "`mesh.tp` > 1",
    ),
    Name(
        "comm/pp_s",
        "s",
        "the pipeline's time less `busy`: blocked until neighbours have sent or received; and the sum of a tied "
        "weight's gradient over its two stages",
        "`mesh.pp` > 1",
    ),
)
_MEMORY = (
    Name("memory/current_max_bytes", "bytes", "memory in use now, on the rank that uses most"),
    Name("memory/current_min_bytes", "bytes", "the same on the rank that uses least"),
    Name("memory/peak_max_bytes", "bytes", "highest memory in use so far in this process, on the rank with most"),
    Name("memory/peak_min_bytes", "bytes", "the same on the rank with least"),
)
_LOOKED = "health steps"
_HEALTH = (
    Name(
        "activation_rms/<layer>",
        "1",
        "root mean square of what the block hands on, over all elements, rows and positions of the global batch",
        _LOOKED,
    ),
    Name("activation_max/<layer>", "1", "largest magnitude of the same", _LOOKED),
    Name(
        "attention_logit_max/<layer>",
        "1",
        "largest `q·k × scale` over all heads and all pairs of positions that may attend",
        "health steps, layers with attention",
    ),
    Name(
        "attention_entropy/<layer>",
        "nats",
        "`−Σ p ln p` of the attention of a query, mean over all heads, rows and positions",
        "health steps, layers with attention",
    ),
    Name("grad_rms/<part>", "1", "root mean square of the gradient of `loss`, before clipping, over the part", _LOOKED),
    Name("grad_max/<part>", "1", "largest magnitude of the same", _LOOKED),
    Name("weight_rms/<part>", "1", "root mean square of the part's master weights, before the update", _LOOKED),
    Name("weight_max/<part>", "1", "largest magnitude of the same", _LOOKED),
    Name(
        "update_ratio/<part>",
        "1",
        "`RMS(weights after − weights before) / RMS(weights before)`, decay included",
        "health steps whose update was made",
    ),
)
SECTIONS: dict[str, tuple[Name, ...]] = {
    "Progress": _PROGRESS,
    "Learning": _LEARNING,
    "Mixture of experts (only those)": _EXPERTS,
    "Speed": _SPEED,
    "Where the time goes": _TIME,
    "Waiting for other ranks": _WAITS,
    "Memory": _MEMORY,
    "The compiler": _COMPILER,
    "Health of the model": _HEALTH,
}


def find(name: str) -> Name | None:
    """The entry that a concrete name belongs to, or None."""
    return next((entry for entries in SECTIONS.values() for entry in entries if entry.matches(name)), None)


def unknown(names: Iterable[str]) -> list[str]:
    """Those of the names that no entry covers, sorted."""
    return sorted(name for name in names if find(name) is None)


_INTRODUCTION = """\
# Metrics

<!-- Made by `python -m titanlike.metrics.names > docs/metrics.md`; change titanlike/metrics/names.py. -->

Every run writes into its folder, from rank 0:

| file | content |
|---|---|
| `metrics.jsonl` | one JSON object a step, with the names below |
| `metrics.dropped.jsonl` | lines of steps that were run again after a resume, moved out of `metrics.jsonl` |
| `events.jsonl` | one JSON object an event: `start` and `resume`, with the mesh; `startup`, with \
the seconds from the command to the end of the first step, in parts; `checkpoint`, \
with `checkpoint_stall_s`, the seconds for which it held up the training; `digest` of the state; \
`samples` with the texts of `[validation.generate]`; `bad_step` with what `[guard]` did, why, and on which samples |
| `profile/` | traces of single steps (docs/profile.md) |
| `tensorboard/` | the same names for TensorBoard (`metrics.tensorboard = false` turns it off) |
| `wandb/`, `wandb-id.txt` | what Weights & Biases keeps there, with `metrics.wandb = true` |

- Floats have all their digits: two runs can be compared bitwise (`scripts/report.py --compare A B`).
- A value that is not finite is the string `"NaN"`, `"Infinity"` or `"-Infinity"`, since JSON has no number for it.
- There is one line a step, also over resumes. A line stays once it is written; a kill tears at most the last.
- The console shows a few of the names: `loss`, `val_loss`, `grad_norm`, `lr`, `tokens_per_s` (as tok/s) and one MFU.

`scripts/report.py RUN [RUN ...]` makes one HTML page of it all.
"""

_CLOSING = """\
## Notes

- **Times** are those of rank 0. They are disjoint: a phase inside another pauses it, and all of them with
  `time/other_s` add up to `step_time_s + time/validation_s`. On a GPU they come from events and are read without
  making the host wait, so each line has the times and rates of the step before, and the first line has none.
- **Start-up** is told once a process, in a line on the console and in the event `startup`: `launcher_s` (from the
  start of torchrun to that of this process; not after a restart by torchrun), `imports_s` (Python, imports, the
  config), `data_s` (open the data), `process_group_s` (meet the other ranks, make the groups of the mesh), `build_s`
  (cut the model, draw the weights, make the optimizer), `checkpoint_s` (find and load the newest one; save that of
  step 0 where one is), `first_step_s` (the first batch and its step, with compilation), `total_s`. They are rank 0's,
  so a part in which ranks meet has the wait for the slowest one in it. When a process began is read from the system.
- **Waiting** is exposed time: what overlaps with computation is not in it. It lies in the phases of the step above
  and is not added to them. It is measured at our own seams, between two clock readings around each wait: on CPU
  (gloo) the time for which the host is blocked, on a GPU (NCCL) the time for which the stream of the computation
  stands still, by events. All are of rank 0, but for `bubble/<n>`. What cannot be told: whether a wait is for bytes
  on the wire or for a rank that is late; the collectives of tp and ep inside the blocks, which are part of the graph
  that computes and count as busy (a trace of `[profile]` shows them); and an axis for the sum of loss, count and norm
  over all ranks, for which all wait in `time/clip_s`. In the first step of a process, compilation and warm-up count
  as busy.
- **Bubble**: pipeline ranks begin a step together, so the longest of their times is that of the pipeline, and what a
  rank does not compute of it is idle, at the end of the step too. The start-up table shows what the schedule alone
  predicts, with stages that cost the same and nothing for communication.
- **FLOPs** count a multiply and an add as two, and the backward twice the forward. Of experts, those that a token
  goes through count, in "all parameters" too. Recomputation under activation checkpointing is not counted, nor is
  what a document mask saves. `F` is exactly what torch's `FlopCounterMode` counts with the math attention kernel.
  Layers are those with attention, heads are query heads.
- **MFU** against a datasheet is given for bfloat16 on devices whose dense peak is known (titanlike/metrics/flops.py).
  For others there is none, rather than one against a guessed peak.
- **Health** is measured every `metrics.health_interval` steps. A part is a block (`layers.3`) or a module at the top
  of the model (`tok_embeddings`, `norm`, `output`); a tied weight counts once, under its first name. Activations and
  attention are those of an extra forward over the whole global batch, without gradients, with dropout off and the
  blocks run eagerly: a compiled forward has no place to look at, a recomputed one runs twice, and which rows a
  microbatch holds depends on the mesh. So the numbers do not: in float64 they equal those of one rank to 1e-10.
  Attention is seen where a block calls `scaled_dot_product_attention`. Such a step costs about a forward more, the
  attention logits once more, and a copy of the rank's master weights until its update is done; others cost nothing.
- **Weights & Biases** is optional: `pip install 'titanlike[wandb]'` and `metrics.wandb = true`. Rank 0 logs each line
  of `metrics.jsonl` as it is, `step` being the x axis; a run folder is one run there, over resumes too.
  `metrics.wandb_project` names the project, `metrics.wandb_offline = true` keeps it in the folder for `wandb sync`.
  Tested with a stub in the package's place, and once with wandb 0.31.0 in offline mode; its service was never reached
  from here.
- **Memory** is what torch's allocator holds in use on a GPU, and the resident set of the process on CPU.
"""


def document() -> str:
    """The text of docs/metrics.md."""
    parts = [_INTRODUCTION]
    for title, entries in SECTIONS.items():
        rows = [
            f"| `{entry.name}` | {entry.unit} | {entry.meaning}{f' (only: {entry.when})' if entry.when else ''} |"
            for entry in entries
        ]
        parts.append("\n".join([f"## {title}", "", "| name | unit | meaning |", "|---|---|---|", *rows, ""]))
    return "\n".join([*parts, _CLOSING])


if __name__ == "__main__":
    print(document(), end="")
