"""A rank that has become slower or faster than planned, step after step, when the others have not."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from statistics import median
from typing import NamedTuple

from rota.plan import Plan

_TIMES = 1.2  # as long as planned, compared with the others: beyond this, or its inverse, a rank has changed
_MOST_STEPS = 0.8  # of the steps


class Change(NamedTuple):
    """A rank whose ops took `times_planned` times as long as planned, those of the others `others` times.

    Both are medians over steps. `position`: which of the pipelines it is in.
    """

    position: int
    rank: int
    times_planned: float
    others: float


def planned_us(plan: Plan) -> list[int]:
    """How long each rank's ops take in a step, as planned."""
    return [sum(plan.duration_us(op) for op in order) for order in plan.orders]


def changed_rank(planned: Sequence[int], pipelines: Sequence[Sequence[Sequence[float]]]) -> Change | None:
    """The rank that has changed most, in at least four of five steps by more than a fifth; None if none has.

    Args:
        planned: as `planned_us` returns it.
        pipelines: of each pipeline, for each rank how long its ops took in each step, in µs.
    """
    found = []
    for position, busy_us in enumerate(pipelines):
        for rank in range(len(planned)):
            mine, others = _ratios(planned, busy_us, rank)
            pairs = [*zip(mine, others, strict=False)]  # there may be no others
            num_slow = sum(a > _TIMES * b for a, b in pairs)
            num_fast = sum(_TIMES * a < b for a, b in pairs)
            if pairs and max(num_slow, num_fast) >= _MOST_STEPS * len(pairs):
                found.append(Change(position, rank, median(mine), median(others)))
    # Of two ranks each has changed compared with the other: the one further from its plan is meant.
    return max(found, key=lambda one: (_size(one.times_planned, one.others), _size(one.times_planned)), default=None)


def compared(planned: Sequence[int], pipelines: Sequence[Sequence[Sequence[float]]], change: Change) -> Change:
    """The same rank, compared with other planned times."""
    mine, others = _ratios(planned, pipelines[change.position], change.rank)
    return change._replace(times_planned=median(mine), others=median(others))


def _ratios(planned: Sequence[int], busy_us: Sequence[Sequence[float]], rank: int) -> tuple[list[float], list[float]]:
    """How many times as long as planned a rank's ops took in each step, and the median of the others."""
    ratios = {i: [us / planned[i] for us in steps] for i, steps in enumerate(busy_us) if planned[i]}
    others = [of for i, of in ratios.items() if i != rank]
    return ratios.get(rank, []), [median(step) for step in zip(*others, strict=True)]


def _size(a: float, b: float = 1.0) -> float:
    """How far a / b is from 1, in either direction; rounded, as ranks that differ by rounding alone are equal."""
    return round(abs(log(max(a, 1e-9) / max(b, 1e-9))), 6)
