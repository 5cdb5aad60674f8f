"""What a rehearsal refuses before a process is started, what its ranks hold, and how its result is told."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from typing import Any

import pytest

from rota import (
    Cluster,
    Costs,
    Edge,
    Kind,
    Link,
    Op,
    PipelineError,
    Placement,
    Plan,
    PlanError,
    Rehearsal,
    Task,
    place,
    rehearse,
    simulate,
)
from rota.memory import task_changes
from rota.placing import wave
from rota.planning.rehearsal import allocation
from rota.planning.rehearsal.allocation import RankMemory, blocks_of, refuse_too_much
from rota.planning.rehearsal.outcome import LinkUse, MemoryUse, Overhead
from rota.planning.rehearsal.rank_step import num_warm_ups, step_ends_ns
from rota.planning.rehearsal.rehearsing import without_occupancy
from rota.planning.rehearsal.timed_waits import Arrivals, TimedWaits, stages_of
from rota.runtime.compute import Batch
from rota.runtime.microbatches import Microbatches
from rota.schedules import NAMED, gpipe, one_f_one_b


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is refused is refused before one is started."""

    def start(*arguments: Any, **options: Any) -> None:
        raise AssertionError("a process is started")

    monkeypatch.setattr(subprocess, "Popen", start)


def plan_of(num_ranks: int = 2, **costs: Any) -> Plan:
    return gpipe(place(Costs.uniform(num_ranks, **costs), Cluster.uniform(num_ranks)), 2)


@pytest.mark.parametrize(("num_microbatches", "expected"), [(1, 4), (8, 4), (9, 4), (16, 2), (31, 2), (32, 1), (64, 1)])
def test_short_steps_warm_up_more_often(num_microbatches: int, expected: int) -> None:
    placement = place(Costs.uniform(2), Cluster.uniform(2))
    assert num_warm_ups(gpipe(placement, num_microbatches)) == expected


def test_plans_that_hang_or_overflow_start_nothing() -> None:
    plan = plan_of()
    stuck = replace(plan, orders=(plan.orders[0][::-1], plan.orders[1]))
    with pytest.raises(PlanError, match="wait in a cycle"):
        rehearse(stuck)
    limited = replace(plan.placement, cluster=Cluster.uniform(2, limit_bytes=1))
    with pytest.raises(PlanError, match="over its limit"):
        rehearse(replace(plan, placement=limited))
    with pytest.raises(AssertionError, match="a process is started"):
        rehearse(plan)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"num_steps": 0}, "num_steps is 0; give a whole number of 1 or more"),
        ({"num_steps": 1.5}, "num_steps is 1.5; give"),
        ({"timeout_s": 0}, "timeout_s is 0; give seconds above 0"),
        ({"timeout_s": float("nan")}, "timeout_s is nan; give"),
        ({"timeout_s": "60"}, "timeout_s is '60'; give"),
        ({"device": "tpu"}, "device 'tpu': PyTorch finds no accelerator on this machine; give auto or cpu"),
    ],
)
def test_wrong_options(options: dict[str, Any], told: str) -> None:
    with pytest.raises(PipelineError, match=told):
        rehearse(plan_of(), **options)


def test_what_a_pipeline_would_refuse() -> None:
    """A stage's forward and backward on different ranks: no model runs so."""
    tasks = (Task(0, Kind.F, (0,), 1), Task(0, Kind.B, (1,), 1))
    placement = Placement(tasks, (Edge(0, 1, 5),), Cluster.uniform(2))
    plan = Plan(placement, 1, ((Op(0, Kind.F, 0),), (Op(0, Kind.B, 0),)))
    with pytest.raises(PipelineError, match="place a stage's forward and backward on the same ranks"):
        rehearse(plan)


def test_more_ranks_than_a_machine_has_connections_for() -> None:
    with pytest.raises(PipelineError, match="the plan has 257 ranks, and one machine rehearses 256 at most"):
        rehearse(plan_of(257))


@pytest.mark.parametrize(
    ("allocate", "costs", "told"),
    [
        (True, {"static_bytes": 10**15}, "2 ranks that allocate the plan's memory need 2 PB"),
        (True, {"activation_bytes": 10**15}, "2 ranks that allocate the plan's memory need 4 PB"),
        (False, {"boundary_bytes": 10**15}, r"the messages of 2 ranks need \d+ PB"),
    ],
)
def test_memory_that_the_machine_does_not_have(allocate: bool, costs: dict[str, Any], told: str) -> None:
    with pytest.raises(PipelineError, match=f"{told}, and this machine has .* available; "):
        rehearse(plan_of(**costs), allocate=allocate)
    with pytest.raises(AssertionError, match="a process is started"):
        rehearse(plan_of(static_bytes=10**15, activation_bytes=10**15))  # without allocate nothing of it is held


