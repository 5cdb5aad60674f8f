"""Your own schedule: say what one stage does; checker, simulator, pictures and runtime work with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from rota.core.placement import Placement
from rota.core.plan import Plan
from rota.core.tasks import Op
from rota.schedules.common import depth, require_microbatches, require_one_stage_per_rank


class PipeSchedule(ABC):
    """A schedule with one stage per rank: subclass it and yield a stage's ops, first to last.

    For several stages per rank, make a `Plan` of orders.

    class Mine(PipeSchedule):
        def steps(self, stage):
            for m in self.microbatches(stage):
                yield Op(stage, Kind.F, m)
                yield Op(stage, Kind.B, m)

    plan = Mine(placement, num_microbatches=8).plan()

    Args:
        placement: At most one stage per rank.
        num_microbatches: Micro-batches per step.

    Raises:
        ScheduleError: `num_microbatches` is less than 1.
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
        """How many stages follow on the longest path to the end: 1F1B's warm-up."""
        return depth(self.placement)[stage]

    def plan(self) -> Plan:
        """The plan of all stages; `rota.check` says whether it is complete and can run.

        Raises:
            ScheduleError: A rank has several stages.
        """
        require_one_stage_per_rank(type(self).__name__, self.placement)
        orders = []
        for rank in range(self.placement.num_ranks):
            steps = [step for stage in self.placement.stages_on(rank) for step in self.steps(stage)]
            orders.append(tuple(Op.parse(step) if isinstance(step, str) else step for step in steps))
        return Plan(self.placement, self.num_microbatches, tuple(orders))
