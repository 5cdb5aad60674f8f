"""Your own schedule: say what one stage does, and get checker, simulator, pictures and runtime for nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from rota.errors import ScheduleError
from rota.placement import Placement
from rota.plan import Plan
from rota.schedules.common import depth, require_microbatches
from rota.tasks import Op


class PipeSchedule(ABC):
    """Subclass it and yield a stage's ops, first to last; one stage a rank. For several, make a `Plan` of orders.

    class Mine(PipeSchedule):
        def steps(self, stage):
            for m in self.microbatches(stage):
                yield Op(stage, Kind.F, m)
                yield Op(stage, Kind.B, m)

    plan = Mine(placement, num_microbatches=8).plan()
    """

    def __init__(self, placement: Placement, num_microbatches: int) -> None:
        require_microbatches(type(self).__name__, num_microbatches)
        self.placement = placement
        self.num_microbatches = num_microbatches

    @abstractmethod
    def steps(self, stage: int) -> Iterable[Op | str]:
        """The ops of `stage` in order, each an `Op` or its text, such as "2F0"."""

    def microbatches(self, stage: int) -> range:
        """The micro-batches that pass through `stage`."""
        return self.placement.microbatches(stage, self.num_microbatches)

    def stages_after(self, stage: int) -> int:
        """How many stages follow on the longest way to the end: 1F1B's warm-up."""
        return depth(self.placement)[stage]

    def plan(self) -> Plan:
        """The plan of all stages; `rota.check` tells whether it is complete and can run."""
        orders = []
        for rank in range(self.placement.num_ranks):
            stages = self.placement.stages_on(rank)
            if len(stages) > 1:
                raise ScheduleError(
                    f"{type(self).__name__}: rank {rank} has the stages {', '.join(map(str, stages))}, whose order "
                    f"steps() cannot tell; place one stage a rank, or make rota.Plan(placement, n, orders)"
                )
            steps = [step for stage in stages for step in self.steps(stage)]
            orders.append(tuple(Op.parse(step) if isinstance(step, str) else step for step in steps))
        return Plan(self.placement, self.num_microbatches, tuple(orders))
