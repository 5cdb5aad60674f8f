"""Ranks that are slower than planned, step after step, when the others are not: a busy machine, or a wrong cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from rota.plan import Plan
from rota.runtime.recorder import Record

LEAST_STEPS = 5
_SLOWER = 1.2  # times as slow as the others, each compared with its plan
_MOST_STEPS = 0.8  # of the steps


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that was more than a fifth slower than the median of the others in `num_slow` of `num_steps` steps.

    `times_planned`: how many times as long as planned its ops took, and `others`: theirs. Both are medians of steps.
    """

    rank: int
    times_planned: float
    others: float
    num_slow: int
    num_steps: int

    def to_text(self) -> str:
        """One sentence: which rank is slower, in how many steps, and by how much."""
        return (
            f"rank {self.rank} was slower than the median of the other ranks in {self.num_slow} of the last "
            f"{self.num_steps} steps: its ops took {self.times_planned:.2f} times as long as planned, theirs "
            f"{self.others:.2f} times"
        )


def stragglers(plan: Plan, records: Sequence[Record]) -> list[Straggler]:
    """The stragglers among the plan's ranks in `records`; none if these have fewer than `LEAST_STEPS` steps.

    None either if the ranks shared cores: then a rank's ops took long because others ran beside them.
    """
    if any(record.num_cores is not None and len(records) > record.num_cores for record in records):
        return []
    planned_us = [sum(plan.duration_us(op) for op in order) for order in plan.orders]
    num_steps = (
        min((len(record.busy_ns) for record in records), default=0) - 1
    )  # the oldest may be the first step, which warms up
    ratios = {
        record.rank: [busy_ns / 1000 / planned_us[record.rank] for busy_ns in [*record.busy_ns][-num_steps:]]
        for record in records
        if planned_us[record.rank]
    }
    if num_steps < LEAST_STEPS:
        return []
    found = []
    for rank, mine in ratios.items():
        others = [median(step) for step in zip(*(of for other, of in ratios.items() if other != rank), strict=True)]
        num_slow = sum(a > _SLOWER * b for a, b in zip(mine, others, strict=False))  # there may be no others
        if num_slow >= _MOST_STEPS * num_steps:
            found.append(Straggler(rank, median(mine), median(others), num_slow, num_steps))
    return found
