"""Offsets of one period by simulated annealing: where CP-SAT needs long, this often finds a rhythm at once.

The state is an offset for each node. Rounds follow from offsets: each node comes as soon as its inputs allow; then
nodes that come before anything is freed move as late as possible. Overlaps and bytes over the limit are the energy
(Kirkpatrick, Gelatt and Vecchi, 1983). Retiming repairs orders that overlap a little.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rota.compiled import copy, inner, loop
from rota.core.tasks import scalar
from rota.search.budget import Budget
from rota.search.periodic.modulo import Interval, rhythm_of
from rota.search.periodic.retiming import Rhythm
from rota.search.problem import NO_LIMIT, Floats, Integers, Rows

_MOVES_PER_NODE = 6_000
_STEPS = 12  # least number of calls of the compiled loop; the budget is checked between them
_MOST_OPS_PER_CALL = 4_000_000  # in ops as the budget counts them
_HOT, _COLD = 0.05, 0.003  # temperatures; an overlap of a whole period has the energy 1
_OVER = 0.2  # the energy of exceeding a limit by the largest task of the rank
_OPS_PER_VISIT = 0.25  # cost of a node, or of a pair on one rank, in ops as the budget counts them


class _Tables(NamedTuple):
    """The nodes of a period, for compiled loops. `first_x` and the field after it are as in `Rows`."""

    period_us: int
    num_copies: int  #: micro-batches of each component per period
    durations_us: Integers  #: int64[num_nodes]
    held_bytes: Integers  #: int64[num_nodes]
    peak_bytes: Integers  #: int64[num_nodes]
    limits_bytes: Integers  #: int64[num_ranks], or NO_LIMIT
    weights: Floats  #: float64[num_ranks]: the energy of a byte over the limit
    sequence: Integers  #: int64[num_nodes]: nodes, inputs first
    #: int64[num_nodes]: place among nodes that start at one instant: no duration first, then in sequence.
    places: Integers
    is_late: Integers  #: int64[num_nodes]: 1 where nothing is freed before the node, so that it should come late
    first_input: Integers  #: int64[num_nodes + 1]
    inputs: Integers  #: int64[...]: source, least µs from start to start, source … per node
    first_output: Integers  #: int64[num_nodes + 1]
    outputs: Integers  #: int64[...]: target, least µs from start to start, target … per node
    first_on: Integers  #: int64[num_ranks + 1]
    on: Integers  #: int64[...]: each rank's nodes
    first_rank: Integers  #: int64[num_nodes + 1]
    ranks: Integers  #: int64[...]: each node's ranks


def anneal_offsets(interval: Interval, budget: Budget, seed: int = 0) -> Rhythm | None:
    """A rhythm within the limits with a period near the interval's; None if none was found."""
    tables, num_nodes = _tables(interval), interval.loop.num_tasks * interval.num_copies
    rng = np.random.default_rng(seed)
    state = rng.integers(0, interval.period_us, num_nodes)
    best, least = state.copy(), np.array([np.inf])
    visits = num_nodes + int((np.diff(tables.first_on) ** 2).sum())
    steps = max(int(_MOVES_PER_NODE * num_nodes * visits * _OPS_PER_VISIT) // _MOST_OPS_PER_CALL, _STEPS)
    moves = _MOVES_PER_NODE * num_nodes // steps
    for step in range(steps):
        heats = np.array([_HOT * (_COLD / _HOT) ** (part / steps) for part in (step, step + 1)])
        random_seed = int(rng.integers(1 << 31))
        _walk(tables, state, best, least, random_seed, moves, heats)
        budget.spend_ops(int(moves * visits * _OPS_PER_VISIT))
        if least[0] == 0 or budget.is_over:
            break
    starts = best.copy()
    _set_rounds(tables, best, starts)
    if _over_bytes(tables, best, starts):
        return None
    return rhythm_of(interval, starts.tolist(), tables.places.tolist())


def _tables(interval: Interval) -> _Tables:
    loop, u = interval.loop, interval.num_copies
    num_nodes, tasks = loop.num_tasks * u, loop.placement.tasks
    inputs: list[list[int]] = [[] for _ in range(num_nodes)]
    outputs: list[list[int]] = [[] for _ in range(num_nodes)]

    def wait(source: int, target: int, least: int) -> None:
        inputs[target] += [source, least]
        outputs[source] += [target, least]

    for source, target, least in loop.waits:
        for j in range(u):
            wait(source * u + j, target * u + j, least)
    for task in range(loop.num_tasks):
        for j in range(u - 1):
            wait(task * u + j, task * u + j + 1, loop.durations_us[task])
    frees = [i for i, task in enumerate(tasks) if scalar(task.held_bytes) < 0]
    is_late = [all(loop.apart_us(free, i) is None for free in frees) for i in range(loop.num_tasks)]
    limited = [None if loop.left_bytes(rank) else limit for rank, limit in enumerate(loop.limits_bytes)]
    needed = [abs(scalar(task.held_bytes)) + scalar(task.peak_bytes) for task in tasks]
    largest = [max((needed[i] for i in on), default=0) for on in loop.tasks_on]
    into, out_of = Rows.of(inputs), Rows.of(outputs)
    on = Rows.of([interval.nodes(on) for on in loop.tasks_on])
    ranks = Rows.of([tasks[node // u].ranks for node in range(num_nodes)])
    durations = np.repeat(loop.durations_us, u)
    sequence = np.array([task * u + j for j in range(u) for task in loop.problem.topological])
    return _Tables(
        interval.period_us,
        u,
        durations,
        np.repeat([task.held_bytes for task in tasks], u),
        np.repeat([task.peak_bytes for task in tasks], u),
        np.array([NO_LIMIT if limit is None else limit for limit in limited], np.int64),
        np.array([_OVER / max(size, 1) for size in largest]),
        sequence,
        np.argsort(sequence) + np.where(durations > 0, num_nodes, 0),
        np.repeat(is_late, u),
        *(into.first, into.values, out_of.first, out_of.values, on.first, on.values, ranks.first, ranks.values),
    )


@loop
def _set_rounds(tables: _Tables, offsets: Integers, starts: Integers) -> None:
    """Sets `starts` to the earliest that fit offsets and waits; nodes before any free then move to the latest."""
    first, values = tables.first_input, tables.inputs
    for node in tables.sequence:
        starts[node] = offsets[node]
        if first[node] < first[node + 1]:
            least = -(1 << 60)
            for e in range(first[node], first[node + 1], 2):
                least = max(least, starts[values[e]] + values[e + 1])
            starts[node] = least + (offsets[node] - least) % tables.period_us
    first, values = tables.first_output, tables.outputs
    for i in range(len(tables.sequence) - 1, -1, -1):
        node = tables.sequence[i]
        if tables.is_late[node] and first[node] < first[node + 1]:
            most = 1 << 60
            for e in range(first[node], first[node + 1], 2):
                most = min(most, starts[values[e]] - values[e + 1])
            starts[node] = most - (most - offsets[node]) % tables.period_us


@inner
def _over_on(rank: int, tables: _Tables, offsets: Integers, starts: Integers) -> int:
    """The most bytes by which the rank exceeds its limit; the order is that of `rhythm_of`."""
    if tables.limits_bytes[rank] >= 1 << 60:
        return 0
    nodes = tables.on[tables.first_on[rank] : tables.first_on[rank + 1]]
    base = 0
    for node in nodes:
        base -= tables.held_bytes[node] * ((starts[node] - offsets[node]) // tables.period_us)
    over = 0
    for b in nodes:
        level = base + tables.peak_bytes[b] + max(tables.held_bytes[b], 0)
        for c in nodes:
            if offsets[c] < offsets[b] or (offsets[c] == offsets[b] and tables.places[c] < tables.places[b]):
                level += tables.held_bytes[c]
        over = max(over, level - tables.limits_bytes[rank])
    return over


@loop
def _over_bytes(tables: _Tables, offsets: Integers, starts: Integers) -> int:
    """The sum over all ranks."""
    over = 0
    for rank in range(len(tables.limits_bytes)):
        over += _over_on(rank, tables, offsets, starts)
    return over


@inner
def _energy(tables: _Tables, offsets: Integers, starts: Integers) -> float:
    _set_rounds(tables, offsets, starts)
    d, period_us, num_copies = tables.durations_us, tables.period_us, tables.num_copies
    overlap_us, energy = 0, 0.0
    for rank in range(len(tables.limits_bytes)):
        nodes = tables.on[tables.first_on[rank] : tables.first_on[rank + 1]]
        for i in range(len(nodes)):
            for j in range(len(nodes)):
                a, b = nodes[i], nodes[j]
                gap = (offsets[b] - offsets[a]) % period_us
                if i != j and gap < d[a] and (gap > 0 or d[b] > 0):
                    overlap_us += d[a] - gap
        over = _over_on(rank, tables, offsets, starts)
        if over > 0:
            energy += over * tables.weights[rank]
    for first in range(0, len(d), num_copies) if num_copies > 1 else range(0):
        last = first + num_copies - 1
        overlap_us += max(starts[last] + d[last] - starts[first] - period_us, 0)
    return energy + overlap_us / period_us


@inner
def _move(tables: _Tables, s: Integers, starts: Integers, new: Integers) -> bool:
    """Changes `new`, a copy of the offsets `s`; False if there was nothing to move."""
    d, period_us = tables.durations_us, tables.period_us
    v = np.random.randint(len(s))
    rank = tables.ranks[np.random.randint(tables.first_rank[v], tables.first_rank[v + 1])]
    nodes = tables.on[tables.first_on[rank] : tables.first_on[rank + 1]]
    w = nodes[np.random.randint(len(nodes))]
    kind = np.random.random()
    if kind < 0.35:  # exchange v with the next one
        gap, w = period_us, v
        for node in nodes:
            if node != v and (s[node] - s[v]) % period_us < gap:
                gap, w = (s[node] - s[v]) % period_us, node
        new[w] = s[v]
        new[v] = (s[v] + d[w] + max(gap - d[v], 0)) % period_us
    elif kind < 0.6:  # take v out and put it behind w; those between close up
        for node in nodes:
            if node != v and (s[node] - s[v]) % period_us <= (s[w] - s[v]) % period_us:
                new[node] = (s[node] - d[v]) % period_us
        new[v] = (new[w] + d[w]) % period_us
    elif kind < 0.8:  # next to what v waits for or feeds, mostly with all of its rank
        if np.random.random() < 0.5:
            first, values, sign = tables.first_input, tables.inputs, 1
        else:
            first, values, sign = tables.first_output, tables.outputs, -1
        if first[v] == first[v + 1]:
            return False
        e = first[v] + 2 * np.random.randint((first[v + 1] - first[v]) // 2)
        new[v] = (starts[values[e]] + sign * values[e + 1]) % period_us
        if np.random.random() < 0.7:
            for node in nodes:
                new[node] = (s[node] + new[v] - s[v]) % period_us if node != v else new[v]
    elif np.random.random() < 0.5:  # right behind w
        new[v] = (s[w] + d[w]) % period_us
    else:  # right before w
        new[v] = (s[w] - d[v]) % period_us
    return w != v or (0.6 <= kind < 0.8)


@loop
def _walk(
    tables: _Tables, state: Integers, best: Integers, least: Floats, seed: int, num_moves: int, heats: Floats
) -> None:
    """Tries `num_moves` moves from `state` on; keeps `best` and its energy `least[0]` up to date."""
    hot, cold = heats[0], heats[1]
    np.random.seed(seed)
    starts, trial = state.copy(), state.copy()
    energy = _energy(tables, state, starts)
    for i in range(num_moves):
        if energy < least[0]:
            least[0] = energy
            copy(state, best)
            if energy == 0:
                return
        copy(state, trial)
        if not _move(tables, state, starts, trial):
            continue
        new = _energy(tables, trial, starts)
        if new <= energy or np.random.random() < np.exp((energy - new) / (hot * (cold / hot) ** (i / num_moves))):
            energy = new
            copy(trial, state)
        else:
            _set_rounds(tables, state, starts)
