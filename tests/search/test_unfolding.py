"""Micro-batches that differ, searched: against all plans of tiny placements, with and without the sequence kept."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings

from rota import Cluster, Costs, Placement, Plan, RotaError, SearchError, check, interleaved, place, simulate
from rota.core.tasks import Kind, Task, values_of
from rota.schedules import FAMILIES, one_f_one_b
from rota.search import bounds_of, find_frontier, find_plan, find_repeating
from rota.search.bounds import every
from rota.search.unfolding import Unfolding
from support.core_strategies import differing_plans, with_limits
from support.sampling import IS_WHOLE, some
from support.search_brute_force import best_of, every_plan, tiny_placement


def of_sizes(placement: Placement, chooser: random.Random, num_microbatches: int) -> Placement:
    """The placement with two classes: another time, other bytes; half of them with chunks of samples."""
    other = replace(
        placement,
        tasks=tuple(
            Task(t.stage, t.kind, t.ranks, chooser.randint(0, 6), chooser.randint(-2, 4), chooser.randint(0, 2))
            for t in placement.tasks
        ),
        edges=tuple(edge._replace(num_bytes=chooser.randint(0, 3)) for edge in placement.edges),
    )
    class_of = [0, *(chooser.randint(0, 1) for _ in range(num_microbatches - 1))]
    if num_microbatches == 4:  # two samples of the same classes take turns
        samples = [0, 0, 1, 1] if placement.num_components == 1 else [0, 1, 0, 1]
        return Placement.of_classes(
            [placement, other], [(0, 1)[samples[:m].count(s)] for m, s in enumerate(samples)], samples
        )
    streams, joined = placement.num_components, chooser.random() < 0.5
    sample_of = [m % streams + streams * chooser.randint(0, 1) for m in range(num_microbatches)] if joined else ()
    return Placement.of_classes([placement, other], class_of, sample_of)


class Case(NamedTuple):
    placement: Placement
    num_microbatches: int
    plans: list[Plan]


def cases(count: int, seed: int) -> Iterator[Case]:
    """Tiny placements whose micro-batches differ, with all their plans."""
    chooser = random.Random(seed)
    while count:
        num_microbatches = chooser.choice((2, 3, 3, 4))
        placement = of_sizes(tiny_placement(chooser, carries=chooser.random() < 0.5), chooser, num_microbatches)
        if placement.is_alike:
            continue
        plans = every_plan(placement, num_microbatches)
        if len(plans) > 1:
            count -= 1
            yield Case(placement, num_microbatches, plans)


@pytest.fixture(scope="module")
def tiny() -> list[Case]:
    return [*cases(some(40), seed=11)]


def keeps_sequence(plan: Plan) -> bool:
    """Forwards by number; whatever else, sample by sample, with the chunks of a sample in reverse."""
    samples = plan.placement.sample_of or range(plan.num_microbatches)
    back = {m: (samples.index(samples[m]), -m) for m in range(plan.num_microbatches)}
    return all(
        row == sorted(row, key=None if task[1] is Kind.F else back.__getitem__)
        for order in plan.orders
        for task in {op[:2] for op in order}
        for row in [[op.microbatch for op in order if op[:2] == task]]
    )


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_tiny_placements_as_by_brute_force(tiny: list[Case], objective: str, keep: bool) -> None:
    """Never better than the best of all plans, the bound never above it; what is proven is the best."""
    num_proven = num_fitting = 0
    options = {"objective": objective, "time_limit_s": 0.1, "deterministic": True, "keep_sequence": keep}
    for placement, count, plans in tiny:
        best = best_of([plan for plan in plans if keeps_sequence(plan)] if keep else plans)
        try:
            result = find_plan(placement, count, **options)  # type: ignore[arg-type]
        except SearchError:  # what transfers hold is guessed
            assert best is None or any(max(values_of(edge.num_bytes)) for edge in placement.edges)
            continue
        check(result.plan)
        num_fitting += 1
        assert result.plan.placement == placement
        assert result.bound_us <= getattr(best, f"{objective}_us") <= result.value_us
        assert ("in this sequence" if keep else "in any sequence") in result.among
        assert result.among in result.to_text()
        assert not keep or keeps_sequence(result.plan)
        num_proven += result.is_optimal
    assert num_proven > (0.8 if IS_WHOLE else 0.5) * num_fitting > some(40) / 8


def test_bounds_hold_for_all_plans(tiny: list[Case]) -> None:
    """With memory limits and without; those of a kept sequence for all plans that keep it."""
    for placement, count, plans in tiny:
        for chosen, unfolding in (
            (plans, Unfolding(placement)),
            ([plan for plan in plans if keeps_sequence(plan)], Unfolding(placement, keeps_sequence=True)),
        ):
            best = best_of(chosen) if chosen else None
            if best is not None:
                assert all(bound.us <= best.makespan_us for bound in every(unfolding.problem))
                assert all(bound.us <= best.span_us for bound in every(unfolding.problem, "span"))
        assert bounds_of(placement, count)[0].us == every(Unfolding(placement).problem)[0].us


@given(differing_plans() | differing_plans(wired=True))
@settings(max_examples=some(150))
def test_an_unfolded_plan_is_the_same_plan(plan: Plan) -> None:
    if plan.placement.is_alike:
        return
    unfolding = Unfolding(plan.placement)
    unfolded, timeline = unfolding.unfold(plan), simulate(plan)
    other = simulate(unfolded)
    assert other.starts_us == timeline.starts_us
    assert other.ends_us == timeline.ends_us
    assert sorted(span[:3] for span in other.transfer_spans()) == sorted(span[:3] for span in timeline.transfer_spans())
    if not plan.placement.step_ends:  # what an unfolded stage reduces is one micro-batch's
        assert other.makespan_us == timeline.makespan_us
        assert other.peak_memory_bytes == timeline.peak_memory_bytes
    assert unfolding.fold(unfolded).orders == plan.orders


@given(differing_plans(most_microbatches=4))
@settings(max_examples=some(20))
def test_never_worse_than_a_named_schedule(plan: Plan) -> None:
    placement = with_limits(plan, [2 * peak for peak in simulate(plan).peak_memory_bytes]).placement
    if placement.is_alike:
        return
    try:
        result = find_plan(placement, plan.num_microbatches, time_limit_s=0.05, deterministic=True)
    except SearchError:
        assert any(max(values_of(edge.num_bytes)) for edge in placement.edges)
        return
    check(result.plan)
    assert simulate(result.plan).makespan_us == result.value_us >= result.bound_us
    for family in FAMILIES:
        try:
            named = family(placement, plan.num_microbatches)
            check(named)
        except RotaError:
            continue
        assert result.makespan_us <= simulate(named).makespan_us


def mixed(num_ranks: int, sizes: tuple[int, ...], num_stages: int = 0) -> Placement:
    placements = [
        (interleaved if num_stages else place)(
            Costs.uniform(num_stages or num_ranks, 10 * s, 20 * s, None, 4 * s, 2 * s, reduce_us=7),
            Cluster.uniform(num_ranks),
        )
        for s in sorted({*sizes})
    ]
    return Placement.of_classes(placements, [sorted({*sizes}).index(s) for s in sizes])


def test_a_better_sequence_is_found_and_proven() -> None:
    placement = mixed(2, (3, 1, 1))
    kept = find_plan(placement, 3, keep_sequence=True, deterministic=True)
    free = find_plan(placement, 3, deterministic=True)
    assert kept.is_optimal
    assert free.is_optimal
    assert free.makespan_us < kept.makespan_us <= simulate(one_f_one_b(placement, 3)).makespan_us
    assert not keeps_sequence(free.plan)


def test_searches_for_alike_micro_batches_refuse_others() -> None:
    placement = mixed(2, (1, 2))
    for refused, message in [
        (lambda: find_plan(placement, 2, objective="period"), "no steady state"),
        (lambda: find_plan(placement, 3), "has the sizes of 2 micro-batches"),
        (lambda: bounds_of(placement, 3), "has the sizes of 2 micro-batches"),
        (lambda: find_frontier(placement), "no steady state"),
        (lambda: find_repeating(placement), "no steady state"),
        (lambda: find_repeating(placement, 2), "no steady state"),
        (lambda: find_plan(mixed(2, (1, 2) * 400), 800), "too large to search"),
    ]:
        with pytest.raises(SearchError, match=message):
            refused()
