"""What ops keep and what waits at boundaries is what the plan says, measured by the debug mode.

Steps with plans of their own hold no more than these plans say, wherever the longest sample is in the step.
"""

from __future__ import annotations

import gc
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import rota
from rota import (
    Cluster,
    Costs,
    Kind,
    Op,
    Pipeline,
    Placement,
    Plan,
    Size,
    SizeModel,
    Stages,
    interleaved,
    place,
    simulate,
)
from rota.runtime.memory_watch import MemoryWatch
from rota.schedules import NAMED
from support.networks import batch_of, clear, loss_fn, stages_of
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


# --- plans per step ---------------------------------------------------------------------------------------------------

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
            assert limit is not None
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


def planned_batch(model: SizeModel, lengths: list[int]) -> Job:
    """A planned batch, in little more memory than the longest sample needs alone."""
    with pytest.raises(rota.SearchError, match=f"sample 0 of length {LONGEST} fits in no micro-batch") as refusal:
        rota.plan_batch(model, Cluster.uniform(NUM_RANKS, max(model.static_bytes)), lengths)
    need = int(str(refusal.value).split("alone it needs ")[1].split()[0])
    cluster = Cluster.uniform(NUM_RANKS, need + need // 4, latency_us=100)
    found = rota.plan_batch(model, cluster, lengths, tries=200)
    assert all(peak <= limit for peak, limit in zip(found.timeline.peak_memory_bytes, cluster.limit_bytes, strict=True))
    return found.plan, [(len(group), max(lengths[i] for i in group)) for group in found.groups]


def test_limits_hold_wherever_the_longest_sample_is(pool: Pool) -> None:
    model = measured_model()
    places = [(schedule, where) for schedule in ("1f1b", "gpipe") for where in range(5)]
    jobs = [with_one_long(model, *place) for place in places]
    peaks = [simulate(plan).peak_memory_bytes[0] for plan, _ in jobs]
    assert len({*peaks[:5]}) > 1  # there is a worst place
    jobs.append(planned_batch(model, [LONGEST, *range(4, 20)]))
    base = NAMED["1f1b"](place(model.costs(Size(1, 1)), Cluster.uniform(NUM_RANKS)), 2)
    for rank, of_rank in enumerate(pool.run(NUM_RANKS, held_in_steps, base, jobs)):
        for (planned, limit, held), (_, sizes) in zip(of_rank, jobs, strict=True):
            assert 0.6 * planned <= held <= limit + slack_bytes(sizes), (rank, sizes, planned, limit, held)


# --- what was sent or read is let go at once: a rank holds what the plan says, not what a step has seen ---------------

NUM_NOTING = 3

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


def noting_plan(schedule: str, num_microbatches: int) -> Plan:
    costs = NAMED[schedule].adapted(Costs.uniform(NUM_NOTING, 10, 20))
    return NAMED[schedule](place(costs, Cluster.uniform(NUM_NOTING)), num_microbatches)


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
    return stages_of(*[noting] * NUM_NOTING)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "varuna"])
def test_nothing_that_crossed_a_boundary_outlives_the_step(pool: Pool, schedule: str) -> None:
    by_rank = pool.run(NUM_NOTING, alive_after_a_step, noting_stages(), noting_plan(schedule, 6), batch_of(6))
    assert not any(any(after.values()) for after in by_rank), by_rank


def test_outputs_between_stages_of_one_rank_are_freed_too(pool: Pool) -> None:
    """The second stage's input is the first one's output: alive until the second's backward, then gone."""
    placement = place(Costs.uniform(3, 10, 20), Cluster.uniform(2), [0, 0, 1])
    by_rank = pool.run(2, alive_after_a_step, noting_stages(), NAMED["gpipe"](placement, 4), batch_of(4))
    assert not any(by_rank[0].values()), by_rank
