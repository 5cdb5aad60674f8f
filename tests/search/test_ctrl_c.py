"""Ctrl-C ends a search from any of its phases: with the best plan so far, and after little more work."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.placement import Placement
from rota.core.placing import wave
from rota.core.simulation import check
from rota.search import find_plan, finding, portfolio
from rota.search.budget import Budget

MOST_S = 0.5  # nominal, of work after Ctrl-C


def step(boundary_bytes: int) -> Placement:
    """Uneven, so that nothing is proven soon."""
    times = [93, 80, 95, 90, 71, 99, 104, 88]
    costs = Costs(times, times[::-1], [47] * 8, activation_bytes=2, boundary_bytes=boundary_bytes)
    return wave(costs, Cluster.uniform(4, 12 + 4 * boundary_bytes, latency_us=6))


ANY = ["named_plans", "bounds.best", "refuse_too_little_memory", "Dispatcher.__call__"]
LONG = ["find_steady", "improving.improve", "neighbourhood.improve", "exact.solve"]
FITTING = ["exact.solve", "exact.cpsat.solve", "exact._count_transfers"]


@pytest.mark.parametrize("objective", ["makespan", "span"])
@pytest.mark.parametrize(
    ("phase", "boundary_bytes"),
    [*((phase, 0) for phase in ANY + LONG), *((phase, 1) for phase in ANY + FITTING), ("Portfolio._hold_less", 0)],
)
def test_ctrl_c_in_each_phase(monkeypatch: pytest.MonkeyPatch, phase: str, boundary_bytes: int, objective: str) -> None:
    budgets: list[Budget] = []
    spent_s: list[float] = []

    def budget_of(*args: Any) -> Budget:
        budgets.append(Budget(*args))
        return budgets[0]

    def press() -> None:
        if not spent_s:
            spent_s.append(budgets[0].spent_s)
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(finding, "Budget", budget_of)
    before_call(monkeypatch, phase, press)
    num_microbatches, nominal_s = 4 if boundary_bytes else 8, 5.0
    if phase == "Portfolio._hold_less":
        nominal_s = 0.5
    result = find_plan(
        step(boundary_bytes),
        num_microbatches,
        objective=objective,
        time_limit_s=nominal_s,
        deterministic=True,  # type: ignore[arg-type]
    )
    assert spent_s, "the phase was reached"
    assert result.stopped_by == "Ctrl-C"
    check(result.plan)
    assert budgets[0].spent_s - spent_s[0] <= MOST_S


def before_call(monkeypatch: pytest.MonkeyPatch, path: str, hook: Callable[[], None]) -> None:
    """Calls `hook` before each call of a function that the portfolio uses."""
    *places, name = path.split(".")
    owner: Any = portfolio
    for place in places:
        owner = getattr(owner, place)
    original = getattr(owner, name)

    def hooked(*args: Any, **options: Any) -> Any:
        hook()
        return original(*args, **options)

    monkeypatch.setattr(owner, name, hooked)
