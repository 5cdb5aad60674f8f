"""Micro-batches that differ: durations and sizes per class of them, and placements and plans that hold these."""

import json
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from rota import Cluster, Costs, Link, Placement, Plan, SharedLink, Timeline, check, place, schedules, simulate
from rota.core.errors import FormatError, PlacementError, PlanError
from rota.core.tasks import Edge, Kind, PerClass, Task, by_class, scalar, value_in
from support.core_strategies import differing, differing_plans, plans
from support.sampling import some

F, B = Kind.F, Kind.B
TWO = PerClass((3, 5))


def short_and_long(class_of: tuple[int, ...] = (0, 1, 1, 0), num_stages: int = 2) -> Placement:
    """A chain whose class 1 takes three times as long, and holds three times as much, as class 0."""
    costs = [Costs.uniform(num_stages, 10 * s, 20 * s, None, 8 * s, 4 * s) for s in (1, 3)]
    return Placement.of_classes([place(each, Cluster.uniform(num_stages)) for each in costs], class_of)


@pytest.mark.parametrize(
    "wrong",
    [
        *(lambda: TWO + 1, lambda: 1 + TWO, lambda: max(TWO, 0), lambda: sorted([TWO, TWO])),
        *(lambda: -TWO, lambda: bool(TWO), lambda: int(TWO), lambda: f"{TWO:,}", lambda: [0][TWO]),
        *(lambda: range(TWO), lambda: json.dumps([TWO]), lambda: scalar(TWO)),
    ],
)
def test_an_amount_per_class_is_not_computed_with_by_mistake(wrong: Callable[[], Any]) -> None:
    with pytest.raises(TypeError):
        wrong()


@given(st.lists(st.integers(), min_size=1), st.integers())
def test_by_class_computes_by_class_and_is_one_number_where_all_are_the_same(values: list[int], other: int) -> None:
    found = by_class(operator.sub, PerClass(values), other)
    assert [value_in(found, c) for c in range(len(values))] == [value - other for value in values]
    assert isinstance(found, int) == (len({*values}) == 1)
    assert by_class(operator.sub, values[0], other) == values[0] - other
    assert isinstance(by_class(lambda *_: other, PerClass(values)), int)


@given(differing())
@settings(max_examples=some(100))
def test_a_placement_is_that_of_each_class(placement: Placement) -> None:
    placement = replace(placement, sample_of=())
    assert len(placement.classes) == placement.num_classes
    for m, c in enumerate(placement.class_of):
        alone = placement.for_microbatch(m)
        assert alone == placement.classes[c]
        assert not alone.class_of
        for name in ("tasks", "edges", "routes"):
            for mixed, one in zip(getattr(placement, name), getattr(alone, name), strict=True):
                fields = getattr(mixed, "_fields", None) or ("duration_us", "held_bytes", "peak_bytes")
                assert all(placement.value(getattr(mixed, f), m) == getattr(one, f) for f in fields)
    if placement.class_of:
        assert Placement.of_classes(placement.classes, placement.class_of) == placement
        assert placement != placement.classes[0]
    else:
        assert placement.classes == (placement,)
    if any(task.kind is F for task in placement.tasks):
        for m in range(len(placement.class_of)):
            assert placement.forward_only().for_microbatch(m) == placement.for_microbatch(m).forward_only()


