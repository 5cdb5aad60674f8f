"""What was sent or read is let go at once: a rank holds what the plan says, not what a step has seen."""

from __future__ import annotations

import gc
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from rota import Cluster, Costs, Kind, Pipeline, Plan, Stages, place
from rota.schedules import NAMED
from support.networks import batch_of, loss_fn
from support.pool import Pool

pytestmark = pytest.mark.dist

NUM_RANKS, WIDTH = 3, 6

#: Storages that crossed a boundary, of each kind, in this process.
crossed: defaultdict[str, list[StorageWeakRef]] = defaultdict(list)
#: How many of them were alive when a forward or backward began, at most.
most_alive: defaultdict[str, int] = defaultdict(int)
#: As many may be alive: until `deadline_s` the count is taken again, as another thread lets go of what was sent.
allowed: dict[str, int] = {}
deadline_s = 0.0


def note(kind: str, tensor: Tensor) -> None:
    crossed[kind].append(StorageWeakRef(tensor.untyped_storage()))


def alive(kind: str) -> int:
    return sum(not storage.expired() for storage in crossed[kind])


def look() -> None:
    for kind in [*crossed]:
        while alive(kind) > allowed.get(kind, math.inf) and time.monotonic() < deadline_s:
            time.sleep(0.001)
        most_alive[kind] = max(most_alive[kind], alive(kind))


class Noting(nn.Module):
    """A linear layer, which saves its input for the backward but not its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        look()
        note("received", x)
        y: Tensor = self.linear(x)
        note("sent", y)
        if x.requires_grad:
            x.register_hook(lambda gradient: note("gradients sent", gradient))
        y.register_hook(self.received_gradient)
        return y

    def received_gradient(self, gradient: Tensor) -> None:
        look()
        note("gradients received", gradient)


def plan_for(schedule: str, num_microbatches: int, num_ranks: int = NUM_RANKS) -> Plan:
    costs = NAMED[schedule].adapted(Costs.uniform(num_ranks, 10, 20))
    placement = place(costs, Cluster.uniform(num_ranks))
    return NAMED[schedule](placement, num_microbatches)


def most_alive_in_a_step(
    rank: int, stages: Stages, plan: Plan, batch: Any, limits: Sequence[dict[str, int]] = ()
) -> tuple[dict[str, int], dict[str, int]]:
    """For each kind: the most that were alive at once in the second step, and those alive after it.

    `limits` by rank and kind: what is over them is given time.
    """
    global deadline_s
    with Pipeline(stages, plan, loss_fn) as pipeline:
        pipeline.step(*batch)
        crossed.clear()
        most_alive.clear()
        allowed.clear()
        allowed.update(limits[rank] if limits else {})
        deadline_s = time.monotonic() + 60
        pipeline.step(*batch)
        gc.collect()
        after = {kind: alive(kind) for kind in crossed if not (kind == "received" and rank == 0)}
    allowed.clear()  # this process runs other tests, too
    assert len(crossed["sent"]) == sum(op.kind in (Kind.F, Kind.R) for op in plan.orders[rank])
    return dict(most_alive), after


def noting_stages() -> Stages:
    return Stages([Noting() for _ in range(NUM_RANKS)])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "varuna"])
def test_nothing_that_crossed_a_boundary_outlives_the_step(pool: Pool, schedule: str) -> None:
    by_rank = pool.run(NUM_RANKS, most_alive_in_a_step, noting_stages(), plan_for(schedule, 6), batch_of(6))
    for _, after in by_rank:
        assert not any(after.values()), by_rank


def test_alive_boundary_tensors_do_not_grow_with_the_number_of_microbatches(pool: Pool) -> None:
    limits: list[dict[str, int]] = []
    for rank in range(NUM_RANKS):
        in_flight = NUM_RANKS - rank
        from_before = {"received": in_flight, "gradients sent": 5} if rank > 0 else {}  # else it is the caller's batch
        from_behind = {"sent": in_flight + 3, "gradients received": 2} if rank < NUM_RANKS - 1 else {}
        limits.append(from_before | from_behind)
    plan, batch = plan_for("1f1b", 32), batch_of(32)
    by_rank = pool.run(NUM_RANKS, most_alive_in_a_step, noting_stages(), plan, batch, limits)
    for (most, _), limit in zip(by_rank, limits, strict=True):
        assert all(most[kind] <= limit[kind] for kind in limit), by_rank


def outputs_alive_before_backward(rank: int, stages: Stages, plan: Plan, batch: Any) -> int:
    """In the second step, before the first backward."""
    seen: list[int] = []

    def count(_: Tensor) -> None:
        deadline = time.monotonic() + 60
        is_sent = rank < NUM_RANKS - 1  # else outputs are there until their backward
        while is_sent and is_second and not seen and alive("sent") and time.monotonic() < deadline:
            time.sleep(0.001)  # what has arrived there is let go here a little later, by another thread
        seen.append(alive("sent"))

    stages[rank].received_gradient = count  # type: ignore[assignment]
    is_second = False
    with Pipeline(stages, plan, loss_fn) as pipeline:
        pipeline.step(*batch)
        is_second = True
        crossed.clear()
        seen.clear()
        pipeline.step(*batch)
    return seen[0]


def test_outputs_are_not_kept_for_their_backward(pool: Pool) -> None:
    plan, batch = plan_for("gpipe", 6), batch_of(6)
    by_rank = pool.run(NUM_RANKS, outputs_alive_before_backward, noting_stages(), plan, batch)
    assert by_rank[:2] == [0, 0]


def test_outputs_between_stages_of_one_rank_are_freed_too(pool: Pool) -> None:
    """The second stage's input is the first one's output: alive until the second's backward, then gone."""
    placement = place(Costs.uniform(3, 10, 20), Cluster.uniform(2), [0, 0, 1])
    by_rank = pool.run(2, most_alive_in_a_step, noting_stages(), NAMED["gpipe"](placement, 4), batch_of(4))
    assert not any(by_rank[0][1].values()), by_rank
