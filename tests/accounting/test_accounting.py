"""Idle time by cause: it adds up, each cause is what docs/explain.md says it is, and what would help was simulated."""

import json
import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings, strategies as st

from rota import Cluster, Costs, Link, Placement, PlanError, SharedLink, place, schedules, simulate, wave
from rota.accounting import Cause, Explanation, Idle, explain, idle
from rota.core.plan import Plan, Usage
from rota.core.tasks import Edge, Kind, Op, Task, Transfer
from rota.core.text import time_text
from rota.core.timeline import StepEndWork, Timeline
from support.core_strategies import plans, wired_plans, with_limits
from support.measured import measured_like
from support.sampling import some


def plan_of(*orders: str, costs: Costs | None = None, cluster: Cluster | None = None) -> Plan:
    """A chain of as many stages as ranks (F 1 µs, B 2 µs), by the ranks' orders."""
    ops = tuple(tuple(map(Op.parse, order.split())) for order in orders)
    placement = place(costs or Costs.uniform(len(orders)), cluster or Cluster.uniform(len(orders)))
    return Plan(placement, 1 + max(op.microbatch for order in ops for op in order), ops)


def told(idles: Iterable[Idle]) -> list[str]:
    return [
        f"{one.rank} {one.start_us}-{one.end_us} {one.cause} {one.waits_for}" + (f" | {one.ready}" if one.ready else "")
        for one in idles
    ]


def assert_whole(timeline: Timeline, idles: tuple[Idle, ...]) -> None:
    """Exactly the time in which no op runs, in order, each microsecond once."""
    assert list(idles) == sorted(idles, key=lambda one: (one.rank, one.start_us))
    for rank in range(timeline.num_ranks):
        mine = [one for one in idles if one.rank == rank]
        assert sum(one.duration_us for one in mine) == timeline.idle_us[rank]
        assert all(one.duration_us > 0 for one in mine)
        busy = [(s, e) for s, e in zip(timeline.starts_us[rank], timeline.ends_us[rank], strict=True) if s < e]
        spans = sorted([*busy, *((one.start_us, one.end_us) for one in mine)])
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
        assert not spans or spans[-1][1] <= timeline.makespan_us


@given(plans() | wired_plans())
@settings(max_examples=some(500))
def test_planned_idle_time_adds_up(plan: Plan) -> None:
    timeline = simulate(plan)
    idles = idle(timeline)
    assert_whole(timeline, idles)
    assert idle(timeline, planned=timeline) == idles, "nothing is slower than planned"
    causes = {one.cause for one in idles}
    assert {Cause.SLOWER, Cause.CORES, Cause.MEMORY}.isdisjoint(causes)
    assert Cause.LAUNCH not in causes
    assert Cause.SHARED_LINK not in causes or plan.placement.cluster.shared


@given(plans() | wired_plans(), st.integers(0, 2**16), st.none() | st.integers(1, 3), st.booleans())
@settings(max_examples=some(500))
def test_measured_idle_time_adds_up(plan: Plan, seed: int, num_cores: int | None, limited: bool) -> None:
    if limited:
        plan = with_limits(plan, [max(0, peak - 5) for peak in simulate(plan).peak_memory_bytes])
    timeline = measured_like(plan, random.Random(seed))
    for planned in (None, plan, timeline):
        idles = idle(timeline, planned, num_cores)
        assert_whole(timeline, idles)
        assert planned is not timeline or Cause.SLOWER not in {one.cause for one in idles}
        if planned is None:
            assert idles == idle(timeline, plan, num_cores)
        assert num_cores or Cause.CORES not in {one.cause for one in idles}


