"""Search orders for the best candidates, instead of their named schedules."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

from rota.core.errors import SearchError
from rota.core.stopping import ended_by_ctrl_c
from rota.core.text import count_text
from rota.planning.candidate import Candidate
from rota.planning.evaluation import SEARCHED, Contender
from rota.planning.layout_bounds import placement_bound_us
from rota.planning.sweep import Sweep, best_of_kinds

_MOST = 3  # finalists
_SHARE, _MOST_S = 0.05, 3.0  # for each: a share of the time limit, in nominal seconds of the search
_COMPILING_S = 15.0
_LEAST_S = 8.0  # left, without which no search is begun: loading it takes seconds, and steps tell more
_WORTH = 0.001  # share of the best time: a smaller gain is not worth a search


def can_search() -> bool:
    """Whether OR-Tools and Numba, which the search needs, are installed."""
    return all(importlib.util.find_spec(module) is not None for module in ("ortools", "numba"))


def search_finalists(sweep: Sweep) -> None:
    """Search for better orders of the best candidates, if the search extra is installed and time is left."""
    if not can_search():
        return
    left_out = "left out for lack of time: better orders than those of named schedules; "
    finalists = _finalists(sweep)
    if finalists and sweep.best is not None and not sweep.deadline.has(_LEAST_S):
        sweep.remarks.append(f"{left_out}give a longer --time-limit")
        return
    for candidate in finalists:
        compiling_s = _compiling_s()
        if not sweep.deadline.has(_seconds(sweep) + compiling_s):
            compiles = f"the first search for them compiles itself, in about {compiling_s:.0f} s"
            sweep.remarks += [f"{left_out}{compiles}: give a longer --time-limit once"] if compiling_s else []
            return
        sweep.take(_searched(sweep, candidate))


def _compiling_s() -> float:
    """Seconds until the search runs: the first one on a machine compiles itself."""
    from rota.search.timing import is_compiled

    return 0.0 if is_compiled() else _COMPILING_S


def _seconds(sweep: Sweep) -> float:
    return min(_SHARE * sweep.deadline.seconds, _MOST_S)


def _finalists(sweep: Sweep) -> list[Candidate]:
    """The fastest candidates that could beat the best plan; if nothing fits, those that nearly do."""
    if sweep.best is None:
        return sweep.almost_fitting[:_MOST]
    within_us = sweep.best.makespan_us * (1 - _WORTH)
    return [plan.candidate for plan in best_of_kinds(sweep.plans) if plan.bound_us < within_us][:_MOST]


def _searched(sweep: Sweep, candidate: Candidate) -> Contender | None:
    """The plan of a search with a fixed amount of work, so that the answer is the same every time."""
    from rota.search.budget import Budget
    from rota.search.portfolio import Portfolio
    from rota.search.problem import Problem

    layout, deadline = candidate.layout, sweep.deadline
    best_us = None if sweep.best is None else sweep.best.makespan_us
    doing = f"searching {count_text(layout.num_ranks, 'rank')} x {layout.num_replicas}"
    deadline.report(doing, sweep.num_plans, best_us, at_once=True)
    budget = Budget(_seconds(sweep), deterministic=True, latest_s=deadline.left_s)
    try:
        with ended_by_ctrl_c(budget):
            problem = Problem(candidate.placement, layout.num_microbatches)
            result = Portfolio(problem, "makespan", budget, lambda _: None).run()
    except SearchError:
        return None  # nothing fits
    deadline.stopped_by = deadline.stopped_by or budget.stopped_by
    deadline.ran_out |= budget.must_stop and not budget.stopped_by
    bound_us = max(int(result.bound_us), placement_bound_us(candidate.placement, layout.num_microbatches))
    return Contender(candidate, SEARCHED, replace(result.plan, usage=candidate.usage), bound_us)
