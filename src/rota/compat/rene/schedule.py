"""Schedules: in which order a stage runs its instructions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from rota.compat.rene.instruction import Backward, Forward, ForwardBackward, Instruction, Recomputation
from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.placing import place
from rota.core.tasks import Kind
from rota.schedules import one_f_one_b


class PipelineSchedule(ABC):
    """The instructions of one stage. Subclass it and implement `__iter__`.

    Args:
        num_stages: The number of pipeline stages.
        num_micro_batches: The number of micro-batches of a step.
        stage_id: The stage whose instructions are yielded, from 0.
    """

    def __init__(self, num_stages: int, num_micro_batches: int, stage_id: int) -> None:
        self.num_stages = num_stages
        self.num_micro_batches = num_micro_batches
        self.stage_id = stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1

    @abstractmethod
    def __iter__(self) -> Iterator[Instruction]:
        """Yield the stage's instructions in execution order."""


class Synchronous1F1B(PipelineSchedule):
    """1F1B, as `rota.schedules.one_f_one_b` has it."""

    def __iter__(self) -> Iterator[Instruction]:
        """Yield the stage's instructions in execution order."""
        placement = place(Costs.uniform(self.num_stages), Cluster.uniform(self.num_stages))
        for op in one_f_one_b(placement, self.num_micro_batches).orders[self.stage_id]:
            yield from self.instructions_of(op.kind, op.microbatch)

    def instructions_of(self, kind: Kind, micro_batch_id: int) -> Iterator[Instruction]:
        """Yield the instructions for one forward or one backward."""
        yield (Forward if kind is Kind.F else Backward)(self.stage_id, micro_batch_id)


class EarlyRecomputation1F1B(Synchronous1F1B):
    """1F1B in which an idle stage recomputes before its backward can start (Lai et al., "Merak", 2023).

    A stage is idle after its last forward; until then, recomputation and backward are one instruction.
    """

    def instructions_of(self, kind: Kind, micro_batch_id: int) -> Iterator[Instruction]:
        """Yield the instructions for one forward or one backward."""
        if kind is Kind.F:
            yield Forward(self.stage_id, micro_batch_id)
        elif micro_batch_id <= self.num_micro_batches - self.num_stages + self.stage_id:
            yield ForwardBackward(self.stage_id, micro_batch_id)
        else:
            yield Recomputation(self.stage_id, micro_batch_id)
            yield Backward(self.stage_id, micro_batch_id)
