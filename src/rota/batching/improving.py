"""Local search over the sequence of micro-batches and the policy of list scheduling; each try is one dispatch.

A *valley* sequence has small micro-batches at both ends, so that the pipeline fills and drains fast, and large ones in
the middle, where neighbours of similar size keep each other's ranks busy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from rota.batching.dispatching import Dispatch, Policy, dispatch, run
from rota.batching.problem import BatchProblem, Integers

_SCALES = (1.0, 0.3, 0.7, 0.85, 1.15, 1.5)  # of the forward levels of 1F1B
#: Micro-batches that wait for their weight gradients: on every rank, and more for each rank of depth, as in ZB-H1.
_WEIGHT_SCALES = (
    (1.0, 0.0),
    (0.0, 0.0),
    (2.0, 0.0),
    (4.0, 0.0),
    (1e4, 0.0),
    (0.0, 1.0),
    (0.0, 2.0),
    (0.0, 0.5),
    (1.0, 1.0),
)
_PATIENCES = (0.5, 0.0, 1.0, 2.0)


def valley(problem: BatchProblem) -> Integers:
    """int64[num_microbatches]: from both ends towards the middle, ever larger ones."""
    order = np.argsort(problem.durations_us.sum(axis=1), kind="stable")
    return np.concatenate([order[::2], order[1::2][::-1]])


def falling(problem: BatchProblem) -> Integers:
    """int64[num_microbatches]: the largest first."""
    return np.argsort(-problem.durations_us.sum(axis=1), kind="stable")


def best_policy(problem: BatchProblem, sequence: Integers) -> tuple[Policy, Dispatch]:
    """The best policy of some, and its dispatch: one parameter after the other, twice."""
    choices: list[tuple[Any, ...]] = [_SCALES, _WEIGHT_SCALES, _PATIENCES]
    if not (problem.choice_of == 2).any():
        choices[1] = _WEIGHT_SCALES[:1]
    chosen = [0, 0, 0]
    tried: dict[tuple[int, ...], Dispatch] = {}

    def value(key: tuple[int, ...]) -> int:
        if key not in tried:
            tried[key] = dispatch(
                problem, sequence, _policy(problem, *(c[k] for c, k in zip(choices, key, strict=True)))
            )
        return tried[key].makespan_us

    for _ in range(2):
        for i, options in enumerate(choices):
            keys = [(*chosen[:i], k, *chosen[i + 1 :]) for k in range(len(options))]
            chosen = [*min(keys, key=value)]
    return _policy(problem, *(c[k] for c, k in zip(choices, chosen, strict=True))), tried[tuple(chosen)]


def _policy(problem: BatchProblem, scale: float, weight_scale: tuple[float, float], patience: float) -> Policy:
    """Forward levels that fall from the first rank to the last as in 1F1B, times `scale`."""
    held = np.maximum(problem.held_bytes, 0)
    of_rank = np.array([held[:, problem.rank_of == rank].sum(axis=1).mean() for rank in range(problem.num_ranks)])
    depth = np.arange(problem.num_ranks, 0, -1)
    room = np.minimum(problem.limits_bytes, 2 * of_rank * problem.num_ranks)
    levels = (room * depth / problem.num_ranks * scale).astype(np.int64)
    weights = problem.choice_of == 2
    waiting = -problem.held_bytes[:, weights].mean() if weights.any() else 0.0
    flat, slope = weight_scale
    weight_levels = (waiting * (flat + slope * np.arange(problem.num_ranks))).astype(np.int64)
    return Policy(levels, weight_levels, patience)


def improve(
    problem: BatchProblem, sequence: Integers, policy: Policy, goal_us: int, tries: int
) -> tuple[Integers, Policy]:
    """The best sequence and policy found by so many dispatches, or the first that reaches `goal_us`; repeatable."""
    sequence, levels, weight_levels = sequence.copy(), policy.forward_levels.copy(), policy.weight_levels.copy()
    typical = np.maximum(problem.held_bytes, 0).sum(axis=1).mean() / max(problem.num_ranks, 1)
    patience = _climb(
        problem.tables,
        sequence,
        levels,
        weight_levels,
        policy.patience,
        problem.limits_bytes,
        float(typical),
        goal_us,
        tries,
    )
    return sequence, Policy(levels, weight_levels, float(patience))


@njit(cache=True, nogil=True)
def _climb(tables, sequence, levels, weight_levels, patience, limits, typical, goal, tries):  # type: ignore[no-untyped-def]
    """Moves that make nothing worse are kept; the arrays end as the best found, the patience is returned."""
    count, num_tasks = tables.durations_us.shape
    num_ranks = len(limits)
    num_moves = 10 if num_tasks > 2 * num_ranks else 8
    starts = np.zeros((count, num_tasks), np.int64)
    orders = np.zeros((num_ranks, 0), np.int32)
    best = run(tables, sequence, levels, weight_levels, patience, limits, starts, orders)
    state = np.uint64(88172645463325252)
    old_sequence, old_levels, old_weight_levels = sequence.copy(), levels.copy(), weight_levels.copy()
    for _ in range(tries):
        if best <= goal:
            break
        old_sequence[:], old_levels[:], old_weight_levels[:], old_patience = sequence, levels, weight_levels, patience
        state ^= state << np.uint64(13)
        state ^= state >> np.uint64(7)
        state ^= state << np.uint64(17)
        dice = np.int64(state >> np.uint64(33))
        move, dice = dice % num_moves, dice // num_moves
        a, b = dice % count, (dice // count) % count
        if move < 3:  # exchange two, often neighbours
            if move == 0:
                b = (a + 1 + b % 4) % count
            sequence[a], sequence[b] = sequence[b], sequence[a]
        elif move < 5:  # take one out and put it elsewhere
            taken = sequence[a]
            if a < b:
                sequence[a:b] = old_sequence[a + 1 : b + 1]
            else:
                sequence[b + 1 : a + 1] = old_sequence[b:a]
            sequence[b] = taken
        elif move == 5:
            patience = (b % 9) / 4.0
        else:
            step = int(typical * (0.1 + (b % 16) / 8.0) * (1 if a % 2 else -1))
            changed = levels if move < 8 else weight_levels
            rank = (dice // 64) % num_ranks
            if move % 2 == 0:
                changed[rank] = max(changed[rank] + step, 0)
            else:
                for q in range(num_ranks):
                    changed[q] = max(changed[q] + step, 0)
        value = run(tables, sequence, levels, weight_levels, patience, limits, starts, orders)
        if value <= best:
            best = value
        else:
            sequence[:], levels[:], weight_levels[:] = old_sequence, old_levels, old_weight_levels
            patience = old_patience
    return patience
