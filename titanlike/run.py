"""A training run from its config to its last checkpoint: the walk that scripts/train.py takes.

config -> data -> mesh -> model, cut and materialised (build.py) -> newest good checkpoint (resume.py) ->
loop(step, log, save) -> end.

Properties:
- What a run computes is a function of the config and of the state in its checkpoint. No generator's state is saved:
  each step seeds it anew.
- What one rank finds wrong ends all of them: an error of the user before the process group, or raised on all ranks
  alike where they meet; any other by the lost connection.
- A step whose loss or gradient norm is bad is left out, ends the run or takes it back (guard.py); no checkpoint holds
  what came of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from typing import Any

import torch
import torch.distributed as dist

from titanlike import __version__, out_of_memory
from titanlike.checkpoint import Checkpointer, Shard, StopSignal
from titanlike.compile_watch import CompileWatch
from titanlike.config import Config
from titanlike.data import open_data
from titanlike.errors import file_errors
from titanlike.generate.during import Samples
from titanlike.guard import Guard, Verdict
from titanlike.hooks import Hook, Hooks
from titanlike.mesh import Mesh, init_distributed, pick_device, world_size
from titanlike.metrics import Metrics
from titanlike.metrics.health import Health
from titanlike.metrics.memory import memory_over_ranks
from titanlike.metrics.startup_times import StartupTimes
from titanlike.metrics.timers import Timers
from titanlike.metrics.waits import waits
from titanlike.profiler import Profiler
from titanlike.recovery import end_run, roll_back, tell_bad_step
from titanlike.resume import start
from titanlike.run_folder import check_shared, run_folder
from titanlike.sample import sample
from titanlike.startup import tables, throughput
from titanlike.tables import check_architecture
from titanlike.trainer import StepResult, Trainer
from titanlike.watchdog import Watchdog, put_away, record_collectives

SAMPLE_TOKENS = 200


def train(config: Config) -> None:
    """Run the training that `config` describes, on all ranks that the launcher started.

    Uses the default process group if there is one, and makes it otherwise. Raises UserError for what the user can mend,
    before a process group exists where it can be seen by then; NonFinite, which is one, on all ranks if the run
    diverges.
    """
    world, times = world_size(), StartupTimes.of_this_process()
    config.validate_for(world)
    times.done("imports")
    dp = config.resolved_dp(world)
    rank = int(os.environ.get("RANK", "0"))
    with run_folder(config.run_dir, rank):
        hooks = Hooks(config)
        data = open_data(config, rank // config.mesh.tp % dp, dp)
        check_architecture(config, data.tokenizer.vocab_size)  # its errors belong before the process group too
        times.done("data")
        device = pick_device(config.run.device)

        stop = StopSignal().install()
        watch = Watchdog(config.run.hang_timeout, config.run_dir / "hang")
        if rank == 0:
            put_away(watch.folder)
        if config.run.hang_timeout > 0:
            record_collectives()
        try:
            init_distributed(device, max(600.0, 2 * config.run.hang_timeout), config.run.debug_collectives)
            watch.start()
            check_shared(config.run_dir)
            mesh = Mesh(config.mesh.pp, dp, config.mesh.tp, device, config.mesh.ep)
            times.done("process_group")
            trainer = Trainer(config, mesh, data.tokenizer.vocab_size)
            with Metrics(config.metrics, config.run_dir, config.train.steps, mesh.is_main) as metrics:
                metrics.tables(tables(config, trainer, data))
                checkpointer = Checkpointer(config.checkpoint, config.run_dir, device, say=metrics.message, stop=stop)
                Run(config, trainer, data, metrics, checkpointer, hooks, watch, times).loop()
                watch.phase("the end")
                checkpointer.close()
        except (RuntimeError, MemoryError) as error:
            told = out_of_memory.told(error, config, world, data.tokenizer.vocab_size, f"{watch.where} on rank {rank}")
            if told is not None:
                raise told from error
            raise
        finally:
            watch.stop()
            stop.restore()  # from here on a signal ends the process, also one that waits to print its error


class Logging(Hook):
    """The line of each step in the log: the last of the hooks."""

    def after_step(self, run: Run, step: int, values: dict[str, float]) -> None:
        run.log(step, values)


class Run:
    """The loop and what it carries from step to step."""

    def __init__(
        self,
        config: Config,
        trainer: Trainer,
        data: Any,
        metrics: Metrics,
        checkpointer: Checkpointer,
        hooks: Hooks,
        watch: Watchdog,
        times: StartupTimes,
    ) -> None:
        self.config = config
        self.trainer = trainer
        self.mesh = trainer.mesh
        self.data = data
        self.metrics = metrics
        self.checkpointer = checkpointer
        self.hooks = hooks
        hooks.add(Logging(config))
        self.watch = watch
        self.guard = Guard(config.guard)
        self.verdict: Verdict | None = None
        """on the step under way"""
        self.cursor: dict[str, Any] | None = None
        self.tokens = 0
        self.last_val_loss = self.best_val_loss = math.inf
        self.samples = Samples(trainer, data.tokenizer) if config.validation.generate.prompts else None
        uncompiled = trainer.built.uncompiled
        self.compile_watch = CompileWatch() if config.compiles and uncompiled is None else None
        if uncompiled is not None:
            metrics.message(
                f"warning: compile.enable = true, but {uncompiled[0]}: the model runs uncompiled; {uncompiled[1]}, or "
                "say compile.enable = false"
            )
        self.timers = Timers(self.mesh.device.type)
        self.health = Health(trainer) if config.metrics.health_interval else None
        self.throughput = throughput(config, trainer)
        self.profiler = None
        if config.profile.steps is not None:
            device_type = self.mesh.device.type
            self.profiler = Profiler(
                config.profile, config.run_dir, self.mesh.rank, self.degrees(), device_type, self.timers
            )
        self.startup_times: StartupTimes | None = times
        """until the first step is done"""
        times.done("build")

    # -- the loop ----------------------------------------------------------------------------------------------------

    def loop(self) -> None:
        """Resume if there is something to resume, then take steps until the last one or until asked to stop."""
        config, trainer, metrics = self.config, self.trainer, self.metrics
        trainer.timers = self.timers
        self.timers.on_border = self.watch.phase
        trainer.alive = self.watch.alive
        trainer.before_update = self.before_update
        start(self)
        steps = config.train.steps
        if trainer.step_count >= steps:
            metrics.message(
                f"nothing to do: the run is at step {trainer.step_count} and train.steps is {steps}; a larger "
                "train.steps continues it"
            )
            return
        wanted = self.guard.rolls_back and self.checkpointer.saved_step is None
        if trainer.step_count == 0 and (self.checkpointer.decide(0).save or wanted):
            self.save()
        self.hooks("on_start", self)
        if self.startup_times is not None:
            self.startup_times.done("checkpoint")
        batches = self.data.train_batches(self.cursor)
        self.timers.start()
        while trainer.step_count < steps:
            step = trainer.step_count + 1
            self.watch.step(step)
            if self.profiler is not None:
                self.profiler.before_step(step)
            with self.timers.phase("data"):
                batch = next(batches)
            self.hooks("before_step", self, step, batch)
            health = self.health_of(step)
            if health is not None:
                with self.timers.phase("health"):
                    health.forward(batch)
            trainer.seed_step(step)  # after what may draw numbers: a loader when it starts, a hook
            with self.compile_watch.training_step() if self.compile_watch else contextlib.nullcontext():
                # A user's hooks may read any weight at any point.
                result = trainer.train_step(batch, finish=self.hooks.users)
            verdict = self.verdict_on(result)
            self.first_step_is_done(step)
            before, self.cursor = self.cursor, batch.cursor
            self.tokens += config.train.global_batch_size * batch.tokens.shape[1]
            values = {
                "loss": result.loss.item(),
                "grad_norm": result.grad_norm.item(),
                "lr": result.lr,
                "tokens": self.tokens,
            }
            values |= {f"passes/{name}": passes for name, passes in self.data.passes(batch.cursor).items()}
            values |= {f"lr/{n}": result.lr * group.lr_scale for n, group in enumerate(config.optimizer.groups)}
            values |= {name: value.item() for name, value in trainer.auxiliary_values(result).items()}
            if verdict is not None:
                tell_bad_step(self, step, verdict, batch, values, before, result.updated)
                if verdict.action == "skip":
                    trainer.step_count = step
                    values["skipped"] = 1
                else:
                    self.log(step, values)
                    if verdict.action == "stop":
                        end_run(self, step, verdict)
                    roll_back(self, step, verdict)
                    batches = self.data.train_batches(self.cursor)
                    self.timers.start()
                    continue
            if health is not None:
                if verdict is None:
                    health.after_update()
                values |= health.values()
            if self.validation_is_due(step):
                values |= self.validate()
            if self.samples is not None and self.samples.due(step):
                with self.timers.phase("validation"):
                    metrics.samples(step, self.samples.texts())
            values |= memory_over_ranks(self.mesh.device, None if dist.get_world_size() == 1 else dist.group.WORLD)
            times = self.timers.end_step()
            values |= times | self.throughput.values(times.get("step_time_s", 0.0))
            values |= waits(self.timers.spans, self.mesh)
            if self.compile_watch is not None:
                values |= self.compile_watch.values()
                if said := self.compile_watch.warning(step):
                    metrics.message(said)
            # Logged, by the last of the hooks, before it is saved: a run that dies in between logs the step again,
            # rather than never. So the time of a save is part of the next step's.
            self.hooks("after_step", self, step, values)
            if self.profiler is not None and step == self.profiler.last:
                # A collective that ends after the profile writes its end into freed memory (a limit of torch on CPU).
                trainer.zero.finish_gather()
            if self.profiler is not None and (written := self.profiler.after_step(step, values)):
                metrics.message(written)
            interval = config.checkpoint.digest_interval
            if interval > 0 and step % interval == 0:
                self.log_digest(step)
            decision = self.checkpointer.decide(step, last=step == steps)
            if decision.save:
                with self.timers.phase("checkpoint"):
                    self.save()
            if decision.stop:
                break
        trainer.zero.finish_gather()
        if self.profiler is not None:
            self.profiler.close()
        if trainer.step_count >= steps:
            self.watch.phase("the sample at the end")
            self.finish()
        self.hooks("on_end", self)

    def before_update(self, result: StepResult) -> bool:
        """What the trainer asks when the gradients are reduced: whether to update the weights."""
        step = self.trainer.step_count + 1
        self.hooks("before_optimizer", self, step, result)
        health = self.health_of(step)
        if health is not None:
            health.before_update(result)
        if not self.looks_first:
            return True
        self.verdict = self.guard.judge(result.loss.item(), result.grad_norm.item())
        return self.verdict is None

    def first_step_is_done(self, step: int) -> None:
        """Say once how long it took until then."""
        if self.startup_times is not None:
            self.startup_times.done("first_step")
            self.metrics.event("startup", step, **self.startup_times.fields())
            self.metrics.message(self.startup_times.line())
            self.startup_times = None

    def health_of(self, step: int) -> Health | None:
        """What looks at the model in this step, if it is one of every `metrics.health_interval`."""
        return self.health if self.health is not None and step % self.config.metrics.health_interval == 0 else None

    @property
    def looks_first(self) -> bool:
        """Whether a step is judged before its update. On an accelerator that is done only where it is needed."""
        return self.mesh.device.type == "cpu" or self.guard.must_look_first

    def verdict_on(self, result: StepResult) -> Verdict | None:
        """The guard's verdict on the step that was just taken, the same on all ranks."""
        if not self.looks_first:
            self.verdict = self.guard.judge(result.loss.item(), result.grad_norm.item())
        verdict, self.verdict = self.verdict, None
        return verdict

    def log(self, step: int, values: dict[str, float]) -> None:
        with file_errors(f"the metrics of step {step}"):
            self.metrics.log(step, values)

    def log_digest(self, step: int) -> None:
        """Say the digest of the whole training state after `step`: equal digests are equal states, on any mesh."""
        digest = self.checkpointer.digest(self.tensors())
        self.metrics.event("digest", step, digest=digest)
        self.metrics.message(f"digest of the state after step {step}: {digest}")

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
        values = {"val_loss": self.last_val_loss} | (values if len(values) > 1 else {})
        self.hooks("on_validation", self, self.trainer.step_count, values)
        return values

    def finish(self) -> None:
        """What is said at the end: validation loss beside its yardstick, and a few lines of text."""
        if self.data.validation:
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
        return {name: Shard(*box) for name, box in self.trainer.boxes().items()}

    def meta(self) -> dict[str, Any]:
        """What a checkpoint holds besides tensors, as JSON; the same on all ranks."""
        return {
            "step": self.trainer.step_count,
            "tokens": self.tokens,
            "data": self.cursor,
            "optimizer_steps": self.trainer.updates,
            "guard": self.guard.state(),
            "best_val_loss": self.best_val_loss if math.isfinite(self.best_val_loss) else None,
            "tokenizer": self.data.tokenizer.fingerprint,
            "mesh": self.degrees(),
            "config": self.config.model_dump(mode="json"),
            "model": dataclasses.asdict(self.trainer.built.plain.config),
            "titanlike": __version__,
            "torch": torch.__version__,
        }

    def degrees(self) -> dict[str, int]:
        degrees = {"pp": self.mesh.pp, "dp": self.mesh.dp, "tp": self.mesh.tp}
        return degrees | ({"ep": self.mesh.ep} if self.mesh.ep > 1 else {})

    def save(self) -> None:
        """Save a checkpoint of the state after the last step."""
        step = self.trainer.step_count
        meta = self.meta()
        self.hooks("on_save", self, step, meta)
        stall = self.checkpointer.save(step, self.tensors(), meta)
        self.metrics.event("checkpoint", step, checkpoint_stall_s=stall)
