"""Tries all layouts, those with the lowest bounds first, until no bound left is below the best plan's time.

Then it searches orders for the best candidates, instead of their named schedules.

layouts, by bound ─▶ cuts, backward whole or split ─▶ candidates, by bound ─▶ named schedules ─▶ the best plans
        │                          │                        │
        └── cannot be faster       └── does not fit         └── cannot be faster
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import chain, count
from operator import attrgetter, itemgetter
from typing import final

from rota.core.errors import PlacementError, SearchError
from rota.core.stopping import Stopped, ended_by_ctrl_c, look
from rota.core.text import count_text
from rota.planning import evaluation
from rota.planning.choosing import SEARCHED, Contender
from rota.planning.evaluation import ANY_ORDER, Misfit, families, seconds_of
from rota.planning.layout_bounds import layout_bound_us, placement_bound_us
from rota.planning.layouts import Candidate, Layout, cuts, layouts
from rota.planning.request import Deadline, Request
from rota.schedules import Family

_KEPT = 96  # variants, those with the best plans
_ALIKE = 16  # plans of a variant
_CLOSEST = 6  # plans that nearly fit, to search for orders that fit

_RESERVED = 0.3  # of the time, for the search of the finalists' orders
_NUM_FINALISTS = 3
_SHARE, _MOST_S = 0.05, 3.0  # for each finalist: a share of the time limit, in nominal seconds of the search
_COMPILING_S = 15.0
_LEAST_S = 8.0  # left, without which no search is begun: loading it takes seconds, and steps tell more
_WORTH = 0.001  # share of the best time: a smaller gain is not worth a search

_OTHERS = 5  # numbers of ranks and replicas to compare the best with
_OTHERS_TRIED = 200

Heap = list[tuple[int, int, Layout | Candidate]]  # bound, a number that decides ties, what it is a bound of
Kind = tuple[int, int, str, bool]
Variant = tuple[Kind, int, int, bool, bool]


@final
class Sweep:
    """Tries layouts: call `run`, then read the attributes. Deterministic unless the deadline ends it."""

    def __init__(self, request: Request, deadline: Deadline) -> None:
        self.request = request
        self.deadline = deadline
        #: The plans of each variant that are as fast as its fastest, which is the first; only the best variants.
        self.kept: dict[Variant, list[Contender]] = {}
        self.remarks: list[str] = []  # for the user
        self.num_layouts = self.num_pruned = self.num_misfits = self.num_left = self.num_plans = 0
        #: A lower bound on every layout's step.
        self.bound_us = 0
        self._numbers = count()
        self._slow: list[tuple[int, Candidate, Family]] = []  # with their bounds
        self._fitting: set[Layout] = set()
        self._over: set[Layout] = set()
        self._closest: list[Misfit] = []
        self._reserve_s = _RESERVED * deadline.seconds

    @property
    def best(self) -> Contender | None:
        """The best plan found so far; None before the first one that fits."""
        return min((plans[0] for plans in self.kept.values()), key=lambda plan: plan.key, default=None)

    @property
    def plans(self) -> list[Contender]:
        """All plans that were kept."""
        return [plan for plans in self.kept.values() for plan in plans]

    @property
    def worst_us(self) -> float:
        """The time that a plan has to beat: slower ones may be as fast as the best, for all that is known."""
        return math.inf if self.best is None else self.best.makespan_us * (1 + self.request.tolerance)

    def run(self) -> None:
        """Try the layouts, those with the lowest bounds first, until none can beat the best plan or the time is up."""
        heap: Heap = []
        for layout in chain.from_iterable(layouts(self.request, rows) for rows in self.request.profiles):
            if not self.deadline.has(0.0):
                break
            heap.append((layout_bound_us(self.request, layout), next(self._numbers), layout))
        heapify(heap)
        self.bound_us = heap[0][0] if heap else 0
        self.num_layouts = len(heap)
        while heap and heap[0][0] < self.worst_us and self.deadline.has(self._reserve_s):
            self._look_at(heap, self.worst_us)
        left = sum(isinstance(item, Layout) for *_, item in heap)
        self.num_pruned = left if heap and heap[0][0] >= self.worst_us else 0
        self.num_left = left - self.num_pruned
        self._try_slow()
        self.num_misfits = len(self._over - self._fitting)
        self._others(heap)

    def _look_at(self, heap: Heap, worst_us: float) -> None:
        bound_us, _, item = heappop(heap)
        if isinstance(item, Layout):
            for candidate_us, candidate in self._candidates(item, bound_us, worst_us):
                heappush(heap, (candidate_us, next(self._numbers), candidate))
        else:
            self._try_families(item, bound_us, worst_us)

    def _others(self, heap: Heap) -> None:
        """Find plans to compare the best with: the most promising on other numbers of ranks."""
        compared = {kind[:2] for kind, *_ in self.kept}
        if self.best is None:
            return
        for bound_us, number, item in sorted(heap, key=lambda entry: entry[:2])[:_OTHERS_TRIED]:
            layout = item if isinstance(item, Layout) else item.layout
            if len(compared) >= _OTHERS or not self.deadline.left_s > self._reserve_s:
                return
            if layout.division in compared:
                continue
            alone = [(bound_us, number, item)]
            while alone:
                self._look_at(alone, math.inf)
            compared = {kind[:2] for kind, *_ in self.kept}

    def _candidates(self, layout: Layout, bound_us: int, worst_us: float) -> Iterator[tuple[int, Candidate]]:
        """The layout's candidates with their bounds, without those that cannot fit or cannot be faster."""
        ranks, rows = count_text(layout.num_ranks, "rank"), count_text(layout.rows, "row")
        self._report(f"{ranks} x {layout.num_replicas}, {rows}, {layout.shape}")
        layers = self.request.profiles[layout.rows]
        for boundaries in cuts(layers, layout, self.request.machine):
            if self.deadline.left_s <= 0:
                break
            whole = Candidate(self.request, layout, boundaries, recomputed=frozenset(layout.recomputed))
            for candidate in evaluation.whole_and_split(whole):
                try:
                    over = evaluation.misfit(candidate)
                except PlacementError:  # the shape does not suit these stages
                    continue
                if over is not None:
                    self._over.add(layout)
                    self._remember(over)
                    continue
                us = max(bound_us, placement_bound_us(candidate.placement, layout.num_microbatches))
                if us < worst_us:
                    yield us, candidate

    def _remember(self, over: Misfit) -> None:
        self._closest = sorted([*self._closest, over], key=attrgetter("over_bytes"))[:_CLOSEST]

    def _try_families(self, candidate: Candidate, bound_us: int, worst_us: float) -> None:
        for family in families(candidate.layout, self.request.choices.inference):
            if (family.backward == "split") != candidate.splits_backward:
                continue
            if seconds_of(family, candidate):
                self._slow.append((bound_us, candidate, family))
            else:
                self.take(self._evaluated(candidate, family, worst_us))

    def _try_slow(self) -> None:
        """Try the schedules that are searches themselves, where they can still win."""
        for bound_us, candidate, family in sorted(self._slow, key=itemgetter(0)):
            if bound_us < self.worst_us and self.deadline.has(self._reserve_s + seconds_of(family, candidate)):
                self._report(family.name)
                self.take(self._evaluated(candidate, family, self.worst_us))

    def _evaluated(self, candidate: Candidate, family: Family, worst_us: float) -> Contender | Misfit | None:
        """The result of `evaluate`; also None if the time is over before that."""
        try:
            look()
            return evaluation.evaluate(candidate, family, worst_us)
        except Stopped:
            self.deadline.ran_out = True
            return None

    def take(self, result: Contender | Misfit | None) -> None:
        """Keep a plan if it is as fast as the fastest of its variant; remember what does not fit."""
        self.num_plans += result is not None
        if isinstance(result, Misfit):
            self._over.add(result.candidate.layout)
            self._remember(result)
        elif result is not None:
            self._fitting.add(result.candidate.layout)
            variant, before = variant_of(result), self.best
            plans = sorted([*self.kept.get(variant, ()), result], key=lambda plan: plan.key)
            most_us = plans[0].makespan_us * (1 + self.request.tolerance)
            # Slower plans of a variant are never recommended; one as fast may need less memory.
            self.kept[variant] = [plan for plan in plans if plan.makespan_us <= most_us][:_ALIKE]
            if len(self.kept) > _KEPT:
                del self.kept[max(self.kept, key=lambda variant: self.kept[variant][0].key)]
            if before is None or result.makespan_us < before.makespan_us:
                self._report(result.schedule, at_once=True)

    @property
    def almost_fitting(self) -> list[Candidate]:
        """Candidates that no named schedule fits, though another order might."""
        return [over.candidate for over in self._closest if over.schedule != ANY_ORDER]

    def closest(self) -> Misfit | None:
        """The plan that is least over the limits, whatever the bounds say; for when nothing fits."""
        misfits: list[Misfit] = []
        for over in self._closest:
            candidates = [over.candidate]
            if over.candidate.layout.recompute == "none" and self.request.may_recompute:
                candidates.append(over.candidate.recomputing(range(over.candidate.layout.num_stages)))
            for candidate in candidates:
                for family in families(candidate.layout, self.request.choices.inference):
                    if self.deadline.left_s > seconds_of(family, candidate):
                        result = self._evaluated(candidate, family, 0)
                        misfits += [result] if isinstance(result, Misfit) else []
        return min(misfits, key=attrgetter("over_bytes"), default=None)

    def _report(self, doing: str, at_once: bool = False) -> None:
        best = self.best
        self.deadline.report(doing, self.num_plans, None if best is None else best.makespan_us, at_once)


def kind_of(plan: Contender) -> Kind:
    """Ranks, replicas, shape, and whether anything is recomputed: plans alike in these are variants of one."""
    layout = plan.candidate.layout
    return *layout.division, layout.shape, bool(plan.candidate.recomputed)


def variant_of(plan: Contender) -> Variant:
    """What makes one plan simpler than another: its kind, stages per rank, rows, split backward, a searched order."""
    layout, is_searched = plan.candidate.layout, plan.schedule == SEARCHED
    return kind_of(plan), layout.stages_per_rank, layout.rows, plan.candidate.splits_backward, is_searched


def best_of_kinds(plans: Iterable[Contender]) -> list[Contender]:
    """The fastest plan of each kind, fastest first."""
    best: dict[Kind, Contender] = {}
    for plan in sorted(plans, key=lambda plan: plan.key):
        best.setdefault(kind_of(plan), plan)
    return list(best.values())


# --- searched orders of the finalists ---------------------------------------------------------------------------------


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
        return sweep.almost_fitting[:_NUM_FINALISTS]
    within_us = sweep.best.makespan_us * (1 - _WORTH)
    return [plan.candidate for plan in best_of_kinds(sweep.plans) if plan.bound_us < within_us][:_NUM_FINALISTS]


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
