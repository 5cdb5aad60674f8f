"""Planned against measured: each cause of a delay ends up in its own part, and the parts add up."""

from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from rota import Costs, Edge, Kind, Op, Placement, Plan, PlanError, Task, Timeline, place, schedules, simulate
from rota.accounting.comparison import Comparison, KindRow, Part, compare
from rota.core.cluster import Cluster, Link, SharedLink
from support.core_strategies import Chooser, plans, wired_plans
from support.measured import measured_like
from support.sampling import some


def gpipe(num_microbatches: int = 4, forward_us: tuple[int, ...] = (100, 100), latency_us: int = 10) -> Plan:
    placement = place(Costs(forward_us, 200, boundary_bytes=0), Cluster.uniform(2, latency_us=latency_us))  # type: ignore[arg-type]
    return schedules.gpipe(placement, num_microbatches)


PLANNED = simulate(gpipe())


def measured(plan: Plan) -> Timeline:
    """What another plan's simulation would look like if it were measured under `PLANNED`'s plan."""
    return replace(simulate(plan), plan=PLANNED.plan)


def parts(comparison: Comparison) -> tuple[int, int, int]:
    """Of slower ops, of later arrivals, and of all else."""
    us = comparison.parts_us
    slower, later = us[Part.SLOWER] + us[Part.CORES], us[Part.ARRIVALS]
    return slower, later, comparison.difference_us - slower - later


def test_a_plan_is_simulated() -> None:
    late = measured(gpipe(forward_us=(100, 150)))
    assert compare(PLANNED.plan, late) == compare(PLANNED, late)
    assert compare(late, PLANNED.plan) == compare(late, PLANNED)


def test_slower_ops_of_one_stage_are_told() -> None:
    comparison = compare(PLANNED, measured(gpipe(forward_us=(100, 150))))
    assert parts(comparison) == (200, 0, 0)  # four forwards of the last stage, one after the other
    row = next(row for row in comparison.rows if (row.stage, row.kind) == (1, Kind.F))
    assert row == KindRow(1, Kind.F, 4, planned_us=100, median_us=150, least_us=150, most_us=150)
    late = {(d.rank, d.op): (d.later_us, d.longer_us) for d in comparison.ops}
    assert late[1, Op(1, Kind.F, 0)] == (0, 50)
    assert late[1, Op(1, Kind.F, 3)] == (150, 50)
    assert late[0, Op(0, Kind.B, 3)] == (200, 0)


