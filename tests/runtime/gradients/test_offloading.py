"""Plans that offload: what a backward gets from the host is what it would have had, and the device holds less."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rota import Cluster, Costs, Kind, Pipeline, Plan, Stages, place
from rota.runtime.gradients import offloading
from rota.schedules import NAMED
from support.copies import with_offload
from support.networks import (
    assert_equal_steps,
    batch_of,
    loss_fn,
    pipeline_steps,
    refusal,
    serial_microbatches,
    stages_of,
)
from support.pool import Pool

from .test_recompute import NUM_MICROBATCHES, seen_by

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "hanayo", "chimera", "dualpipe")


def planned(schedule: str, num_ranks: int, share: float) -> Plan:
    """A plan of a named schedule that offloads this share of what each stage keeps."""
    family = NAMED[schedule]
    costs = family.costs_from(Costs.uniform(num_ranks, 10, 20, activation_bytes=2000))
    return family(with_offload(family.place(costs, Cluster.uniform(num_ranks)), share), NUM_MICROBATCHES)


def of_all_sizes(rank: int, job: Callable[..., Any], *args: Any) -> Any:
    """Small tensors are copied, too."""
    with patch.object(offloading, "LEAST_BYTES", 0):
        return job(rank, *args)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_is_the_same_to_the_bit(pool: Pool, schedule: str) -> None:
    """Dropout, statistics of the micro-batch and a changing weight; with two streams, two copies of all weights."""
    kept, copied = (planned(schedule, 2, share) for share in (0, 1))
    job = "none", kept.placement.num_components == 1
    expected = pool.run(2, seen_by, kept, *job)
    for (result, held), (same, most) in zip(pool.run(2, of_all_sizes, seen_by, copied, *job), expected, strict=True):
        assert result[0] == same[0]
        torch.testing.assert_close(result[1:], same[1:], rtol=0, atol=0)
        assert held < 0.8 * most if schedule == "gpipe" else held <= most


class Block(nn.Module):
    """What saves in unusual ways: a checkpointed part, views, one tensor twice, an output, complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.table = torch.linspace(0, 1, 6, dtype=torch.float64)  # not a buffer

    def forward(self, x: Tensor) -> Tensor:
        first, second, third = self.layers
        y = torch.tanh(checkpoint(first, x, use_reentrant=False)) * self.table
        parts = second(y).t().chunk(2)
        z = torch.cat([parts[0] * parts[0], parts[1] * parts[0]]).t()
        spectrum = torch.fft.fft(z)
        return (spectrum * spectrum.conj()).real.sqrt() + third(y)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_unusual_tensors(pool: Pool, schedule: str) -> None:
    torch.manual_seed(3)
    stages = Stages([Block().double() for _ in range(2)])
    batches = [batch_of(NUM_MICROBATCHES, step) for step in (1, 2)]
    plan = planned(schedule, 2, 0.5)
    results = pool.run(2, of_all_sizes, pipeline_steps, stages, plan, batches)
    for step, batch in enumerate(batches):
        assert_equal_steps([of_rank[step] for of_rank in results], serial_microbatches(stages, batch, NUM_MICROBATCHES))


def writes_late(linear: nn.Linear, x: Tensor) -> Tensor:
    y = linear(x)
    z = torch.exp(y)
    with torch.no_grad():
        z.mul_(2)
    return z


def told(rank: int, stages: Stages, plan: Plan, **options: Any) -> str:
    def act() -> None:
        with Pipeline(stages, plan, loss_fn, **options) as pipeline:
            pipeline.step(*batch_of(NUM_MICROBATCHES))

    return refusal(act)


def test_refused(pool: Pool) -> None:
    plan = planned("gpipe", 1, 1)
    stages = stages_of(writes_late)
    assert "writes into a tensor that its backward needs" in pool.run(1, of_all_sizes, told, stages, plan)[0]
    assert "but only 0 bytes are in tensors of 4096 bytes or more" in pool.run(1, told, stages, plan)[0]
    assert "names stage 0, which the plan offloads" in pool.run(1, recomputing, stages, plan)[0]
    both = Costs.uniform(1, recompute_us=1, activation_bytes=9, checkpoint_bytes=5, offload_bytes=5)
    placement = place(both, Cluster.uniform(1).with_host_links(1))
    assert "recomputes and offloads stage 0" in pool.run(1, told, stages, NAMED["gpipe"](placement, 4))[0]


class Growing(nn.Linear):
    """Its buffer is saved, stays on the device, and changes before the backward."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) * self.scale
        with torch.no_grad():
            self.scale.mul_(3)
        return y


def test_writes_into_what_stays_are_refused(pool: Pool) -> None:
    """Autograd itself compares versions of what it keeps alone."""
    refused = pool.run(1, of_all_sizes, told, Stages([Growing().double()]), planned("gpipe", 1, 1))[0]
    assert "stage 0 (Growing) writes into a tensor that its backward needs" in refused


@pytest.mark.parametrize("missing", [(Kind.F, Kind.O), (Kind.O, Kind.L), (Kind.L, Kind.B)])
def test_half_copies_are_refused(pool: Pool, missing: tuple[Kind, Kind]) -> None:
    plan = planned("gpipe", 1, 1)
    tasks = plan.placement.tasks
    edges = [e for e in plan.placement.edges if (tasks[e.source].kind, tasks[e.target].kind) != missing]
    broken = replace(plan, placement=replace(plan.placement, edges=tuple(edges)))
    assert "stage 0 lacks a part of F → O → L → B" in pool.run(1, told, stages_of(writes_nothing), broken)[0]


def recomputing(rank: int, stages: Stages, plan: Plan) -> str:
    return told(rank, stages, plan, recompute="full")


def copies_seen(rank: int, plan: Plan) -> list[tuple[str, bool]]:
    """The copies of a step, and whether each ended before the op that waits for it."""
    with Pipeline(stages_of(writes_nothing), plan, loss_fn) as pipeline:
        pipeline.step(*batch_of(NUM_MICROBATCHES))
        timeline = pipeline.timeline()
    starts = {span.work: span.start_us for span in timeline.op_spans()}
    return [
        (str(span.work), span.start_us <= span.end_us <= starts[span.work.target])  # type: ignore[union-attr]
        for span in timeline.transfer_spans()
    ]


def writes_nothing(linear: nn.Linear, x: Tensor) -> Tensor:
    return torch.tanh(linear(x))


def test_copies_are_in_the_timeline(pool: Pool) -> None:
    (copies,) = pool.run(1, of_all_sizes, copies_seen, planned("gpipe", 1, 1))
    ways = [f"0F{m}→0O{m}" for m in range(4)] + [f"0L{m}→0B{m}" for m in range(4)]
    assert copies == [(way, True) for way in ways]
