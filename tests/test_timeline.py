"""Timelines: the critical path, the spans, and their text."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings

from rota import Cluster, Costs, Kind, Op, Plan, PlanError, RotaError, Transfer, place, schedules, simulate
from rota.core.timeline import Span, StepEndWork, Timeline
from support.core_strategies import plans, wired_plans
from support.sampling import some

TIMELINE = simulate(
    schedules.one_f_one_b(
        place(
            Costs((3, 5), (7, 9), activation_bytes=4, boundary_bytes=6, reduce_us=2, optimizer_us=(1, 0)),
            Cluster.uniform(2, latency_us=1, bytes_per_us=2),
        ),
        num_microbatches=3,
    )
)


def linked(plan: Plan, before: Span, after: Span) -> bool:
    """Whether `after` has to wait for `before`: by data, by a rank's order or at the step's end."""
    a, b = before.work, after.work
    if isinstance(a, Op) and isinstance(b, Transfer):
        return b.source == a
    if isinstance(a, Transfer) and isinstance(b, Op):
        return a.target == b
    if isinstance(a, Op) and isinstance(b, Op):
        index = plan.placement.index
        reads = {(edge.source, edge.target) for edge in plan.placement.edges}
        data = a.microbatch == b.microbatch and (index[a[:2]], index[b[:2]]) in reads
        return data or any((a, b) in pairwise(order) for order in plan.orders)
    if isinstance(a, Op) and isinstance(b, StepEndWork):
        order = plan.orders[after.rank]
        if b.what == "optimizer":
            return a == order[-1]
        return a == [op for op in order if op.stage == b.stage and op.kind in (Kind.B, Kind.W)][-1]
    return before.rank == after.rank and (a[1], b[1]) != ("optimizer", "reduce")


@given(plans() | wired_plans())
@settings(max_examples=some(400))
def test_the_critical_path_explains_the_makespan(plan: Plan) -> None:
    """Of a transfer that another one waits for, only the time for which it occupies what they share."""
    path = simulate(plan).critical_path()
    assert path[0].start_us == 0
    assert path[-1].end_us == simulate(plan).makespan_us
    shared = {(r.sender, r.receiver): {*r.shared} for r in plan.placement.routes if r.shared}
    for before, after in pairwise(path):
        assert before.end_us == after.start_us
        if isinstance(before.work, Transfer) and isinstance(after.work, Transfer):
            assert shared[before.work[2:4]] & shared[after.work[2:4]]
        else:
            assert linked(plan, before, after), (before, after)


@given(plans() | wired_plans())
@settings(max_examples=some(200))
def test_spans_are_all_that_happens(plan: Plan) -> None:
    timeline = simulate(plan)
    ops = [(span.rank, span.work) for span in timeline.op_spans()]
    assert ops == [(rank, op) for rank, order in enumerate(plan.orders) for op in order]
    transfers = [span.work for span in timeline.transfer_spans()]
    assert sorted(transfers) == sorted(plan.transfers)
    assert all(span.rank == span.work.sender for span in timeline.transfer_spans())
    ends = [plan.placement.step_ends[i] for i, _ in plan.step_end_ranks]
    worked = sum(end.reduce_us + end.optimizer_us for end in ends)
    assert sum(span.duration_us for span in timeline.step_end_spans()) == worked
    assert len(list(timeline.spans())) == len(ops) + len(transfers) + len(list(timeline.step_end_spans()))


@given(plans())
@settings(max_examples=some(100))
def test_idle_busy_and_bubble_add_up(plan: Plan) -> None:
    timeline = simulate(plan)
    for rank, order in enumerate(plan.orders):
        load = sum(plan.placement.task(op.stage, op.kind).duration_us for op in order)
        assert (timeline.busy_us[rank], timeline.idle_us[rank]) == (load, timeline.makespan_us - load)
    assert 0 <= timeline.bubble_fraction <= 1
    windows = [ends[-1] - starts[0] for starts, ends in zip(timeline.starts_us, timeline.ends_us, strict=True) if ends]
    assert timeline.span_us == max(windows) <= timeline.makespan_us


def test_a_transfer_that_was_measured_to_end_after_its_reader_began_is_not_on_the_path() -> None:
    (first, *others), *routes = TIMELINE.arrived_us
    skewed = replace(TIMELINE, arrived_us=((first + 1, *others), *routes))
    assert [str(span.work) for span in skewed.critical_path()][:2] == ["0F0", "1F0"]


def changed(**fields: object) -> str:
    return json.dumps({**json.loads(TIMELINE.to_json()), **fields})


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (TIMELINE.plan.to_json(), 'not a timeline file: it says "rota": "plan"'),
        (changed(starts_us=[[0]]), "timeline.starts_us does not fit the plan: expected rows of [6, 6] entries"),
        (changed(ends_us=[[0] * 6, [1.5] * 6]), "timeline.ends_us[1][0] is 1.5; expected a whole number"),
        (changed(ends_us=[[0] * 6] * 2), "timeline: rank 0, op 2: 0 µs comes after 3 µs"),
        (changed(arrived_us=[[9, 0, 9], [99, 99, 99]]), "timeline: 0F1→1F1 ends at 0 µs, before it starts"),
        (changed(step_ends_us=[[9, 8, 9, 9]] * 2), "timeline: 0 reduce ends at 8 µs, before it starts"),
        (changed(orders=["0F0 0F1", "1F0"]), "rank 0 never does 0F2 and 3 more"),
    ],
)
def test_what_is_wrong_is_told_with_place_and_value(text: str, told: str) -> None:
    with pytest.raises(RotaError) as caught:
        Timeline.from_json(text)
    assert told in str(caught.value)


def test_orders_that_wait_in_a_cycle_have_no_times() -> None:
    """Not even in zero time: a critical path of them would have no beginning."""
    fields = json.loads(TIMELINE.to_json())
    fields["orders"][0] = " ".join(reversed(fields["orders"][0].split()))
    for name in ("starts_us", "ends_us"):
        fields[name] = [[7] * len(row) for row in fields[name]]
    with pytest.raises(PlanError, match="the orders wait in a cycle"):
        Timeline.from_json(json.dumps(fields))
