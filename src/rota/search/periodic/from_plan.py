"""The steady state in the middle of a whole step's plan: where no rhythm is found from scratch, plans have one inside.

Some micro-batches in a row from the middle of the plan are taken as a period. Each rank's order within it is made to
repeat, and retimed to the least period that it allows; it is kept if what ranks hold then fits.
"""

from __future__ import annotations

from collections.abc import Iterator

from rota.search.bounds.memory_bounds import period_bound
from rota.search.budget import Budget
from rota.search.periodic.loop import Loop
from rota.search.periodic.modulo import Interval, rhythm_of
from rota.search.periodic.steady import Steady, SteadyResult
from rota.search.problem import Integers, Problem
from rota.search.timing import fits
from rota.stopping import look

_MOST_COPIES = 12  # micro-batches of a component per period
_PLACES = 5  # in the plan, where periods are cut out
_MOST_OPS = 20_000  # of a period unrolled, whose memory is looked at
_S_PER_NODE = 2e-5  # nominal seconds


def steady_within(problem: Problem, starts_us: Integers, budget: Budget) -> SteadyResult | None:
    """The best steady state that the plan repeats in its middle, or None.

    Args:
        problem: The step; its transfers hold no memory.
        starts_us: int64[num_ops]: when each node starts.
        budget: What this may spend.
    """
    loop, best = Loop(problem.given), None
    if any(loop.carried):
        return None
    if any(limit is not None and loop.left_bytes(rank) > 0 for rank, limit in enumerate(loop.limits_bytes)):
        return None
    bound_us = period_bound(problem.given)
    for steady in _candidates(problem, loop, starts_us, budget):
        look()
        if (best is None or steady.us_per_microbatch < best.us_per_microbatch) and _fits(steady):
            best = steady
    return None if best is None else SteadyResult(best, bound_us, False)


def _fits(steady: Steady) -> bool:
    """Whether ranks hold no more than they may until the state is steady; as no transfer does, orders say it all."""
    periods = steady.latency_us // steady.period_us + 3
    unrolled = Problem(steady.placement, periods * steady.microbatches_per_period * steady.placement.num_components)
    return unrolled.first_node[-1] <= _MOST_OPS and fits(unrolled, steady.orders(unrolled.num_microbatches))


def _candidates(problem: Problem, loop: Loop, starts_us: Integers, budget: Budget) -> Iterator[Steady]:
    rounds = int(problem.counts.min())
    ties = {task: place for place, task in enumerate(problem.topological)}
    rows = [starts_us[first : first + rounds].tolist() for first in problem.first_node[:-1]]
    for u in range(1, min(_MOST_COPIES, rounds // 3) + 1):
        for place in range(1, _PLACES + 1):
            k = place * (rounds - u - 1) // (_PLACES + 1)
            lengths = sorted(row[k + u] - row[k] for row in rows)
            period_us = lengths[len(lengths) // 2]
            if period_us <= 0:
                continue
            if budget.is_over:
                return
            budget.spend(_S_PER_NODE * u * loop.num_tasks)
            starts = [start for row in rows for start in row[k : k + u]]
            places = [ties[task] * u + j for task in range(loop.num_tasks) for j in range(u)]
            rhythm = rhythm_of(Interval(loop, u, period_us), starts, places)
            if rhythm is not None:
                yield Steady.of(problem.given, u, rhythm)
