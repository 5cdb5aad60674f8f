"""The measured timeline: one on all ranks, possible, and true to the clock, however busy the machine is."""

import math
import time
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from rota import Cluster, Costs, Kind, Op, Pipeline, Plan, Stages, Timeline, compare, place, simulate
from rota.runtime import process_group
from rota.schedules import NAMED, gpipe
from support.networks import Layer, batch_of, chain, graph_of_layers, loss_fn, refusal
from support.pool import Pool, on_ranks
from support.random_plans import random_plan
from support.sampling import some

NUM_RANKS = 3
FORWARD_S, BACKWARD_S = 0.02, 0.04


def timelines(rank: int, stages: Stages, plan: Plan, num_steps: int = 2) -> list[Timeline]:
    """The timeline of each step."""
    found = []
    batch = batch_of(plan.num_microbatches)
    with Pipeline(stages, plan, loss_fn) as pipeline:
        for _ in range(num_steps):
            pipeline.step(*batch)
            found.append(pipeline.timeline())
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
    for seed in range(100, 100 + some(20)):
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


#: When this process's ops began and ended to sleep, by their kind and in their order, in ns of the clock of timelines.
slept_ns: dict[Kind, list[tuple[int, int]]] = {Kind.F: [], Kind.B: []}


def sleep(kind: Kind, duration_s: float) -> None:
    began_ns = time.monotonic_ns()
    time.sleep(duration_s)
    slept_ns[kind].append((began_ns, time.monotonic_ns()))


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        sleep(Kind.F, FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        sleep(Kind.B, BACKWARD_S)
        return gradient


class Sleeping(Layer):
    """Takes 20 ms forward and 40 ms backward, or longer."""

    def forward(self, *values: Tensor) -> Tensor:
        output: Tensor = Sleep.apply(super().forward(*values))
        return output


def timeline_and_sleeps(rank: int, stages: Stages, plan: Plan) -> tuple[Timeline, dict[Kind, list[tuple[int, int]]]]:
    """The timeline of the second step, and when its ops have slept."""
    batch = batch_of(plan.num_microbatches)
    with Pipeline(stages, plan, loss_fn) as pipeline:
        pipeline.step(*batch)
        for times in slept_ns.values():
            times.clear()
        pipeline.step(*batch)
        return pipeline.timeline(), slept_ns


def test_each_span_holds_what_its_op_did_and_takes_no_less_than_that(pool: Pool) -> None:
    """On one clock for all ranks: the ops' own notes of when they slept fit into the spans by one shift of time."""
    costs = Costs.uniform(NUM_RANKS, int(FORWARD_S * 1e6), int(BACKWARD_S * 1e6))
    plan = NAMED["1f1b"](place(costs, Cluster.uniform(NUM_RANKS)), 4)
    found = pool.run(NUM_RANKS, timeline_and_sleeps, Stages([Sleeping().double() for _ in range(NUM_RANKS)]), plan)
    measured, planned = found[0][0], simulate(plan)
    assert_possible(measured)
    assert measured.makespan_us >= planned.makespan_us
    least_us, most_us = -math.inf, math.inf  # by which the ops' clock is ahead of the timeline's
    for rank, (_, slept) in enumerate(found):
        in_turn = {kind: iter(times) for kind, times in slept.items()}
        for op, start_us, end_us in zip(
            plan.orders[rank], measured.starts_us[rank], measured.ends_us[rank], strict=True
        ):
            began_ns, ended_ns = next(in_turn[op.kind])
            least_us, most_us = max(least_us, ended_ns / 1000 - end_us), min(most_us, began_ns / 1000 - start_us)
    assert least_us <= most_us + 1  # a timeline has whole µs
    for span, expected in zip(measured.op_spans(), planned.op_spans(), strict=True):
        assert (span.rank, span.work) == (expected.rank, expected.work)
        assert span.duration_us >= expected.duration_us - 1
    for row in compare(planned, measured).rows:
        assert row.median_us >= row.planned_us - 1


@on_ranks(NUM_RANKS)
def test_no_timeline_before_a_step_nor_after_close(rank: int) -> None:
    """On a rank that has nothing to do neither, or it would wait for the others."""
    plan = gpipe(place(Costs.uniform(3), Cluster.uniform(3), [2, 1, 2]), 2)
    told = "there is no timeline: ask for it after a step that ran to its end, and before close"
    with Pipeline(chain(plan.num_stages), plan, loss_fn) as pipeline:
        assert refusal(pipeline.timeline) == told
    assert refusal(pipeline.timeline) == told


ROUNDS = 20


def most_off_ns(began_ns: int) -> float:
    """The fastest round takes at most the mean of all, and the other clock is read somewhere within it."""
    return (time.monotonic_ns() - began_ns) / ROUNDS / 2 + 1


class OtherClock:
    """A clock that started a second later than ours, for one rank."""

    @staticmethod
    def monotonic_ns() -> int:
        return time.monotonic_ns() - 1_000_000_000


def offset_with_other_clock(rank: int) -> tuple[int, float]:
    """Rank 2 is on a machine of its own."""
    group = dist.group.WORLD
    clock = OtherClock if rank == 2 else time
    with patch.multiple(process_group, time=clock, _machine=lambda: f"machine {rank // 2}"):
        began_ns = time.monotonic_ns()
        return process_group.clock_offset_ns(group, ROUNDS), most_off_ns(began_ns)


def test_clock_offset_of_another_machine(pool: Pool) -> None:
    (same, _), (too, _), (other, most_ns) = pool.run(3, offset_with_other_clock)
    assert same == too == 0
    assert abs(other - 1_000_000_000) <= most_ns