def test_the_control_group_s_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocation, "available_bytes", lambda: 10)
    refuse_too_much(10, "they", "do without")
    with pytest.raises(PipelineError, match="they need 11 B, and this machine has 10 B available; do without"):
        refuse_too_much(11, "they", "do without")
    monkeypatch.setattr(allocation, "available_bytes", lambda: None)  # the system does not tell
    refuse_too_much(10**18, "they", "do without")


# --- what a rank holds ------------------------------------------------------------------------------------------------

COSTS = {
    "F B": Costs.uniform(2, activation_bytes=1000, static_bytes=77, forward_peak_bytes=30, backward_peak_bytes=500),
    "F I W": Costs.uniform(2, weight_us=1, activation_bytes=1000, input_frees_bytes=300, weight_peak_bytes=9),
    "F I W, I takes": Costs.uniform(2, weight_us=1, activation_bytes=1000, input_frees_bytes=-200),
    "F R B": Costs.uniform(2, recompute_us=1, checkpoint_bytes=100, activation_bytes=1000, forward_peak_bytes=30),
    "F R I W": Costs.uniform(2, weight_us=1, recompute_us=1, checkpoint_bytes=100, activation_bytes=1001),
}


@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
def test_buffers_are_what_the_plan_says_op_by_op(costs: Costs) -> None:
    plan = one_f_one_b(place(costs, Cluster.uniform(2)), 5)
    for rank, order in enumerate(plan.orders):
        changes = task_changes(plan.placement, rank)
        level = plan.placement.static_bytes[rank]
        memory = RankMemory(plan.placement, rank)
        assert memory.held_bytes == level
        most = level
        for op in order * 2:  # two steps
            at_start, at_end = changes[op.stage, op.kind]
            memory.op_starts(op)
            level += at_start
            assert memory.held_bytes == level, op
            most = max(most, level)
            memory.op_ends(op)
            level += at_end
            assert memory.held_bytes == level, op
        assert level == plan.placement.static_bytes[rank]
        assert memory.peak_bytes == most == simulate(plan).peak_memory_bytes[rank]


def test_what_nothing_frees_goes_with_the_step() -> None:
    placement = Placement((Task(0, Kind.F, (0,), 1, held_bytes=8),), (), Cluster.uniform(1))
    memory = RankMemory(placement, 0)
    for _ in range(2):
        memory.begin_step()
        for m in range(3):
            memory.op_starts(Op(0, Kind.F, m))
            memory.op_ends(Op(0, Kind.F, m))
        assert memory.held_bytes == 24


def test_the_process_grows_by_what_is_held() -> None:
    big = 64_000_000
    memory = RankMemory(Placement((Task(0, Kind.F, (0,), 1, peak_bytes=big),), (), Cluster.uniform(1), (big,)), 0)
    memory.op_starts(Op(0, Kind.F, 0))
    assert memory.process_bytes is None or memory.process_bytes >= 1.9 * big


def test_tasks_that_free_what_nothing_holds_are_refused() -> None:
    tasks = (Task(0, Kind.F, (0,), 1, held_bytes=10), Task(0, Kind.B, (0,), 1, held_bytes=-13))
    placement = Placement(tasks, (Edge(0, 1),), Cluster.uniform(1))
    with pytest.raises(PipelineError, match="task 0B frees 13 bytes, 3 more than the stage's tasks before it hold"):
        blocks_of(placement)
    plan = Plan(placement, 1, ((Op(0, Kind.F, 0), Op(0, Kind.B, 0)),))
    with pytest.raises(PipelineError, match="3 more"):
        rehearse(plan, allocate=True)


# --- how it is told ---------------------------------------------------------------------------------------------------


