"""Sequences of micro-batches, and the best of some policies of list scheduling.

A *valley* sequence has small micro-batches at both ends, so that the pipeline fills and drains fast, and large ones in
the middle, where neighbours of similar size keep each other's ranks busy.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rota.batching.dispatching import Dispatch, Policy, dispatch
from rota.batching.problem import BatchProblem, Floats, Integers

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


def by_policy(problem: BatchProblem, sequence: Integers) -> Dispatch | None:
    """The best orders of some policies, by one parameter after the other; None if memory never lets some op start."""
    weight_scales = _WEIGHT_SCALES if problem.has_weights else _WEIGHT_SCALES[:1]
    choices: list[tuple[Any, ...]] = [_SCALES, weight_scales, _PATIENCES]
    levels, waiting, depth = _forward_levels(problem), _waiting_bytes(problem), np.arange(problem.num_ranks)
    tried: dict[tuple[int, ...], Dispatch] = {}

    def value(key: tuple[int, ...]) -> int:
        if key not in tried:
            scale, (flat, slope), patience = (choices[i][k] for i, k in enumerate(key))
            weight_levels = (waiting * (flat + slope * depth)).astype(np.int64)
            policy = Policy((levels * scale).astype(np.int64), weight_levels, patience)
            tried[key] = dispatch(problem, sequence, policy)
        return tried[key].makespan_us

    chosen = [0, 0, 0]
    for _ in range(2):
        for i, options in enumerate(choices):
            keys = [(*chosen[:i], k, *chosen[i + 1 :]) for k in range(len(options))]
            chosen = [*min(keys, key=value)]
    found = tried[tuple(chosen)]
    return found if found.is_complete else None


def _forward_levels(problem: BatchProblem) -> Floats:
    """Bytes per rank that fall from the first rank to the last as in 1F1B."""
    held = np.maximum(problem.held_bytes, 0).mean(axis=0)
    of_rank = np.bincount(problem.rank_of, weights=held, minlength=problem.num_ranks)
    room = np.minimum(problem.limits_bytes, 2 * of_rank * problem.num_ranks)
    return room * np.arange(problem.num_ranks, 0, -1) / problem.num_ranks


def _waiting_bytes(problem: BatchProblem) -> float:
    """What a W of a typical micro-batch frees."""
    return -float(problem.held_bytes[:, problem.choice_of == 2].mean()) if problem.has_weights else 0.0