def test_classes_that_do_not_fit_together_are_refused() -> None:
    one, three = (place(Costs.uniform(n), Cluster.uniform(n)) for n in (1, 3))
    longer = replace(one, tasks=tuple(replace(task, duration_us=9) for task in one.tasks))
    for wrong, message in [
        (lambda: Placement.of_classes([one], []), "the class of each micro-batch"),
        (lambda: Placement.of_classes([one, three], [0, 1]), r"placements\[1\] have different tasks or ranks"),
        (lambda: Placement.of_classes([one, replace(one, static_bytes=(1,))], [0]), "different static_bytes"),
        (lambda: Placement.of_classes([one, longer], [0, 2]), r"class_of\[1\] is 2, but there are 2 placements"),
        (lambda: Placement.of_classes([short_and_long()] * 2, [0]), "has classes or chunks of micro-batches itself"),
        (lambda: replace(short_and_long(), class_of=()), "class_of is empty"),
        (lambda: replace(short_and_long(), class_of=(0, 2)), r"class_of\[1\] is 2, but there are 2 classes"),
        (lambda: replace(short_and_long(), edges=(Edge(0, 1, PerClass((1, 2, 3))),)), "but num_bytes of the edge"),
        (lambda: Task(0, F, (0,), PerClass((1, -1))), "duration_us of task 0F is -1"),
    ]:
        with pytest.raises(PlacementError, match=message):
            wrong()


def test_a_route_on_a_shared_link_has_bytes_in_all_classes_or_in_none() -> None:
    tasks = (Task(0, F, (0,), 1), Task(1, F, (1,), 1))
    cluster = Cluster((None, None), Link(), shared=(SharedLink("host", 1, (0,), (1,)),))
    mixed = Placement(tasks, (Edge(0, 1, PerClass((0, 4))),), cluster, class_of=(0, 1))
    with pytest.raises(PlacementError, match="0 bytes for some classes"):
        _ = mixed.routes


@given(differing_plans() | differing_plans(wired=True))
@settings(max_examples=some(100))
def test_a_plan_and_its_timeline_are_read_as_they_were_written(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan
    timeline = simulate(plan)
    assert Timeline.from_json(timeline.to_json()) == timeline
    for name in ("class_of", "sample_of"):
        assert tuple(json.loads(plan.to_json()).get(name, ())) == getattr(plan.placement, name)


@given(plans())
@settings(max_examples=some(100))
def test_one_class_is_a_plan_as_ever(plan: Plan) -> None:
    """Byte for byte in JSON, whether its placement was given once or once per class."""
    again = Placement.of_classes([plan.placement] * 3, [m % 3 for m in range(plan.num_microbatches)])
    assert again == plan.placement
    assert replace(plan, placement=again).to_json() == plan.to_json()
    assert "class_of" not in plan.to_json()


def test_two_sizes_by_hand() -> None:
    """1F1B on two ranks, micro-batches 10, 30, 30, 10 µs per forward: the large ones make rank 1 wait."""
    timeline = simulate(schedules.one_f_one_b(short_and_long(), 4))
    assert timeline.starts_us == ((0, 10, 40, 60, 130, 190, 220, 280), (10, 20, 40, 70, 130, 160, 220, 230))
    assert timeline.makespan_us == 300
    assert timeline.peak_memory_bytes == (24 + 24 + 12, 24 + 12)  # and what is received


def test_a_plan_for_another_number_of_micro_batches_is_refused() -> None:
    plan = schedules.gpipe(short_and_long(), 3)
    with pytest.raises(PlanError, match="num_microbatches is 3, but the placement has the sizes of 4 micro-batches"):
        check(plan)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f["tasks"][0].__setitem__(2, [1, 2, 3]), "numbers for 3 classes of micro-batches, but"),
        (lambda f: f["tasks"][0].__setitem__(2, []), r"tasks\[0\]\[2\] is \[\]; expected a list of length >= 1"),
        (lambda f: f["tasks"][0].__setitem__(2, [1, None]), "expected a whole number"),
        (lambda f: f["tasks"][0].__setitem__(2, [1, -2]), "duration_us of task 0F is -2"),
        (lambda f: f.pop("class_of"), "class_of is empty"),
        (lambda f: f.update(class_of=[0, 1, 1, 7]), r"class_of\[3\] is 7"),
    ],
)
def test_files_with_other_classes_are_refused(change: Callable[[dict[str, Any]], object], message: str) -> None:
    fields = json.loads(schedules.gpipe(short_and_long(), 4).to_json())
    change(fields)
    with pytest.raises((FormatError, PlacementError), match=message):
        Plan.from_json(json.dumps(fields))
