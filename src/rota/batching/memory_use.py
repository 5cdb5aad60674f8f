"""What a dispatched step really holds, transfers included: `rota.memory`'s account, on arrays."""

from __future__ import annotations

import numpy as np

from rota.batching.dispatching import Dispatch
from rota.batching.problem import BatchProblem, Integers

_TRANSFER_ENDS, _OP_ENDS, _TRANSFER_STARTS, _OP = range(4)  # events at one instant come in this order


def peaks_bytes(problem: BatchProblem, sequence: Integers, found: Dispatch) -> Integers:
    """int64[num_ranks]: the most that each rank holds at any time, without static bytes."""
    durations, starts = problem.durations_us, found.starts_us
    ends = starts + durations
    crosses = problem.rank_of[problem.edges[:, 0]] != problem.rank_of[problem.edges[:, 1]]
    received = np.zeros_like(durations)
    for e in np.flatnonzero(crosses).tolist():
        received[:, problem.edges[e, 1]] += problem.edge_bytes[:, e]
    at_start = np.maximum(problem.held_bytes, 0) + problem.peak_bytes
    at_end = np.minimum(problem.held_bytes, 0) - problem.peak_bytes - received
    result = np.zeros(problem.num_ranks, np.int64)
    for rank in range(problem.num_ranks):
        microbatches, tasks = _executed(problem, sequence, found, rank)
        begun, over = starts[microbatches, tasks], ends[microbatches, tasks]
        keys = [np.stack([4 * begun + _OP, 4 * over + np.where(over > begun, _OP_ENDS, _OP)], axis=1).ravel()]
        changes = [np.stack([at_start[microbatches, tasks], at_end[microbatches, tasks]], axis=1).ravel()]
        for e in np.flatnonzero(crosses).tolist():
            source, target = problem.edges[e].tolist()
            sent, sizes = ends[:, source], problem.edge_bytes[:, e]
            if rank in (problem.rank_of[source], problem.rank_of[target]):
                keys.append(4 * sent + _TRANSFER_STARTS)
                changes.append(sizes)
            if rank == problem.rank_of[source]:
                keys.append(4 * (sent + problem.lags_us[:, e]) + _TRANSFER_ENDS)
                changes.append(-sizes)
        order = np.argsort(np.concatenate(keys), kind="stable")
        result[rank] = max(int(np.cumsum(np.concatenate(changes)[order]).max(initial=0)), 0)
    return result


def _executed(problem: BatchProblem, sequence: Integers, found: Dispatch, rank: int) -> tuple[Integers, Integers]:
    """(micro-batches, tasks) of a rank's ops in order of execution."""
    tasks = found.orders[rank]
    tasks = tasks[tasks >= 0].astype(np.int64)
    microbatches = np.zeros_like(tasks)
    for task in np.flatnonzero(problem.rank_of == rank).tolist():
        microbatches[tasks == task] = sequence
    return microbatches, tasks
