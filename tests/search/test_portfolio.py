"""`find_plan` as a whole: right figures, within limits, never worse than a named schedule, equal to brute force."""

from random import Random

import pytest
from hypothesis import given, settings

from rota import Cluster, Costs, Placement, Plan, PlanError, RotaError, SearchError, check, interleaved, place, simulate
from rota.schedules import FAMILIES, one_f_one_b, zb_h1
from rota.search import Progress, SearchResult, find_plan
from support import core_strategies as strategies
from support.sampling import some
from support.search_brute_force import tiny_cases
from support.tessel_shapes import tessel

QUICK_S = 0.05  # nominal


def quick(placement: Placement, num_microbatches: int, objective: str = "makespan") -> SearchResult:
    return find_plan(placement, num_microbatches, objective=objective, time_limit_s=QUICK_S, deterministic=True)  # type: ignore[arg-type]


@given(strategies.plans(most_microbatches=5))
@settings(max_examples=some(300))
def test_random_placements(plan: Plan) -> None:
    """Of every kind: DAGs, several ranks a task, several streams, transfers, limits that bind, zero durations."""
    chooser = Random(plan.num_ops)
    peaks = simulate(plan).peak_memory_bytes
    limits = [chooser.choice((None, peak, 2 * peak)) for peak in peaks]  # so that something fits: this plan
    placement = strategies.with_limits(plan, limits).placement
    objective = chooser.choice(("makespan", "span"))
    try:
        result = quick(placement, plan.num_microbatches, objective)
    except SearchError:  # what transfers hold is guessed: a plan that needs luck it may miss
        assert any(edge.num_bytes for edge in placement.edges)
        return
    check(result.plan)
    timeline = simulate(result.plan)
    value = timeline.span_us if objective == "span" else timeline.makespan_us
    assert value == result.value_us >= result.bound_us
    assert (result.makespan_us, result.span_us) == (timeline.makespan_us, timeline.span_us)
    assert result.gap == (0 if value == result.bound_us else pytest.approx(1 - result.bound_us / value))
    for family in FAMILIES:
        assert_no_worse(result, family, placement, plan.num_microbatches)


def assert_no_worse(result: SearchResult, family, placement: Placement, num_microbatches: int) -> None:  # type: ignore[no-untyped-def]
    try:
        named = family(placement, num_microbatches)
        check(named)
    except RotaError:
        return
    timeline = simulate(named)
    assert result.value_us <= (timeline.span_us if result.objective == "span" else timeline.makespan_us), family.name


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_tiny_placements_as_by_brute_force(objective: str) -> None:
    proven = 0
    for placement, num_microbatches, best in tiny_cases(some(100), seed=len(objective)):
        if best is None:
            with pytest.raises(SearchError):
                find_plan(placement, num_microbatches, objective=objective, time_limit_s=0.1, deterministic=True)  # type: ignore[arg-type]
            continue
        result = find_plan(placement, num_microbatches, objective=objective, time_limit_s=0.5, deterministic=True)  # type: ignore[arg-type]
        assert result.value_us == best[objective == "span"], placement
        proven += result.is_optimal
    assert proven > some(100) / 3


@pytest.mark.parametrize(
    ("shape", "limit", "num_microbatches", "makespan_us"),
    [
        *(("v", 4, 6, 36), ("v", 4, 128, 524), ("v", None, 128, 524), ("v", 3, 128, 692)),
        *(("k", 6, 128, 772), ("x", 4, 256, 1030), ("m", 6, 128, 780), ("m", 4, 128, 780)),
        *(("m", 3, 128, 948), ("nn", 6, 128, 1036), ("nn-eager", 6, 128, 1036)),
    ],
)
def test_tessel_shapes_proven(shape: str, limit: int | None, num_microbatches: int, makespan_us: int) -> None:
    result = find_plan(tessel(shape, 4, limit), num_microbatches, deterministic=True)
    assert (result.makespan_us, result.gap) == (makespan_us, 0)


def uneven(num_ranks: int, limit: int | None = None) -> Placement:
    """A split backward whose best order takes some search."""
    chooser = Random(5)
    columns = [[chooser.randint(80, 120) for _ in range(num_ranks)] for _ in range(3)]
    costs = Costs(*columns, activation_bytes=2)
    return place(costs, Cluster.uniform(num_ranks, limit, latency_us=5))


def test_equal_plans_the_one_that_holds_less() -> None:
    """Without a limit GPipe takes as long as 1F1B; the plan found holds no more than 1F1B's."""
    placement = tessel("v", 4)
    result = find_plan(placement, 12, deterministic=True)
    assert result.makespan_us == simulate(one_f_one_b(placement, 12)).makespan_us
    assert max(result.peak_memory_bytes) <= 4


@pytest.mark.parametrize("objective", ["makespan", "span", "period"])
def test_deterministic(objective: str) -> None:
    results = [
        find_plan(uneven(4, 7), 7, objective=objective, time_limit_s=0.3, deterministic=True)  # type: ignore[arg-type]
        for _ in range(2)
    ]
    assert results[0].plan == results[1].plan
    assert results[0].bound_us == results[1].bound_us


def test_period() -> None:
    result = find_plan(tessel("v", 4, 3), 24, objective="period", deterministic=True)
    assert result.period_us == result.value_us == result.bound_us == pytest.approx(16 / 3)
    check(result.plan)


def test_named_schedules_are_told() -> None:
    placement = uneven(4, 8)
    result = find_plan(placement, 8, time_limit_s=0.2, deterministic=True)
    named = {named.name: named for named in result.named}
    timeline = simulate(zb_h1(placement, 8))
    assert (named["zb_h1"].makespan_us, named["zb_h1"].span_us) == (timeline.makespan_us, timeline.span_us)
    assert named["zb_h1"].peak_bytes == max(timeline.peak_memory_bytes)
    assert named["zb_h1"].fits
    assert not named["gpipe"].fits
    assert "gpipe" in result.to_text()
    assert "over the limit" in result.to_text()


def test_progress() -> None:
    reports: list[Progress] = []
    result = find_plan(uneven(4, 7), 8, time_limit_s=0.3, deterministic=True, progress=reports.append)
    assert [p.best for p in reports] == sorted((p.best for p in reports), reverse=True)
    assert reports[-1].best == result.value_us
    assert {"list scheduling", "local search", "steady state"} <= {p.doing for p in reports}
    assert f"gap {reports[-1].gap:.2%}" in str(reports[-1])


def test_inference() -> None:
    placement = interleaved(Costs.uniform(8), Cluster.uniform(4)).forward_only()
    result = find_plan(placement, 16, deterministic=True)
    assert result.is_optimal
    assert result.makespan_us == 2 * 16 + 3


def test_room_for_transfers() -> None:
    """What is sent and received counts: the plan found passes `check`, which order alone would not."""
    costs = Costs.uniform(4, 10, 20, activation_bytes=10, boundary_bytes=6)
    placement = place(costs, Cluster.uniform(4, 45, latency_us=1, bytes_per_us=1))
    with pytest.raises(PlanError, match="would hold"):
        check(one_f_one_b(placement, 8))
    result = find_plan(placement, 8, time_limit_s=0.3, deterministic=True)
    check(result.plan)
