"""Loops are compiled part by part beside the search, which meanwhile has named schedules."""

from __future__ import annotations

import sys

import pytest
from numba.core import errors
from numba.core.registry import CPUDispatcher

from rota.core.checking import check
from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.placement import Placement
from rota.core.placing import place, wave
from rota.core.simulation import simulate
from rota.core.stopping import Stopped
from rota.schedules.families import named_plans
from rota.search import SearchResult, compiling, find_plan


def tight(boundary_bytes: int = 0) -> Placement:
    costs = Costs(
        [93, 80, 95, 90] * 2, [91, 97, 70, 88] * 2, [47] * 8, activation_bytes=2, boundary_bytes=boundary_bytes
    )
    return wave(costs, Cluster.uniform(4, 12 + 4 * boundary_bytes, latency_us=6))


def loops() -> list[CPUDispatcher]:
    modules = [module for name, module in sorted(sys.modules.items()) if name.startswith("rota.search.")]
    return [value for module in modules for value in vars(module).values() if isinstance(value, CPUDispatcher)]


def test_searches_compile_nothing_but_the_parts() -> None:
    """Else they would wait for it, and end late."""
    compiling.wait_for(*compiling.Part)
    before = [(loop.py_func.__qualname__, len(loop.signatures)) for loop in loops()]
    assert len(before) > 30
    no_limits = place(Costs([3, 1, 4], [2, 2, 5]), Cluster.uniform(3))
    for placement in (tight(), tight(1), no_limits):
        for objective in ("makespan", "span", "period"):
            find_plan(placement, 6, objective=objective, time_limit_s=0.3, deterministic=True)  # type: ignore[arg-type]
    assert [(loop.py_func.__qualname__, len(loop.signatures)) for loop in loops()] == before


@pytest.mark.parametrize("objective", ["makespan", "span"])
@pytest.mark.parametrize("boundary_bytes", [0, 1])
def test_no_worse_than_named_schedules_while_compiling(
    monkeypatch: pytest.MonkeyPatch, objective: str, boundary_bytes: int
) -> None:
    placement = tight(boundary_bytes)
    result = find_while_compiling(monkeypatch, placement, 8, objective)
    check(result.plan)
    plans = dict(named_plans(placement, 8, lambda _: None))
    timelines = {name: simulate(plan) for name, plan in plans.items()}
    fitting = {
        name: getattr(timeline, f"{objective}_us")
        for name, timeline in timelines.items()
        if all(
            limit is None or peak <= limit
            for peak, limit in zip(timeline.peak_memory_bytes, placement.cluster.limit_bytes, strict=True)
        )
    }
    assert result.value_us == min(fitting.values()) >= result.bound_us > 0
    assert result.how in fitting
    assert {named.name for named in result.named} == set(plans)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_micro_batches_that_differ_are_planned_no_worse_without_time(
    monkeypatch: pytest.MonkeyPatch, is_compiled: bool
) -> None:
    """The first of their two searches may use up the time, such as by compiling."""
    cluster = Cluster.uniform(2, latency_us=1)
    placements = [place(Costs([us, 2 * us], [2 * us, us]), cluster) for us in (3, 10)]
    placement = Placement.of_classes(placements, [0, 1, 0, 1, 1, 0])
    best_us = min(simulate(plan).makespan_us for _, plan in named_plans(placement, 6, lambda _: None))
    if is_compiled:
        compiling.wait_for(*compiling.Part)
        result = find_plan(placement, 6, time_limit_s=1e-6)
    else:
        result = find_while_compiling(monkeypatch, placement, 6, "makespan")
    assert result.makespan_us <= best_us


def find_while_compiling(
    monkeypatch: pytest.MonkeyPatch, placement: Placement, num_microbatches: int, objective: str
) -> SearchResult:
    """A search whose time is up before anything is compiled."""

    def wait_for(*_: compiling.Part, most_s: float | None = None) -> bool:
        if most_s is None:
            raise Stopped
        return False

    monkeypatch.setattr(compiling, "wait_for", wait_for)
    return find_plan(placement, num_microbatches, objective=objective, time_limit_s=600)  # type: ignore[arg-type]


def test_an_error_while_compiling_does_not_hold_a_search_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compiling._EXERCISES, compiling.Part.TIMING, lambda: 1 / 0)
    assert compiling._Compiler().wait_for(compiling.Part.TIMING)


def test_numba_leaves_the_output_alone() -> None:
    """Coloured errors set sys.stdout and set it back, in the thread that compiles, whatever others set meanwhile."""
    assert not hasattr(errors, "ColorShell")
