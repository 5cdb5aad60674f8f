"""In which order list scheduling prefers ops: the time at which each would start in an ideal steady state."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from rota.search.dispatching import Priorities
from rota.search.problem import Integers, Problem


def from_starts(problem: Problem, starts_us: NDArray[np.float64], period_us: float) -> Priorities:
    """Micro-batch k of its stream would start task t at `starts_us[t]` + k · `period_us`."""
    task_of, nth = _nodes(problem)
    return starts_us[task_of] + nth * period_us


def guesses(problem: Problem) -> Iterator[Priorities]:
    """Ideal steady states that know nothing of ranks: each task as early as its micro-batch allows, or as late.

    Tasks that nothing reads (weight gradients) come when asked for by their place in line, or last of all.
    """
    heads, tails = heads_us(problem), _tails(problem)
    whole = float((heads + tails).max(initial=0))
    period = busiest_us(problem)
    read_by_none = problem.outputs.first[1:] == problem.outputs.first[:-1]
    for put_off in (0.0, period, 4 * whole + period * problem.num_microbatches):
        for pace in (1.0, 0.5, 0.0):  # 0: what is deepest in the pipeline goes first
            for early in (True, False):
                starts = (heads if early else whole - tails).astype(np.float64)
                if pace == 0:
                    starts = -starts
                starts = starts + put_off * read_by_none
                yield from_starts(problem, starts, period * pace if pace else 1e-3)


def _nodes(problem: Problem) -> tuple[Integers, Integers]:
    """For each node its task, and the how-manieth micro-batch of the stream it is."""
    task_of = np.repeat(np.arange(len(problem.counts)), problem.counts)
    return task_of, np.arange(len(task_of)) - problem.first_node[task_of]


def heads_us(problem: Problem) -> Integers:
    """How long after its micro-batch's start each task can start."""
    heads = np.zeros(len(problem.counts), np.int64)
    for task in problem.topological:
        row = problem.inputs.values[problem.inputs.first[task] : problem.inputs.first[task + 1]]
        for source, lag in row.reshape(-1, 2):
            heads[task] = max(heads[task], heads[source] + problem.durations_us[source] + lag)
    return heads


def _tails(problem: Problem) -> Integers:
    """How long a micro-batch takes at least from each task's start on."""
    tails = problem.durations_us.copy()
    for task in reversed(problem.topological):
        row = problem.outputs.values[problem.outputs.first[task] : problem.outputs.first[task + 1]]
        for target, lag in row.reshape(-1, 2):
            tails[task] = max(tails[task], problem.durations_us[task] + lag + tails[target])
    return tails


def busiest_us(problem: Problem) -> float:
    """What a micro-batch of each stream takes on the busiest rank; 1 where nothing takes time."""
    on = problem.tasks_on
    loads = [problem.durations_us[on.values[a:b]].sum() for a, b in zip(on.first[:-1], on.first[1:], strict=True)]
    return float(max(loads)) or 1.0
