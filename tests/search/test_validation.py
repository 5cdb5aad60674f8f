"""What a search is asked for: refused in one line, with value and remedy, before anything is searched."""

from fractions import Fraction
from typing import Any

import pytest

from rota import Cluster, Costs, Kind, Op, Placement, Plan, SearchError, Task, check, find_plan, place, simulate
from rota.schedules import one_f_one_b
from rota.search import bounds_of, validation
from rota.search.bounds.memory_bounds import period_bound

CHAIN = place(Costs.uniform(2), Cluster.uniform(2))
PLAN = one_f_one_b(CHAIN, 2)


@pytest.mark.parametrize("value", [2.5, "8", True, None, 0, -1, 10**9])
@pytest.mark.parametrize("function", [find_plan, bounds_of])
def test_num_microbatches(function: Any, value: object) -> None:
    with pytest.raises(SearchError, match=f"num_microbatches is {value!r}.*(at least 1, a whole number|use fewer)"):
        function(CHAIN, value)


@pytest.mark.parametrize("value", [Costs.uniform(2), PLAN, simulate(PLAN), None])
def test_placement(value: Any) -> None:
    told = rf"of type {type(value).__name__}, no Placement; give one, .*rota\.place .*plan's \.placement"
    for function in (find_plan, bounds_of):
        with pytest.raises(SearchError, match=f"placement is {told}"):
            function(value, 2)
    with pytest.raises(SearchError, match=f"placement is {told}"):
        validation.refuse_wrong_curve(value, 1)


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        ("time_limit_s", ["3", None, True, 0, -1.5, float("nan")], "more than 0 seconds, as a number"),
        ("objective", ["speed"], "use one of makespan, span, period"),
        ("progress", ["loud", 3], "give a function, such as print, or None"),
    ],
)
def test_options(name: str, values: list[Any], told: str) -> None:
    for value in values:
        with pytest.raises(SearchError, match=f"{name} is .*{told}") as error:
            find_plan(CHAIN, 2, **{name: value})
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("size", [10**18, 10**19, 10**400])
@pytest.mark.parametrize(
    ("costs", "cluster", "told"),
    [
        ({"forward_us": 1}, {}, r"durations are too large .*2 ranks x 4 micro-batches could take up to .* µs"),
        ({"optimizer_us": 1}, {}, "durations are too large"),
        ({"activation_bytes": 1}, {}, "sizes are too large .*4 micro-batches on rank 0 could .* bytes"),
        ({"forward_peak_bytes": 1}, {}, "sizes are too large"),
        ({"static_bytes": 1}, {}, "sizes are too large"),
        ({"boundary_bytes": 1}, {}, "sizes are too large"),
        ({}, {"latency_us": 1}, "durations are too large"),
        ({}, {"limit_bytes": 1}, "the limit of rank 0 is too large .* leave it out"),
    ],
)
def test_numbers_that_are_too_large(costs: dict[str, int], cluster: dict[str, int], told: str, size: int) -> None:
    scaled = Costs.uniform(2, **{name: size * value for name, value in costs.items()})
    placement = place(scaled, Cluster.uniform(2, **{name: size * value for name, value in cluster.items()}))
    for function in (find_plan, bounds_of):
        with pytest.raises(SearchError, match=told) as error:
            function(placement, 4)
        assert len(str(error.value)) < 200


def test_the_largest_numbers_that_are_searched() -> None:
    """As small ones are; bounds may lose what floats are off, to the safe side."""
    unit = 10**13
    costs = Costs.uniform(4, unit, 3 * unit, activation_bytes=unit, forward_peak_bytes=unit)
    small = place(Costs.uniform(4, 1, 3, forward_peak_bytes=1), Cluster.uniform(4, 3))
    large = place(costs, Cluster.uniform(4, 3 * unit))
    best = [bounds_of(placement, 12)[0].us for placement in (small, large)]
    assert best[0] * (1 - 1e-9) <= best[1] / unit <= best[0]
    assert period_bound(large) == unit * period_bound(small)
    for objective in ("makespan", "period"):
        results = [
            find_plan(placement, 12, objective=objective, time_limit_s=0.2, deterministic=True)  # type: ignore[arg-type]
            for placement in (small, large)
        ]
        check(results[1].plan)
        assert results[1].bound_us <= unit * results[0].bound_us
        assert results[0].bound_us <= results[1].value_us / unit < 2 * results[0].value_us


def test_all_ranks_without_enough_memory_are_told() -> None:
    costs = Costs(forward_us=(1, 1, 1), backward_us=(1, 1, 1), activation_bytes=(10, 5, 30), static_bytes=(100, 0, 100))
    told = (
        r"rank 0 needs at least 110 bytes \(110 B; 100 B of them static\) for 0F of a single micro-batch, over its "
        r"limit of 50; also rank 2 \(130 bytes\); raise the limits to these, or all to 130, give such ranks fewer"
    )
    with pytest.raises(SearchError, match=told):
        find_plan(place(costs, Cluster.uniform(3, 50)), 4)


def test_what_is_left_behind_is_no_optimizer() -> None:
    placement = Placement((Task(0, Kind.F, (0,), 1, 2),), (), Cluster.uniform(1, 9))
    with pytest.raises(SearchError, match=r"rank 0 needs at least 10 bytes .* leave behind: 10 bytes that no op frees"):
        find_plan(placement, 5)
    roomy = Placement((Task(0, Kind.F, (0,), 1, 2),), (), Cluster.uniform(1, 10))
    assert find_plan(roomy, 5).plan == Plan(roomy, 5, (tuple(Op(0, Kind.F, m) for m in range(5)),))
    assert find_plan(roomy, 5).value_us == Fraction(5)