def test_a_launch_gap_is_the_rest() -> None:
    def gaps(times: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(time + 5 * i for i, time in enumerate(times))

    late = replace(PLANNED, starts_us=tuple(map(gaps, PLANNED.starts_us)), ends_us=tuple(map(gaps, PLANNED.ends_us)))
    comparison = compare(PLANNED, late)
    assert parts(comparison) == (0, 0, 35)
    assert comparison.difference_us == 35
    (*starts, last), (*ends, end) = PLANNED.starts_us[0], PLANNED.ends_us[0]
    late = replace(
        PLANNED,
        starts_us=((*starts, last + 5), *PLANNED.starts_us[1:]),
        ends_us=((*ends, end + 5), *PLANNED.ends_us[1:]),
    )
    assert {part: us for part, us in compare(PLANNED, late).parts_us.items() if us} == {Part.LAUNCH: 5}


def test_a_reduction_that_was_measured_and_not_planned_is_the_step_end() -> None:
    reduced = schedules.gpipe(place(Costs.uniform(2, reduce_us=9), Cluster.uniform(2)), 2)
    plain = schedules.gpipe(place(Costs.uniform(2), Cluster.uniform(2)), 2)
    for planned, other in ((plain, reduced), (reduced, plain)):
        comparison = compare(planned, simulate(other))
        assert [part for part, us in comparison.parts_us.items() if us] == [Part.STEP_END]
        assert abs(comparison.difference_us) == 9


def test_ops_that_share_a_core_lose_to_each_other() -> None:
    placement = Placement((Task(0, Kind.F, (0,), 10), Task(1, Kind.F, (1,), 10)), (), Cluster.uniform(2))
    planned = simulate(Plan(placement, 2, ((Op(0, Kind.F, 0),), (Op(1, Kind.F, 1),))))
    slow = replace(planned, ends_us=((20,), (22,)))
    assert compare(planned, slow).parts_us[Part.SLOWER] == 12
    found = compare(planned, slow, num_cores=1).parts_us
    assert (found[Part.SLOWER], found[Part.CORES]) == (2, 10)
    assert compare(planned, slow, num_cores=2).parts_us[Part.CORES] == 0
    waited = replace(planned, starts_us=((0,), (13,)), ends_us=((10,), (23,)))  # 10 of them for the only core
    shared = "2 ranks shared 1 core: the measured times of ops contain waiting for a core."
    assert shared in compare(planned, slow, num_cores=1).to_text()
    assert all(" contain waiting for " not in compare(planned, slow, cores).to_text() for cores in (None, 2))
    found = compare(planned, waited, num_cores=1).parts_us
    assert (found[Part.CORES], found[Part.LAUNCH], found[Part.SLOWER]) == (10, 3, 0)


def test_what_is_sent_late_and_what_clocks_deny() -> None:
    placement = place(Costs.uniform(2, 100, 0), Cluster.uniform(2, latency_us=10)).forward_only()
    planned = simulate(schedules.forward_only(placement, 1))

    def parts_of(sent_us: int, arrived_us: int) -> dict[Part, int]:
        starts, ends = ((0,), (arrived_us,)), ((100,), (arrived_us + 100,))
        late = replace(planned, sent_us=((sent_us,),), arrived_us=((arrived_us,),), starts_us=starts, ends_us=ends)
        return {part: us for part, us in compare(planned, late).parts_us.items() if us}

    assert parts_of(140, 150) == {Part.SENDS: 40}
    assert parts_of(140, 155) == {Part.ARRIVALS: 5, Part.SENDS: 40}
    assert parts_of(95, 95) == {Part.ARRIVALS: -10, Part.CLOCK: -5}  # there 5 µs before it was made


@given(plans() | wired_plans(), st.integers(0, 2**16), st.none() | st.integers(1, 3))
@settings(max_examples=some(200))
def test_every_microsecond_of_what_can_have_been_has_its_cause(plan: Plan, seed: int, num_cores: int | None) -> None:
    """Nothing that started only when it could is left to the clocks, and no cause to what did not happen."""
    real = measured_like(plan, Chooser(seed))
    comparison = compare(plan, real, num_cores)
    assert sum(comparison.parts_us.values()) == comparison.difference_us
    assert comparison.parts_us[Part.CLOCK] == 0
    assert comparison.parts_us[Part.SENDS] >= 0
    if num_cores is None:
        assert comparison.parts_us[Part.CORES] == 0
    if all(len(task.ranks) == 1 for task in plan.placement.tasks):
        assert comparison.parts_us[Part.LAUNCH] >= 0
    back = compare(real, plan, num_cores).parts_us
    assert back == {part: -us for part, us in comparison.parts_us.items()}


def test_busy_links_are_a_part_of_their_own() -> None:
    """Planned: the second message waits 4 µs for the host."""
    tasks = tuple(Task(stage, Kind.F, (stage,), 10) for stage in range(3))
    host = SharedLink("host", 2, (0,), (1, 2))
    cluster = Cluster((None,) * 3, Link(5, None), shared=(host,))
    placement = Placement(tasks, (Edge(0, 1, 8), Edge(0, 2, 8)), cluster)
    planned = simulate(Plan(placement, 1, tuple((Op(stage, Kind.F, 0),) for stage in range(3))))
    assert (planned.sent_us, planned.starts_us[2], planned.makespan_us) == (((10,), (14,)), (23,), 33)

    def parts_of(sent_us: int, start_us: int) -> dict[Part, int]:
        late = replace(
            planned,
            sent_us=((10,), (sent_us,)),
            arrived_us=((19,), (sent_us + 9,)),
            starts_us=((0,), (19,), (start_us,)),
            ends_us=((10,), (29,), (start_us + 10,)),
        )
        return {part: us for part, us in compare(planned, late).parts_us.items() if us}

    assert parts_of(14, 23) == {}
    assert parts_of(21, 30) == {Part.SHARED_LINKS: 7}
    assert parts_of(14, 28) == {Part.LAUNCH: 5}
    assert "busy links" in compare(planned, replace(planned, sent_us=((10,), (15,)))).to_text()


@given(plans() | wired_plans(), st.integers(0, 2**16).map(Chooser))
@settings(max_examples=some(200))
def test_the_parts_add_up_to_the_difference(plan: Plan, chooser: Chooser) -> None:
    """Whatever was measured: every op, transfer and gap as long as chance has it."""

    def stretched(rows: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(time * factor for time in row) for row in rows)

    planned, factor = simulate(plan), chooser.randint(0, 3)
    starts = stretched(planned.starts_us)
    ends = tuple(tuple(time + chooser.randint(0, 5) for time in row) for row in stretched(planned.ends_us))
    arrived = tuple(tuple(time + chooser.randint(0, 5) for time in row) for row in stretched(planned.arrived_us))
    real = replace(planned, starts_us=starts, ends_us=ends, sent_us=stretched(planned.sent_us), arrived_us=arrived)
    comparison = compare(planned, real)
    assert sum(parts(comparison)) == comparison.difference_us == real.makespan_us - planned.makespan_us
    assert sum(comparison.parts_us.values()) == comparison.difference_us
    assert len(comparison.ops) == sum(map(len, plan.orders)) == sum(row.num_ops for row in comparison.rows)
    assert comparison.to_text()


@given(plans(), st.integers(1, 4))
@settings(max_examples=some(100))
def test_ops_and_transfers_that_take_longer_leave_no_rest(plan: Plan, factor: int) -> None:
    """A measured timeline that is itself a simulation, of slower ops and links, is explained to the last µs."""
    placement = replace(plan.placement, step_ends=())
    tasks = tuple(replace(task, duration_us=task.duration_us * factor + i) for i, task in enumerate(placement.tasks))
    cluster = placement.cluster
    slow = replace(cluster, link=replace(cluster.link, latency_us=cluster.link.latency_us + factor))
    planned = simulate(replace(plan, placement=placement))
    real = replace(simulate(replace(plan, placement=replace(placement, tasks=tasks, cluster=slow))), plan=planned.plan)
    comparison = compare(planned, real)
    assert min(parts(comparison)[:2]) >= 0
    assert {part for part, us in comparison.parts_us.items() if us} <= {Part.SLOWER, Part.ARRIVALS}


def test_text() -> None:
    text = compare(PLANNED, measured(gpipe(forward_us=(100, 150)))).to_text()
    lines = {line.split()[0]: line.split() for line in text.splitlines() if line.strip()}
    assert lines["makespan"][1:] == ["µs", "1,520", "1,720", "+13.2%"]
    assert lines["slower"][:4] == ["slower", "ops", "+200", "µs"]
    assert lines["1F"][1:] == ["100", "150", "150%", "150", "150", "4"]
    assert "Longest overruns: 1F0 (+50 µs), 1F1 (+50 µs), 1F2 (+50 µs)" in text
    assert "+0 µs" not in text
    assert "Where the difference" not in compare(PLANNED, PLANNED).to_text()


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (gpipe(num_microbatches=3), "2 ranks and 4 micro-batches against 2 and 3"),
        (schedules.one_f_one_b(PLANNED.plan.placement, 4), "rank 0 runs its ops in another order"),
    ],
)
def test_timelines_of_different_plans_are_refused(other: Plan, told: str) -> None:
    with pytest.raises(PlanError) as caught:
        compare(PLANNED, simulate(other))
    assert "the timelines are of different plans" in str(caught.value)
    assert told in str(caught.value)
    assert "compare two timelines of one plan" in str(caught.value)


def test_the_same_orders_on_another_graph_are_another_plan() -> None:
    costs, cluster = Costs.uniform(3), Cluster.uniform(3)
    chain, joined = (place(costs, cluster, edges=edges) for edges in ([(0, 1), (1, 2)], [(0, 2), (1, 2)]))
    planned, measured = (simulate(schedules.gpipe(placement, 2)) for placement in (chain, joined))
    with pytest.raises(PlanError, match="tasks or edges differ"):
        compare(planned, measured)