@given(plans() | wired_plans(), st.integers(0, 2**16))
@settings(max_examples=some(200))
def test_each_cause_is_what_it_says(plan: Plan, seed: int) -> None:
    timeline = measured_like(plan, random.Random(seed))
    ends: dict[Op, int] = {}
    for rank, order in enumerate(plan.orders):
        for op, end in zip(order, timeline.ends_us[rank], strict=True):
            ends[op] = max(end, ends.get(op, 0))
    sent = {span.work: span for span in sorted(timeline.transfer_spans(), key=lambda span: span.end_us)}
    for one in idle(timeline, plan):
        later = [
            op for op, s in zip(plan.orders[one.rank], timeline.starts_us[one.rank], strict=True) if s >= one.end_us
        ]
        if one.cause in (Cause.WAITING, Cause.WARM_UP):
            assert isinstance(one.waits_for, Op)
            assert ends[one.waits_for] >= one.end_us
        if one.cause in (Cause.TRANSFER, Cause.SHARED_LINK):
            assert isinstance(one.waits_for, Transfer)
            assert sent[one.waits_for].end_us >= one.end_us
        if one.cause is Cause.LAUNCH:
            assert one.waits_for == later[0]
        if one.cause is Cause.DRAIN:
            assert not later
        if one.cause is Cause.STEP_END:
            assert isinstance(one.waits_for, StepEndWork)
            assert not later
        if one.cause is Cause.ORDER:
            assert one.ready in later[1:]


def cause_at(timeline: Timeline, rank: int, now: int) -> Cause:
    """The cause of the microsecond from `now` on, straight from the definitions; each task on one rank, no limits."""
    order, starts, ends = timeline.plan.orders[rank], timeline.starts_us[rank], timeline.ends_us[rank]
    gap = next((i for i, start in enumerate(starts) if start > now), None)
    if gap is None:
        ended = [span for span in timeline.step_end_spans() if span.rank == rank and span.start_us <= now < span.end_us]
        return Cause.STEP_END if ended else Cause.DRAIN
    begun, all_ends = ends[gap - 1] if gap else 0, {span.work: span.end_us for span in timeline.op_spans()}
    placement = timeline.plan.placement

    def inputs(op: Op) -> list[tuple[int, int, int, int, int, int]]:
        """(arrived, made, the maker's rank and position, route or -1, sent) of all that it reads."""
        reads, target = [], placement.index[op[:2]]
        for source, route in [
            *((edge.source, -1) for edge in placement.edges if edge.target == target),
            *((route.source, r) for r, route in enumerate(placement.routes) if route.target == target),
        ]:
            task = placement.tasks[source]
            maker, on = Op(task.stage, task.kind, op.microbatch), task.ranks[0]
            made = sent = arrived = all_ends[maker]
            if route >= 0:
                k = op.microbatch // placement.num_components
                sent, arrived = timeline.sent_us[route][k], timeline.arrived_us[route][k]
            elif on != rank:
                continue
            reads.append((arrived, made, on, timeline.plan.orders[on].index(maker), route, sent))
        return reads

    arrived, made, _, _, route, sent = max(inputs(order[gap]), default=(0, 0, 0, 0, -1, 0))
    free = min(begun, starts[gap])
    if now >= max(arrived, free):
        return Cause.LAUNCH
    for i in range(gap + 1, len(order)):
        ready = max(free, max(inputs(order[i]), default=(0,))[0])
        needed = ends[i] - starts[i]
        if ready <= now and starts[i] < ends[i] and needed <= min(arrived, starts[gap]) - ready:
            return Cause.ORDER
    if now < made:
        return Cause.WAITING if gap else Cause.WARM_UP
    if route >= 0 and placement.routes[route].sender == placement.routes[route].receiver:
        return Cause.COPY
    return Cause.SHARED_LINK if now < sent and placement.routes[route].shared else Cause.TRANSFER


@given(plans(most_microbatches=3) | wired_plans(most_microbatches=3), st.integers(0, 2**16), st.booleans())
@settings(max_examples=some(300))
def test_every_microsecond_has_the_cause_that_the_definitions_give(plan: Plan, seed: int, measured: bool) -> None:
    assume(all(len(task.ranks) == 1 for task in plan.placement.tasks))
    timeline = measured_like(plan, random.Random(seed), longest_us=6) if measured else simulate(plan)
    for one in idle(timeline, timeline):  # nothing is slower than planned
        for now in range(one.start_us, one.end_us):
            assert cause_at(timeline, one.rank, now) is one.cause


