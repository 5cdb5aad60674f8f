"""Orders by a rule of counts: 1F1B, and ZB-H1 where the backward is split, for micro-batches that differ.

A rank does forwards until so many micro-batches are *open*, between F and B, or memory has no room for the next one.
Then it does backwards and forwards in turn. Where the backward is split, a W comes first when more than some number
*wait* for it: as in ZB-H1 (Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2), more on later ranks, which
then have work left while the last gradients go back. Unlike list scheduling, a rule fills no wait with a W that makes
others late.
"""

from __future__ import annotations

from itertools import product

import numpy as np

from rota.batching.dispatching import NEVER, Dispatch
from rota.batching.problem import BatchProblem, Floats, Integers, Orders, Tables
from rota.batching.replaying import fits, replay
from rota.compiled import copy_rows, inner, int64, loop

_OPEN = (1.0, 0.75, 1.25, 1.5, 2.0)  # of the open micro-batches of 1F1B, which are as many as ranks follow
_WAITING = (1.0, 0.75, 0.5, 0.25)  # per rank before it: micro-batches that wait for their W
_POSTPONED = (0.0, 0.5)  # per rank before it: last micro-batches of which every W comes after the last I
_FEW_OPEN, _FEW_WAITING = (1.0, 1.5), (1.0, 0.5)  # those that differ most


def by_rule(problem: BatchProblem, sequence: Integers) -> Dispatch | None:
    """The best of the rules, for one stage per rank; None if the ranks' orders wait for each other in all of them."""
    return _best_of(problem, sequence, _OPEN, _WAITING)


def by_few_rules(problem: BatchProblem, sequence: Integers) -> Dispatch | None:
    """As `by_rule`, of a fifth as many rules."""
    return _best_of(problem, sequence, _FEW_OPEN, _FEW_WAITING)


def _best_of(
    problem: BatchProblem, sequence: Integers, most_open: tuple[float, ...], most_waiting: tuple[float, ...]
) -> Dispatch | None:
    if problem.roles[0, 2] < 0:  # no weight gradients
        rules = [*product(most_open, most_waiting[:1], _POSTPONED[:1])]
    else:
        rules = [*product(most_open, most_waiting, _POSTPONED)]
    starts = np.zeros((problem.num_microbatches, problem.num_tasks), np.int64)
    orders = np.full((problem.num_ranks, problem.most_ops), -1, np.int32)
    step = problem.tables, problem.roles, problem.limits_bytes, sequence
    makespan_us = _best(*step, np.array(rules), starts, orders)
    return Dispatch(makespan_us, starts, orders) if makespan_us < NEVER else None


@loop
def _best(
    tables: Tables, roles: Integers, limits: Integers, sequence: Integers, rules: Floats, starts: Integers, best: Orders
) -> int:
    """The makespan of the best rule, or `NEVER`; fills `starts` and `best`, its orders."""
    orders = best.copy()
    least, last = NEVER, NEVER
    for i in range(len(rules)):
        is_new = _order(tables, roles, limits, sequence, rules[i], orders)
        if is_new and fits(tables, limits, sequence, orders, -1):
            last = replay(tables, sequence, orders, starts, least - 1)
            if last < least:
                least = last
                copy_rows(orders, best)
    if last != least and least < NEVER:
        replay(tables, sequence, best, starts, NEVER)
    return least


@inner
def _order(tables: Tables, roles: Integers, limits: Integers, sequence: Integers, rule: Floats, orders: Orders) -> bool:
    """Fills each rank's order by a rule (open, waiting, postponed); False if no order differs from what was there."""
    held, peaks = tables.held_bytes, tables.peak_bytes
    count, num_ranks, is_new = len(sequence), len(limits), False
    for r in range(num_ranks):
        f, b, w = roles[r, 0], roles[r, 1], roles[r, 2]
        most_open, most_waiting = np.ceil(rule[0] * (num_ranks - r)), rule[1] * r
        from_here = count - int64(rule[2] * r)
        forwards, backwards, weights, level = 0, 0, 0, 0
        for i in range(count * (3 if w >= 0 else 2)):
            waiting = backwards - weights if w >= 0 else 0
            wants_forward = forwards < count and (forwards - backwards < most_open or forwards == backwards)
            has_room = False
            if wants_forward:
                m = sequence[forwards]
                has_room = level + max(held[m, f], 0) + peaks[m, f] <= limits[r]
            if waiting > most_waiting and not from_here <= backwards < count:
                t = w
            elif has_room:
                t = f
            elif wants_forward and waiting > 0:
                t = w
            elif backwards < forwards:
                t = b
            elif waiting > 0:
                t = w
            else:
                t = f  # not even alone: `fits` says so
            if t == f:
                k = forwards
                forwards += 1
            elif t == b:
                k = backwards
                backwards += 1
            else:
                k = weights
                weights += 1
            level += held[sequence[k], t]
            is_new |= orders[r, i] != t
            orders[r, i] = t
    return is_new
