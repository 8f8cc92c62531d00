"""Cutting a model into stages, and the forward-only schedule, without ranks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
import torch

from models.llama import PRESETS, Llama, LlamaConfig
from parallelize.llama import FIRST_PARTS, LAST_PARTS, stage_costs
from parallelize.pipeline import SCHEDULES, cut_stage, split_layers, stages_of_rank, timesteps


def all_cuts(layers: int, stages: int) -> Iterator[list[int]]:
    """Every way to give each of `stages` stages one layer or more."""
    for ends in itertools.combinations(range(1, layers), stages - 1):
        yield [b - a for a, b in itertools.pairwise((0, *ends, layers))]


def stage_sums(cut: list[int], costs: list[float], first: float, last: float) -> list[float]:
    ends = [0, *itertools.accumulate(cut)]
    sums = [sum(costs[a:b]) for a, b in itertools.pairwise(ends)]
    sums[0] += first
    sums[-1] += last
    return sums


def test_the_cut_is_the_best_of_all_cuts() -> None:
    """Symptom: the head's stage gets as many layers as the others and holds up the whole pipeline."""
    draw = random.Random(0)
    for _ in range(300):
        layers = draw.randint(1, 9)
        stages = draw.randint(1, layers)
        costs = [float(draw.choice([1, 1, 1, 2, 5])) for _ in range(layers)]
        first, last = float(draw.choice([0, 0, 1, 4])), float(draw.choice([0, 1, 3, 8]))
        cut = split_layers(costs, first, last, stages)
        assert len(cut) == stages and sum(cut) == layers and min(cut) >= 1

        def quality(cut: list[int]) -> tuple[float, float]:
            sums = stage_sums(cut, costs, first, last)  # noqa: B023 - called within the loop's round
            return max(sums), sum(s * s for s in sums)

        assert quality(cut)[0] == min(quality(other)[0] for other in all_cuts(layers, stages))


def test_equal_layers_are_spread_evenly() -> None:
    """Symptom: a number of layers that the stages don't divide leaves a stage empty."""
    for layers, stages in ((7, 3), (8, 4), (5, 5), (80, 8), (3, 2)):
        cut = split_layers([1.0] * layers, 0.0, 0.0, stages)
        assert max(cut) - min(cut) <= 1 and sum(cut) == layers


def test_the_heads_cost_moves_layers_away_from_the_last_stage() -> None:
    """Llama 3.2 1B: the head costs as much as several layers."""
    config = PRESETS["1b"]
    first, costs, last = stage_costs(config, 8192)
    assert first == 0.0 and len(costs) == 16
    cut = split_layers(costs, first, last, 4)
    assert cut[-1] < cut[0] and sum(cut) == 16
    assert last > 2 * costs[0]


def test_costs_are_the_flops_that_torch_counts() -> None:
    """Symptom: a formula that forgets a projection. torch counts the whole square of attention, the formula the causal
    half."""
    from torch.utils.flop_counter import FlopCounterMode

    config = LlamaConfig(vocab_size=96, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=48)
    seq = 16
    model = Llama(config)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, seq, dtype=torch.int64))
    first, costs, last = stage_costs(config, seq)
    scores = 2 * 2 * config.n_heads * config.head_dim * seq / 2
    counted = counter.get_total_flops()
    square = counter.get_flop_counts()["Global"].get(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu, 0)
    assert square in (0, 2 * 2 * 4 * 8 * seq * seq * 2)  # torch may not know the CPU kernel
    assert seq * (first + sum(costs) + last) == counted - square + seq * scores * config.n_layers


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_stages_are_placed_once_each(schedule: str, pp: int) -> None:
    _, per_rank, v_shaped = SCHEDULES[schedule]
    placed = [stages_of_rank(rank, pp, per_rank, v_shaped) for rank in range(pp)]
    assert sorted(itertools.chain(*placed)) == list(range(pp * per_rank))
    assert all(stages == sorted(stages) for stages in placed)
    if v_shaped:  # first and last stage on one rank: tied weights need no communication
        assert placed[0] == [0, 2 * pp - 1]


def test_a_cut_model_has_the_plain_names_and_all_of_them() -> None:
    """Symptom: a stage numbers its layers from 0, and checkpoints overwrite each other."""
    with torch.device("meta"):
        plain = Llama(LlamaConfig(vocab_size=31, dim=16, n_layers=5, n_heads=2, ffn_dim=24, tie_embeddings=True))
    split = [2, 1, 2]
    names = []
    for index in range(3):
        stage = cut_stage(plain, split, index, FIRST_PARTS, LAST_PARTS)
        names += [name for name, _ in stage.named_parameters(remove_duplicate=False)]
    assert sorted(names) == sorted(name for name, _ in plain.named_parameters(remove_duplicate=False))
    assert len(plain.layers) == 5  # the plain model is not touched


# -- forward only ----------------------------------------------------------------------------------------------------

PLACEMENTS = [
    [stage % pp for stage in range(pp * per_rank)] if not v else [*range(pp), *reversed(range(pp))]
    for pp in (1, 2, 3, 4)
    for per_rank, v in ((1, False), (2, False), (3, False), (2, True))
]


@pytest.mark.parametrize("ranks", PLACEMENTS, ids=str)
@pytest.mark.parametrize("microbatches", [1, 2, 5, 8])
def test_forward_only_schedules_are_complete_and_in_order(ranks: list[int], microbatches: int) -> None:
    """Symptom: validation under pp hangs, or runs a stage before its input is there."""
    when: dict[tuple[int, int], int] = {}
    for time, now in enumerate(timesteps(ranks, microbatches)):
        assert now  # no idle time step
        for rank, task in now.items():
            assert ranks[task[0]] == rank
            assert task not in when
            when[task] = time
    assert set(when) == {(s, m) for s in range(len(ranks)) for m in range(microbatches)}
    for (stage, microbatch), time in when.items():
        assert stage == 0 or when[(stage - 1, microbatch)] < time


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 4, 8])
def test_forward_only_with_a_stage_per_rank_takes_the_shortest_time(pp: int, microbatches: int) -> None:
    assert len(timesteps(list(range(pp)), microbatches)) == microbatches + pp - 1
