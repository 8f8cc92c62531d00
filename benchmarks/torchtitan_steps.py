"""Training steps of torchtitan 0.2.2 on the same weights and the same tokens, for contenders, on CPU ranks.

What runs is torchtitan's own: `train.Trainer` and its train_step, its Llama 3 model, its parallelize and pipelining
functions, optimizer, gradient clipping and learning rates. From here come
- a shim: torchtitan takes the accelerator that the machine has, and CUDA if there is none, so that torch's answer is
  "cpu" while it is imported; its kernels for experts need triton, which torch's CPU builds lack and a dense model
  doesn't use; FSDP2 has to sum gradients in gloo, which knows no sum with a factor;
- the weights, which are those of our model under the same names. Rows of wq and wk change places, for torchtitan's
  rotary embeddings turn element 2 i of a head with 2 i + 1, ours i with i + head_dim / 2;
- the tokens, and a logger that keeps the loss.

torchtitan decays norm weights too, which a few steps don't show in the loss.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import logging
import os
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from contenders import Steps
from steps import global_batch, vocabulary
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from titanlike.build import draw_parameter
from titanlike.config import load_config

VERSION = "0.2.2"


def missing() -> str | None:
    """Why torchtitan cannot be measured here, in one sentence; None if it can."""
    try:
        found = importlib.metadata.version("torchtitan")
    except importlib.metadata.PackageNotFoundError:
        return f"torchtitan is not installed (pip install torchtitan=={VERSION}), so it is left out."
    if found != VERSION:
        return f"torchtitan {found} is installed, and only {VERSION} can be run here, so it is left out."
    return None


def fails(style: str, compiled: bool) -> str | None:
    """Why torchtitan cannot take steps in this way, in one sentence; None if it can."""
    if style == "tp" and compiled:
        return f"torchtitan {VERSION} fails in the backward of blocks compiled under tp, so it is left out."
    return None


def import_trainer() -> Any:
    """torchtitan's `train` module, made to use the CPU."""
    import torch._utils

    kernels = "torchtitan.models.moe.kernels"
    if importlib.util.find_spec("triton") is None:
        sys.modules[kernels] = types.ModuleType(kernels)
        sys.modules[kernels].generate_permute_indices = None  # type: ignore[attr-defined]
    real = torch._utils._get_available_device_type
    torch._utils._get_available_device_type = lambda: "cpu"
    try:
        import torchtitan.train
    finally:
        torch._utils._get_available_device_type = real
    return torchtitan.train


class KeepsLoss:
    """Stands in for torchtitan's metrics, which ask a GPU for its memory: keeps the loss of each step."""

    color = types.SimpleNamespace(blue="", red="", yellow="", reset="")
    device_memory_monitor = types.SimpleNamespace(
        device_name="cpu", get_peak_stats=lambda: types.SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)
    )

    def __init__(self) -> None:
        self.loss = 0.0
        self.ntokens_since_last_log = 0
        self.data_loading_times: list[float] = []

    def should_log(self, _step: int) -> bool:
        return True

    def log(self, _step: int, global_avg_loss: float, *_more: Any, **_extra: Any) -> None:
        self.loss = global_avg_loss


def interleaved(value: Tensor, head_dim: int) -> Tensor:
    """A query or key projection [heads * head_dim, dim] for interleaved rotary embeddings, from one for half-split."""
    return value.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def model_args(config: Any, seq_len: int) -> Any:
    """torchtitan's arguments for the shape of a LlamaConfig. Raises AssertionError for what torchtitan has no word
    for."""
    from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs

    assert config.rope_scaling is None and not config.attention_bias and not config.mlp_bias
    assert not config.tie_embeddings and config.head_dim * config.n_heads == config.dim
    return TransformerModelArgs(
        dim=config.dim,
        n_layers=config.n_layers,
        n_heads=config.n_heads,
        n_kv_heads=config.n_kv_heads,
        vocab_size=config.vocab_size,
        ffn_dim_multiplier=config.ffn_dim / int(8 * config.dim / 3),
        multiple_of=config.ffn_dim,  # what the multiplier gives is rounded up to this
        norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),  # no scaling
        max_seq_len=seq_len,
    )


