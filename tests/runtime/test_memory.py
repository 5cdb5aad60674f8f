"""What ops keep and what waits at boundaries is what the plan says, measured by the debug mode.

Steps with plans of their own hold no more than these plans say, wherever the longest sample is in the step.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import rota
from rota import Cluster, Costs, Op, Pipeline, Placement, Plan, Size, SizeModel, Stages, interleaved, place, simulate
from rota.runtime.memory_watch import MemoryWatch
from rota.schedules import NAMED
from support.networks import clear, loss_fn
from support.pool import Pool
from support.profiles import profile
from support.text_models import LONGEST, WIDTH as TEXT_WIDTH, gpt_stages, summed_loss, tokens

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


@pytest.mark.parametrize(("schedule", "num_ranks"), [("1f1b", 4), ("zb_h1", 2), ("interleaved_1f1b", 2)])
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


NUM_RANKS, SHORT = 2, 6
Job = tuple[Plan, list[tuple[int, int]]]  # with rows and length of each micro-batch


def slack_bytes(sizes: list[tuple[int, int]]) -> int:
    """A value between two ranks arrives or leaves a little earlier or later than planned."""
    return max(rows * length for rows, length in sizes) * TEXT_WIDTH * 8


def measured_model() -> SizeModel:
    with patch("rota.profiling.stage_profile._RUN_NS", 0):
        stages = gpt_stages(NUM_RANKS)
        sizes = [(rows, length) for length in (SHORT, 12, LONGEST) for rows in (1, 3)]
        costs = [profile(stages, *tokens(*size), summed_loss, here=True, repeats=1) for size in sizes]
        return rota.fit_sizes(
            [(Size.padded([length] * rows), of) for (rows, length), of in zip(sizes, costs, strict=True)]
        )


def held_in_steps(rank: int, base: Plan, jobs: list[Job]) -> list[tuple[int, int, int]]:
    """For each job, the most bytes that this rank planned to hold, may hold, and held, all without static bytes."""
    found = []
    with Pipeline(gpt_stages(NUM_RANKS), base, summed_loss, check_data="never") as pipeline:
        for plan, sizes in jobs:
            inputs, targets = zip(*(tokens(*size, seed=m) for m, size in enumerate(sizes)), strict=True)
            given: dict[str, Any] = {"plan": plan, "sizes": sizes}
            pipeline.step([*inputs], [*targets], **given)
            clear(pipeline)
            static, limit = plan.placement.static_bytes[rank], plan.placement.cluster.limit_bytes[rank]
            allowed = limit - static + slack_bytes(sizes)
            with pipeline.watch_memory() as watch, patch.object(MemoryWatch, "op_ended", patient(allowed)):
                pipeline.step([*inputs], [*targets], **given)
            found.append((simulate(plan).peak_memory_bytes[rank] - static, limit - static, watch.peak_bytes))
    return found


def with_one_long(model: SizeModel, schedule: str, where: int) -> Job:
    """Micro-batches of one short sample each, and one of the longest. The limits are what the plan needs."""
    cluster = Cluster.uniform(NUM_RANKS, latency_us=100)
    sizes = [(1, LONGEST if m == where else SHORT) for m in range(5)]
    placements = [place(model.costs(Size.padded([length])), cluster) for length in (SHORT, LONGEST)]
    placement = Placement.of_classes(placements, [int(length == LONGEST) for _, length in sizes])
    plan = NAMED[schedule](placement, len(sizes))
    limited = replace(cluster, limit_bytes=simulate(plan).peak_memory_bytes)
    return replace(plan, placement=replace(placement, cluster=limited)), sizes


def test_limits_hold_wherever_the_longest_sample_is(pool: Pool) -> None:
    model = measured_model()
    places = [(schedule, where) for schedule in ("1f1b", "gpipe") for where in range(5)]
    jobs = [with_one_long(model, *place) for place in places]
    peaks = [simulate(plan).peak_memory_bytes[0] for plan, _ in jobs]
    assert len({*peaks[:5]}) > 1  # there is a worst place
    base = NAMED["1f1b"](place(model.costs(Size(1, 1)), Cluster.uniform(NUM_RANKS)), 2)
    for rank, of_rank in enumerate(pool.run(NUM_RANKS, held_in_steps, base, jobs)):
        for (planned, limit, held), (_, sizes) in zip(of_rank, jobs, strict=True):
            assert 0.6 * planned <= held <= limit + slack_bytes(sizes), (rank, sizes, planned, limit, held)