def test_the_text_begins_with_the_verdict_and_tells_the_worst_first() -> None:
    plan = NAMED["hanayo"](wave(Costs.uniform(4, 5000, 10000), Cluster.uniform(2)), 2)
    planned = simulate(plan)
    late = replace(plan, placement=replace(plan.placement, cluster=Cluster.uniform(2, latency_us=500)))
    measured = simulate(late)
    measured = replace(measured, plan=plan)
    links = (LinkUse(0, 1, 4, 4000, 10, 12, 100.0, 83.0), LinkUse(1, 0, 4, 0, 0, 700, 0.0, 0.0))
    overheads = (Overhead(0, 40, Op(0, Kind.F, 1), 30), Overhead(1, 1234, Op(1, Kind.B, 0), 1000))
    memory = (MemoryUse(0, 3000, 2000, 4000), MemoryUse(1, 3000, 2000, None))
    text = Rehearsal(planned, measured, (measured.makespan_us, 99_000, 100_000), overheads, links, memory).to_text()
    lines = text.splitlines()
    difference = measured.makespan_us - planned.makespan_us
    times = f"{measured.makespan_us / 1000:.1f} ms against {planned.makespan_us / 1000:.1f} simulated"
    share = difference / planned.makespan_us
    assert lines[0].startswith(f"runs to its end; {times}, {share:+.1%} (the median of 3 steps")
    assert f"The difference of +{difference:,} µs is made up of:" in text
    assert f"later arrivals  {difference:>+12,} µs" in text
    rows = [line.split() for line in lines]
    assert rows.index(["1", "1,234", "1B0", "(+1,000", "µs)"]) < rows.index(["0", "40", "0F1", "(+30", "µs)"])
    assert rows.index(["1→0", "4", "0", "B", "0", "700", "any", "0"]) < rows.index(
        ["0→1", "4", "4", "kB", "10", "12", "100", "83"]
    )
    assert ["0", "3", "kB", "2", "kB", "4", "kB"] in rows
    assert ["1", "3", "kB", "2", "kB", "unknown"] in rows


def test_a_rehearsal_on_devices_says_so() -> None:
    planned = simulate(plan_of())
    text = Rehearsal(planned, planned, (planned.makespan_us,), (), (), (), "cuda").to_text()
    assert text.startswith("runs to its end on cuda; ")
    assert "(kernels of the planned length, as calibrated)" in text
    assert "waits of the planned length" not in text


def test_one_step_and_many_ranks_are_told_in_few_lines() -> None:
    plan = plan_of(40, forward_us=100)
    planned = simulate(plan)
    overheads = tuple(Overhead(rank, rank, None, 0) for rank in range(40))
    text = Rehearsal(planned, planned, (planned.makespan_us,), overheads, ()).to_text()
    took = f"{planned.makespan_us / 1000:.3f}"
    assert text.splitlines()[0] == f"runs to its end; {took} ms against {took} simulated, +0.0%"
    assert "… and 32 more rows" in text
    assert "messages" not in text.splitlines()[-1]
    assert len(text.splitlines()) < 20


# --- what messages cost their ranks -----------------------------------------------------------------------------------


def occupied_plan() -> Plan:
    """Two stages on two ranks: 3 µs between ops; sending costs 5 µs and receiving 7."""
    cluster = Cluster((None, None), Link(2, None, 5, None, 7), gap_us=3)
    return NAMED["gpipe"](place(Costs.uniform(2, 10, 20, optimizer_us=4), cluster), 3)


def test_timed_waits_count_what_messages_cost_and_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """With messages that take as long as planned, ops and step ends are where the simulation has them."""
    monkeypatch.setattr("rota.planning.rehearsal.timed_waits.sleep_until", lambda _: True)
    plan = occupied_plan()
    planned = simulate(plan)
    for rank, order in enumerate(plan.orders):
        arrivals = Arrivals()
        waits = TimedWaits(plan, stages_of(plan.placement), rank, arrivals, None)
        waits.begin(Batch(Microbatches([]), Microbatches([]), []), 0)
        for op in order:
            for route, arrived_us in zip(plan.placement.routes, planned.arrived_us, strict=True):
                target = plan.placement.tasks[route.target]
                if (route.receiver, target.stage, target.kind) == (rank, op.stage, op.kind):
                    arrivals.latest_ns = max(arrivals.latest_ns, 1000 * arrived_us[op.microbatch])
            waits.run(op, [])
        assert waits.starts_ns == [1000 * us for us in planned.starts_us[rank]]
        assert waits.ends_ns == [1000 * us for us in planned.ends_us[rank]]
        (ends,) = step_ends_ns(plan, rank, 0, waits.free_ns)
        (of_rank,) = (us for (_, r), us in zip(plan.step_end_ranks, planned.step_ends_us, strict=True) if r == rank)
        assert ends == tuple(1000 * us for us in of_rank)


def test_on_devices_the_simulation_is_without_what_messages_cost_and_gaps() -> None:
    plan = occupied_plan()
    planned, free = simulate(plan), simulate(without_occupancy(plan))
    assert planned.makespan_us > free.makespan_us
    assert not any(us for costs in free.plan.placement.occupied_us for us in costs)
    assert free.plan.placement.routes == plan.placement.routes
    measured = replace(free, plan=plan)
    rehearsal = Rehearsal(free, measured, (free.makespan_us,), (), (), (), "cuda")
    assert not any(rehearsal.comparison.parts_us.values())
    assert f"With these, the plan takes {planned.makespan_us} µs." in rehearsal.to_text()
    assert "without what messages" not in Rehearsal(planned, planned, (planned.makespan_us,), (), ()).to_text()
