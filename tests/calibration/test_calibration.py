"""Measured costs: what was perturbed is found again, to the µs, and planned by."""

import random
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given, settings, strategies as st

from cli.test_cli import run
from rota import Cluster, Costs, Link, Placement, SharedLink, Timeline, place, schedules, simulate
from rota.calibration import calibrate, calibrated, costs_of, median_us
from rota.calibration.measured_times import fit_link
from rota.core.errors import PlacementError, PlanError, RotaError
from rota.core.plan import Plan, Usage
from rota.core.tasks import Edge, Kind, Op, StepEnd, Task
from support.core_strategies import Chooser, placed, plans, wired_plans
from support.measured import measured_like
from support.sampling import some

OLD = place(
    Costs((100,) * 4, 150, 120, activation_bytes=3, boundary_bytes=1000, static_bytes=7, optimizer_us=20),  # type: ignore[arg-type]
    Cluster.uniform(4, latency_us=5, bytes_per_us=100),
)


def in_truth(placement: Placement, chooser: random.Random) -> Placement:
    """Other times for every task, link and step end."""
    tasks = tuple(replace(task, duration_us=chooser.randint(0, 40)) for task in placement.tasks)
    pairs = {(route.sender, route.receiver) for route in placement.routes}
    links = tuple((*pair, Link(chooser.randint(0, 9), None)) for pair in sorted(pairs))
    ends = tuple(StepEnd(end.stage, chooser.randint(1, 9), chooser.randint(1, 9)) for end in placement.step_ends)
    return replace(placement, tasks=tasks, cluster=replace(placement.cluster, links=links), step_ends=ends)


@given(plans(), st.integers(0, 2**16))
@settings(max_examples=some(100))
def test_what_is_planned_by_measured_costs_comes_true(plan: Plan, seed: int) -> None:
    """A run whose every op, transfer and step end takes other times than planned."""
    truth = simulate(replace(plan, placement=in_truth(plan.placement, Chooser(seed))))
    measured = replace(truth, plan=plan)
    new = calibrated(measured)
    assert simulate(replace(plan, placement=new)) == replace(truth, plan=replace(plan, placement=new))
    assert [task.held_bytes for task in new.tasks] == [task.held_bytes for task in plan.placement.tasks]
    assert new.static_bytes == plan.placement.static_bytes


@given(plans() | wired_plans())
def test_what_went_as_planned_changes_nothing(plan: Plan) -> None:
    planned = simulate(plan)
    assert simulate(replace(plan, placement=calibrated(planned, planned))).makespan_us == planned.makespan_us


@given(plans(), st.integers(0, 2**16))
def test_any_timelines_can_be_calibrated_by(plan: Plan, seed: int) -> None:
    chooser = Chooser(seed)
    timelines = [measured_like(plan, chooser) for _ in range(3)]
    new = calibrated(*timelines)
    for task in new.tasks:
        slowest = [
            max(
                end - start
                for rank in task.ranks
                for op, start, end in zip(
                    plan.orders[rank], timeline.starts_us[rank], timeline.ends_us[rank], strict=True
                )
                if op[:2] == (task.stage, task.kind) and op.microbatch == m
            )
            for timeline in timelines
            for m in plan.placement.microbatches(task.stage, plan.num_microbatches)
        ]
        if slowest:
            assert sum(us < task.duration_us for us in slowest) <= len(slowest) / 2
            assert sum(us > task.duration_us for us in slowest) <= len(slowest) / 2
            assert median_us(timelines)[task.stage, task.kind] == task.duration_us == round(median(slowest))


def test_step_ends_that_were_not_measured_stay_as_planned() -> None:
    planned = simulate(schedules.zb_h1(OLD, 4))
    unmeasured = replace(planned, step_ends_us=tuple((a, a, a, a) for a, *_ in planned.step_ends_us))
    assert calibrated(unmeasured).step_ends == OLD.step_ends
    assert calibrated(unmeasured, planned, planned).step_ends == OLD.step_ends


@given(
    st.builds(Link, st.integers(0, 500), st.integers(1, 5000)),
    st.builds(Link, st.integers(0, 500), st.none() | st.integers(1, 5000)),
    st.lists(st.integers(1, 10**7), min_size=2, max_size=4, unique=True),
)
def test_a_link_is_found_by_sizes_that_differ(truth: Link, planned: Link, sizes: list[int]) -> None:
    found = fit_link({size: [truth.transfer_us(size)] * 3 for size in sizes}, planned)
    for size in sizes:  # rates are whole bytes per µs, times whole µs
        assert found.transfer_us(size) == pytest.approx(truth.transfer_us(size), rel=0.35, abs=2)
    assert fit_link({size: [truth.transfer_us(size)] for size in sizes}, truth) == truth