def test_waiting_for_a_shared_link_is_told_apart_from_the_transfer() -> None:
    tasks = tuple(Task(stage, Kind.F, (stage,), 3) for stage in range(3))
    host = SharedLink("host", 4, (0,), (1, 2))
    placement = Placement(tasks, (Edge(0, 1, 8), Edge(0, 2, 8)), Cluster((None,) * 3, Link(1, 8), shared=(host,)))
    plan = Plan(placement, 1, tuple((Op(stage, Kind.F, 0),) for stage in range(3)))
    text = explain(plan).to_text()
    assert "link      an input waits for a link that others are using" in text
    assert "rank 2: 2 µs while 0F→2F waits for a shared link" in text


def test_an_op_that_was_ready_but_would_not_fit_is_a_matter_of_memory() -> None:
    plan = plan_of("0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1", costs=Costs.uniform(2, activation_bytes=10))
    for limit, cause in ((19, "memory"), (20, "order")):
        assert told(idle(simulate(with_limits(plan, [limit, None]))))[0] == f"0 1-4 {cause} 1B0 | 0F1"


def test_what_is_kept_until_its_turn_counts_as_memory() -> None:
    """0F2 would fit when it is ready, but not beside 0F1, which comes before its turn."""
    costs = Costs.uniform(2, activation_bytes=10)
    orders = "0F0 0F1 0B0 0B1 0F2 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"
    plan = with_limits(plan_of(*orders, costs=costs), [29, None])
    assert [line for line in told(idle(simulate(plan))) if "| 0F2" in line] == [
        "0 2-4 memory 1B0 | 0F2",
        "0 6-7 order 1B1 | 0F2",
    ]


def slow_timeline() -> Timeline:
    """0F0 took 3 µs longer than planned, 1F0 started 2 µs late, 1B0 took 1 µs longer."""
    plan = plan_of("0F0 0B0", "1F0 1B0")
    return Timeline(plan, ((0, 10), (6, 7)), ((4, 12), (7, 10)), ((4,), (10,)), ((4,), (10,)))


def test_slower_ops_upstream_and_launch_gaps() -> None:
    plan = plan_of("0F0 0B0", "1F0 1B0")
    assert told(idle(slow_timeline(), plan)) == [
        "0 4-9 waiting 1B0",
        "0 9-10 slower 1B0",
        "1 0-1 warm-up 0F0",
        "1 1-4 slower 0F0",
        "1 4-6 launch 1F0",
        "1 10-12 drain 0B0",
    ]


def test_slowness_is_found_further_upstream_than_the_maker() -> None:
    """Rank 2 waits for 1F0, which is as fast as planned but waited for 0F0, which was not."""
    plan = plan_of("0F0 0B0", "1F0 1B0", "2F0 2B0")
    slow = replace(plan, placement=place(Costs((5, 1, 1), (2, 2, 2)), Cluster.uniform(3)))
    measured = replace(simulate(slow), plan=plan)
    assert [line for line in told(idle(measured, plan)) if line[0] == "2"][:3] == [
        "2 0-1 warm-up 1F0",
        "2 1-5 slower 0F0",
        "2 5-6 warm-up 1F0",
    ]


def test_cores_that_are_shared() -> None:
    """On one core 1F0 starts 2 µs late and loses half of the 8 µs that 0F1 runs beside it; the rest is slowness."""
    plan = plan_of("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1", costs=Costs((10, 10), (20, 20)))
    starts, ends = ((0, 10, 50, 80), (12, 30, 50, 60)), ((10, 20, 70, 100), (30, 50, 60, 80))
    measured = Timeline(plan, starts, ends, ((10, 20), (50, 80)), ((10, 20), (50, 80)))
    assert told(idle(measured, plan, num_cores=1)) == [
        "0 20-22 waiting 1B0",
        "0 22-26 cores 1F0",
        "0 26-30 slower 1F0",
        "0 30-50 waiting 1B0",
        "0 70-80 waiting 1B1",
        "1 0-10 warm-up 0F0",
        "1 10-12 cores 1F0",
        "1 80-100 drain 0B1",
    ]
    assert {one.cause for one in idle(measured, plan, num_cores=2)}.isdisjoint({Cause.CORES})
    noted = Timeline.from_json(replace(measured, num_cores=1).to_json())
    assert idle(noted, plan) == idle(measured, plan, num_cores=1)  # as a run notes it
    assert idle(noted, plan, num_cores=2) == idle(measured, plan, num_cores=2)
    # Two ops share the core from 12 to 20 and from 50 to 70 µs.
    found, text = explain(noted), explain(noted).to_text()
    shared = f"2 ranks shared 1 core: of the {sum(measured.busy_us)} µs that all ops took together, they waited 28 µs"
    assert text.split("\n")[1].startswith(f"{shared} (22%) for a core.")
    assert "With a core per rank, and the median of each op's measured times (which include waiting" in text
    assert f"the plan takes {found.model_us} µs." in text
    assert "started late" not in text
    assert "shared" not in explain(noted, num_cores=2).to_text()


