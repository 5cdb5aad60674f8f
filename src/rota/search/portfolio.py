"""The methods of a search, in turn, on one incumbent.

    list scheduling ─▶ named schedules ─▶ steady state ─▶ local search ─▶ exact, if small ─▶ windows ─▶ hold less
                                                ▲                                               │
                                                └─────────────── longer and longer ─────────────┘

Each hands over orders; `Incumbent` keeps the best. The search ends when it meets the proven bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from fractions import Fraction
from itertools import islice, product
from typing import Literal

import numpy as np

from rota.checking import check
from rota.errors import RotaError, SearchError
from rota.placement import Placement
from rota.plan import Plan
from rota.schedules import zb_auto
from rota.schedules.defined import named_plans
from rota.search import bounds, exact
from rota.search.bounds.memory_bounds import period_reason
from rota.search.budget import Budget
from rota.search.dispatching import Dispatcher, Priorities, serial
from rota.search.incumbent import Incumbent
from rota.search.infeasibility import nothing_found, refuse_too_little_memory
from rota.search.local import improving, neighbourhood
from rota.search.local.policies import OPS_A_DISPATCH
from rota.search.periodic.steady_search import SteadyResult, find_steady
from rota.search.priorities import guesses
from rota.search.problem import Orders, Problem, with_more_room
from rota.search.result import NamedPlan, Objective, Progress, SearchResult
from rota.search.timing import fits, peaks, score, start_times
from rota.stopping import Stopped, look, watched

_PATIENCES = (0.0, 1.0)  # of list scheduling: never wait for a better op, or do
_CAPS = (1.0, 0.75, 0.5)  # parts of the memory limit: fewer micro-batches in flight are at times faster
_DISPATCH_SHARE = 0.1  # of the whole budget
_FIRST_SHARE, _GROWTH = 0.03, 1.5  # of the whole budget for a method's first turn; from turn to turn
_EXACT_TIMES = 3  # that share for a proof
_TURN_S = 0.01  # a turn's own, so that turns in which nothing is done come to an end
_AUTO_S_AN_OP = 0.0006  # nominal seconds that zb_auto takes
_HALVINGS = 5
_FEW_OPS, _FEW_GUESSES = 3_000, 4  # on longer steps fewer policies are tried for holding less
_EXACT_OPS = 400  # up to which CP-SAT may prove a whole step
_MOST_ROOMS = 20  # how often the room for what transfers hold is guessed anew

_Measure = Literal["makespan", "span"]
_Improve = Callable[[Problem, Orders, _Measure, int, Budget, int], Orders]


class Portfolio:
    """`run`, then `result`."""

    def __init__(
        self,
        placement: Placement,
        num_microbatches: int,
        objective: Objective,
        budget: Budget,
        seed: int,
        progress: Callable[[Progress], None],
    ) -> None:
        self.problem = Problem(placement, num_microbatches)
        self.roomy = self.problem  # with room for what transfers hold
        self.objective = objective
        self.budget = budget
        self.seed = seed
        self.progress = progress
        self.doing = ""
        self.measure: _Measure = "span" if objective == "span" else "makespan"
        bound = bounds.best(self.problem, self.measure)
        self.bound_us, self.why = bound.us, bound.why
        self.named: list[NamedPlan] = []
        self.steady: SteadyResult | None = None
        self.has_tried_all = False  #: whether no orders are better, of those with each task's micro-batches in order
        self.num_ops = int(self.problem.first_node[-1])
        self.incumbent = Incumbent(self.problem, objective == "span", self.tell)

    @property
    def is_proven(self) -> bool:
        return self.incumbent.key is not None and self.incumbent.value_us <= self.bound_us

    @property
    def is_over(self) -> bool:
        return self.budget.is_over or self.is_proven

    def tell(self) -> None:
        if self.incumbent.key is not None:
            self.progress(Progress(self.doing, self.incumbent.value_us, self.bound_us, self.budget.elapsed_s))

    def turn_to(self, doing: str) -> None:
        self.doing = doing
        self.tell()

    def share(self, part: float) -> Budget:
        return self.budget.share(part * self.budget.seconds)

    def run(self) -> None:
        """Until the best is proven, or the budget over. Raises SearchError if nothing fits."""
        with watched(lambda: self.budget.must_stop), suppress(Stopped):
            self._run()
        if self.incumbent.orders is None or (self.objective == "period" and self.steady is None):
            if self.budget.progress_error is not None:
                raise self.budget.progress_error
            raise self._nothing_found()

    def _run(self) -> None:
        refuse_too_little_memory(self.problem)
        if self.objective == "period":
            self._find_period()
            return
        self.incumbent.offer(serial(self.problem), "one micro-batch at a time")
        self._dispatch(guesses(self.problem))
        self._take_named()
        for method in (self._take_auto, self._take_turns):
            if not self.is_over:
                method()
        if self.incumbent.orders is not None:
            self._hold_less()

    def _nothing_found(self) -> SearchError:
        if self.objective == "period":
            return SearchError(
                "found no steady state that fits; ask for the makespan, which also knows plans without one, or raise "
                "the memory limit"
            )
        held = self.incumbent.peaks_bytes(serial(self.problem)).tolist()
        return nothing_found(self.problem.placement, held, self.budget.elapsed_s, self.has_tried_all)

    # --- methods --------------------------------------------------------------------------------------------------

    def _take_named(self) -> None:
        for name, plan in named_plans(self.problem.placement, self.problem.num_microbatches, self.turn_to):
            self._take_plan(name, plan)

    def _take_plan(self, name: str, plan: Plan) -> None:
        orders = self.problem.to_orders(plan)
        timed = score(self.problem, orders)
        if timed is None:  # it waits in a cycle
            return
        held, limits = self.incumbent.peaks_bytes(orders), self.problem.placement.cluster.limit_bytes
        fits = all(limit is None or peak <= limit for peak, limit in zip(held, limits, strict=True))
        self.named.append(NamedPlan(name, timed.makespan_us, timed.span_us, int(held.max()), fits))
        self.incumbent.offer(orders, name)

    def _take_auto(self) -> None:
        """`zb_auto` is a search itself: it is left out where it would take all of the time."""
        auto_s = _AUTO_S_AN_OP * self.num_ops
        if auto_s > self.budget.left_s:
            return
        self.turn_to("zb_auto")
        try:
            self._take_plan("zb_auto", zb_auto(self.problem.placement, self.problem.num_microbatches))
        except RotaError:
            return  # another placement, or nothing that it knows fits
        self.budget.spend(auto_s)

    def _dispatch(self, all_priorities: Iterable[Priorities], how: str = "list scheduling") -> None:
        """Where transfers hold too much, with ever more room left for them."""
        self.turn_to(how)
        all_priorities, share = list(all_priorities), self.share(_DISPATCH_SHARE)
        for _ in range(_MOST_ROOMS):
            look()
            dispatcher = Dispatcher(self.roomy)
            least, limits = peaks(self.roomy, serial(self.roomy)), self.roomy.limits_bytes
            for cap, priorities, patience in product(_CAPS, all_priorities, _PATIENCES):
                capped = np.minimum(limits, np.maximum(least, (limits * cap).astype(np.int64)))
                look()
                self.incumbent.offer(dispatcher(priorities, patience, capped), how)
                share.spend_ops(OPS_A_DISPATCH * self.num_ops)
                if self.is_proven or share.is_over:
                    break
            if not self._leave_room():
                return

    def _leave_room(self) -> bool:
        """Whether there has to be more of it, as nothing fitted with what its transfers hold."""
        over = self.incumbent.most_over_bytes
        if self.incumbent.orders is not None or not over.any():
            return False
        self.roomy = with_more_room(self.roomy, over)
        self.incumbent.most_over_bytes = np.zeros_like(over)
        return True

    def _find_period(self) -> None:
        """The whole budget for the steady state; its plan is the best that comes of it."""
        self._unroll(1.0, 0)

    def _unroll(self, part: float, turn: int) -> None:
        """The best steady state, from its first micro-batch to its last; and as priorities."""
        if self.steady is not None and self.steady.is_optimal:
            return
        self.turn_to("steady state")
        found = self._find_steady(self.share(part), turn)
        if found is None:
            return
        if self.steady is None or found.steady.us_per_microbatch < self.steady.steady.us_per_microbatch:
            self.steady = found
        flat = found.steady.flat_starts(self.problem.num_microbatches)
        self._dispatch([np.concatenate(flat).astype(np.float64)], "list scheduling by the steady state")

    def _find_steady(self, share: Budget, turn: int) -> SteadyResult | None:
        """Its unrolled plan is a candidate."""
        found = find_steady(
            self.problem.placement,
            share,
            microbatches_per_period=None if turn == 0 else 2 + (turn - 1) % 3,
            seed=self.seed + turn,
            num_microbatches=self.problem.num_microbatches,
        )
        if found is not None:
            orders = self.problem.to_orders(found.steady.unroll(self.problem.num_microbatches))
            self.incumbent.offer(orders, "steady state")
        return found

    def _improve(self, part: float, turn: int) -> None:
        self._better("local search", improving.improve, part, turn)

    def _windows(self, part: float, turn: int) -> None:
        self._better("windows", neighbourhood.improve, part, turn)

    def _better(self, doing: str, improve: _Improve, part: float, turn: int) -> None:
        """With the room for transfers, if the best leaves it."""
        orders = self.incumbent.orders
        if orders is None:
            return
        self.turn_to(doing)
        problem = self.roomy if fits(self.roomy, orders) else self.problem
        share, seed = self.share(part), self.seed + turn
        self.incumbent.offer(improve(problem, orders, self.measure, self.bound_us, share, seed), doing)

    def _prove(self, part: float, turn: int) -> None:
        """The whole step at once, if it is small."""
        if self.num_ops > _EXACT_OPS:
            return
        self.turn_to("exact search")
        share, seed = self.share(_EXACT_TIMES * part), self.seed + turn
        found = exact.solve(self.roomy, self.measure, self.incumbent.orders, self.bound_us, share, seed)
        self.incumbent.offer(found.orders, "exact search")
        if self.roomy is self.problem and found.bound_us > self.bound_us:
            self.bound_us, self.why = found.bound_us, "CP-SAT has tried all orders"
        if self.incumbent.transfers_hold and self.num_ops <= exact.MOST_TIMED_OPS and not self.is_over:
            share = self.share(_EXACT_TIMES * part)
            orders, ended = exact.find_fitting(self.problem, self.measure, self.incumbent.orders, share, seed)
            is_kept = self.incumbent.offer(orders, "exact search")
            self.has_tried_all |= ended and (is_kept or orders is None)

    def _take_turns(self) -> None:
        """Each method with ever larger shares, so that none is waited for long."""
        turn, part = 0, _FIRST_SHARE
        while not self.is_over and not (self.has_tried_all and self.incumbent.orders is None):
            for method in (self._unroll, self._improve, self._prove, self._windows):
                if not self.is_over:
                    method(part, turn)
            self.budget.spend(_TURN_S)
            turn, part = turn + 1, part * _GROWTH

    def _hold_less(self) -> None:
        """The same value with less memory: list scheduling under ever lower limits, for as long as it keeps up."""
        self.turn_to("holding less")
        orders, how = self.incumbent.orders, self.incumbent.how
        assert orders is not None
        dispatcher = Dispatcher(self.roomy)
        starts = start_times(dispatcher.tables, orders)
        assert starts is not None
        most = None if self.num_ops <= _FEW_OPS else _FEW_GUESSES
        all_priorities = [starts.astype(np.float64), *islice(guesses(self.problem), most)]
        low, high = peaks(self.roomy, serial(self.roomy)), peaks(self.problem, orders)
        part, step = 1.0, 0.5
        for _ in range(_HALVINGS):
            if self.budget.is_over:
                return
            part -= step
            limits = np.maximum(low, (high * part).astype(np.int64))
            found = []
            for policy, p in product(all_priorities, _PATIENCES):
                look()
                found.append(dispatcher(policy, p, limits))
            self.budget.spend_ops(OPS_A_DISPATCH * self.num_ops * len(found))
            better = [self.incumbent.offer(orders, how) for orders in found]
            if not any(better):
                part += step
            step /= 2

    # --- what comes of it -----------------------------------------------------------------------------------------

    def result(self) -> SearchResult:
        """Every plan is checked again before it is handed out."""
        assert self.incumbent.orders is not None
        plan = self.problem.to_plan(self.incumbent.orders)
        check(plan)
        value_us, bound_us, why = Fraction(self.incumbent.value_us), Fraction(self.bound_us), self.why
        if self.objective == "period":
            assert self.steady is not None
            value_us, bound_us = self.steady.steady.us_per_microbatch, self.steady.bound_us
            why = period_reason(self.problem.placement)
        return SearchResult(
            plan,
            self.objective,
            value_us,
            bound_us,
            why,
            self.incumbent.how,
            self.steady.steady.us_per_microbatch if self.steady else None,
            tuple(sorted(self.named, key=lambda named: (named.makespan_us, named.name))),
            self.budget.elapsed_s,
            self.budget.stopped_by,
        )