@given(
    st.integers(0, 10**6), st.integers(0, 10**4), st.builds(Link, st.integers(0, 99), st.none() | st.integers(1, 99))
)
def test_one_size_is_met_exactly(size: int, us: int, planned: Link) -> None:
    found = fit_link({size: [us, us, us + 70]}, planned)
    assert found.transfer_us(size) == us
    if Link(0, planned.bytes_per_us).transfer_us(size) <= us:
        assert found.bytes_per_us == planned.bytes_per_us  # only the latency was off


@given(wired_plans(), st.integers(0, 2**16))
def test_what_wires_cost_stays_as_planned(plan: Plan, seed: int) -> None:
    """Ops and transfers were measured, and take what they took; who shares what, and what messages cost, was not."""
    new = calibrated(measured_like(plan, Chooser(seed)))
    old = plan.placement
    assert new.cluster.shared == old.cluster.shared
    assert [(route.shared, route.service_us) for route in new.routes] == [(r.shared, r.service_us) for r in old.routes]
    simulate(replace(plan, placement=new))  # its order of service still fits


def test_waiting_for_a_shared_link_is_not_part_of_a_link() -> None:
    """Both transfers of 80 bytes are sent at once: alone each takes 3 + 10 µs; together both end after 3 + 20."""
    tasks = tuple(Task(stage, Kind.F, (stage,), 10) for stage in range(3))
    host = SharedLink("host", 8, (0,), (1, 2))
    placement = Placement(tasks, (Edge(0, 1, 80), Edge(0, 2, 80)), Cluster((None,) * 3, Link(3), shared=(host,)))
    planned = simulate(Plan(placement, 1, tuple((Op(stage, Kind.F, 0),) for stage in range(3))))

    def measured(*arrived_us: int) -> Timeline:
        arrived = tuple((us,) for us in arrived_us)
        starts_us = planned.plan.shared_transfers.starts_us(((10,), (10,)), arrived)
        return replace(planned, sent_us=starts_us, arrived_us=arrived)

    assert calibrated(measured(33, 33)).routes == placement.routes
    assert calibrated(measured(23, 33)).routes == placement.routes  # one after the other
    slow = measured(43, 53)  # each of them 20 µs longer than planned, of which both lost 16 to each other
    assert {route.duration_us for route in calibrated(slow).routes} == {33 - 16, 43 - 16}


@given(placed())
def test_a_placement_is_made_of_its_costs(placement: Placement) -> None:
    try:
        costs = costs_of(placement, "told")
    except PlacementError as error:
        assert "no stage of its own" in str(error)  # noqa: PT017
        return
    again = place(costs, placement.cluster, [placement.ranks_of(stage) for stage in placement.stages])
    assert (again.tasks, again.edges, again.step_ends) == (placement.tasks, placement.edges, placement.step_ends)
    assert again.static_bytes == placement.static_bytes
    assert costs.note == "told"
    assert Costs.from_json(costs.to_json()) == costs


@pytest.mark.parametrize(
    ("placement", "told"),
    [
        (OLD.forward_only(), "stage 0 has no I; only placements that rota.place made for training"),
        (replace(OLD, edges=OLD.edges[1:]), "the backward's edges do not mirror the forward's"),
        (replace(OLD, edges=OLD.edges[:-1]), r"edges differ from what rota.place makes, such as 3I -> 3W, 0 bytes"),
        (place(Costs.uniform(1, static_bytes=3), Cluster.uniform(2), [(0, 1)]), "rank 0 has 3 static bytes, but no"),
    ],
)
def test_what_costs_cannot_say_is_refused(placement: Placement, told: str) -> None:
    with pytest.raises(PlacementError, match=told):
        costs_of(placement)


def measured_by(orders: Plan, forward_us: tuple[int, ...]) -> Timeline:
    """The orders, run where forwards take other times than planned."""
    times = {(stage, Kind.F): us for stage, us in enumerate(forward_us)}
    tasks = tuple(
        replace(task, duration_us=times.get((task.stage, task.kind), task.duration_us))
        for task in orders.placement.tasks
    )
    truth = simulate(replace(orders, placement=replace(orders.placement, tasks=tasks)))
    return replace(truth, plan=orders)


def test_the_loop_closes() -> None:
    """Plan, run, calibrate, run again: what was predicted is what happens."""
    usage = Usage(("a", "b", "c"), 4, 2)
    old = replace(schedules.gpipe(OLD, 8), usage=usage)
    first = measured_by(old, (150, 90, 110, 100))
    found = calibrate([first])
    assert found.planned_us == simulate(old).makespan_us
    assert found.measured_us == (first.makespan_us,)
    assert found.predicted_us == first.makespan_us
    assert found.gain > 0.05
    best = found.candidates[0]
    assert best.makespan_us == min(one.makespan_us for one in found.candidates) == simulate(found.chosen).makespan_us
    assert found.chosen.usage == replace(usage, note="measured in a run, in 1 recorded step")
    second = measured_by(replace(found.chosen, placement=OLD), (150, 90, 110, 100))
    assert second.makespan_us == best.makespan_us
    again = calibrate([second])
    assert again.gain < 0.01
    assert again.chosen.orders == found.chosen.orders
    assert again.verdict().startswith("Keep the plan's orders: none of ")
    text = found.to_text().splitlines()
    assert text[1].split()[-2] == f"{simulate(old).makespan_us:,}"
    assert text[2].split() == ["measured", "(one", "step)", f"{first.makespan_us:,}", "+0.0%"]
    assert text[-1].startswith(f"Use {best.name}: {found.gain:.1%} faster than the same orders")


