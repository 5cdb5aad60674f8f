"""One search: several methods take turns, the best plan is kept, and a proven bound says how good it is.

    list scheduling ─▶ named schedules ─▶ steady state ─▶ local search ─▶ exact, if small ─▶ windows ─▶ hold less
                                                ▲                                               │
                                                └─────────────── longer and longer ─────────────┘

Each method hands over orders, and `Incumbent` keeps the best. The search ends when the best is at the proven bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from fractions import Fraction
from functools import partial
from itertools import islice, product
from typing import Literal, NamedTuple

import numpy as np

from rota.checking import check
from rota.errors import PlanError, RotaError, SearchError
from rota.placement import Placement
from rota.plan import Plan
from rota.schedules import zb_auto
from rota.schedules.families import named_plans
from rota.search import bounds, exact
from rota.search.bounds.memory_bounds import period_reason, refuse_too_little_memory
from rota.search.budget import Budget
from rota.search.dispatching import OPS_PER_DISPATCH, Dispatcher, Priorities, guesses, serial
from rota.search.exact import longest_us
from rota.search.local import fitting, improving, neighbourhood
from rota.search.local.policies import Climb
from rota.search.periodic.from_plan import steady_within
from rota.search.periodic.steady import SteadyResult, find_steady
from rota.search.problem import NO_LIMIT, Integers, Orders, Problem, reserving
from rota.search.result import NamedPlan, Objective, Progress, SearchResult
from rota.search.timing import Score, Tables, fits, peaks, score, start_times
from rota.search.transfer_levels import Transfers, counting_transfers, peaks_with_transfers
from rota.stopping import Stopped, look, watched
from rota.units import size_text

_PATIENCES = (0.0, 1.0)  # of list scheduling: never wait for a better op, or do
_CAPS = (1.0, 0.75, 0.5)  # parts of the memory limit: fewer micro-batches in flight are sometimes faster
_DISPATCH_SHARE = 0.1  # of the whole budget
_FIRST_SHARE, _GROWTH = 0.03, 1.5  # of the whole budget for a method's first turn, and its growth from turn to turn
_FIRST_SHARE_OF_FITTING = 0.15  # the same for small steps whose transfers hold memory
_EXACT_TIMES_OF_FITTING = 4  # times that share for CP-SAT, which gains nothing from being asked twice
_EXACT_TIMES = 3  # times that share for a proof
_TURN_S = 0.01  # nominal cost of a turn itself, so that idle turns use up the budget
_AUTO_S_PER_OP = 0.0006  # nominal seconds that zb_auto costs per op
_MOST_STEADY_TASKS = 200  # up to here the middle of a plan is tried as a steady state
_WITHIN_S_PER_TASK = 0.01  # nominal seconds that this costs
_CHECK_S_PER_OP = 8e-6  # real seconds to make and check the plan in the end
_HALVINGS = 5
_FEW_OPS, _FEW_GUESSES = 3_000, 4  # in longer steps fewer priorities are tried for holding less
_EXACT_OPS = 400  # up to here CP-SAT may prove a whole step
_MOST_RESERVES = 20  # how often to guess the memory reserved for transfers

_Measure = Literal["makespan", "span"]
_Improve = Callable[[Problem, Orders, _Measure, int, Budget, int], Orders]


class Portfolio:
    """One search: `run`, then `result`.

    `given` are plans to begin with, where the problem is no step of a model as such: then named schedules and steady
    states, which need many micro-batches that are alike, are left out.
    """

    def __init__(
        self,
        problem: Problem,
        objective: Objective,
        budget: Budget,
        seed: int,
        progress: Callable[[Progress], None],
        given: Iterable[tuple[str, Plan]] | None = None,
    ) -> None:
        self.problem, self.given = problem, given
        #: The same, with what ops read and send in their peaks, and with memory reserved for other transfers.
        self.with_reserve = self.counted = counting_transfers(self.problem)
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
        self.climb: Climb | None = None  # goes on from turn to turn
        self.has_tried_all = (
            False  #: whether all orders with each task's micro-batches in sequence are ruled out as better
        )
        self.has_tried_waits = False  #: the same where ops may also wait, for the bound
        self.none_fits = False  #: whether it is proven that no plan fits
        self.num_ops = int(self.problem.first_node[-1])
        self.budget.reserve(_CHECK_S_PER_OP * self.num_ops)
        self.incumbent = Incumbent(self.problem, objective == "span", self.report)

    @property
    def is_proven(self) -> bool:
        """Whether the best plan so far reaches the lower bound."""
        return self.incumbent.key is not None and self.incumbent.value_us <= self.bound_us

    @property
    def is_over(self) -> bool:
        """Whether the budget is used up or the best plan is proven."""
        return self.budget.is_over or self.is_proven

    def report(self) -> None:
        """Calls `progress`, if there is a plan."""
        if self.incumbent.key is not None:
            self.progress(Progress(self.doing, self.incumbent.value_us, self.bound_us, self.budget.elapsed_s))

    def turn_to(self, doing: str) -> None:
        """Report progress under a new name of what is being done."""
        self.doing = doing
        self.report()

    def share(self, part: float) -> Budget:
        """A share of the budget: `part` (0 to 1) of its nominal seconds."""
        return self.budget.share(part * self.budget.seconds)

    def run(self) -> None:
        """Searches until the best is proven or the budget is used up. Raises SearchError if nothing fits."""
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
        for method in (self._take_turns,) if self.given is not None else (self._take_auto, self._take_turns):
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
        orders = serial(self.problem)
        held, over = self.incumbent.peaks_bytes(orders).tolist(), self.incumbent.over_bytes(orders)
        raised = ", ".join(
            f"of rank {rank} to {held[rank]} bytes ({size_text(held[rank])})" for rank in np.flatnonzero(over)
        )
        found, longer = "found no order that fits", "give the search more time, "
        if self.has_tried_all:
            found, longer = "no order with each task's micro-batches in turn fits", ""
        if self.none_fits:
            found, longer = "no order fits, even if ops wait on purpose", ""
        return SearchError(
            f"{found}, in {self.budget.elapsed_s:.1f} s: {longer}raise the limit {raised}, in which one micro-batch at "
            f"a time fits, or make micro-batches smaller"
        )

    # --- methods --------------------------------------------------------------------------------------------------

    def _take_named(self) -> None:
        given = self.given
        if given is None:
            given = named_plans(self.problem.given, self.problem.num_microbatches, self.turn_to)
        for name, plan in given:
            self._take_plan(name, plan)

    def _take_plan(self, name: str, plan: Plan) -> None:
        try:
            orders = self.problem.to_orders(plan)
        except PlanError:  # it waits in a cycle
            return
        timed = score(self.problem, orders)
        if timed is None:  # also a cycle
            return
        held, limits = self.incumbent.peaks_bytes(orders), self.problem.placement.cluster.limit_bytes
        fits = all(limit is None or peak <= limit for peak, limit in zip(held, limits, strict=True))
        self.named.append(NamedPlan(name, timed.makespan_us, timed.span_us, int(held.max()), fits))
        self.incumbent.offer(orders, name)

    def _take_auto(self) -> None:
        """`zb_auto` is a search itself: it is left out where it would use up the time."""
        auto_s = _AUTO_S_PER_OP * self.num_ops
        if auto_s > self.budget.left_s:
            return
        self.turn_to("zb_auto")
        try:
            self._take_plan("zb_auto", zb_auto(self.problem.given, self.problem.num_microbatches))
        except RotaError:
            return  # another placement, or nothing that it knows fits
        self.budget.spend(auto_s)

    def _dispatch(self, all_priorities: Iterable[Priorities], how: str = "list scheduling") -> None:
        """Tries list scheduling; where transfers hold too much, again with more memory reserved for them."""
        self.turn_to(how)
        all_priorities, share = list(all_priorities), self.share(_DISPATCH_SHARE)
        for _ in range(_MOST_RESERVES):
            look()
            dispatcher = Dispatcher(self.with_reserve)
            least, limits = peaks(self.with_reserve, serial(self.with_reserve)), self.with_reserve.limits_bytes
            for cap, priorities, patience in product(_CAPS, all_priorities, _PATIENCES):
                capped = np.minimum(limits, np.maximum(least, (limits * cap).astype(np.int64)))
                look()
                self.incumbent.offer(dispatcher(priorities, patience, capped), how)
                share.spend_ops(OPS_PER_DISPATCH * self.num_ops)
                if self.is_proven or share.is_over:
                    break
            if not self._reserve_more():
                return

    def _reserve_more(self) -> bool:
        """Reserves more if nothing fitted because of what transfers hold; whether it did."""
        over = self.incumbent.most_over_bytes
        if self.incumbent.orders is not None or not over.any():
            return False
        self.with_reserve = reserving(self.with_reserve, over)
        self.incumbent.most_over_bytes = np.zeros_like(over)
        return True

    def _find_period(self) -> None:
        """Spends the whole budget on the steady state, which the plan then follows."""
        self._unroll(1.0, 0)

    def _unroll(self, part: float, turn: int) -> None:
        """Tries the best steady state, unrolled, and as priorities of list scheduling."""
        if self.steady is not None and self.steady.is_optimal:
            return
        self.turn_to("steady state")
        found = self._find_steady(self.share(part), turn)
        within = self._steady_within()
        if within is not None and (found is None or within.steady.us_per_microbatch < found.steady.us_per_microbatch):
            found = within
            self._offer_unrolled(found)
        if found is None:
            return
        if self.steady is None or found.steady.us_per_microbatch < self.steady.steady.us_per_microbatch:
            self.steady = found
        flat = found.steady.flat_starts(self.problem.num_microbatches)
        self._dispatch([np.concatenate(flat).astype(np.float64)], "list scheduling by the steady state")

    def _find_steady(self, share: Budget, turn: int) -> SteadyResult | None:
        """Looks for a steady state, and offers its unrolled plan."""
        found = find_steady(
            self.problem.given,
            share,
            microbatches_per_period=None if turn == 0 else 2 + (turn - 1) % 3,
            seed=self.seed + turn,
            num_microbatches=self.problem.num_microbatches,
        )
        if found is not None:
            self._offer_unrolled(found)
        return found

    def _offer_unrolled(self, found: SteadyResult) -> None:
        orders = self.problem.to_orders(found.steady.unroll(self.problem.num_microbatches))
        self.incumbent.offer(orders, "steady state")

    def _steady_within(self) -> SteadyResult | None:
        """The steady state in the middle of the best plan so far."""
        orders = self.incumbent.orders
        if orders is None or len(self.problem.placement.tasks) > _MOST_STEADY_TASKS:
            return None
        starts = start_times(Tables.of(self.problem), orders)
        assert starts is not None
        found = steady_within(self.problem, starts)
        self.budget.spend(_WITHIN_S_PER_TASK * len(self.problem.placement.tasks))
        return found

    def _improve(self, part: float, turn: int) -> None:
        orders = self.incumbent.orders
        if orders is None:
            return
        problem = self.with_reserve if fits(self.with_reserve, orders) else self.problem
        if self.climb is None or self.climb.problem is not problem:
            self.climb = Climb(problem, self.measure == "span", self.seed)
        self._better("local search", partial(improving.improve, climb=self.climb), part, turn)

    def _windows(self, part: float, turn: int) -> None:
        self._better("windows", neighbourhood.improve, part, turn)

    def _better(self, doing: str, improve: _Improve, part: float, turn: int) -> None:
        """Improve the best plan, keeping the transfer reserve if that plan already does."""
        orders = self.incumbent.orders
        if orders is None:
            return
        self.turn_to(doing)
        problem = self.with_reserve if fits(self.with_reserve, orders) else self.problem
        share, seed = self.share(part), self.seed + turn
        self.incumbent.offer(improve(problem, orders, self.measure, self.bound_us, share, seed), doing)

    def _fit(self, part: float, turn: int) -> None:
        """Local search through orders that do not fit."""
        self.turn_to("local search with transfers")
        best, starts = self.incumbent.orders, [serial(self.counted)]
        best_us = NO_LIMIT if best is None else self.incumbent.value_us
        if best is not None:
            starts.insert(0, best)
        share, seed, is_span = self.share(part), self.seed + turn, self.incumbent.of_span

        def offer(orders: Orders) -> bool:
            return self.incumbent.offer(orders, self.doing)

        fitting.find_fitting(self.problem, starts, is_span, best_us, self.bound_us, share, seed, offer)

    def _fit_exactly(self, part: float, turn: int) -> None:
        """Searches the whole step at once with all that transfers hold, if it is small."""
        self.turn_to("exact search")
        found = self._solve_with_transfers(part, turn, may_wait=False)
        is_kept = self.incumbent.offer(found.orders, "exact search")
        self.has_tried_all |= found.is_complete and (is_kept or found.orders is None)

    def _bound_with_waits(self, part: float, turn: int) -> None:
        """Raises the bound by a search in which ops may also wait; this can prove that no plan fits."""
        self.turn_to("exact search")
        had_none = self.incumbent.orders is None
        found = self._solve_with_transfers(part, turn, may_wait=True)
        self.incumbent.offer(found.orders, "exact search")
        self.none_fits |= had_none and found.bound_us > longest_us(self.problem)
        self.has_tried_waits |= found.is_complete
        if found.bound_us > self.bound_us and not self.none_fits:
            self.bound_us, self.why = found.bound_us, "CP-SAT has tried all orders, and all waits"

    def _solve_with_transfers(self, part: float, turn: int, *, may_wait: bool) -> exact.Exact:
        best, seed = self.incumbent.orders, self.seed + turn
        # Where nothing is known that fits, finding anything comes first.
        is_urgent = best is None and not may_wait
        share = self.budget.share(self.budget.left_s) if is_urgent else self.share(_EXACT_TIMES_OF_FITTING * part)
        return exact.solve_with_transfers(
            self.problem, self.measure, best, self.bound_us, share, seed, may_wait=may_wait
        )

    def _prove(self, part: float, turn: int) -> None:
        """Searches the whole step at once, if it is small."""
        if self.num_ops > _EXACT_OPS:
            return
        self.turn_to("exact search")
        share, seed = self.share(_EXACT_TIMES * part), self.seed + turn
        found = exact.solve(self.with_reserve, self.measure, self.incumbent.orders, self.bound_us, share, seed)
        self.incumbent.offer(found.orders, "exact search")
        if self.with_reserve is self.counted and found.bound_us > self.bound_us:
            self.bound_us, self.why = found.bound_us, "CP-SAT has tried all orders"

    def _take_turns(self) -> None:
        """Give each method a turn, with larger and larger shares, so that no method delays the others for long."""
        turn, part, methods = 0, _FIRST_SHARE, [self._unroll, self._improve, self._prove, self._windows]
        if self.given is not None:
            methods = [self._improve, self._prove, self._windows]
            if self.num_ops <= _EXACT_OPS:  # trying a policy lasts longer than its nominal time where ops are few
                part, methods = _FIRST_SHARE_OF_FITTING, [self._prove, self._improve, self._windows]
        if self.incumbent.transfers_hold:
            methods.insert(0, self._fit)
            if self.num_ops <= exact.MOST_TIMED_OPS:
                part = _FIRST_SHARE_OF_FITTING
                methods = [self._fit, self._fit_exactly, self._bound_with_waits]
        while not self.is_over and not (self.none_fits or (self.has_tried_all and self.has_tried_waits)):
            for method in methods:
                is_needed = not self.has_tried_all or (method == self._bound_with_waits and not self.has_tried_waits)
                if is_needed and not self.is_over:
                    method(part, turn)
            self.budget.spend(_TURN_S)
            turn, part = turn + 1, part * _GROWTH

    def _hold_less(self) -> None:
        """Looks for the same value with less memory: list scheduling under lower and lower limits."""
        self.turn_to("holding less")
        orders, how = self.incumbent.orders, self.incumbent.how
        assert orders is not None
        dispatcher = Dispatcher(self.with_reserve)
        starts = start_times(dispatcher.tables, orders)
        assert starts is not None
        most = None if self.num_ops <= _FEW_OPS else _FEW_GUESSES
        all_priorities = [starts.astype(np.float64), *islice(guesses(self.problem), most)]
        low, high = peaks(self.with_reserve, serial(self.with_reserve)), peaks(self.problem, orders)
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
            self.budget.spend_ops(OPS_PER_DISPATCH * self.num_ops * len(found))
            better = [self.incumbent.offer(orders, how) for orders in found]
            if not any(better):
                part += step
            step /= 2

    # --- the result -----------------------------------------------------------------------------------------------

    def result(self) -> SearchResult:
        """The answer; the plan is checked again first."""
        assert self.incumbent.orders is not None
        plan = self.problem.to_plan(self.incumbent.orders)
        check(plan)
        value_us, bound_us, why = Fraction(self.incumbent.value_us), Fraction(self.bound_us), self.why
        if self.objective == "period":
            assert self.steady is not None
            value_us, bound_us = self.steady.steady.us_per_microbatch, self.steady.bound_us
            why = period_reason(self.problem.given)
        return SearchResult(
            plan,
            self.objective,
            value_us,
            bound_us,
            why,
            self.incumbent.how,
            self._period_us(),
            tuple(sorted(self.named, key=lambda named: (named.makespan_us, named.name))),
            self.budget.elapsed_s,
            self.budget.stopped_by,
        )

    def _period_us(self) -> Fraction | None:
        """None too where the plan itself is faster: the steady state was abandoned before it became good."""
        if self.steady is None:
            return None
        period_us, num_microbatches = self.steady.steady.us_per_microbatch, self.problem.num_microbatches
        is_slow = self.objective != "period" and period_us * num_microbatches > self.incumbent.value_us
        return None if is_slow else period_us


class Key(NamedTuple):
    """What makes a plan better, most important first."""

    value_us: int
    other_us: int
    peak_bytes: int
    held_bytes: int  #: by all ranks, at their peaks


class Incumbent:
    """Takes candidates and keeps the best one that fits.

    It compares makespan, then memory; or span, then makespan, then memory. What transfers hold is only known from the
    times: where it was too much, `most_over_bytes` (int64[num_ranks]) is the most by which a limit was exceeded.
    """

    def __init__(self, problem: Problem, of_span: bool, on_better: Callable[[], None]) -> None:
        self.problem = problem
        self.of_span = of_span
        self.orders: Orders | None = None
        self.key: Key | None = None
        self.how = ""
        placement = problem.placement
        limits = placement.cluster.limit_bytes
        self._limits_bytes = np.array([NO_LIMIT if limit is None else limit for limit in limits], np.int64)
        #: Whether some transfer's bytes count on a rank with a limit.
        self.transfers_hold = _transfers_hold(problem.given)
        self._tables = Tables.of(problem)
        self._transfers = Transfers.of(problem)._replace(limits_bytes=np.zeros(placement.num_ranks, np.int64))
        self.most_over_bytes = np.zeros(placement.num_ranks, np.int64)
        self._on_better = on_better

    @property
    def value_us(self) -> int:
        """The makespan or span of the best plan, in µs; there must be one."""
        assert self.key is not None
        return self.key.value_us

    def offer(self, orders: Orders | None, how: str) -> bool:
        """Whether the orders are better, fit, and are kept; `how` names where they come from."""
        timed = None if orders is None else score(self.problem, orders)
        if orders is None or timed is None:
            return False
        key = self._key(timed, orders)
        if (self.key is not None and key >= self.key) or not self._fits(orders):
            return False
        self.orders, self.key, self.how = orders, key, how
        self._on_better()
        return True

    def _key(self, timed: Score, orders: Orders) -> Key:
        held = peaks(self.problem, orders)
        most, all_ranks = int(held.max(initial=0)), int(held.sum())
        if self.of_span:
            return Key(timed.span_us, timed.makespan_us, most, all_ranks)
        return Key(timed.makespan_us, 0, most, all_ranks)

    def _fits(self, orders: Orders) -> bool:
        if (peaks(self.problem, orders) > self.problem.limits_bytes).any():
            return False
        if not self.transfers_hold:
            return True
        over = self.over_bytes(orders)
        self.most_over_bytes = np.maximum(self.most_over_bytes, over)
        return not over.any()

    def over_bytes(self, orders: Orders) -> Integers:
        """int64[num_ranks]: by how much each rank exceeds its limit."""
        over: Integers = np.maximum(self.peaks_bytes(orders) - self._limits_bytes, 0)
        return over

    def peaks_bytes(self, orders: Orders) -> Integers:
        """int64[num_ranks]: the most that each rank holds at any time, static bytes included."""
        placement = self.problem.placement
        if not self.transfers_hold:
            return peaks(self.problem, orders) + np.array(placement.static_bytes, np.int64)
        starts_us = start_times(self._tables, orders)
        assert starts_us is not None
        held: Integers = peaks_with_transfers(self._tables, self._transfers, orders, starts_us)
        return held + np.array(placement.static_bytes, np.int64)


def _transfers_hold(placement: Placement) -> bool:
    """Whether some transfer's bytes count on a rank with a limit."""
    limits = placement.cluster.limit_bytes
    return any(r.num_bytes and (limits[r.sender], limits[r.receiver]) != (None, None) for r in placement.routes)
