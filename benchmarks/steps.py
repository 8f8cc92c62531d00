"""Training steps of titanlike and of plain torch loops on the same weights and the same tokens, for contenders."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from contenders import Steps
from torch import Tensor, nn

from titanlike.build import DTYPES, draw_parameter, group_of
from titanlike.config import Config, load_config
from titanlike.data.batch import Batch
from titanlike.mesh import Mesh, init_distributed, pick_device


def global_batch(rows: int, seq_len: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Random (tokens, labels) [rows, seq], the same on every rank."""
    ids = torch.randint(0, vocab_size, (rows, seq_len + 1), generator=torch.Generator().manual_seed(0))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def join(config: Config) -> Mesh:
    """The process group and the mesh of the config."""
    device = pick_device("cpu")
    init_distributed(device)
    return Mesh(config.mesh.pp, config.resolved_dp(dist.get_world_size()), config.mesh.tp, device)


def vocabulary(config: Config) -> int:
    """model.vocab_size, or that of the preset."""
    presets: dict[str, Any] = dict(config.architecture.presets)
    return config.model.vocab_size or presets[config.model.preset or "26m"].vocab_size


def titanlike_steps(settings: dict[str, Any]) -> Steps:
    """Steps of `Trainer` under config keys. A variant is a number of microbatches of train.microbatch_size rows on each
    dp rank; None: as many as the config says. Facts: see `facts_of`."""
    from titanlike.trainer import Trainer

    config = load_config(None, settings)
    mesh = join(config)
    vocab = vocabulary(config)
    trainer = Trainer(config, mesh, vocab)
    loss = [0.0]

    def step(variant: int | None, finish: bool = False) -> None:
        if variant is not None:
            trainer.accumulation = variant  # a pipeline's schedule is made for one number: there, None only
        rows = trainer.accumulation * config.train.microbatch_size
        tokens, labels = global_batch(rows * mesh.dp, config.train.seq_len, vocab)
        own = slice(mesh.coordinate("dp") * rows, (mesh.coordinate("dp") + 1) * rows)
        loss[0] = trainer.train_step(Batch(tokens[own], labels[own], None, None, [], {}), finish).loss.item()

    def facts(variant: int | None) -> dict[str, Any]:
        step(variant, finish=True)  # nothing of a step before is in what is counted
        found = facts_of(lambda v: step(v, finish=True), variant)  # and a profile must not end before its collectives
        found["optimizer_bytes"] = trainer.zero.bytes_per_rank()["optimizer_states"]
        found["buckets"] = len(trainer.zero.buckets)
        found["parameters"] = sum(parameter.numel() for parameter in trainer.built.plain.parameters())
        return found

    return Steps(step, lambda: loss[0], facts)


def apart_steps(settings: dict[str, Any]) -> Steps:
    """titanlike_steps on one rank, whatever the number of ranks: each of them for itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": str(free.getsockname()[1])}
    return titanlike_steps(settings)


class WithLoss(nn.Module):
    """A model whose forward is the mean token loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.model(tokens).flatten(0, 1).float(), labels.flatten())


def torch_steps(settings: dict[str, Any]) -> Steps:
    """Steps of a loop that one would write with torch alone, on the plain model of the same config: `style` is ddp,
    fsdp (fully_shard of each block and of the whole) or plain (one rank), with fused AdamW and clipping. The other
    settings are config keys; compile.enable compiles the whole model, with FSDP each block. Variants are as for
    titanlike_steps."""
    config = load_config(None, {name: value for name, value in settings.items() if name != "style"})
    style, vocab, dtype = settings["style"], vocabulary(config), DTYPES[config.train.dtype]
    assert dtype == torch.float32, "the torch loops have no master weights"
    init_distributed(pick_device("cpu"))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    plain: Any = config.architecture.model_class(config.model_config_for(vocab))
    groups: dict[tuple[float, float], list[str]] = {}
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            shape = tuple(parameter.shape)
            parameter.copy_(draw_parameter(plain, config.run.seed, name, shape, parameter.device))
            groups.setdefault(group_of(config.optimizer, name, shape), []).append(name)
    model: Any = WithLoss(plain)
    if style == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for block in plain.layers.values():
            if config.compile.enable:
                block.compile(fullgraph=True, dynamic=False)
            fully_shard(block)
        fully_shard(model)
    elif config.compile.enable:
        model.compile(fullgraph=True, dynamic=False)
    by_name = dict(plain.named_parameters())
    o = config.optimizer
    optimizer = torch.optim.AdamW(
        [{"params": [by_name[name] for name in names], "weight_decay": key[1]} for key, names in groups.items()],
        lr=o.lr,
        betas=(o.beta1, o.beta2),
        eps=o.eps,
        fused=True,
    )
    if style == "ddp":
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    last_loss = [torch.zeros(())]

    def step(variant: int | None) -> None:
        microbatches = variant or config.accumulation(ranks)
        size = config.train.microbatch_size
        tokens, labels = global_batch(microbatches * size * ranks, config.train.seq_len, vocab)
        first = rank * microbatches * size
        last_loss[0] = torch.zeros(())
        for i in range(microbatches):
            rows, last = slice(first + i * size, first + (i + 1) * size), i == microbatches - 1
            if style == "fsdp":
                model.set_requires_gradient_sync(last)
            with model.no_sync() if style == "ddp" and not last else contextlib.nullcontext():
                loss = model(tokens[rows], labels[rows]) / microbatches
                loss.backward()
            last_loss[0] += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), config.train.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=style != "ddp")

    def facts(variant: int | None) -> dict[str, Any]:
        step(variant)  # as many steps as titanlike_steps takes
        found = facts_of(step, variant)
        found["optimizer_bytes"] = sum(
            (value.to_local() if hasattr(value, "to_local") else value).nbytes
            for state in optimizer.state.values()
            for value in state.values()
        )
        return found

    def loss() -> float:
        total = last_loss[0] / ranks
        dist.all_reduce(total)
        return total.item()

    return Steps(step, loss, facts)


def device_bytes(name: str) -> int:
    """Bytes that a network device has sent since the start of the machine; 0 where there is no /proc."""
    try:
        with open("/proc/net/dev") as devices:
            for line in devices:
                device, _, counters = line.partition(":")
                if device.strip() == name:
                    return int(counters.split()[8])
    except OSError:
        pass
    return 0


COLLECTIVES = ("allreduce", "alltoall", "reduce_scatter", "allgather", "broadcast")


def facts_of(step: Callable[[Any], None], variant: Any) -> dict[str, Any]:
    """Of one step on this rank: `collectives`, their number by kind, as torch's profiler sees them; `sent_bytes`, what
    the network device counted, divided by the number of ranks if they share it (Linux)."""
    from torch.profiler import ProfilerActivity, profile

    device = os.environ["GLOO_SOCKET_IFNAME"]
    sharing = dist.get_world_size() if device == "lo" else 1
    dist.barrier()
    before = device_bytes(device)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(variant)
    dist.barrier()
    sent = (device_bytes(device) - before) // sharing
    counted: dict[str, int] = {}
    for event in profiler.events() or ():
        for kind in COLLECTIVES:
            if event.name.startswith("c10d::") and kind in event.name:
                counted[kind] = counted.get(kind, 0) + 1
                break
    return {"collectives": counted, "sent_bytes": sent}
