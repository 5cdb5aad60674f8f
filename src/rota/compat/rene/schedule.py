"""In which order a stage does its instructions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from rota.compat.rene.instruction import Backward, Forward, ForwardBackward, Instruction, Recomputation
from rota.costs import Cluster, Costs
from rota.placing import place
from rota.schedules import one_f_one_b
from rota.tasks import Kind


class PipelineSchedule(ABC):
    """Subclass it, and yield the instructions of stage `stage_id`."""

    def __init__(self, num_stages: int, num_micro_batches: int, stage_id: int) -> None:
        self.num_stages = num_stages
        self.num_micro_batches = num_micro_batches
        self.stage_id = stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1

    @abstractmethod
    def __iter__(self) -> Iterator[Instruction]:
        """In the order in which the stage does them."""


class Synchronous1F1B(PipelineSchedule):
    """`rota.schedules.one_f_one_b`."""

    def __iter__(self) -> Iterator[Instruction]:
        placement = place(Costs.uniform(self.num_stages), Cluster.uniform(self.num_stages))
        for op in one_f_one_b(placement, self.num_micro_batches).orders[self.stage_id]:
            yield from self.of_kind(op.kind, op.microbatch)

    def of_kind(self, kind: Kind, micro_batch_id: int) -> Iterator[Instruction]:
        """For a forward, or for a backward."""
        yield (Forward if kind is Kind.F else Backward)(self.stage_id, micro_batch_id)


class EarlyRecomputation1F1B(Synchronous1F1B):
    """1F1B in which a stage with nothing else to do recomputes ahead of its backward (Lai et al., "Merak", 2023).

    That is after its last forward; until then recomputation and backward are one.
    """

    def of_kind(self, kind: Kind, micro_batch_id: int) -> Iterator[Instruction]:
        if kind is Kind.F:
            yield Forward(self.stage_id, micro_batch_id)
        elif micro_batch_id <= self.num_micro_batches - self.num_stages + self.stage_id:
            yield ForwardBackward(self.stage_id, micro_batch_id)
        else:
            yield Recomputation(self.stage_id, micro_batch_id)
            yield Backward(self.stage_id, micro_batch_id)
