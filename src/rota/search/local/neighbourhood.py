"""Large-neighbourhood search (Shaw, "Using constraint programming and local search methods", CP 1998).

All orders stay, except for the ops of a window of time on some adjacent ranks. CP-SAT puts these into a better order,
exactly and under the memory limit. Paths into the window are heads, paths out of it are tails: what makes all its ends
earlier ends the step earlier.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Literal

import numpy as np
from ortools.sat.python import cp_model

from rota.core.stopping import Stopped
from rota.search.budget import Budget
from rota.search.critical_path import CriticalPath, Paths
from rota.search.exact import cpsat
from rota.search.exact.ordering import Ordering, Window, step_ends_in
from rota.search.problem import Orders, Problem

_FIRST_SIZE, _LEAST_SIZE, _MOST_SIZE = 60, 20, 400  # ops of a window that are re-ordered
_OPS_PER_RANK = 12  # of a window on average; with fewer there is little to exchange, so only some ranks are free
_WINDOW_S = 1.0  # nominal seconds for one window
_GROW, _SHRINK = 1.06, 0.9  # the size, after a window that was easy, and after one that was too hard


def improve(
    problem: Problem,
    orders: Orders,
    objective: Literal["makespan", "span"],
    bound_us: int,
    budget: Budget,
    seed: int = 0,
) -> Orders:
    """Re-orders one window after the other, until the budget is used up or the objective is at its bound.

    `orders`, where it begins, fit and have no cycle; so does what it returns. The windows are chosen by `seed`.
    """
    critical_path, turn, size = CriticalPath(problem, objective == "span"), Random(seed), float(_FIRST_SIZE)
    paths = critical_path.paths(orders)
    assert paths is not None
    while paths.value_us > bound_us and not budget.is_over:
        budget.spend_ops(len(orders))  # to find the window
        share = budget.share(_WINDOW_S)
        window = window_at(critical_path, paths, *_choose(critical_path, paths, int(size), turn))
        try:
            status, rows = reorder(window, bound_us, paths.value_us - 1, share, turn.randrange(1 << 30))
        except Stopped:
            break
        if rows is not None:
            better = critical_path.orders(_replaced(paths, window, rows))
            new_paths = critical_path.paths(better)
            assert new_paths is not None
            if new_paths.value_us < paths.value_us:  # a span may have grown elsewhere: see `CriticalPath.paths`
                orders, paths = better, new_paths
        if status == cp_model.UNKNOWN:
            size = max(size * _SHRINK, _LEAST_SIZE)
        elif share.spent_s < _WINDOW_S / 4:
            size = min(size * _GROW, _MOST_SIZE)
    return orders


def reorder(
    window: Window, least_us: int, most_us: int, budget: Budget, seed: int
) -> tuple[int, list[list[int]] | None]:
    """(status of CP-SAT, the window's rows in an order that ends by `most_us`, or None where none was found)."""
    ordering = Ordering(window, least_us, most_us)
    budget.spend(ordering.nominal_s)
    if ordering.is_impossible:
        return int(cp_model.INFEASIBLE), None
    ordering.minimize()
    ordering.hint()
    status, solver = cpsat.solve(ordering.model, budget, seed)
    is_solved = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return status, ordering.rows(solver.value) if is_solved else None


def _choose(critical_path: CriticalPath, paths: Paths, size: int, turn: Random) -> tuple[int, int, list[bool]]:
    """(begin, end, which ranks are free), in ticks: `size` ops around an idle time, where there is time to gain."""
    rank, at = _idle(critical_path, paths, turn)
    num_ranks, center = critical_path.problem.num_ranks, rank
    if rank >= num_ranks:
        center = turn.choice([r for r in range(num_ranks) if len(paths.rows[r])])
    width = min(max(size // _OPS_PER_RANK, 2), num_ranks)
    first = min(max(center - turn.randrange(width), 0), num_ranks - width)
    free = [*range(first, first + width), *_links_of(critical_path.problem, range(first, first + width))]
    starts = np.sort(np.concatenate([paths.starts[paths.rows[r]] for r in free]))
    begin = int(np.searchsorted(starts, at)) - turn.randrange(size)
    begin = max(min(begin, len(starts) - size), 0)
    last = min(begin + size, len(starts)) - 1
    return int(starts[begin]), int(starts[last]) + 1, [r in free for r in range(len(paths.rows))]


def _links_of(problem: Problem, ranks: range) -> set[int]:
    """The shared links that serve transfers between these ranks and any others: if they stay, little can change."""
    routes = problem.original.routes
    return {problem.num_ranks + i for r in routes if r.sender in ranks or r.receiver in ranks for i in r.shared}


def _idle(critical_path: CriticalPath, paths: Paths, turn: Random) -> tuple[int, int]:
    """(rank, start of its op after an idle time, or of its last op); long idle times are more likely."""
    rank = turn.choice([r for r, row in enumerate(paths.rows) if len(row)])
    starts = paths.starts[paths.rows[rank]]
    ends = starts + critical_path.lengths[critical_path.problem.task_of[paths.rows[rank]]]
    over = max(paths.value_us * critical_path.ticks, int(ends[-1]))
    idle = np.cumsum(np.append(starts, over) - np.insert(ends, 0, 0))
    place = int(np.searchsorted(idle, turn.random() * idle[-1], side="right"))
    return rank, int(starts[min(place, len(starts) - 1)])


def window_at(critical_path: CriticalPath, paths: Paths, begin: int, end: int, is_free: Sequence[bool]) -> Window:
    """The window of all ops that start from `begin` on and before `end`, in ticks."""
    problem, starts, tails_of, lengths = critical_path.problem, paths.starts, paths.tails, critical_path.lengths
    rows, levels, step_ends = [], [], []
    heads: dict[int, int] = {}
    tails: dict[int, int] = {}
    for rank, row in enumerate(paths.rows):
        first, after = np.searchsorted(starts[row], (begin, end))
        nodes, tasks = row[first:after].tolist(), critical_path.problem.task_of[row]
        head = int(starts[row[first - 1]] + lengths[tasks[first - 1]]) if first else 0
        tail = int(lengths[tasks[after]] + tails_of[row[after]] if after < len(row) else paths.after[rank])
        for node in nodes:
            heads[node] = max(heads.get(node, head), head)
            tails[node] = max(tails.get(node, tail), tail)
        rows.append(tuple(nodes))
        levels.append(int(problem.held_bytes[tasks[:first]].sum()))
        step_ends.append(step_ends_in(problem, paths.step_ends[rank], range(first, after), nodes))
    _add_paths(critical_path, paths, heads, tails)
    sequence = sorted(heads, key=starts.__getitem__)
    return Window(
        critical_path, tuple(sequence), tuple(rows), tuple(is_free), tuple(levels), heads, tails, tuple(step_ends)
    )


def _add_paths(critical_path: CriticalPath, paths: Paths, heads: dict[int, int], tails: dict[int, int]) -> None:
    """Raises heads by data that comes into the window, and tails by data that leaves it."""
    problem, starts, tails_of = critical_path.problem, paths.starts, paths.tails
    first, lengths, ticks = problem.first_node.tolist(), critical_path.lengths.tolist(), critical_path.ticks
    for node, task in zip(list(heads), problem.task_of[list(heads)].tolist(), strict=True):
        for source, lag in problem.inputs[task].reshape(-1, 2).tolist():
            neighbour = node - first[task] + first[source]
            if neighbour not in heads:
                heads[node] = max(heads[node], int(starts[neighbour]) + lengths[source] + lag * ticks)
        for target, lag in problem.outputs[task].reshape(-1, 2).tolist():
            neighbour = node - first[task] + first[target]
            if neighbour not in heads:
                tails[node] = max(tails[node], lag * ticks + lengths[target] + int(tails_of[neighbour]))


def _replaced(paths: Paths, window: Window, rows: list[list[int]]) -> list[list[int]]:
    """All nodes of each rank in order, with the window's in their new order."""
    result = []
    for old, before, row in zip(paths.rows, window.rows, rows, strict=True):
        nodes: list[int] = old.tolist()
        if row:
            first = nodes.index(before[0])
            nodes[first : first + len(row)] = row
        result.append(nodes)
    return result
