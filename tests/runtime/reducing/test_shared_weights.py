"""Weights on several ranks, tied or in two streams: equal from the start, gradients summed, counted once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rota import Cluster, Costs, Pipeline, Plan, Stages, bidirectional, place
from rota.schedules import NAMED, chimera, dualpipe, gpipe
from support.networks import batch_of, chain, loss_fn, refusal
from support.parallel_modules import Normed, assert_equal_normed, normed_step
from support.pool import Pool, on_ranks


def tied(num_stages: int, *ties: tuple[int, ...]) -> Stages:
    stages = chain(num_stages)
    for first, *others in ties:
        for other in others:
            stages[other].linear.weight = stages[first].linear.weight
    return stages


def steps_on(rank: int, stages: Stages, plan: Plan, batches: list[Any]) -> list[Normed]:
    """Steps and their gradients' norm; the ranks begin with other weights than rank 0, where they hold the same."""
    with torch.no_grad():
        for tie in stages.ties:
            stage, name = tie[0]
            stages[stage].get_parameter(name).add_(rank if rank != plan.placement.ranks_of(stage)[0] else 0)
    with Pipeline(stages, plan, loss_fn) as pipeline:
        assert len({*pipeline.parameters()}) == len([*pipeline.parameters()])
        return [normed_step(pipeline, *batch) for batch in batches]


def plan_for(ranks: list[int], schedule: str = "gpipe", **costs: Any) -> Plan:
    placement = place(Costs.uniform(len(ranks), **costs), Cluster.uniform(max(ranks) + 1), ranks)
    return NAMED[schedule](placement, 4)


TIED: dict[str, tuple[Stages, Plan]] = {
    "ends": (tied(4, (0, 3)), plan_for([0, 1, 2, 3], "1f1b")),
    "two ties": (tied(4, (0, 3), (1, 2)), plan_for([0, 1, 2, 3], "1f1b")),
    "three stages": (tied(4, (0, 1, 3)), plan_for([0, 1, 2, 3])),
    "partly on one rank": (tied(4, (0, 2, 3)), plan_for([0, 1, 0, 1], "interleaved_1f1b")),
    "on one rank": (tied(4, (0, 3)), plan_for([0, 1, 1, 0])),
    "split backward": (tied(3, (0, 2)), plan_for([0, 1, 2], "zb_h1", weight_us=1)),
    "recomputed": (tied(3, (0, 2)), plan_for([0, 1, 2], recompute_us=1)),
}


@pytest.mark.parametrize("case", TIED)
def test_tied(pool: Pool, case: str) -> None:
    stages, plan = TIED[case]
    batches = [batch_of(4, seed) for seed in (1, 2)]
    by_rank = pool.run(plan.num_ranks, steps_on, stages, plan, batches)
    assert_equal_normed(by_rank, stages, batches)


def test_frozen_ties_stay_without_gradients(pool: Pool) -> None:
    stages, plan = tied(4, (0, 3)), TIED["ends"][1]
    stages[0].linear.weight.requires_grad_(False)
    batches = [batch_of(4)]
    assert_equal_normed(pool.run(4, steps_on, stages, plan, batches), stages, batches)


@on_ranks(4)
def test_other_ties_on_one_rank_are_told_on_all(rank: int) -> None:
    told = refusal(Pipeline, tied(4, (0, 3)) if rank != 1 else chain(4), TIED["ends"][1], loss_fn)
    assert "rank 1 has a different set of tied and replicated weights from rank 0" in told


def two_streams(schedule: Callable[..., Plan], num_ranks: int, num_microbatches: int, **costs: Any) -> Plan:
    placement = bidirectional(Costs.uniform(num_ranks, **costs), Cluster.uniform(num_ranks))
    return schedule(placement, num_microbatches)


STREAMS = {
    "chimera on 2": two_streams(chimera, 2, 4),
    "dualpipe": two_streams(dualpipe, 4, 8, weight_us=1),
    "gpipe on 3": two_streams(gpipe, 3, 5),  # rank 1 holds both copies of stage 1
    "one micro-batch": two_streams(gpipe, 2, 1),  # none for the second stream
}


@pytest.mark.parametrize("case", STREAMS)
def test_two_streams(pool: Pool, case: str) -> None:
    plan = STREAMS[case]
    stages = chain(plan.num_ranks)
    batches = [batch_of(plan.num_microbatches, seed) for seed in (1, 2)]
    by_rank = pool.run(plan.num_ranks, steps_on, stages, plan, batches)
    assert_equal_normed(by_rank, stages, batches)


@on_ranks(2)
def test_running_statistics_in_two_streams_are_refused(rank: int) -> None:
    stages = Stages([nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6)).double() for _ in range(2)])
    with Pipeline(stages, STREAMS["chimera on 2"], loss_fn) as pipeline:
        for module in stages.modules:
            module[0].eval()
        pipeline.step(*batch_of(4))
        for module in stages.modules:
            module[0].train()
        told = refusal(pipeline.step, *batch_of(4))
    assert "changes its buffer '0.num_batches_tracked', which stages on several ranks share" in told
