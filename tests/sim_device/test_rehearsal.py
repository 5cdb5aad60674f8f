"""Rehearsals on simulated devices: spinning kernels instead of ops, and messages by the channels of the runtime."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import pytest

from rota import Cluster, Costs, Kind, PipelineError, Plan, place, simulate
from rota.placing import bidirectional
from rota.planning.rehearsal.rank_step import RankReport
from rota.planning.rehearsal.rehearsing import measured_timeline
from rota.profiling.spinning import Spinner
from rota.schedules import NAMED
from runtime.test_timeline import assert_possible
from support.pool import Pool
from support.random_plans import random_plan

pytestmark = pytest.mark.dist

NUM_STEPS, RUNS_US = 1, 2000


class Rehearsed(NamedTuple):
    report: RankReport
    syncs: list[str]  # in the steps
    own_bytes: int  # that the device still holds
    spins_ns: list[int]  # what each spinning kernel was to last, with the step that warms up


def rehearsed(rank: int, cases: list[tuple[Plan, bool]]) -> list[Rehearsed]:
    from rota.planning.rehearsal import rank as rehearsed_rank
    from support.sim_device import SimDevice
    from support.sim_device.runtime_device import SIM, syncs_inside_steps
    from support.sim_device.tensors import NS_PER_TICK

    found = []
    for plan, allocate in cases:
        device = SimDevice(f"rank {rank}", cost_ns=lambda name, written: 1_000)
        syncs: list[str] = []
        spins_ns = noted_spins(device)

        def ended(_: int, syncs: list[str] = syncs) -> None:
            syncs.append(" ".join(syncs_inside_steps()))

        # The device is in real time here, by which kernels cannot be calibrated while the machine is busy.
        exactly = mock.patch.object(Spinner, "_calibrated", return_value=(0.0, NS_PER_TICK / 1000))
        once = mock.patch.object(rehearsed_rank, "num_warm_ups", return_value=1)  # more would test no more
        with device.active(), exactly, once:
            report = rehearsed_rank.run_rank([plan], NUM_STEPS, allocate, 60, ended, SIM)
            device.check()
        found.append(Rehearsed(report, syncs[1:], device.allocated_bytes, spins_ns))
    return found


def noted_spins(device: Any) -> list[int]:
    """Fills up with what each spinning kernel is to last."""
    found: list[int] = []
    launch = device.launch

    def noted(name: str, *blocks: Any, lasts_ns: int | None = None, **options: Any) -> None:
        if name == "sleep":
            assert lasts_ns is not None
            found.append(lasts_ns)
        launch(name, *blocks, lasts_ns=lasts_ns, **options)

    device.launch = noted
    return found


def plan_named(name: str, num_ranks: int, **costs: int) -> Plan:
    given = Costs.uniform(num_ranks, RUNS_US, 2 * RUNS_US, boundary_bytes=5000, activation_bytes=900, **costs)
    return NAMED[name](place(given, Cluster.uniform(num_ranks)), 4)


def plans(num_ranks: int) -> list[Plan]:
    """Whole and split backwards, two streams, and random graphs with stages on several ranks."""
    streams = bidirectional(
        Costs.uniform(num_ranks, RUNS_US, 2 * RUNS_US, boundary_bytes=70), Cluster.uniform(num_ranks)
    )
    random_plans = [random_plan(seed, num_ranks)[1] for seed in range(2)]
    assert any(len(task.ranks) > 1 for plan in random_plans for task in plan.placement.tasks)
    return [
        plan_named("1f1b", num_ranks),
        plan_named("zb_h1", num_ranks, weight_us=RUNS_US),
        NAMED["chimera"](streams, 4),
        *random_plans,
    ]


def test_plans_run_in_order_without_a_race_or_a_wait_of_the_host(pool: Pool) -> None:
    cases = [(plan, bool(i % 2)) for i, plan in enumerate(plans(2))]
    by_rank = pool.run(2, rehearsed, cases)
    for case, (plan, allocate) in enumerate(cases):
        of_ranks = [found[case] for found in by_rank]
        assert [of.syncs for of in of_ranks] == [[""] * NUM_STEPS] * 2
        reports = [of.report for of in of_ranks]
        assert [report.held_bytes is not None for report in reports] == [allocate] * 2
        for step in range(NUM_STEPS):
            timeline = measured_timeline(plan, reports, step)
            if not timeline.step_ends_us and timeline.makespan_us:
                assert_possible(timeline)
            for measured, planned in zip(timeline.op_spans(), simulate(plan).op_spans(), strict=True):
                assert (measured.rank, measured.work) == (planned.rank, planned.work)
        assert [len(report.steps) for report in reports] == [NUM_STEPS] * 2


def test_ops_last_as_planned_and_memory_is_what_the_ops_hold(pool: Pool) -> None:
    plan = plan_named("1f1b", 2, static_bytes=10_000, forward_peak_bytes=77)
    by_rank = pool.run(2, rehearsed, [(plan, True)])
    for rank, (of_rank,) in enumerate(by_rank):
        for step in of_rank.report.steps:
            assert len(step.late_ns) == len(plan.orders[rank])
            assert min(step.late_ns) >= 0
            for op, start_ns, end_ns in zip(plan.orders[rank], step.starts_ns, step.ends_ns, strict=True):
                planned_us = RUNS_US if op.kind is Kind.F else 2 * RUNS_US
                assert (end_ns - start_ns) / 1000 > planned_us * 0.99, op  # the device waits for a busy host
            sent = {(route, position): ns for route, position, ns in step.sent}
            assert {column[:2] for column in step.ready_ns} == {column[:2] for column in step.arrived}
            assert len(sent) == 4
        planned_ns = [1000 * RUNS_US * (1 if op.kind is Kind.F else 2) for op in plan.orders[rank]]
        assert of_rank.spins_ns == pytest.approx(planned_ns * (1 + NUM_STEPS), rel=0.01)
        most_held = max(2 - rank, 1)  # micro-batches
        assert of_rank.report.held_bytes == 10_000 + most_held * 900 + 77
        assert of_rank.report.process_bytes >= of_rank.report.held_bytes  # messages are there too


def too_large(rank: int, plan: Plan) -> str:
    from rota.planning.rehearsal.rank import run_rank
    from support.sim_device import SimDevice
    from support.sim_device.runtime_device import SIM

    with SimDevice(cost_ns=lambda name, written: 1_000).active(), pytest.raises(PipelineError) as raised:
        run_rank([plan], 1, True, 60, device=SIM)
    return str(raised.value)


def test_a_device_with_too_little_memory_is_told(pool: Pool) -> None:
    told = pool.run(2, too_large, plan_named("1f1b", 2, static_bytes=3_000_000))
    assert [text.startswith(f"rank {rank} needs 3 MB, and sim:0 has 2 MB free; ") for rank, text in enumerate(told)]
