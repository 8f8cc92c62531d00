"""The idle share of a pipeline, from the order of actions that torch's own schedule classes give each rank.

A rank runs its actions in order, each as soon as what it needs is there; a forward takes 1, the backward to the input
1, the backward to the weights 1, communication nothing, and all stages cost the same. What is left idle until the last
rank is done is the bubble. So it is the number of the schedule as it is run, not of the paper that it is named after.
"""

from __future__ import annotations

import functools
from typing import Any

DURATION = {"F": 1, "I": 1, "W": 1, "B": 2}
"""torch's letters for forward, backward to the input, backward to the weights, and both at once"""

Task = tuple[str, int, int]
"""(letter, stage, microbatch)"""


class _FakeStage:
    """What the constructors of torch's schedules ask of a stage."""

    submod = None

    def __init__(self, index: int, stages: int, ranks: int) -> None:
        self.stage_index = index
        self.num_stages = stages
        self.group_size = ranks
        self.group_rank = 0
        self.is_first, self.is_last = index == 0, index == stages - 1


def action_order(class_name: str, ranks: int, stages: int, microbatches: int) -> list[list[Task]]:
    """The compute actions of each rank in order, of torch's schedule `class_name` (as in `get_schedule_class`).

    Raises:
        ValueError: the schedule cannot take this number of stages or microbatches.
    """
    # These two run from a loop of their own, and the order that torch reports of 1F1B is not the one that it runs.
    if class_name == "GPipe":
        return [_one_stage(rank, microbatches, warmup=microbatches) for rank in range(ranks)]
    if class_name == "1F1B":
        return [_one_stage(rank, microbatches, warmup=min(microbatches, ranks - rank)) for rank in range(ranks)]
    from torch.distributed.pipelining.schedules import get_schedule_class

    base: Any = get_schedule_class(class_name)

    class Order(base):
        def _prepare_schedule_with_comms(self, *_args: Any, **_kwargs: Any) -> None:
            """Sends and receives are not asked for, and take long to place."""

    # The stages of rank 0; the V-shaped schedules look at their number alone.
    schedule = Order([_FakeStage(i * ranks, stages, ranks) for i in range(stages // ranks)], microbatches)
    order: list[list[Task]] = []
    for rank in range(ranks):
        tasks: list[Task] = []
        for action in schedule.pipeline_order[rank]:
            # A pair that may overlap counts as one after the other: they share the rank's compute units.
            for each in () if action is None else action.sub_actions or (action,):
                letter = each.computation_type.value
                if letter in DURATION:
                    tasks.append((letter, each.stage_index, each.microbatch_index))
        order.append(tasks)
    return order


def _one_stage(rank: int, microbatches: int, warmup: int) -> list[Task]:
    """`warmup` forwards, then one backward and one forward in turn, then the backwards that are left."""
    tasks = [("F", rank, m) for m in range(warmup)]
    for m in range(microbatches):
        tasks.append(("B", rank, m))
        if warmup + m < microbatches:
            tasks.append(("F", rank, warmup + m))
    return tasks


def idle_share(order: list[list[Task]]) -> float:
    """The share of the ranks' time that they wait, from 0 to 1, when each runs its tasks in order.

    Raises:
        ValueError: the ranks would wait for each other for ever.
    """
    stages = 1 + max(stage for tasks in order for _, stage, _ in tasks)
    ended: dict[Task, int] = {}

    def needs(task: Task) -> Task | None:
        letter, stage, microbatch = task
        if letter == "F":
            return None if stage == 0 else ("F", stage - 1, microbatch)
        if letter == "W":
            return ("I", stage, microbatch)
        return ("F", stage, microbatch) if stage == stages - 1 else ("I", stage + 1, microbatch)

    clock, done = [0] * len(order), [0] * len(order)
    while any(d < len(tasks) for d, tasks in zip(done, order)):
        moved = False
        for rank, tasks in enumerate(order):
            while done[rank] < len(tasks):
                task = tasks[done[rank]]
                needed = needs(task)
                if needed is not None and needed not in ended:
                    break
                start = max(clock[rank], ended[needed] if needed is not None else 0)
                clock[rank] = start + DURATION[task[0]]
                letter, stage, microbatch = task
                ended[("I" if letter == "B" else letter, stage, microbatch)] = clock[rank]
                done[rank] += 1
                moved = True
        if not moved:
            raise ValueError("the schedule's ranks wait for each other")
    busy = sum(DURATION[task[0]] for tasks in order for task in tasks)
    return 1 - busy / (max(clock) * len(order))


@functools.cache
def bubble_of(class_name: str, ranks: int, stages: int, microbatches: int) -> float:
    """The idle share of torch's schedule `class_name` on `ranks` ranks with `stages` stages in all."""
    return idle_share(action_order(class_name, ranks, stages, microbatches))
