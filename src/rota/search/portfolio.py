"""One search: several methods take turns, the best plan is kept, and a proven bound says how good it is.

    named schedules ─▶ list scheduling ─▶ all states ─▶ steady state ─▶ local search ─▶ exact ─▶ windows ─▶ hold less
                                              ▲                                                     │
                                              └───────────────── longer and longer ─────────────────┘

Each method hands over orders, and `Incumbent` keeps the best. The search ends when the best is at the proven bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from fractions import Fraction
from itertools import islice, product
from typing import Literal

import numpy as np

from rota.core.errors import NothingFitsError, PlanError
from rota.core.plan import Plan
from rota.core.simulation import check, simulate
from rota.core.stopping import Stopped, look, watched
from rota.core.text import size_text
from rota.schedules.families import named_plans
from rota.search import bounds, exact
from rota.search.bounds.memory_bounds import period_reason, refuse_too_little_memory
from rota.search.budget import Budget
from rota.search.copying import Copying
from rota.search.dispatching import Dispatcher, Priorities, guesses, serial
from rota.search.exact import longest_us
from rota.search.exact.rounds import Rounds
from rota.search.incumbent import Incumbent
from rota.search.local import improving, neighbourhood
from rota.search.local.policies import Climb
from rota.search.periodic.steady import SteadyResult, find_steady
from rota.search.problem import NO_LIMIT, Orders, Problem, reserving
from rota.search.result import NamedPlan, Objective, Progress, SearchResult
from rota.search.timing import fits, peaks, score, start_times
from rota.search.transfer_levels import counting_transfers

_PATIENCES = (0.0, 1.0)  # of list scheduling: never wait for a better op, or do
_CAPS = (1.0, 0.75, 0.5)  # parts of the memory limit: fewer micro-batches in flight are sometimes faster
_DISPATCH_SHARE = 0.1  # of the whole budget
_FIRST_SHARE, _GROWTH = 0.03, 1.5  # of the whole budget for a method's first turn, and its growth from turn to turn
_FIRST_SHARE_OF_SMALL = 0.15  # the same for small steps, of micro-batches that differ or whose transfers hold memory
_EXACT_TIMES_WITH_TRANSFERS = 5  # times that share for CP-SAT, which gains nothing from being asked twice
_EXACT_TIMES = 3  # times that share for a proof
_ROUNDS_TIMES = 6  # times that share for long steps with few micro-batches in flight, which this solves exactly
_LONG_OPS = 20_000  # in longer steps a policy takes long to try, and nothing else finds more: local search goes first
_LONG_TIMES = 8  # and has so many times that share
_TURN_S = 0.01  # nominal cost of a turn itself, so that idle turns use up the budget
_NAMED_S_PER_OP = 4e-6  # nominal seconds that a named schedule costs per op
_TRYING = {"hanayo": 3e-5}  #: the same for one that tries several ways
_STEADY_S_PER_PAIR = 3e-4  # nominal seconds per two tasks of a rank to make the models of a steady state
#: Named schedules that are searches themselves: nominal seconds per op.
_SEARCHING = {"v_half": 0.0002, "v_min": 0.0002}
_SEARCHING_PART, _LONG_SEARCHING_PART = 0.5, 0.1  # of what is left, for one of them; in long steps policies find more
_MAKE_S_PER_OP, _CHECK_S_PER_OP = 4e-7, 3e-6  # real seconds to make the plan in the end, and to check it
_MOST_CHECKED_OPS = 50_000  # up to here the final plan is also checked as `rota.check` does
_HALVINGS = 5
_FEW_OPS, _FEW_GUESSES = 3_000, 4  # in longer steps fewer priorities are tried for holding less
_EXACT_OPS = 400  # up to here CP-SAT may prove a whole step
_SERIAL = "one micro-batch at a time"
_COPYING_S = 0.3  # nominal seconds for a search without copies, at most
_NAMED_S = 0.35  # real seconds for named schedules, even if the search has less
_MOST_RESERVES = 20  # how often to guess the memory reserved for transfers

_Measure = Literal["makespan", "span"]
_Method = Callable[[float, int], None]  #: called with its share of the budget, and the number of the turn


class Portfolio:
    """One search, which `run` does.

    `first_plans` are (name, plan) to begin with, where the problem is no step of a model as such: then named schedules
    and steady states, which need many micro-batches that are alike, are left out.
    """

    def __init__(
        self,
        problem: Problem,
        objective: Objective,
        budget: Budget,
        progress: Callable[[Progress], None],
        first_plans: Iterable[tuple[str, Plan]] | None = None,
    ) -> None:
        self.problem, self.first_plans = problem, None if first_plans is None else tuple(first_plans)
        #: The same, with what ops read and send in their peaks, and with memory reserved for other transfers.
        self.with_reserve = self.counted = counting_transfers(self.problem)
        self.objective = objective
        self.budget = budget
        self.progress = progress
        self.doing = ""
        self.measure: _Measure = "span" if objective == "span" else "makespan"
        self.bound_us, self.why = _most_work(self.problem)
        self.named: list[NamedPlan] = []
        self.steady: SteadyResult | None = None
        self.climb: Climb | None = None  # goes on from turn to turn
        self.rounds: Rounds | None = None  # goes on from turn to turn
        self.copying: Copying | None = None  # goes on from turn to turn
        #: Whether all orders with each task's micro-batches in sequence are ruled out as better …
        self.has_tried_all = False
        self.has_tried_waits = False  #: … and where ops may also wait, for the bound
        self.none_fits = False  #: whether it is proven that no plan fits
        self.num_ops = int(self.problem.first_node[-1])
        self.is_checked = self.num_ops <= _MOST_CHECKED_OPS
        self.budget.reserve((_MAKE_S_PER_OP + _CHECK_S_PER_OP * self.is_checked) * self.num_ops)
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
            value_us = self.incumbent.value_us
            self.progress(Progress(self.doing, value_us, self.bound_us, self.budget.elapsed_s))

    def turn_to(self, doing: str) -> None:
        """Report progress under a new name of what is being done."""
        self.doing = doing
        self.report()

    def share(self, part: float) -> Budget:
        """A share of the budget: `part` (0 to 1) of its nominal seconds."""
        return self.budget.share(part * self.budget.seconds)

    def run(self) -> SearchResult:
        """Searches until the best is proven or the budget is used up. Raises SearchError if nothing fits."""
        with watched(lambda: self.budget.must_stop), suppress(Stopped):
            self._run()
        if self.incumbent.orders is None or (self.objective == "period" and self.steady is None):
            if self.budget.progress_error is not None:
                raise self.budget.progress_error
            raise self._nothing_found()
        return self._result()

    def _run(self) -> None:
        refuse_too_little_memory(self.problem)
        self.incumbent.offer(serial(self.problem), _SERIAL)
        self.budget.last_at_least(_NAMED_S)
        if self.objective == "period":
            self._unroll(1.0, 0)
            return
        first = [self._take_named, self._bound, self._guess]
        if self.first_plans is None:
            if self.num_ops > _LONG_OPS:
                first = [self._bound, self._guess, self._take_named]
            first.append(self._take_searching)
        for method in (*first, self._take_turns):
            if not self.is_over or method == self._take_named:
                method()
        if self.incumbent.orders is not None:
            self._hold_less()

    def _bound(self) -> None:
        bound = bounds.best(self.problem, self.measure)
        self.bound_us, self.why = bound.us, bound.why

    def _nothing_found(self) -> NothingFitsError:
        if self.objective == "period":
            return NothingFitsError(
                "found no steady state that fits; ask for the makespan, which also knows plans without one, or raise "
                "the memory limit"
            )
        held = simulate(self.problem.to_plan(serial(self.problem))).peak_memory_bytes
        raised = ", ".join(
            f"of rank {rank} to {held[rank]} bytes ({size_text(held[rank])})"
            for rank, limit in enumerate(self.problem.original.cluster.limit_bytes)
            if limit is not None and held[rank] > limit
        )
        finding, longer = "found no order that fits", "give the search more time, "
        if self.has_tried_all:
            finding, longer = "no order with each task's micro-batches in turn fits", ""
        if self.none_fits:
            finding, longer = "no order fits, even if ops wait on purpose", ""
        return NothingFitsError(
            f"{finding}, in {self.budget.elapsed_s:.1f} s: {longer}raise the limit {raised}, in which one micro-batch "
            f"at a time fits, or make micro-batches smaller"
        )

    # --- methods --------------------------------------------------------------------------------------------------

    def _take_named(self) -> None:
        """The plans to begin with: `first_plans`, or the named schedules that are quick."""
        plans = self._named_plans(lambda name: name not in _SEARCHING) if self.first_plans is None else self.first_plans
        for name, plan in plans:
            self._take_plan(name, plan)
            self.budget.spend(_TRYING.get(name, _NAMED_S_PER_OP) * self.num_ops)

    def _take_searching(self) -> None:
        """Named schedules that are searches themselves; they are left out where they would use up the time."""
        part = _LONG_SEARCHING_PART if self.num_ops > _LONG_OPS else _SEARCHING_PART

        def has_time(name: str) -> bool:
            return name in _SEARCHING and _SEARCHING[name] * self.num_ops <= part * self.budget.left_s

        for name, plan in self._named_plans(has_time):
            self._take_plan(name, plan)
            self.budget.spend(_SEARCHING[name] * self.num_ops)

    def _named_plans(self, wants: Callable[[str], bool]) -> Iterable[tuple[str, Plan]]:
        return named_plans(self.problem.original, self.problem.num_microbatches, self.turn_to, wants)

    def _take_plan(self, name: str, plan: Plan) -> None:
        try:
            orders = self.problem.to_orders(plan)
        except PlanError:  # it waits in a cycle
            return
        timed = score(self.problem, orders)
        if timed is None:  # also a cycle
            return
        held = self.incumbent.peaks_bytes(orders)
        is_within = bool((held <= self.incumbent.limits_bytes).all())
        self.named.append(NamedPlan(name, timed.makespan_us, timed.span_us, int(held.max()), is_within))
        self.incumbent.offer(orders, name)

    def _guess(self) -> None:
        self._dispatch(guesses(self.problem))

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
                self.incumbent.offer(dispatcher(priorities, patience, capped, most_us=self._most_us()), how)
                share.spend_ops(dispatcher.ops_of_last_call)
                if self.is_proven or share.is_over:
                    break
            over = self.incumbent.most_over_bytes
            if self.incumbent.orders is not None or not over.any():
                return
            self.with_reserve = reserving(self.with_reserve, over)
            self.incumbent.most_over_bytes = np.zeros_like(over)

    def _most_us(self) -> int:
        """What lasts longer than this is no better than the best plan."""
        is_known = self.incumbent.key is not None and self.measure == "makespan"
        return self.incumbent.value_us if is_known else NO_LIMIT

    def _unroll(self, part: float, turn: int) -> None:
        """Tries the best steady state, unrolled, and as priorities of list scheduling."""
        if self.steady is not None and self.steady.is_optimal:
            return
        self.turn_to("steady state")
        result = find_steady(
            self.problem.original,
            self.share(part),
            microbatches_per_period=None if turn == 0 else 2 + (turn - 1) % 3,
            seed=turn,
            num_microbatches=self.problem.num_microbatches,
        )
        self.budget.spend(_STEADY_S_PER_PAIR * sum(len(tasks) ** 2 for tasks in self.problem.tasks_on))
        if result is None:
            return
        self.incumbent.offer(result.steady.orders(self.problem.num_microbatches), "steady state")
        if self.steady is None or result.steady.us_per_microbatch < self.steady.steady.us_per_microbatch:
            self.steady = result
        flat = result.steady.flat_starts(self.problem.num_microbatches)
        self._dispatch([np.concatenate(flat).astype(np.float64)], "list scheduling by the steady state")

    def _improve(self, part: float, turn: int) -> None:
        if (best := self._best()) is None:
            return
        self.turn_to("local search")
        problem, orders = best
        if self.climb is None or self.climb.problem is not problem:
            self.climb = Climb(problem, self.measure == "span", 0)
        share = self.share(part * (_LONG_TIMES if self.num_ops > _LONG_OPS else 1))
        self.incumbent.offer(improving.improve(self.climb, orders, self.bound_us, share, turn), self.doing)

    def _add_copies(self, part: float, turn: int) -> None:
        """Searches without copies, in more memory, and adds them."""
        self.turn_to("search without copies")
        if self.copying is None:
            self.copying = Copying(self.problem.original, self.problem.num_microbatches, self._search_alike, turn)
        share = self.share(part)
        while not share.is_over and not self.is_proven:
            if (plan := self.copying.try_one(share.share(_COPYING_S))) is not None:
                self._offer(plan)
            share.spend(_TURN_S)

    def _search_alike(self, problem: Problem, budget: Budget) -> Plan:
        return Portfolio(problem, self.objective, budget, lambda _: None).run().plan

    def _offer(self, plan: Plan) -> None:
        with suppress(PlanError):  # it waits in a cycle
            self.incumbent.offer(self.problem.to_orders(plan), self.doing)

    def _windows(self, part: float, turn: int) -> None:
        if (best := self._best()) is None:
            return
        self.turn_to("windows")
        better = neighbourhood.improve(*best, self.measure, self.bound_us, self.share(part), turn)
        self.incumbent.offer(better, self.doing)

    def _best(self) -> tuple[Problem, Orders] | None:
        """The best orders, and the problem to improve them in: with the reserve for transfers if they keep it."""
        orders = self.incumbent.orders
        if orders is None:
            return None
        return self.with_reserve if fits(self.with_reserve, orders) else self.problem, orders

    def _fit_exactly(self, part: float, turn: int) -> None:
        """Searches the whole step at once with all that transfers hold, if it is small."""
        self.turn_to("exact search")
        best, share = self.incumbent.orders, self.share(_EXACT_TIMES_WITH_TRANSFERS * part)
        if best is None:  # where nothing is known that fits, finding anything comes first
            share = self.budget.share(self.budget.left_s)
        result = exact.solve(self.problem, self.measure, best, self.bound_us, share, turn, transfers="as in a plan")
        is_kept = self.incumbent.offer(result.orders, "exact search")
        self.has_tried_all |= result.is_complete and (is_kept or result.orders is None)

    def _bound_with_waits(self, part: float, turn: int) -> None:
        """Raises the bound by a search in which ops may also wait; this can prove that no plan fits."""
        self.turn_to("exact search")
        best, share = self.incumbent.orders, self.share(_EXACT_TIMES_WITH_TRANSFERS * part)
        result = exact.solve(self.problem, self.measure, best, self.bound_us, share, turn, transfers="with waits")
        self.incumbent.offer(result.orders, "exact search")
        self.none_fits |= best is None and result.bound_us > longest_us(self.problem)
        self.has_tried_waits |= result.is_complete
        if result.bound_us > self.bound_us and not self.none_fits:
            self.bound_us, self.why = result.bound_us, "CP-SAT has tried all orders, and all waits"

    def _prove(self, part: float, turn: int) -> None:
        """Searches the whole step at once, if it is small."""
        if self.num_ops > _EXACT_OPS:
            return
        self.turn_to("exact search")
        share = self.share(_EXACT_TIMES * part)
        result = exact.solve(self.with_reserve, self.measure, self.incumbent.orders, self.bound_us, share, turn)
        self.incumbent.offer(result.orders, "exact search")
        if self.with_reserve is self.counted and result.bound_us > self.bound_us:
            self.bound_us, self.why = result.bound_us, "CP-SAT has tried all orders"

    def _try_all_rounds(self, part: float, _turn: int) -> None:
        """Goes on through the states of a step with few micro-batches in flight, whatever its length."""
        assert self.rounds is not None
        if self.rounds.is_over or self.incumbent.orders is None:
            return
        self.turn_to("all states, round by round")
        self.rounds.run(self.incumbent.value_us, self.share(_ROUNDS_TIMES * part))
        left_s = self.rounds.left_s()
        if left_s is not None and left_s < self.budget.left_s:  # the optimum is near, which no other method would prove
            self.rounds.run(self.incumbent.value_us, self.share(1.0))
        self.incumbent.offer(self.rounds.orders, "all states")
        if self.rounds.bound_us > self.bound_us:
            self.bound_us, self.why = self.rounds.bound_us, "all states of a step have been tried, round by round"

    def _take_turns(self) -> None:
        """Give each method a turn, with larger and larger shares, so that no method delays the others for long."""
        turns, part = self._turns()
        number = 0
        while not self.is_over and not (self.none_fits or (self.has_tried_all and self.has_tried_waits)):
            for method in turns:
                is_needed = not self.has_tried_all or (method == self._bound_with_waits and not self.has_tried_waits)
                if is_needed and not self.is_over:
                    method(part, number)
            self.budget.spend(_TURN_S)
            number, part = number + 1, part * _GROWTH

    def _turns(self) -> tuple[list[_Method], float]:
        """The methods for such a problem, in order, and their share of the budget in the first turn."""
        if self.incumbent.transfers_hold and self.num_ops <= exact.MOST_TIMED_OPS:
            return [self._fit_exactly, self._bound_with_waits], _FIRST_SHARE_OF_SMALL
        if self.first_plans is not None:
            if self.num_ops <= _EXACT_OPS:  # trying a policy lasts longer than its nominal time where ops are few
                return [self._prove, self._improve, self._windows], _FIRST_SHARE_OF_SMALL
            return [self._improve, self._prove, self._windows], _FIRST_SHARE
        turns: list[_Method] = [self._unroll, self._improve, self._prove, self._windows]
        if self.num_ops > _LONG_OPS:
            turns[:2] = self._improve, self._unroll
        if any(task.kind.is_copy for task in self.problem.original.tasks):
            turns.insert(0, self._add_copies)
        elif self.measure == "makespan":
            self.rounds = Rounds(self.problem)
            if not self.rounds.is_over:
                turns.insert(0, self._try_all_rounds)
        return turns, _FIRST_SHARE

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
            tried = []
            for priorities, patience in product(all_priorities, _PATIENCES):
                look()
                tried.append(dispatcher(priorities, patience, limits, most_us=self._most_us()))
                self.budget.spend_ops(dispatcher.ops_of_last_call)
            better = [self.incumbent.offer(orders, how) for orders in tried]
            if not any(better):
                part += step
            step /= 2

    # --- the result -----------------------------------------------------------------------------------------------

    def _result(self) -> SearchResult:
        """The plan is checked again first, if that does not take long.

        Compiled loops have found that the orders are complete, contradict nothing and fit, in either case.
        """
        assert self.incumbent.orders is not None
        plan = self.problem.to_plan(self.incumbent.orders)
        if self.is_checked:
            check(plan)
        value_us, bound_us, why = Fraction(self.incumbent.value_us), Fraction(self.bound_us), self.why
        period_us = None if self.steady is None else self.steady.steady.us_per_microbatch
        if self.objective == "period":
            assert self.steady is not None
            value_us, bound_us = self.steady.steady.us_per_microbatch, self.steady.bound_us
            why = period_reason(self.problem.original)
        elif period_us is not None and period_us * self.problem.num_microbatches > value_us:
            period_us = None  # the steady state was abandoned before it became good
        return SearchResult(
            plan,
            self.objective,
            value_us,
            bound_us,
            why,
            self.incumbent.how,
            period_us,
            tuple(sorted(self.named, key=lambda named: (named.makespan_us, named.name))),
            self.budget.elapsed_s,
            self.budget.stopped_by,
        )


def _most_work(problem: Problem) -> tuple[int, str]:
    """The bound that needs no loops, and its reason: the work of the busiest rank."""
    work_us = [int((problem.counts * problem.durations_us)[tasks].sum()) for tasks in problem.tasks_on]
    busiest = max(range(len(work_us)), key=work_us.__getitem__)
    return work_us[busiest], f"{problem.rank_name(busiest)} works {work_us[busiest]:,} µs"
