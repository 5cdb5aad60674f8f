"""The measured timeline: one on all ranks, possible, and close to the simulated one where ops take what is planned."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rota import Cluster, Costs, Op, Pipeline, PipelineError, Plan, Stages, Timeline, compare, place, simulate
from rota.runtime import recorder
from rota.schedules import NAMED, gpipe
from support.fresh import run_fresh
from support.networks import Layer, batch_of, chain, graph_of_layers, loss_fn
from support.pool import Pool
from support.random_plans import random_plan

pytestmark = pytest.mark.dist

NUM_RANKS = 3
FORWARD_S, BACKWARD_S = 0.02, 0.04


def timelines(rank: int, stages: Stages, plan: Plan, num_steps: int = 2, good_us: float = 0) -> list[Timeline]:
    """The timeline of each step, up to the first that takes no longer than `good_us`: other processes may disturb."""
    found = []
    batch = batch_of(plan.num_microbatches)
    with Pipeline(stages, plan, loss_fn) as pipeline:
        for _ in range(num_steps):
            pipeline.step(*batch)
            found.append(pipeline.timeline())
            if found[-1].makespan_us <= good_us:  # on all ranks alike
                break
    return found


def timelines_of_each(rank: int, cases: list[tuple[Stages, Plan]]) -> list[Timeline]:
    return [timeline for stages, plan in cases for timeline in timelines(rank, stages, plan)]


def assert_possible(timeline: Timeline) -> None:
    """Ops of a rank follow each other in the plan's order; nothing is read before it was made and has arrived."""
    plan = timeline.plan
    at: dict[tuple[int, Op], tuple[int, int]] = {}
    for rank, (order, starts, ends) in enumerate(zip(plan.orders, timeline.starts_us, timeline.ends_us, strict=True)):
        assert all(start <= end for start, end in zip(starts, ends, strict=True))
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
        at |= {(rank, op): (start, end) for op, start, end in zip(order, starts, ends, strict=True)}
    assert len({op for _, op in at}) == plan.num_ops
    assert min(start for start, _ in at.values()) == 0
    assert timeline.makespan_us == max(end for _, end in at.values()) > 0
    seen = set()
    for span in timeline.transfer_spans():
        transfer: Any = span.work
        seen.add(transfer)
        made, read = at[transfer.sender, transfer.source][1], at[transfer.receiver, transfer.target][0]
        assert made <= span.start_us <= span.end_us <= read, transfer
    assert seen == set(plan.transfers)
    for edge in plan.placement.edges:
        a, b = plan.placement.tasks[edge.source], plan.placement.tasks[edge.target]
        for rank in {*a.ranks} & {*b.ranks} if len(a.ranks) == 1 or a.ranks == b.ranks else ():
            for m in plan.placement.microbatches(a.stage, plan.num_microbatches):
                assert at[rank, Op(a.stage, a.kind, m)][1] <= at[rank, Op(b.stage, b.kind, m)][0]


