"""What a run does about a step that its guard has judged bad. All ranks come here together, with the same verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch.distributed as dist

from titanlike.errors import NonFinite, UserError
from titanlike.guard import MAX_ROLLBACKS_TO_A_STEP, Guard, Verdict
from titanlike.resume import take

if TYPE_CHECKING:
    from titanlike.run import Run


def tell_bad_step(
    run: Run,
    step: int,
    verdict: Verdict,
    batch: Any,
    values: dict[str, float],
    cursor: dict[str, Any] | None,
    updated: bool,
) -> None:
    """Write the event `bad_step`: what is done and why, on which samples of which sources, and where it shows.

    `cursor` is where the data stood before the batch; `updated`: the verdict came after the update.
    """
    mesh = run.mesh
    gradients = []
    if not updated:  # after an update by a factor that is not finite every gradient is bad
        for name, shard in run.trainer.zero.shards.items():
            if shard.grad is not None and not shard.grad.isfinite().all():
                gradients.append(name)
    samples = [] if mesh.coordinate("pp") or mesh.coordinate("tp") else batch.sample_ids
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (samples, gradients))
    samples = [name for one, _ in found for name in one]
    sources = sorted({name.split(":")[0] for name in samples})
    run.metrics.event(
        "bad_step",
        step,
        action=verdict.action,
        reason=verdict.reason,
        loss=values["loss"],
        grad_norm=values["grad_norm"],
        samples=samples,
        sources=sources,
        gradients=sorted({name for _, one in found for name in one}),
        data=cursor,
    )
    done = {"skip": "left out", "stop": "the last", "rollback": "rolled back"}[verdict.action]
    more = f" and {len(samples) - 4} more" if len(samples) > 4 else ""
    run.metrics.message(
        f"step {step} is {done}: {verdict.reason}; samples {', '.join(samples[:4])}{more} (all in events.jsonl)"
    )


def end_run(run: Run, step: int, verdict: Verdict) -> NoReturn:
    """End the run. Nothing of this step is saved."""
    run.checkpointer.wait()  # the one that is being written is of a good step
    last = run.checkpointer.saved_step
    kept = "no checkpoint was saved yet" if last is None else f"the last checkpoint is of step {last}, before it"
    raise (UserError if verdict.finite else NonFinite)(
        f"step {step} has {verdict.reason}, so the run was ended; {kept}: lower optimizer.lr, resume from an earlier "
        "step by checkpoint.load_step, or see docs/guard.md"
    )


def roll_back(run: Run, step: int, verdict: Verdict) -> None:
    """Go back to the newest good checkpoint, and on from there with the data after that of `step`.

    The checkpoint is saved anew with that place in the data: a restart does not meet the bad batch again.
    """
    checkpointer, bad = run.checkpointer, run.cursor
    assert bad is not None
    checkpointer.config = checkpointer.config.model_copy(update={"load_step": None})  # it has been seen to at the start
    loaded = checkpointer.load(run.tensors())
    assert loaded is not None, "a run that may roll back saves before its first step"
    take(run, loaded)
    again = run.guard.rolled_back(loaded.step, loaded.meta.get("guard", Guard(run.config.guard).state()))
    if not again:
        raise UserError(
            f"step {step} has {verdict.reason}, and the run was taken back to step {loaded.step} "
            f"{MAX_ROLLBACKS_TO_A_STEP} times already, so it was ended: lower optimizer.lr, or go on from an earlier "
            "step by checkpoint.load_step"
        )
    # The data goes on after the bad batch; its count of steps, by which stages of the data change, is the run's.
    run.cursor = {**bad, "step": loaded.step}
    run.metrics.message(f"back to {loaded.folder}: step {loaded.step}, on with the data after that of step {step}")
    run.metrics.resume_from(loaded.step, mesh=run.degrees(), world_size=dist.get_world_size(), rolled_back_from=step)
    run.save()
    run.hooks("on_start", run)