def test_another_plan_is_refused() -> None:
    with pytest.raises(PlanError, match="the plan has no 0F1 on rank 0; explain a timeline by its own plan"):
        idle(simulate(plan_of("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")), plan_of("0F0 0B0", "1F0 1B0"))


UNEVEN = Costs((100, 100, 100, 140), (200, 200, 200, 280), activation_bytes=1000, reduce_us=50, optimizer_us=20)


def uneven_plan() -> Plan:
    return schedules.one_f_one_b(place(UNEVEN, Cluster.uniform(4, latency_us=15)), 8)


def test_what_would_help_is_what_simulating_it_says() -> None:
    explanation = explain(uneven_plan())
    planned_us = simulate(uneven_plan()).makespan_us
    assert explanation.model_us == planned_us == explanation.timeline.makespan_us
    assert all(one.gain_us == planned_us - one.makespan_us > 0 for one in explanation.suggestions)
    found = {one.words: one.makespan_us for one in explanation.suggestions}
    moved = replace(UNEVEN, forward_us=(100, 100, 120, 120), backward_us=(200, 200, 240, 240))
    words = (
        "stage 3 takes 27% longer than the mean: move 60 µs (14%) of its work to stage 2, if it has more than one layer"
    )
    assert (
        found[words] == simulate(schedules.one_f_one_b(place(moved, Cluster.uniform(4, latency_us=15)), 8)).makespan_us
    )
    at_once = simulate(schedules.one_f_one_b(place(UNEVEN, Cluster.uniform(4)), 8)).makespan_us
    assert found["transfers that take no time"] == at_once


def test_transfers_that_take_no_time_cost_nothing_and_share_nothing() -> None:
    host = SharedLink("host", 1, (0, 1), (0, 1))
    wired = Cluster((None, None), Link(4, 2), shared=(host,))
    costs = Costs((50, 10), (90, 20), boundary_bytes=80)
    plan = schedules.gpipe(place(costs, wired), 3)
    nodes = dict(plan.shared_transfers.transfers())
    plan = replace(plan, service_orders=tuple(tuple(nodes[node] for node in order) for order in plan.served))
    found = {one.words: one.makespan_us for one in explain(plan).suggestions}
    free = schedules.gpipe(place(costs, Cluster((None, None))), 3)
    assert found["transfers that take no time"] == simulate(free).makespan_us


_EVEN, _MOVE = "cut the model so that all stages take equal time", "move 60 µs (14%) of its work"


@pytest.mark.parametrize(
    ("num_layers", "advice"),
    [
        ((), {f"{_EVEN}, if it has more than one layer", f"{_MOVE} to stage 2, if it has more than one layer"}),
        ((1, 1, 1, 7), {_EVEN, f"{_MOVE}, 1 of its 7 layers, to stage 2"}),
        ((1, 1, 1, 2), set()),  # with one of them, stage 2 would take longer than stage 3 takes
        ((2, 2, 2, 1), set()),
    ],
)
def test_only_whole_layers_are_moved(num_layers: tuple[int, ...], advice: set[str]) -> None:
    plan = replace(uneven_plan(), usage=Usage(("a", "b", "c"), 1, 1, num_layers))
    longer = "stage 3 (all from c on) takes 27% longer than the mean: "
    found = [one.words.removeprefix(longer) for one in explain(plan).suggestions if one.words.startswith(longer)]
    assert len(found) == len(advice)
    assert set(found) == advice
    command = "  rota autoplan --profile profile.json --links cluster.json --ranks 4 --batch 8 -o better.json"
    assert (command in explain(plan).to_text().split("\n")) is bool(advice)


