"""A training run from its config to its last checkpoint: the walk that scripts/train.py takes.

config -> mesh -> model, cut and materialised (build.py) -> data -> newest good checkpoint -> loop(step, log, save) ->
end.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import torch
import torch.distributed as dist

from parallelize.pipeline import bubble_fraction
from titanlike import __version__
from titanlike.checkpoint import Checkpointer, Shard, StopSignal
from titanlike.config import Config, write_resolved
from titanlike.data import open_data
from titanlike.errors import UserError
from titanlike.mesh import Mesh, init_distributed, pick_device, world_size
from titanlike.metrics import Metrics
from titanlike.metrics.flops import (
    device_name,
    device_peak_flops,
    flops_per_token,
    measure_matmul_peak,
    model_shape,
)
from titanlike.metrics.memory import memory_over_ranks
from titanlike.metrics.tables import BatchFacts, MemoryFacts, ModelFacts, PipelineFacts, startup_tables
from titanlike.metrics.throughput import Throughput
from titanlike.metrics.timers import Timers
from titanlike.sample import sample
from titanlike.trainer import Trainer

SAMPLE_TOKENS = 200


class NonFinite(RuntimeError):
    """The loss or the gradient norm of a step is infinite or not a number."""


def train(config: Config) -> None:
    """Run the training that `config` describes, on all ranks that the launcher started.

    Raises UserError for what the user can mend, before a process group exists where it can be seen by then.
    """
    world = world_size()
    config.validate_for(world)
    dp = config.resolved_dp(world)
    rank = int(os.environ.get("RANK", "0"))
    data = open_data(config, rank // config.mesh.tp % dp, dp)
    config.model_config_for(data.tokenizer.vocab_size)  # its errors belong before the process group too
    device = pick_device(config.run.device)

    stop = StopSignal().install()
    init_distributed(device)
    mesh = Mesh(config.mesh.pp, dp, config.mesh.tp, device)
    trainer = Trainer(config, mesh, data.tokenizer.vocab_size)
    with Metrics(config.metrics, config.run_dir, config.train.steps, mesh.is_main) as metrics:
        if mesh.is_main:
            write_resolved(config, config.run_dir / "config.toml")
        metrics.tables(tables(config, trainer, data))
        checkpointer = Checkpointer(config.checkpoint, config.run_dir, device, say=metrics.message, stop=stop)
        Run(config, trainer, data, metrics, checkpointer).loop()
        checkpointer.close()
    stop.restore()


class Run:
    """The loop and what it carries from step to step."""

    def __init__(
        self, config: Config, trainer: Trainer, data: Any, metrics: Metrics, checkpointer: Checkpointer
    ) -> None:
        self.config = config
        self.trainer = trainer
        self.mesh = trainer.mesh
        self.data = data
        self.metrics = metrics
        self.checkpointer = checkpointer
        self.cursor: dict[str, Any] | None = None
        self.tokens = 0
        self.last_val_loss = self.best_val_loss = math.inf
        self.timers = Timers(self.mesh.device.type)
        self.throughput = throughput(config, trainer)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def loop(self) -> None:
        """Resume if there is something to resume, then take steps until the last one or until asked to stop."""
        config, trainer, metrics = self.config, self.trainer, self.metrics
        trainer.timers = self.timers
        self.resume()
        steps = config.train.steps
        if trainer.step_count == 0 and self.checkpointer.decide(0).save:
            self.save()
        batches = self.data.train_batches(self.cursor)
        self.timers.start()
        while trainer.step_count < steps:
            step = trainer.step_count + 1
            self.seed_step(step)
            with self.timers.phase("data"):
                batch = next(batches)
            result = trainer.train_step(batch)
            self.cursor = batch.cursor
            self.tokens += config.train.global_batch_size * batch.tokens.shape[1]
            values = {
                "loss": result.loss.item(),
                "grad_norm": result.grad_norm.item(),
                "lr": result.lr,
                "tokens": self.tokens,
            }
            values |= {f"lr/{n}": result.lr * group.lr_scale for n, group in enumerate(config.optimizer.groups)}
            if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
                metrics.log(step, values)
                raise NonFinite(
                    f"step {step}: loss {values['loss']}, grad_norm {values['grad_norm']}; nothing was saved after the "
                    f"last checkpoint, lower optimizer.lr or start again from an earlier checkpoint.load_step"
                )
            if self.validation_is_due(step):
                values |= self.validate()
            values |= memory_over_ranks(self.mesh.device, None if dist.get_world_size() == 1 else dist.group.WORLD)
            times = self.timers.end_step()
            values |= times | self.throughput.values(times.get("step_time_s", 0.0))
            # Logged before it is saved: a run that dies in between logs the step again, rather than never. So the time
            # of a save is part of the next step's.
            metrics.log(step, values)
            decision = self.checkpointer.decide(step, last=step == steps)
            if decision.save:
                with self.timers.phase("checkpoint"):
                    self.save()
            if decision.stop:
                break
        if trainer.step_count >= steps:
            self.finish()

    def seed_step(self, step: int) -> None:
        """Make random draws of the model (dropout) a function of (seed, step, place in the mesh), so that a resume
        needs no saved generator state. tp ranks draw alike, for they hold parts of the same activations."""
        place = self.mesh.coordinate("pp") * self.mesh.dp + self.mesh.coordinate("dp")
        torch.manual_seed(((self.config.run.seed * 1_000_003 + step) * 1_000_003 + place) % 2**63)

    def validation_is_due(self, step: int) -> bool:
        """Every `validation.interval` steps and after the last one."""
        interval = self.config.validation.interval
        return bool(self.data.validation) and (
            step == self.config.train.steps or (interval > 0 and step % interval == 0)
        )

    def validate(self) -> dict[str, float]:
        """val_loss, token-weighted over the sets, and val_loss/<set> if there are several."""
        total, tokens, values = 0.0, 0, {}
        with self.timers.phase("validation"):
            for name, held_out in self.data.validation.items():
                loss, count = self.trainer.evaluate(held_out.batches(self.trainer.evaluation_rows))
                total, tokens = total + loss * count, tokens + count
                values[f"val_loss/{name}"] = loss
        self.last_val_loss = total / max(tokens, 1)
        self.best_val_loss = min(self.best_val_loss, self.last_val_loss)
        return {"val_loss": self.last_val_loss} | (values if len(values) > 1 else {})

    def finish(self) -> None:
        """What is said at the end: validation loss beside its yardstick, and a few lines of text."""
        if self.data.validation:
            if math.isinf(self.last_val_loss):  # a resume of a finished run
                self.validate()
            yardsticks = [f"{name} {held_out.unigram_entropy():.4f}" for name, held_out in self.data.validation.items()]
            self.metrics.message(
                f"validation loss: last {self.last_val_loss:.4f}, best {self.best_val_loss:.4f} nats/token; "
                f"unigram entropy of the same text: {', '.join(yardsticks)}"
            )
        tokenizer = self.data.tokenizer
        ids = sample(self.trainer, [tokenizer.end_id], SAMPLE_TOKENS, seed=self.config.run.seed)
        if tokenizer.end_id in ids:
            ids = ids[: ids.index(tokenizer.end_id)]
        self.metrics.message("a sample of the model's text:\n" + tokenizer.decode(ids))

    # -- state -------------------------------------------------------------------------------------------------------

    def tensors(self) -> dict[str, Shard]:
        """Every tensor of the training state, as this rank's boxes of the plain model's tensors."""
        return {name: Shard(*box) for name, box in self.trainer.zero.boxes().items()}

    def save(self) -> float:
        """Save a checkpoint of the state after the last step. Returns for how many seconds it held up the training."""
        meta = {
            "step": self.trainer.step_count,
            "tokens": self.tokens,
            "data": self.cursor,
            "best_val_loss": self.best_val_loss if math.isfinite(self.best_val_loss) else None,
            "tokenizer": self.data.tokenizer.fingerprint,
            "mesh": {"pp": self.mesh.pp, "dp": self.mesh.dp, "tp": self.mesh.tp},
            "config": self.config.model_dump(mode="json"),
            "model": dataclasses.asdict(self.trainer.built.plain.config),
            "titanlike": __version__,
            "torch": torch.__version__,
        }
        return self.checkpointer.save(self.trainer.step_count, self.tensors(), meta)

    def resume(self) -> None:
        """Load the newest good checkpoint of the run folder, if it has one."""
        loaded = self.checkpointer.load(self.tensors())
        if loaded is not None:
            meta = loaded.meta
            if meta["tokenizer"] != self.data.tokenizer.fingerprint:
                raise UserError(
                    f"the checkpoint {loaded.folder} was trained with another tokenizer than data.tokenizer = "
                    f"{self.config.data.tokenizer!r}: use the one it was trained with, or another run.name"
                )
            self.trainer.step_count = loaded.step
            self.trainer.zero.set_step_count(loaded.step)
            self.trainer.zero.gather()
            self.cursor = meta["data"]
            self.tokens = meta["tokens"]
            self.best_val_loss = math.inf if meta["best_val_loss"] is None else meta["best_val_loss"]
            self.metrics.message(loaded.summary)
        self.metrics.resume_from(
            self.trainer.step_count,
            mesh={"pp": self.mesh.pp, "dp": self.mesh.dp, "tp": self.mesh.tp},
            world_size=dist.get_world_size(),
        )


# -- what is shown before the first step -----------------------------------------------------------------------------


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
    """The sizes that the FLOP formulas need, of the whole plain model."""
    model = trainer.built.plain
    return model_shape(model, model.config.n_layers, model.config.n_heads, model.config.head_dim)


def tables(config: Config, trainer: Trainer, data: Any) -> list[Any]:
    """The start-up tables; all ranks call it, for each tells its own memory."""
    mesh, model = trainer.mesh, trainer.built.plain
    held = trainer.zero.bytes_per_rank()
    mine = MemoryFacts(mesh.rank, held["weights"], held["gradients"], held["master_weights"] + held["optimizer_states"])
    memory: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(memory, mine)
    shape = config_shape(trainer)
    sizes = {
        name: getattr(model.config, name)
        for name in ("n_layers", "dim", "n_heads", "n_kv_heads", "ffn_dim", "vocab_size")
    }
    pipeline = None
    if mesh.pp > 1:
        stages, schedule = len(trainer.built.stage_ranks), config.pipeline.schedule
        pipeline = PipelineFacts(
            schedule, stages, trainer.accumulation, bubble_fraction(schedule, mesh.pp, stages, trainer.accumulation)
        )
    name = config.model.architecture + (f" {config.model.preset}" if config.model.preset else "")
    return startup_tables(
        ModelFacts(name, shape.parameters, shape.embedding_parameters, sizes),
        {"pp": mesh.pp, "dp": mesh.dp, "tp": mesh.tp},
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
