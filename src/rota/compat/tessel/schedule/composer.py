"""`Composer`: the schedules of a placement, by Rota's search."""

from __future__ import annotations

from typing import final

from rota.compat.tessel.conversion import micro_of, to_schedule
from rota.compat.tessel.schedule.schedplan import SchedPlan
from rota.search import find_repeating


@final
class Composer:
    """`micro` is a placement, `memory` the limit of each device (None: no limit).

    A schedule has a warm-up, a repetend with each block once, and a cool-down. The repetend has the fewest bubbles of
    all; with this repetend the whole is the shortest. None where nothing fits, or where a micro-batch leaves something
    behind. `time_limit_s` counts nominal seconds of work, so that the answer is the same on every run.
    """

    @staticmethod
    def compose(micro: SchedPlan, memory: int | None, *, time_limit_s: float = 10.0) -> SchedPlan | None:
        """With the fewest micro-batches that the best repetend of all needs."""
        return _compose(micro, memory, None, time_limit_s)

    @staticmethod
    def compose_n(
        micro: SchedPlan, memory: int | None, nmicros: int, *, time_limit_s: float = 10.0
    ) -> SchedPlan | None:
        """With `nmicros` micro-batches."""
        return _compose(micro, memory, nmicros, time_limit_s)

    @staticmethod
    def compose_fast(
        micro: SchedPlan, memory: int | None, wc_ratio: tuple[int, float] = (128, 0.05), *, time_limit_s: float = 10.0
    ) -> SchedPlan | None:
        """`compose`, which is fast. `wc_ratio` said when Tessel's heuristic may stop; it is not needed here."""
        del wc_ratio
        return _compose(micro, memory, None, time_limit_s)


def _compose(micro: SchedPlan, memory: int | None, nmicros: int | None, time_limit_s: float) -> SchedPlan | None:
    given = micro_of(micro, memory)
    count = None if nmicros is None else nmicros * given.placement.num_components
    found = find_repeating(given.placement, count, time_limit_s=time_limit_s)
    return None if found is None else to_schedule(given, found)
