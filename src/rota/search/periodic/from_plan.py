"""The steady state in the middle of a whole step's plan: where no rhythm is found from scratch, plans have one inside.

Some micro-batches in a row from the middle of the plan are taken as a period. Each rank's order within it is made to
repeat, and retimed to the least period that it allows; it is kept if what ranks hold then fits. Local search on these
orders goes on from there.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from rota.search.bounds.memory_bounds import period_bound
from rota.search.budget import Budget
from rota.search.periodic.loop import Loop
from rota.search.periodic.modulo import Interval, rhythm_of
from rota.search.periodic.reordering import reorder_period
from rota.search.periodic.retiming import Rhythm
from rota.search.periodic.steady import Steady, SteadyResult
from rota.search.problem import Integers, Problem
from rota.stopping import look

_MOST_COPIES = 12  # micro-batches of a component per period
_PLACES = 5  # in the plan, where periods are cut out
_MOST_OPS = 20_000  # of a period unrolled, whose memory is simulated
_MOST_REORDERED = 3  # numbers of micro-batches per period that are searched further


def steady_within(
    problem: Problem, starts_us: Integers, budget: Budget | None = None, seed: int = 0
) -> SteadyResult | None:
    """The best steady state that the plan repeats in its middle, or one found from there, or None.

    Args:
        problem: The step; its transfers hold no memory.
        starts_us: int64[num_ops]: when each node starts.
        budget: What the search on from there may spend; None: there is none.
        seed: Of its random choices.
    """
    loop = Loop(problem.given)
    if any(loop.carried):
        return None
    if any(limit is not None and loop.left_bytes(rank) > 0 for rank, limit in enumerate(loop.limits_bytes)):
        return None
    best: dict[int, Steady] = {}  # by micro-batches per period
    for steady in _candidates(problem, loop, starts_us):
        look()
        u = steady.microbatches_per_period
        if u not in best or steady.period_us < best[u].period_us:
            periods = steady.latency_us // steady.period_us + 3
            if periods * u * loop.num_tasks <= _MOST_OPS and not any(steady.over_bytes()):
                best[u] = steady
    if not best:
        return None
    found = sorted(best.values(), key=lambda steady: steady.us_per_microbatch)
    if budget is not None and min(loop.durations_us) > 0 and len(problem.ranks.values) == loop.num_tasks:
        share_s = budget.seconds / _MOST_REORDERED
        found[:_MOST_REORDERED] = [
            _reordered(problem, loop, steady, budget.share(share_s), seed) for steady in found[:_MOST_REORDERED]
        ]
    fastest = min(found, key=lambda steady: (steady.us_per_microbatch, steady.latency_us))
    return SteadyResult(fastest, period_bound(problem.given), False)


def _reordered(problem: Problem, loop: Loop, steady: Steady, budget: Budget, seed: int) -> Steady:
    """A better steady state with as many micro-batches per period, from this one on."""
    u, num_components = steady.microbatches_per_period, problem.given.num_components
    starts, ties = ([value for row in rows for value in row] for rows in (steady.starts_us, steady.ties))
    least_us = ceil(period_bound(problem.given) * u * num_components)
    weight = u * num_components / problem.num_microbatches
    rhythm = Rhythm(steady.period_us, tuple(starts), tuple(ties))
    interval = Interval(loop, u, steady.period_us)
    return Steady.of(problem.given, u, reorder_period(interval, rhythm, least_us, budget, seed, weight))


def _candidates(problem: Problem, loop: Loop, starts_us: Integers) -> Iterator[Steady]:
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
            starts = [start for row in rows for start in row[k : k + u]]
            places = [ties[task] * u + j for task in range(loop.num_tasks) for j in range(u)]
            rhythm = rhythm_of(Interval(loop, u, period_us), starts, places)
            if rhythm is not None:
                yield Steady.of(problem.given, u, rhythm)