def torchtitan_steps(settings: dict[str, Any]) -> Steps:
    """Steps of torchtitan's Trainer. `style` is one, ddp, fsdp, tp or pp (1F1B); the other settings are config keys of
    ours, compile.enable among them. There is one variant, None."""
    config = load_config(None, {name: value for name, value in settings.items() if name != "style"})
    style, vocab = settings["style"], vocabulary(config)
    ranks, rows, seq_len = int(os.environ["WORLD_SIZE"]), config.train.global_batch_size, config.train.seq_len
    dp = ranks if style in ("ddp", "fsdp") else 1
    os.environ["LOCAL_RANK"] = "0"  # the device is cpu:0 on all ranks
    os.environ["LOG_RANK"] = str(ranks - 1)  # where a pipeline has its loss; it warns of other ranks
    train = import_trainer()
    logging.getLogger().setLevel(logging.ERROR)
    for known in ("DTensor (random operators|manual_seed)", "In CPU autocast", "Torchinductor does not support"):
        warnings.filterwarnings("ignore", message=known)
    from torchtitan.config import JobConfig
    from torchtitan.models.llama3 import get_train_spec
    from torchtitan.protocols.train_spec import register_train_spec

    ours: Any = config.model_config_for(vocab)
    metrics = KeepsLoss()
    spec = get_train_spec()
    spec.model_args = {"ours": model_args(ours, seq_len)}
    spec.build_tokenizer_fn = None
    spec.build_dataloader_fn = None  # type: ignore[assignment]  # read as: may be None
    spec.build_metrics_processor_fn = lambda *_: metrics  # type: ignore[assignment,return-value]
    spec.state_dict_adapter = None
    register_train_spec("ours", spec)
    job = JobConfig()
    job.job.dump_folder = tempfile.gettempdir()
    job.comm.trace_buf_size = 0
    job.model.name, job.model.flavor = "ours", "ours"
    job.training.local_batch_size, job.training.seq_len = rows // dp, seq_len
    job.training.max_norm = config.train.max_grad_norm
    job.training.mixed_precision_param = "float32"
    job.training.steps = config.train.steps
    o = config.optimizer
    job.optimizer.lr, job.optimizer.weight_decay, job.optimizer.eps = o.lr, o.weight_decay, o.eps
    job.optimizer.beta1, job.optimizer.beta2 = o.beta1, o.beta2
    job.lr_scheduler.warmup_steps, job.lr_scheduler.decay_ratio = 0, 0.0
    job.activation_checkpoint.mode = "none"
    job.compile.enable = config.compile.enable
    job.parallelism.data_parallel_replicate_degree = ranks if style == "ddp" else 1
    job.parallelism.data_parallel_shard_degree = ranks if style == "fsdp" else 1
    job.parallelism.tensor_parallel_degree = ranks if style == "tp" else 1
    job.parallelism.pipeline_parallel_degree = ranks if style == "pp" else 1
    job.parallelism.pipeline_parallel_microbatch_size = config.train.microbatch_size
    trainer = train.Trainer(job)
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    with torch.device("meta"):
        plain: Any = config.architecture.model_class(ours)
    copy_weights(trainer, plain, config.run.seed, ours.head_dim)

    tokens, labels = global_batch(rows, seq_len, vocab)
    first = dist.get_rank() * (rows // dp) if dp > 1 else 0
    own = slice(first, first + rows // dp)

    def batches() -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for _ in itertools.count():
            yield {"input": tokens[own]}, labels[own]

    iterator = trainer.batch_generator(batches())

    def step(_variant: None) -> None:
        trainer.step += 1
        trainer.gc_handler.run(trainer.step)
        trainer.train_step(iterator)

    def loss() -> float:
        last = torch.tensor(metrics.loss)
        dist.broadcast(last, src=ranks - 1)  # a pipeline's last rank has it
        return last.item()

    return Steps(step, loss)


@torch.no_grad()
def copy_weights(trainer: Any, plain: Any, seed: int, head_dim: int) -> None:
    """Give the parts of torchtitan's model that this rank holds the initial weights of `plain`, a model of ours."""
    for part in trainer.model_parts:
        for name, parameter in part.named_parameters():
            name = name.replace("_orig_mod.", "")
            value = draw_parameter(plain, seed, name, tuple(parameter.shape), torch.device("cpu"))
            if name.endswith(("attention.wq.weight", "attention.wk.weight")):
                value = interleaved(value, head_dim)
            if isinstance(parameter, DTensor):
                value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
            parameter.copy_(value)
