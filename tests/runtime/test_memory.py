"""What was sent or read is let go at once: a rank holds what the plan says, not what a step has seen."""

from __future__ import annotations

import gc
from collections import defaultdict
from typing import Any

import pytest
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from rota import Cluster, Costs, Kind, Pipeline, Plan, Stages, place
from rota.schedules import NAMED
from support.networks import batch_of, loss_fn, stages_of
from support.pool import Pool

pytestmark = pytest.mark.dist

NUM_RANKS = 3

#: Storages that crossed a boundary, of each kind, in this process.
crossed: defaultdict[str, list[StorageWeakRef]] = defaultdict(list)


def note(kind: str, tensor: Tensor) -> None:
    crossed[kind].append(StorageWeakRef(tensor.untyped_storage()))


def alive(kind: str) -> int:
    return sum(not storage.expired() for storage in crossed[kind])


def noting(linear: nn.Linear, x: Tensor) -> Tensor:
    """Saves its input for the backward but not its output."""
    note("received", x)
    y: Tensor = linear(x)
    note("sent", y)
    if x.requires_grad:
        x.register_hook(lambda gradient: note("gradients sent", gradient))
    y.register_hook(lambda gradient: note("gradients received", gradient))
    return y


def plan_for(schedule: str, num_microbatches: int) -> Plan:
    costs = NAMED[schedule].adapted(Costs.uniform(NUM_RANKS, 10, 20))
    return NAMED[schedule](place(costs, Cluster.uniform(NUM_RANKS)), num_microbatches)


def alive_after_a_step(rank: int, stages: Stages, plan: Plan, batch: Any) -> dict[str, int]:
    """For each kind those that are alive after the second step."""
    with Pipeline(stages, plan, loss_fn) as pipeline:
        pipeline.step(*batch)
        crossed.clear()
        pipeline.step(*batch)
        gc.collect()
        after = {kind: alive(kind) for kind in crossed if not (kind == "received" and rank == 0)}
    assert len(crossed["sent"]) == sum(op.kind in (Kind.F, Kind.R) for op in plan.orders[rank])
    return after


def noting_stages() -> Stages:
    return stages_of(*[noting] * NUM_RANKS)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "varuna"])
def test_nothing_that_crossed_a_boundary_outlives_the_step(pool: Pool, schedule: str) -> None:
    by_rank = pool.run(NUM_RANKS, alive_after_a_step, noting_stages(), plan_for(schedule, 6), batch_of(6))
    assert not any(any(after.values()) for after in by_rank), by_rank


def test_outputs_between_stages_of_one_rank_are_freed_too(pool: Pool) -> None:
    """The second stage's input is the first one's output: alive until the second's backward, then gone."""
    placement = place(Costs.uniform(3, 10, 20), Cluster.uniform(2), [0, 0, 1])
    by_rank = pool.run(2, alive_after_a_step, noting_stages(), NAMED["gpipe"](placement, 4), batch_of(4))
    assert not any(by_rank[0].values()), by_rank