def test_one_schedule_may_be_asked_for_and_the_search_may_join() -> None:
    timeline = measured_by(schedules.gpipe(OLD, 8), (100, 100, 100, 100))
    found = calibrate([timeline, timeline, timeline], "zb_h1")
    assert [one.name for one in found.candidates] == ["zb_h1"]
    assert "measured (median of 3 steps)" in found.to_text()
    other = found.with_plan("my own", schedules.one_f_one_b(found.plan.placement, 8))
    assert [one.name for one in other.candidates] == ["zb_h1", "my own"]
    with pytest.raises(RotaError, match=r"zb_v: needs a chain of stages; place it by rota\.wave"):
        calibrate([timeline], "zb_v")


def test_a_rank_with_too_much_to_do_is_told() -> None:
    timeline = measured_by(schedules.gpipe(OLD, 8), (100, 100, 240, 100))
    assert "Rank 2 has 26% more work than the mean" in calibrate([timeline]).verdict()
    even = calibrate([measured_by(schedules.gpipe(OLD, 8), (100, 100, 110, 100))])
    assert "more work" not in even.to_text()


def test_schedules_that_do_not_fit_in_memory_are_left_out() -> None:
    costs = replace(costs_of(OLD), activation_bytes=(2_000,) * 4, input_frees_bytes=None)
    limited = place(costs, replace(OLD.cluster, limit_bytes=(13_000,) * 4))
    timeline = measured_by(schedules.zb_h1(limited, 8), (100, 100, 100, 100))
    found = calibrate([timeline])
    names = {one.name for one in found.candidates}
    assert "gpipe" not in names
    assert "zb_h1" in names
    with pytest.raises(PlanError, match="over its limit"):
        found.with_plan("gpipe", schedules.gpipe(found.plan.placement, 40))


def test_timelines_of_different_placements_are_refused() -> None:
    other = simulate(schedules.gpipe(place(Costs.uniform(3), Cluster.uniform(3)), 2))
    with pytest.raises(PlanError, match="timeline 2 is of another placement than the first"):
        calibrate([simulate(schedules.zb_h1(OLD, 4)), other])
    with pytest.raises(PlanError, match="no timelines to calibrate with"):
        calibrated()


@pytest.fixture
def measured_file(tmp_path: Path) -> Path:
    path = tmp_path / "measured.json"
    path.write_text(measured_by(schedules.gpipe(OLD, 8), (150, 90, 110, 100)).to_json())
    return path


def test_calibrate_writes_both_files(measured_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    better, costs = tmp_path / "better.json", tmp_path / "costs.json"
    code, out, _ = run(capsys, "calibrate", measured_file, measured_file, "--costs", costs, "-o", better)
    timeline = Timeline.from_json(measured_file.read_text())
    found = calibrate([timeline, timeline])
    assert (code, out) == (
        0,
        f"{found.to_text()}\nWrote {costs}; plan with `rota plan … --costs {costs} --links {better}`.\n"
        f"Wrote {better}.\n",
    )
    assert Plan.from_json(better.read_text()) == found.chosen
    read = Costs.from_json(costs.read_text())
    assert read.forward_us == (150, 90, 110, 100)
    assert read.note == f"calibrated by {measured_file}, {measured_file}"
    assert run(capsys, "plan", "gpipe", "--costs", costs, "--microbatches", 8)[0] == 0


def test_calibrate_searches(measured_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ortools")
    better = tmp_path / "better.json"
    code, out, _ = run(capsys, "calibrate", measured_file, "--plan", "search", "--time-limit", 1e-6, "-o", better)
    assert code == 0
    rows = [line for line in out.splitlines() if line.startswith("  ")]
    assert rows[0].startswith("  search ("), "however little time it has"
    times = [int(row.split()[-2].replace(",", "")) for row in rows]
    assert times == sorted(times)
    assert simulate(Plan.from_json(better.read_text())).makespan_us == times[0]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["{measured}", "--time-limit", "3"], "--time-limit is for --plan search; leave it out, or add --plan search"),
        (["{measured}", "-o", "{measured}"], "is read by the command, and would be overwritten"),
        (["{plan}"], "is a plan; give timelines measured with `rota run --timeline`"),
    ],
)
def test_calibrate_refuses(
    arguments: list[str], told: str, measured_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(schedules.gpipe(OLD, 2).to_json())
    given_arguments = [each.format(measured=measured_file, plan=plan, folder=tmp_path) for each in arguments]
    code, _, error = run(capsys, "calibrate", *given_arguments)
    assert code == 2
    assert told in error
