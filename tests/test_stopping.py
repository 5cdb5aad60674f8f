"""Searches that are ended: every part looks often enough, counted in calls and not timed, and nothing is lost."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rota import Cluster, Costs, Placement, check, find_frontier, find_plan, place, wave
from rota.core.stopping import Stopped, look, watched
from rota.schedules import NAMED
from rota.schedules.families import named_plans
from rota.search import Progress, find_repeating
from rota.search.budget import Budget

MOST_CALLS = 60_000  # of Python functions between two looks: some hundredths of a second


class Looks:
    """Counts the calls of functions between two looks; says that it is over from the `last`-th look on."""

    def __init__(self, last: int | None = None) -> None:
        self.last, self.num_looks, self.num_calls, self.most_calls = last, 0, 0, 0

    def __call__(self) -> bool:
        self.num_looks += 1
        self.most_calls, self.num_calls = max(self.most_calls, self.num_calls), 0
        return self.last is not None and self.num_looks >= self.last

    @contextmanager
    def counted(self) -> Iterator[None]:
        def count(frame: object, event: str, argument: object) -> None:
            self.num_calls += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            yield
        finally:
            sys.setprofile(before)


def split_chain(num_ranks: int, limit: int | None = None, boundary: int = 0) -> Placement:
    costs = Costs(
        tuple(90 + 7 * r % 20 for r in range(num_ranks)), 110, 80, activation_bytes=2, boundary_bytes=boundary
    )
    return place(costs, Cluster.uniform(num_ranks, limit, latency_us=5))


def a_v(num_ranks: int) -> Placement:
    return wave(Costs.uniform(2 * num_ranks, 93, 91, 47, activation_bytes=2), Cluster.uniform(num_ranks, latency_us=6))


def test_schedules_that_are_searches_look_often() -> None:
    for name, placement in (("v_half", a_v(4)), ("v_min", a_v(4)), ("hanayo", a_v(4))):
        looks = Looks()
        with watched(looks), looks.counted():
            NAMED[name](placement, 16)
        assert looks.num_looks > 10, name
        assert looks.most_calls < MOST_CALLS, name


@pytest.mark.parametrize("last", [1, 30, 5000])
def test_what_such_a_schedule_found_until_it_is_over_is_its_plan(last: int) -> None:
    looks = Looks(last)
    with watched(looks):
        try:
            plan = NAMED["v_half"](a_v(2), 8)
        except Stopped:
            assert last < 1000  # it had none yet
        else:
            check(plan)
    assert looks.num_looks <= last + 3


def test_one_watch_within_another() -> None:
    outer = Looks(2)
    with watched(outer), watched(lambda: False):
        look()
        with pytest.raises(Stopped):
            look()
    look()  # nobody watches
    assert list(named_plans(split_chain(2), 2, lambda _: None))


@contextmanager
def budgets_watched_by(looks: Looks, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Budgets' looks from the main thread; CP-SAT has its own limits."""
    ask = Budget.must_stop.fget

    def must_stop(self: Budget) -> bool:
        if threading.current_thread() is threading.main_thread() and looks() and self._whole is None:
            self.stopped_by = "a test"
        return bool(ask(self))

    monkeypatch.setattr(Budget, "must_stop", property(must_stop))
    yield


SEARCHES: dict[str, Callable[[], Any]] = {
    "makespan": lambda: find_plan(split_chain(8, 12), 16, time_limit_s=0.2, deterministic=True).plan,
    "span": lambda: find_plan(split_chain(6, 9), 12, objective="span", time_limit_s=0.2, deterministic=True).plan,
    "transfers": lambda: find_plan(split_chain(4, 14, 1), 8, time_limit_s=0.2, deterministic=True).plan,
    "wave": lambda: find_plan(a_v(4), 16, time_limit_s=0.5, deterministic=True).plan,
    "frontier": lambda: find_frontier(split_chain(4), time_limit_s=0.5, deterministic=True).points[-1].limit_bytes,
    "repeating": lambda: find_repeating(split_chain(4, 8), 6, time_limit_s=1.0),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.sweep] * (name in ("span", "frontier"))) for name in SEARCHES]
)
def test_every_part_of_a_search_looks_often(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    SEARCHES[name]()  # most of what it needs is compiled or loaded by now
    for _ in range(2):
        looks = Looks()
        with monkeypatch.context() as patch, budgets_watched_by(looks, patch), looks.counted():
            assert SEARCHES[name]() is not None
        if looks.most_calls < MOST_CALLS:
            return
    raise AssertionError(f"{looks.most_calls:,} calls between two looks")


@pytest.mark.parametrize("last", [30, 200, 1000])
@pytest.mark.parametrize("name", ["makespan", "span", "transfers", "wave"])
def test_a_search_that_is_stopped_anywhere_has_a_plan(name: str, last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    SEARCHES[name]()  # what it needs is compiled by now
    looks = Looks(last)
    with budgets_watched_by(looks, monkeypatch):
        check(SEARCHES[name]())
    assert looks.num_looks < last + 40  # it does not go on


@pytest.mark.parametrize("doing", ["list scheduling", "steady state", "local search", "windows", "holding less"])
def test_ctrl_c_ends_a_search_with_its_best_plan(doing: str) -> None:
    def press(progress: Progress) -> None:
        if progress.doing == doing:
            signal.raise_signal(signal.SIGINT)

    result = find_plan(split_chain(8, 12), 24, time_limit_s=0.3, deterministic=True, progress=press)
    check(result.plan)
    assert result.stopped_by == "Ctrl-C"


def fails(told: object) -> None:
    raise ValueError("the screen is gone")


def test_an_error_of_progress_loses_nothing() -> None:
    with pytest.warns(RuntimeWarning, match="ValueError in progress: the screen is gone"):
        result = find_plan(split_chain(8, 12), 24, time_limit_s=600, progress=fails)
    check(result.plan)
    assert result.was_stopped
    assert "stopped by ValueError in progress: the screen is gone" in result.to_text()
    with pytest.warns(RuntimeWarning, match="the screen is gone"):
        curve = find_frontier(split_chain(4), time_limit_s=600, progress=fails)
    assert curve.points
    assert "stopped by ValueError in progress: the screen is gone" in curve.to_text()


def test_an_error_of_progress_is_raised_where_there_is_nothing_to_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = Budget(10)
    budget.progress_error, budget.stopped_by = ValueError("the screen is gone"), "ValueError in progress"
    monkeypatch.setattr("rota.search.finding.Budget", lambda *_: budget)
    monkeypatch.setattr("rota.search.portfolio.serial", lambda _: None)
    with pytest.raises(ValueError, match="the screen is gone"):
        find_plan(split_chain(4, 8), 8)


def test_a_schedule_by_name_is_never_watched() -> None:
    check(NAMED["v_half"](a_v(2), 8))