@pytest.mark.parametrize(
    ("limit_bytes", "words"),
    [
        (None, "the order of gpipe"),
        (7000, "the order of eager_1f1b"),
        (6000, "memory for one more micro-batch (1 kB over the limit), in the order of eager_1f1b"),
        (5999, None),
    ],
)
def test_other_orders_are_told_if_they_fit_or_nearly_fit(limit_bytes: int | None, words: str | None) -> None:
    costs = Costs.uniform(4, 100, 200, activation_bytes=1000)
    placement = place(costs, Cluster.uniform(4, limit_bytes, latency_us=100))
    found = [one for one in explain(schedules.one_f_one_b(placement, 12)).suggestions if "order" in one.words]
    assert [one.words for one in found] == ([] if words is None else [words])
    assert [one.gain_us for one in found] == [1600] * len(found)


def test_an_explanation_adds_up_and_says_the_worst_first() -> None:
    timeline = measured_like(uneven_plan(), random.Random(1), longest_us=300)
    explanation = explain(timeline, uneven_plan())
    totals = list(explanation.by_cause.values())
    assert sum(totals) == sum(timeline.idle_us) == sum(stretch.total_us for stretch in explanation.worst)
    assert totals == sorted(totals, reverse=True)
    assert [sum(of_rank.values()) for of_rank in explanation.by_rank] == list(timeline.idle_us)
    assert explanation.model_us < timeline.makespan_us
    text, fields = explanation.to_text(), json.loads(explanation.to_json())
    assert f"idle {timeline.bubble_fraction:.1%}" in text
    assert time_text(totals[0]) in text
    assert text.count("(*)") == 2 * (Cause.ORDER in explanation.by_cause)
    model = time_text(explanation.model_us)
    assert f"With the median time of each op, and messages as planned, the plan takes {model}; the other" in text
    assert list(fields["by_cause_us"].values()) == totals
    assert fields["worst"][0]["us"] == explanation.worst[0].total_us


LAYERS = (2, 1, 1, 1, 1, 1, 1, 1)


def uneven(num_layers: tuple[int, ...], forward_us: tuple[int, ...] = (10, 10, 10, 40, 30, 10, 10, 10)) -> Plan:
    """Eight stages on four ranks, down and back up: rank 3 has the two in the middle."""
    plan = schedules.hanayo(wave(Costs(forward_us, forward_us), Cluster.uniform(4)), 4)
    return replace(plan, usage=Usage(tuple("abcdefg"), 1, 1, num_layers))


def cuts(explanation: Explanation) -> bool:
    return any(suggestion.what == "cut" for suggestion in explanation.suggestions)


def test_a_rank_that_cuts_cannot_relieve_bounds_the_step() -> None:
    found = explain(uneven(LAYERS))
    assert not cuts(found)
    assert found.imbalance == (
        "The work of the ranks is uneven: rank 3 has 115% more than the mean. A step takes at least as long as its "
        "work, 560 µs; with as much work in all, but the same on every rank, it could take 260 µs at best. Try fewer "
        "stages, of more layers each, or more places to cut, inside the blocks (`--cuts`, or rota.CutPoint in the "
        "model)."
    )
    assert found.imbalance in found.to_text()
    assert explain(uneven(LAYERS, (16, 16, 16, 17, 16, 16, 16, 17))).timeline.makespan_us >= 260
    assert found.timeline.makespan_us >= 560


@pytest.mark.parametrize(
    ("plan", "is_cut"),
    [
        (uneven(()), True),  # its slowest stage may have several layers
        (uneven((2, 1, 1, 9, 9, 1, 1, 1)), True),
        (uneven(LAYERS, (10,) * 8), False),
    ],
    ids=["unknown layers", "several layers", "even"],
)
def test_even_ranks_and_those_for_which_a_cut_is_advised(plan: Plan, is_cut: bool) -> None:
    found = explain(plan)
    assert found.imbalance == ""
    assert cuts(found) is is_cut
