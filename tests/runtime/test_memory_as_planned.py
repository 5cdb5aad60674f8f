"""What ops keep and what waits at boundaries is what the plan says, measured by the debug mode."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from rota import Cluster, Costs, Op, Pipeline, Plan, Stages, interleaved, place, simulate
from rota.runtime.memory_watch import MemoryWatch
from rota.schedules import NAMED
from support.networks import loss_fn
from support.pool import Pool

pytestmark = pytest.mark.dist

ROWS, WIDTH, HIDDEN, NUM_MICROBATCHES = 4, 4, 64, 12
BOUNDARY_BYTES, HIDDEN_BYTES = ROWS * WIDTH * 8, ROWS * HIDDEN * 8
#: Boundary tensors, a sixteenth of an activation each, arrive or leave a little earlier or later.
_A_FEW = 5 * BOUNDARY_BYTES


class Wide(nn.Module):
    """Keeps its input, a tensor 16 times as large and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.up(x) * 0.5))
        return y


def plan_for(schedule: str, num_ranks: int) -> Plan:
    num_stages = num_ranks * (2 if schedule == "interleaved_1f1b" else 1)
    # The first stage's input is the caller's. Its I does nothing, and keeps the gradient for W; that of another
    # keeps the gradients of both layers' outputs.
    kept = [HIDDEN_BYTES + BOUNDARY_BYTES * (stage > 0) for stage in range(num_stages)]
    kept[-1] += BOUNDARY_BYTES  # by the loss
    splits = schedule == "zb_h1"
    costs = Costs(
        forward_us=(10,) * num_stages,
        backward_us=(10 if splits else 20,) * num_stages,
        weight_us=(10,) * num_stages if splits else None,
        activation_bytes=tuple(kept),
        input_frees_bytes=(-BOUNDARY_BYTES, *[-HIDDEN_BYTES - BOUNDARY_BYTES] * (num_stages - 1)) if splits else None,
        boundary_bytes=BOUNDARY_BYTES,
    )
    make = interleaved if schedule == "interleaved_1f1b" else place
    return NAMED[schedule](make(costs, Cluster.uniform(num_ranks)), NUM_MICROBATCHES)


def watched(rank: int, stages: Stages, plan: Plan, allowed_bytes: Sequence[float]) -> tuple[int, int, list[Op]]:
    """`allowed_bytes` by rank: what is over them is given time, as another thread lets go of what was sent."""
    generator = torch.Generator().manual_seed(0)  # the same batch on all ranks
    batch = torch.randn(2, NUM_MICROBATCHES * ROWS, WIDTH, dtype=torch.float64, generator=generator).unbind()
    with Pipeline(stages, plan, loss_fn) as pipeline:
        pipeline.step(*batch)
        for parameter in pipeline.parameters():
            parameter.grad = None  # new ones are not counted either
        with pipeline.watch_memory() as watch, patch.object(MemoryWatch, "op_ended", patient(allowed_bytes[rank])):
            pipeline.step(*batch)
        seen = len(watch.ops)
        pipeline.step(*batch)
        assert len(watch.ops) == seen
        return watch.most_held_bytes, watch.peak_bytes, [op for op, *_ in watch.ops]


def patient(allowed_bytes: float) -> Callable[[MemoryWatch, Op], None]:
    """`MemoryWatch.op_ended`, once no more than `allowed_bytes` are alive."""
    op_ended, deadline_s = MemoryWatch.op_ended, time.monotonic() + 60

    def wait(watch: MemoryWatch, op: Op) -> None:
        op_ended(watch, op)
        while watch.ops[-1].after_bytes > allowed_bytes and time.monotonic() < deadline_s:
            time.sleep(0.001)
            watch.ops.pop()
            op_ended(watch, op)

    return wait


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "interleaved_1f1b"])
def test_kept_activations_and_buffers_are_as_planned(pool: Pool, schedule: str, num_ranks: int) -> None:
    plan = plan_for(schedule, num_ranks)
    stages = Stages(Wide().double() for _ in range(plan.num_stages))
    planned = simulate(plan).peak_memory_bytes
    allowed = [num_bytes + _A_FEW for num_bytes in planned]
    found: list[Any] = pool.run(num_ranks, watched, stages, plan, allowed)
    for rank, (most_held, peak, ops) in enumerate(found):
        assert tuple(ops) == plan.orders[rank]
        assert abs(most_held - planned[rank]) <= _A_FEW, (rank, found, planned)
        assert peak >= most_held


def test_an_op_that_keeps_more_than_planned_is_seen(pool: Pool) -> None:
    plan = plan_for("1f1b", 2)
    of_less = simulate(plan).peak_memory_bytes
    stages = Stages([nn.Sequential(Wide(), Wide()).double(), Wide().double()])
    found = pool.run(2, watched, stages, plan, [math.inf] * 2)
    assert found[0][0] > 1.5 * of_less[0]