def test_timelines_of_random_plans_are_possible_and_equal_on_all_ranks(pool: Pool) -> None:
    cases = []
    for seed in range(100, 120):
        edges, plan = random_plan(seed, NUM_RANKS)
        cases.append((graph_of_layers(plan.num_stages, edges), plan))
    by_rank = pool.run(NUM_RANKS, timelines_of_each, cases)
    assert by_rank[1:] == by_rank[:1] * (NUM_RANKS - 1)
    for i, timeline in enumerate(by_rank[0]):
        plan = cases[i // 2][1]
        assert timeline.plan == plan
        assert_possible(timeline)
        assert Timeline.from_json(timeline.to_json()) == timeline
        comparison = compare(simulate(plan), timeline)
        parts = sum(comparison.parts_us.values())
        assert parts == comparison.difference_us == timeline.makespan_us - simulate(plan).makespan_us
        assert parts == comparison.slower_ops_us + comparison.later_arrivals_us + comparison.rest_us


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(BACKWARD_S)
        return gradient


class Sleeping(Layer):
    """Takes 20 ms forward and 40 ms backward."""

    def forward(self, *values: Tensor) -> Tensor:
        output: Tensor = Sleep.apply(super().forward(*values))
        return output


def sleeping_plan(schedule: str, num_microbatches: int = 4) -> Plan:
    costs = Costs.uniform(NUM_RANKS, int(FORWARD_S * 1e6), int(BACKWARD_S * 1e6))
    return NAMED[schedule](place(costs, Cluster.uniform(NUM_RANKS)), num_microbatches)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_measured_is_as_planned_where_ops_take_what_is_planned(pool: Pool, schedule: str) -> None:
    plan = sleeping_plan(schedule)
    stages = Stages([Sleeping().double() for _ in range(NUM_RANKS)])
    planned = simulate(plan)
    measured = pool.run(NUM_RANKS, timelines, stages, plan, 20, planned.makespan_us * 1.15)[0]
    for timeline in measured:
        assert_possible(timeline)
        assert timeline.makespan_us >= planned.makespan_us
    best = measured[-1]
    assert best.makespan_us <= planned.makespan_us * 1.15
    assert best.bubble_fraction == pytest.approx(planned.bubble_fraction, abs=0.1)
    for span, expected in zip(best.op_spans(), planned.op_spans(), strict=True):
        assert expected.duration_us <= span.duration_us <= expected.duration_us * 2 + 5000, span
    for row in compare(planned, best).rows:
        assert row.planned_us <= row.median_us <= row.planned_us * 1.2


def test_a_slow_op_is_found_where_it_is(pool: Pool) -> None:
    plan = sleeping_plan("1f1b")
    stages = Stages([(SlowOnce(4 + 2) if stage == 1 else Sleeping()).double() for stage in range(NUM_RANKS)])
    comparison = compare(simulate(plan), pool.run(NUM_RANKS, timelines, stages, plan)[0][1])
    slowest = max(comparison.ops, key=lambda op: op.longer_us)
    assert str(slowest.op) == "1F2"
    assert comparison.slower_ops_us >= 90_000


class SlowOnce(Sleeping):
    """Takes 100 ms more in one of its forwards."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self.left = which

    def forward(self, *values: Tensor) -> Tensor:
        self.left -= 1
        if self.left == -1:
            time.sleep(0.1)
        return super().forward(*values)


class Large(nn.Module):
    """Makes 32 MB out of a little, and a little out of 32 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 6:
            return self.linear(x.unflatten(1, (-1, 6))[:, 0])
        return self.linear(x).repeat(1, 140_000)


def test_transfers_take_time_that_grows_with_their_size(pool: Pool) -> None:
    plan = gpipe(place(Costs.uniform(2), Cluster.uniform(2)), 2)
    (_, large), _ = pool.run(2, timelines, Stages([Large(), Large()]), plan)
    (_, small), _ = pool.run(2, timelines, chain(2), plan)
    assert max(span.duration_us for span in large.transfer_spans()) > 2000
    fastest = [min(span.duration_us for span in timeline.transfer_spans()) for timeline in (small, large)]
    assert fastest[0] < fastest[1]


def step_and_compare_modules(rank: int, plan: Plan) -> None:
    with Pipeline(chain(2), plan, loss_fn) as pipeline:
        before = {*sys.modules}
        pipeline.step(*batch_of(plan.num_microbatches))
        assert not {*sys.modules} - before


def test_first_step_loads_nothing(tmp_path: Path) -> None:
    """Torch loads hundreds of modules at the first backward, which would make its time."""
    plan = gpipe(place(Costs.uniform(2), Cluster.uniform(2)), 2)
    for ended in run_fresh(tmp_path, 2, step_and_compare_modules, plan):
        assert ended.exit_code == 0, ended


# --- when there is none -----------------------------------------------------------------------------------------------


def ask_too_early_and_too_late(rank: int, plan: Plan) -> list[str]:
    told = []
    pipeline = Pipeline(chain(plan.num_stages), plan, loss_fn)
    for act in (lambda: None, pipeline.close):
        act()
        with pytest.raises(PipelineError) as error:
            pipeline.timeline()
        told.append(str(error.value))
    return told


@pytest.mark.parametrize("ranks", [[0, 1, 2], [2, 1, 2]])
def test_no_timeline_before_a_step_nor_after_close(pool: Pool, ranks: list[int]) -> None:
    """On a rank that has nothing to do neither, or it would wait for the others."""
    plan = gpipe(place(Costs.uniform(3), Cluster.uniform(3), ranks), 2)
    told = "there is no timeline: ask for it after a step that ran to its end, and before close"
    assert pool.run(NUM_RANKS, ask_too_early_and_too_late, plan) == [[told, told]] * NUM_RANKS


# --- clocks -----------------------------------------------------------------------------------------------------------


def offset_to_rank_0(rank: int) -> tuple[int, int]:
    """As between two machines, and as it is on one."""
    group = dist.group.WORLD
    assert group is not None
    measured = recorder.answer_offset(1, group, 20) if rank == 0 else recorder.ask_offset_ns(0, group, 20)
    return measured, recorder.clock_offset_ns(group)


def test_clock_offset_on_one_machine(pool: Pool) -> None:
    (_, told_0), (measured, told_1) = pool.run(2, offset_to_rank_0)
    assert abs(measured) < 5_000_000
    assert told_0 == told_1 == 0


class OtherClock:
    """A clock that started a second later than ours, for one rank."""

    @staticmethod
    def monotonic_ns() -> int:
        return time.monotonic_ns() - 1_000_000_000


def offset_with_other_clock(rank: int) -> int:
    """Rank 2 is on a machine of its own."""
    group = dist.group.WORLD
    assert group is not None
    before = recorder.time, recorder._machine
    recorder._machine = lambda: f"machine {rank // 2}"
    if rank == 2:
        recorder.time = OtherClock  # type: ignore[assignment]
    try:
        return recorder.clock_offset_ns(group)
    finally:
        recorder.time, recorder._machine = before


def test_clock_offset_of_another_machine(pool: Pool) -> None:
    same, too, other = pool.run(3, offset_with_other_clock)
    assert same == too == 0
    assert abs(other - 1_000_000_000) < 5_000_000
