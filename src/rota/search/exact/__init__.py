"""The whole step as one CP-SAT model: the best orders with a proof, where the step is small."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from typing import Literal

import numpy as np
from ortools.sat.python import cp_model

from rota.core.stopping import look
from rota.core.tasks import scalar
from rota.search.budget import Budget
from rota.search.critical_path import CriticalPath
from rota.search.exact import cpsat
from rota.search.exact.ordering import Ordering, Window, step_ends_in
from rota.search.exact.step_points import Gaps, StepPoints
from rota.search.exact.transfer_memory import Level, Times
from rota.search.problem import NO_LIMIT, Orders, Problem
from rota.search.transfer_levels import counting_transfers

MOST_TIMED_OPS = 100  # up to here all ops of a span's model start as soon as possible; larger ones are relaxations
_S_PER_CONSTRAINT = 2e-5  # nominal seconds, of a model that counts transfers


@dataclass(frozen=True)
class Exact:
    """Orders that are better than the best known (None: none were found), and a lower bound for all orders."""

    orders: Orders | None
    bound_us: int
    is_complete: bool = False  #: whether there was enough time for a proof


def solve(
    problem: Problem,
    objective: Literal["makespan", "span"],
    best: Orders | None,
    bound_us: int,
    budget: Budget,
    seed: int = 0,
    *,
    transfers: Literal["not counted", "as in a plan", "with waits"] = "not counted",
) -> Exact:
    """Looks for orders better than `best`, the best known that fit, if any, and for a proof that there are none.

    `transfers` says whether what they hold is counted, by time, which small steps allow. "as in a plan": ops start as
    soon as they can, and the bound holds for all plans in which each task does its micro-batches in turn; where
    transfers hold bytes, out of turn may be faster. "with waits": ops may start later than they can, which is easier to
    solve: the bound holds for every plan, but the orders may not fit when ops start as soon as they can.

    When no orders fit at all, the bound is longer than any step.
    """
    is_counted = transfers != "not counted"
    critical_path = CriticalPath(counting_transfers(problem) if is_counted else problem, objective == "span")
    window, value_us = whole_step(critical_path, best)
    horizon_us = longest_us(problem)
    most_us = horizon_us if value_us is None else value_us - 1
    # Waits never make a makespan longer than all work in a row, but a span that ends late may be short.
    ordering = Ordering(window, bound_us, most_us, horizon_us if is_counted or critical_path.of_span else None)
    budget.spend(ordering.nominal_s)
    if ordering.is_impossible:
        return Exact(None, max(bound_us, most_us + 1), True)
    if critical_path.of_span:
        _measure_span(ordering)
    else:
        ordering.minimize()
    is_small_span = critical_path.of_span and len(window.sequence) <= MOST_TIMED_OPS
    if is_counted or is_small_span:
        gaps = Gaps(ordering)
        if transfers != "with waits":
            _start_as_soon_as_possible(ordering, gaps)
        if is_counted:
            _count_transfers(ordering, gaps, problem)
            budget.spend(_S_PER_CONSTRAINT * len(ordering.model.proto.constraints))
    if best is not None:
        ordering.hint()
    # That everything starts as soon as it can is a choice among many reasons, of which a relaxation knows nothing.
    status, solver = cpsat.solve(ordering.model, budget, seed, relaxes=transfers != "as in a plan")
    if status == cp_model.INFEASIBLE:
        return Exact(None, most_us + 1, True)
    bound_us = cpsat.raised(bound_us, solver)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Exact(None, bound_us)
    return Exact(critical_path.orders(ordering.rows(solver.value)), bound_us, status == cp_model.OPTIMAL)


def whole_step(critical_path: CriticalPath, best: Orders | None) -> tuple[Window, int | None]:
    """(all ops in the order of `best`, or one micro-batch at a time, free on every rank; the value of `best`)."""
    problem, value_us = critical_path.problem, None
    if best is None:
        place = np.argsort(problem.topological)[problem.task_of]
        sequence = np.lexsort((place, np.arange(len(place)) - problem.first_node[problem.task_of]))
    else:
        paths = critical_path.paths(best)
        assert paths is not None
        sequence, value_us = np.argsort(paths.starts), paths.value_us
    place_of = np.argsort(sequence)
    rows = tuple(tuple(nodes[np.argsort(place_of[nodes])].tolist()) for nodes in critical_path.nodes_on)
    nodes = sequence.tolist()
    tails, step_ends = dict.fromkeys(nodes, 0), []
    for rank, row in enumerate(rows):
        ends = () if critical_path.of_span else problem.step_ends.of_rank(rank)
        step_ends.append(step_ends_in(problem, ((0, end) for end in ends), range(1), row))
        if ends:
            tails.update((node, max(tails[node], critical_path.optimizer_ticks(rank))) for node in row)
    is_free, levels, heads = (True,) * len(rows), (0,) * len(rows), dict.fromkeys(nodes, 0)
    return Window(critical_path, tuple(nodes), rows, is_free, levels, heads, tails, tuple(step_ends)), value_us


def longest_us(problem: Problem) -> int:
    """An upper bound for a step whose ops start as soon as possible: everything in a row."""
    ends_us = int(problem.step_ends.reduce_us.sum() + problem.step_ends.optimizer_us.sum())
    lags_us = sum(lag * int(problem.counts[source]) for (source, _), lag in problem.lags_us.items())
    return int((problem.durations_us * problem.counts).sum()) + ends_us + lags_us


def _count_transfers(ordering: Ordering, gaps: Gaps, problem: Problem) -> None:
    """Limits levels by time on each rank with a limit where transfers hold bytes."""
    window, model = ordering.window, ordering.model
    most_us = ordering.certain.most + max((scalar(route.duration_us) for route in problem.original.routes), default=0)
    points = StepPoints(ordering, gaps, most_us)
    times = Times(
        model,
        {node: points.start(node) for node in window.sequence},
        points.end,
        ordering.before,
        points.is_until,
        lambda node: int(problem.durations_us[window.task_of[node]]),
    )
    held = {node: int(problem.held_bytes[task]) for node, task in window.task_of.items()}
    peak = {node: int(problem.peak_bytes[task]) for node, task in window.task_of.items()}
    for rank, row in enumerate(window.rows):
        carries = [
            carried.between(*nodes)
            for carried in problem.lowered.carried
            if carried.rank == rank and carried.since.op in window.nodes_of
            for nodes in zip(window.nodes_of[carried.since.op], window.nodes_of[carried.until.op], strict=True)
        ]
        if carries and problem.limits_bytes[rank] != NO_LIMIT:
            for level in Level(times, row, carries).all(held, peak):
                model.add(level <= int(problem.limits_bytes[rank]))
    points.add_implications()


def _measure_span(ordering: Ordering) -> None:
    """Minimizes the longest time from a rank's first start to its last end."""
    window, model = ordering.window, ordering.model
    for tasks in window.tasks_on[: window.critical_path.problem.num_ranks]:
        first = model.new_int_var(0, ordering.certain.most, "first start")
        for task in tasks:
            model.add(first <= ordering.starts[window.nodes_of[task][0]])
        for task in tasks:
            ordering.require_end(ordering.ends[window.nodes_of[task][-1]] - first)
    model.minimize(ordering.end_us)


def _start_as_soon_as_possible(ordering: Ordering, gaps: Gaps) -> None:
    """Each op starts at 0, or when something that it waits for is there. A later start could make a span shorter."""
    window, model = ordering.window, ordering.model
    waits = set(window.edges)
    for row in window.rows:
        waits |= {(a, b, 0) for a, b in permutations(row, 2) if not ordering.certain.is_before(b, a)}
    reasons: dict[int, list[cp_model.IntVar]] = {node: [] for node in window.sequence}
    for a, b, lag in sorted(waits):
        if gaps.least(a, b) > window.lengths[a] + lag:
            continue  # something always comes between the two, or b never starts so soon
        reason = model.new_bool_var(f"{b} waits for {a}")
        model.add(ordering.starts[b] == ordering.ends[a] + lag).only_enforce_if(reason)
        reasons[b].append(reason)
        if (order := ordering.order_of(a, b)) is not None:
            model.add_implication(reason, order)
    for node, literals in reasons.items():
        look()
        if ordering.certain.heads[node] <= 0:
            at_0 = model.new_bool_var(f"{node} at 0")
            model.add(ordering.starts[node] == 0).only_enforce_if(at_0)
            literals.append(at_0)
        model.add_bool_or(literals)
