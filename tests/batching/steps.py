"""Random steps of micro-batches that differ, and their exact optimum by a CP-SAT model of its own."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from ortools.sat.python import cp_model

from rota.batching.problem import BatchProblem


def chain(
    seed: int, num_ranks: int, num_microbatches: int, split: bool, in_flight: float, giants: int = 0
) -> BatchProblem:
    """A chain with one stage per rank, whose memory has room for `in_flight` ordinary micro-batches."""
    rng = np.random.default_rng(seed)
    size = rng.integers(4, 12, (num_microbatches, 1))
    size[:giants] *= 3
    forward = size + rng.integers(0, 3, (num_microbatches, num_ranks))
    held = 10 * size + rng.integers(0, 9, (num_microbatches, num_ranks))
    rows: list[tuple[int, int, np.ndarray, np.ndarray]] = []  # rank, choice, durations, held
    for rank in range(num_ranks):
        rows.append((rank, 1, forward[:, rank], held[:, rank]))
    edges = [(rank, rank + 1) for rank in range(num_ranks - 1)]
    before = num_ranks - 1
    for rank in reversed(range(num_ranks)):
        backward = len(rows)
        freed = held[:, rank] // 2 if split else held[:, rank]
        rows.append((rank, 0, forward[:, rank] * (1 if split else 2) + 1, -freed))
        edges += [(before, backward), *([(rank, backward)] if before != rank else [])]
        before = backward
        if split:
            rows.append((rank, 2, forward[:, rank] - 1, freed - held[:, rank]))
            edges.append((backward, len(rows) - 1))
    ranks = np.array([row[0] for row in rows])
    pairs = np.array(edges)
    lags = np.where(ranks[pairs[:, 0]] != ranks[pairs[:, 1]], rng.integers(0, 3, (num_microbatches, 1)), 0)
    limit = max(int(in_flight * 80), int(held.max()))
    return BatchProblem(
        durations_us=np.ascontiguousarray(np.stack([row[2] for row in rows], axis=1)),
        held_bytes=np.ascontiguousarray(np.stack([row[3] for row in rows], axis=1)),
        peak_bytes=np.zeros((num_microbatches, len(rows)), np.int64),
        lags_us=lags,
        edge_bytes=np.zeros_like(lags),
        edges=pairs,
        rank_of=ranks,
        choice_of=np.array([row[1] for row in rows]),
        limits_bytes=np.full(num_ranks, limit),
        tails_us=rng.integers(0, 5, num_ranks),
    )


def optimum_us(problem: BatchProblem, sequence: Sequence[int] | None = None) -> int | None:
    """The least makespan, of all orders or of those of a sequence; None if CP-SAT did not close it."""
    model = cp_model.CpModel()
    count, tasks = problem.durations_us.shape
    horizon = int(problem.durations_us.sum() + problem.lags_us.sum() + problem.tails_us.max())
    makespan = model.new_int_var(0, horizon, "")
    starts = [[model.new_int_var(0, horizon, "") for _ in range(tasks)] for _ in range(count)]
    last = [[starts[m][t] + int(problem.durations_us[m, t]) for t in range(tasks)] for m in range(count)]
    for rank in range(problem.num_ranks):
        own = np.flatnonzero(problem.rank_of == rank).tolist()
        spans = []
        for m in range(count):
            for t in own:
                spans.append(model.new_fixed_size_interval_var(starts[m][t], int(problem.durations_us[m, t]), ""))
                model.add(last[m][t] + int(problem.tails_us[rank]) <= makespan)
        model.add_no_overlap(spans)
        held, sizes = [], []
        for m in range(count):
            level = 0
            for a, b in pairwise(own):  # a rank's tasks in order: F, B or F, I, W
                level += int(problem.held_bytes[m, a])
                begin = starts[m][a] if level == problem.held_bytes[m, a] else last[m][a]
                length = model.new_int_var(0, horizon, "")
                held.append(model.new_interval_var(begin, length, last[m][b], ""))
                sizes.append(level)
        model.add_cumulative(held, sizes, int(problem.limits_bytes[rank]))
    for m in range(count):
        for e, (a, b) in enumerate(problem.edges.tolist()):
            model.add(starts[m][b] >= last[m][a] + int(problem.lags_us[m, e]))
    for one, other in pairwise(sequence or ()):
        for t in range(tasks):
            model.add(starts[other][t] >= last[one][t])
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_deterministic_time = 10  # counts work: a busy machine closes as much as another
    return round(solver.objective_value) if solver.solve(model) == cp_model.OPTIMAL else None
