"""What is measured and shown before the first step."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch.distributed as dist

from parallelize.pipeline import bubble_fraction
from titanlike.config import Config
from titanlike.metrics.flops import (
    device_name,
    device_peak_flops,
    flops_per_token,
    measure_matmul_peak,
    model_shape,
)
from titanlike.metrics.tables import BatchFacts, MemoryFacts, ModelFacts, PipelineFacts, startup_tables
from titanlike.metrics.throughput import Throughput
from titanlike.tables import tables_of
from titanlike.trainer import Trainer


def throughput(config: Config, trainer: Trainer) -> Throughput:
    """The rates' constants: tokens of a step, FLOPs of a token, the device's peak where it is known."""
    shape = config_shape(trainer)
    measured = None
    if config.metrics.matmul_peak:
        dist.barrier()  # all ranks at once, so that those on one machine share its cores as they do in training
        measured = measure_matmul_peak(trainer.mesh.device, trainer.built.dtype)
    return Throughput(
        tokens_per_step=config.train.global_batch_size * config.train.seq_len,
        ranks=dist.get_world_size(),
        flops=flops_per_token(shape, config.train.seq_len),
        peak_flops=device_peak_flops(device_name(trainer.mesh.device), trainer.built.dtype),
        measured_peak_flops=measured,
    )


def config_shape(trainer: Trainer) -> Any:
    """The sizes that the FLOP formulas need, of the whole plain model. One without heads has no attention to count."""
    model = trainer.built.plain
    heads = getattr(model.config, "n_heads", 0)
    head_dim = getattr(model.config, "head_dim", None) or (trainer.built.width // heads if heads else 0)
    layers = len(model.layers)
    shape = model_shape(model, layers, heads, head_dim)
    own = tables_of(trainer.config.model.architecture).get("flop_shape")
    return shape if own is None else dataclasses.replace(shape, **own(model))


def tables(config: Config, trainer: Trainer, data: Any) -> list[Any]:
    """The start-up tables; all ranks call it, for each tells its own memory."""
    mesh, model = trainer.mesh, trainer.built.plain
    held = trainer.zero.bytes_per_rank()
    mine = MemoryFacts(mesh.rank, held["weights"], held["gradients"], held["master_weights"] + held["optimizer_states"])
    memory: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(memory, mine)
    shape = config_shape(trainer)
    usual = ("n_layers", "dim", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size")
    values = {field.name: getattr(model.config, field.name) for field in dataclasses.fields(model.config)}
    sizes = {name: values[name] for name in usual if name in values}
    aside = ("head_dim", "max_seq_len")
    sizes |= {name: value for name, value in values.items() if type(value) is int and name not in aside}
    pipeline = None
    if mesh.pp > 1:
        stages, schedule = len(trainer.built.stage_ranks), config.pipeline.schedule
        pipeline = PipelineFacts(
            schedule, stages, trainer.accumulation, bubble_fraction(schedule, mesh.pp, stages, trainer.accumulation)
        )
    name = config.model.architecture + (f" {config.model.preset}" if config.model.preset else "")
    return startup_tables(
        ModelFacts(name, shape.parameters, shape.embedding_parameters, sizes, shape.active_parameters),
        {"pp": mesh.pp, "dp": mesh.dp, "tp": mesh.tp} | ({"ep": mesh.ep} if mesh.ep > 1 else {}),
        BatchFacts(
            config.train.global_batch_size,
            config.train.microbatch_size,
            mesh.dp,
            config.train.seq_len,
            config.train.steps,
        ),
        memory=memory,
        data=data.describe(),
        pipeline=pipeline,
        run=[("folder", str(config.run_dir)), ("device", device_name(mesh.device)), ("dtype", config.train.dtype)],
    )
