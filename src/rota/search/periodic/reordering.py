"""Local search on the orders of a period: cyclic job shops by annealing, where CP-SAT needs too long.

Each rank has a cyclic order of its nodes, and each node a round, as in `modulo`. The least period of such orders is the
largest ratio of time to rounds over all cycles of waits (`retiming`); only a change on the cycle of that ratio can
shorten it, as with the blocks of the longest path in a job shop (Nowicki and Smutnicki, 1996; for cyclic ones: Brucker
and Kampmeyer, "Tabu search algorithms for cyclic machine scheduling problems", 2005). So neighbours on that cycle are
exchanged, and annealing (Kirkpatrick et al., 1983) decides what is kept. What ranks hold follows from orders alone, so
that all orders here fit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rota.search.budget import Budget
from rota.search.local.moves import draw
from rota.search.periodic.modulo import Interval
from rota.search.periodic.retiming import Rhythm
from rota.search.problem import NO_LIMIT, Integers, Rows
from rota.stopping import look

_TRIES = 4_000  # in the first round; each round has half as many more
_HEATS = (0.01, 0.03)  # in turn: by what part a period may readily become longer at first
_OPS_PER_TRY_AND_NODE = 1  # of the budget, about
_OPS_PER_CALL = 2_000_000
_MOST_POLISHED = 4  # rounds, once the period cannot become shorter
_NEVER = 1 << 60


class Cyclic(NamedTuple):
    """What is fixed in a period, for compiled loops; all arrays are int64."""

    durations_us: Integers  #: [num_nodes]
    held_bytes: Integers  #: [num_nodes]
    peak_bytes: Integers  #: [num_nodes]
    limits_bytes: Integers  #: [num_ranks], or NO_LIMIT
    sources: Integers  #: [num_waits]
    targets: Integers  #: [num_waits]
    least_us: Integers  #: [num_waits]: from start to start
    wait_rounds: Integers  #: [num_waits]
    first_on: Integers  #: [num_ranks + 1]
    nth: Integers  #: [num_nodes]: which of its rank's nodes each one is

    @classmethod
    def of(cls, interval: Interval) -> Cyclic:
        """The tables of an interval."""
        loop, u = interval.loop, interval.num_copies
        tasks, num_nodes = loop.placement.tasks, loop.num_tasks * u
        waits = [(s * u + j, t * u + j, least, 0) for s, t, least in loop.waits for j in range(u)]
        for task, lasting in enumerate(loop.durations_us):
            waits += [(task * u + j - 1, task * u + j, lasting, 0) for j in range(1, u)]
            if u > 1:
                waits.append((task * u + u - 1, task * u, lasting, 1))
        nodes_on, nth = [interval.nodes(on) for on in loop.tasks_on], np.zeros(num_nodes, np.int64)
        for nodes in nodes_on:
            nth[nodes] = np.arange(len(nodes))
        columns = np.array(waits, np.int64).reshape(-1, 4).T
        limits = [
            NO_LIMIT if limit is None or loop.left_bytes(rank) else limit
            for rank, limit in enumerate(loop.limits_bytes)
        ]
        return cls(
            np.repeat(np.array(loop.durations_us, np.int64), u),
            np.repeat([task.held_bytes for task in tasks], u),
            np.repeat([task.peak_bytes for task in tasks], u),
            np.array(limits, np.int64),
            *(np.ascontiguousarray(column) for column in columns),
            Rows.of(nodes_on).first,
            nth,
        )


class Turns(NamedTuple):
    """Orders and rounds, and what the last timing found, for compiled loops."""

    orders: Integers  #: int64[...]: nodes of rank r from `first_on[r]` on
    rounds: Integers  #: int64[num_ranks' nodes], beside `orders`: the round in which the rank does the node
    starts_us: Integers  #: int64[num_nodes]
    cycle: Integers  #: int64[...]: places in `orders` whose successor on the rank is on the longest cycle
    num_on_cycle: Integers  #: int64[1]
    random: NDArray[np.uint64]  #: uint64[1]


def reorder_period(
    interval: Interval, rhythm: Rhythm, least_us: int, budget: Budget, seed: int = 0, weight: float = 0.0
) -> Rhythm:
    """A rhythm of the least period found from `rhythm` on; all of its tasks are on one rank each.

    Args:
        interval: What has to fit; its period does not count.
        rhythm: Where to begin. It fits.
        least_us: No period is shorter.
        budget: What the search may spend; it also ends when it finds no more.
        seed: Of all random choices.
        weight: What a µs of latency (from the first start to the last end of a period's micro-batches) counts, where a
            µs of the period counts 1.

    Returns:
        The best rhythm found; it is `rhythm` or better.
    """
    tables = Cyclic.of(interval)
    turns = _turns(interval, tables, rhythm, seed)
    per_try = _OPS_PER_TRY_AND_NODE * len(tables.durations_us)
    orders, rounds, best = turns.orders.copy(), turns.rounds.copy(), np.array([np.inf, rhythm.period_us])
    turn, tries = 0, _TRIES
    while not budget.is_over and (best[1] > least_us or turn < _MOST_POLISHED):
        heat, done = _HEATS[turn % len(_HEATS)] * rhythm.period_us, 0
        turns.orders[:], turns.rounds[:] = orders, rounds
        while done < tries and not budget.is_over:
            look()
            share = min(max(_OPS_PER_CALL // per_try, 1), tries - done)
            heats = np.array([heat * (1 - part / tries) for part in (done, done + share)])
            anneal_turns(tables, turns, orders, rounds, best, weight, heats, least_us, share)
            budget.spend_ops(share * per_try)
            done += share
        turn, tries = turn + 1, tries * 3 // 2
    return _rhythm(tables, orders, rounds, turns)


def _turns(interval: Interval, tables: Cyclic, rhythm: Rhythm, seed: int) -> Turns:
    starts, period_us = np.array(rhythm.starts_us, np.int64), rhythm.period_us
    orders: list[int] = []
    for tasks in interval.loop.tasks_on:
        nodes = interval.nodes(tasks)
        lasts = tables.durations_us > 0
        orders += sorted(nodes, key=lambda node: (starts[node] % period_us, lasts[node], rhythm.ties[node]))
    rounds = starts[orders] // period_us
    return Turns(
        np.array(orders, np.int64),
        rounds,
        starts.copy(),
        np.zeros(len(orders), np.int64),
        np.zeros(1, np.int64),
        np.random.default_rng(seed).integers(1, 1 << 63, 1, np.uint64),
    )


def _rhythm(tables: Cyclic, orders: Integers, rounds: Integers, turns: Turns) -> Rhythm:
    """The earliest starts of these orders at their least period."""
    best = turns._replace(orders=orders, rounds=rounds)
    period_us = int(least_period(tables, best, 1, _NEVER))
    return Rhythm(period_us, tuple(best.starts_us.tolist()), tuple(range(len(best.starts_us))))


@njit(cache=True, nogil=True)
def anneal_turns(tables, turns, best_orders, best_rounds, best, weight, heats_us, stop_at_us, num_tries):  # type: ignore[no-untyped-def]
    """Tries exchanges while the heat goes from the first to the second of `heats_us`.

    The best orders are left in `best_orders` and `best_rounds`; `best` is their price and their period in µs.
    """
    orders, rounds, cycle, first_on = turns.orders, turns.rounds, turns.cycle, tables.first_on
    random, num_ranks = turns.random, len(first_on) - 1
    rank_of = np.empty(len(orders), np.int64)
    for r in range(num_ranks):
        rank_of[first_on[r] : first_on[r + 1]] = r
    current, _ = price(tables, turns, weight, stop_at_us, np.inf)
    old_orders, old_rounds, old_cycle = orders.copy(), rounds.copy(), cycle.copy()
    for n in range(num_tries):
        num_critical = turns.num_on_cycle[0]
        place = cycle[draw(random, num_critical)] if num_critical and draw(random, 4) else draw(random, len(orders))
        rank = rank_of[place]
        first, end = first_on[rank], first_on[rank + 1]
        if end - first < 2:
            continue
        kept, low, high = True, rank, rank + 1
        if draw(random, 3):
            steps = 1 if draw(random, 2) else 1 + draw(random, min(end - first, 6))
            goes_on = draw(random, 2) == 0  # the node itself, or its successor goes back
            for _ in range(steps):
                after = place + 1 if place + 1 < end else first
                exchange(orders, rounds, place, after)
                place = after if goes_on else (place - 1 if place > first else end - 1)
        else:
            after = place + 1 if place + 1 < end else first
            a, b = orders[place], orders[after]
            low = max(rank - draw(random, num_ranks), 0) if draw(random, 2) else rank
            high = min(rank + 1 + draw(random, num_ranks), num_ranks) if draw(random, 2) else rank + 1
            for r in range(low, high):
                exchange_alike(tables, orders, rounds, r, tables.nth[a], tables.nth[b])
        for r in range(low, high):
            kept = kept and fits_on(tables, orders, rounds, r)
        if kept:
            heat = heats_us[0] + (heats_us[1] - heats_us[0]) * n / num_tries
            chance = (1 + draw(random, 1 << 30)) / (1 << 30)
            most = current - np.log(chance) * heat
            found, period = price(tables, turns, weight, stop_at_us, most)
            kept = found <= most
        if not kept:
            orders[:] = old_orders
            rounds[:] = old_rounds
            cycle[:] = old_cycle
            turns.num_on_cycle[0] = num_critical
            continue
        current = found
        old_orders[:] = orders
        old_rounds[:] = rounds
        old_cycle[:] = cycle
        if current < best[0]:
            best[0], best[1] = current, period
            best_orders[:] = orders
            best_rounds[:] = rounds


@njit(cache=True, nogil=True)
def price(tables, turns, weight, at_least_us, most):  # type: ignore[no-untyped-def]
    """(period and `weight` times the latency, the period) in µs; the first is more than `most` where it may be."""
    period = least_period(tables, turns, at_least_us, most)
    if period > most:
        return np.float64(period), period
    return period + weight * (turns.starts_us + tables.durations_us).max(), period


@njit(cache=True, nogil=True)
def exchange_alike(tables, orders, rounds, rank, nth_a, nth_b):  # type: ignore[no-untyped-def]
    """Exchanges the rank's `nth_a`-th node with its successor, if that is its `nth_b`-th."""
    first, end = tables.first_on[rank], tables.first_on[rank + 1]
    for i in range(first, end):
        after = i + 1 if i + 1 < end else first
        if tables.nth[orders[i]] == nth_a and tables.nth[orders[after]] == nth_b:
            exchange(orders, rounds, i, after)
            return


@njit(cache=True, nogil=True)
def exchange(orders, rounds, at, after):  # type: ignore[no-untyped-def]
    """Exchanges a node with its successor, which may be the first of the next period."""
    a, b, round_a, round_b = orders[at], orders[after], rounds[at], rounds[after]
    if after < at:
        round_a, round_b = round_a + 1, round_b - 1
    orders[at], rounds[at], orders[after], rounds[after] = b, round_b, a, round_a


@njit(cache=True, nogil=True)
def fits_on(tables, orders, rounds, rank):  # type: ignore[no-untyped-def]
    """Whether the rank holds no more than it may, with its orders as they are."""
    limit, level = tables.limits_bytes[rank], np.int64(0)
    if limit >= 1 << 60:
        return True
    first, end = tables.first_on[rank], tables.first_on[rank + 1]
    for i in range(first, end):
        level -= tables.held_bytes[orders[i]] * rounds[i]
    for i in range(first, end):
        held = tables.held_bytes[orders[i]]
        if level + max(held, 0) + tables.peak_bytes[orders[i]] > limit:
            return False
        level += held
    return True


@njit(cache=True, nogil=True)
def least_period(tables, turns, at_least_us, most_us):  # type: ignore[no-untyped-def]
    """The least period of the orders from `at_least_us` on, or more than `most_us`, as `retime` finds it.

    Starts go on from those of the last orders; any that fulfil all waits will do.
    """
    durations, _, _, _, sources, targets, least, wait_rounds, first_on, _ = tables
    orders, rounds, starts, cycle, num_on_cycle, _ = turns
    num_nodes, period = len(durations), at_least_us
    last, seen = np.full(num_nodes, -1), np.zeros(num_nodes, np.int64)
    num_waits = len(sources)
    num_on_cycle[0] = 0
    starts[:] = 0
    while True:
        is_rising = False
        for i in range(num_waits):
            start = starts[sources[i]] + least[i] - period * wait_rounds[i]
            if start > starts[targets[i]]:
                starts[targets[i]] = start
                last[targets[i]] = i
                is_rising = True
        for r in range(len(first_on) - 1):
            first, end = first_on[r], first_on[r + 1]
            for i in range(first, end):
                after, turn = (i + 1, 0) if i + 1 < end else (first, 1)
                a, b = orders[i], orders[after]
                start = starts[a] + durations[a] - period * (rounds[i] - rounds[after] + turn)
                if start > starts[b]:
                    starts[b] = start
                    last[b] = num_waits + i
                    is_rising = True
        if not is_rising:
            return period
        seen[:] = 0
        node_on = -1
        for node in range(num_nodes):
            at = node
            while seen[at] == 0 and last[at] >= 0:
                seen[at] = node + 1
                at = sources[last[at]] if last[at] < num_waits else orders[last[at] - num_waits]
            if seen[at] == node + 1 and last[at] >= 0:
                node_on = at
                break
        if node_on < 0:
            continue
        total, turns_round, at, num_critical = np.int64(0), np.int64(0), node_on, 0
        while True:
            wait = last[at]
            if wait < num_waits:
                total += least[wait]
                turns_round += wait_rounds[wait]
                at = sources[wait]
            else:
                i = wait - num_waits
                r = 0
                while first_on[r + 1] <= i:
                    r += 1
                after, turn = (i + 1, 0) if i + 1 < first_on[r + 1] else (first_on[r], 1)
                total += durations[orders[i]]
                turns_round += rounds[i] - rounds[after] + turn
                cycle[num_critical] = i
                num_critical += 1
                at = orders[i]
            if at == node_on:
                break
        num_on_cycle[0] = num_critical
        if turns_round <= 0:
            return most_us + 1
        period = -(-total // turns_round)
        if period > most_us:
            return period
        last[:] = -1
