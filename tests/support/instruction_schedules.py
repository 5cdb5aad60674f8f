"""A schedule of one's own, in DeepSpeed's instructions."""

from __future__ import annotations

from collections.abc import Iterator

from rota.compat.deepspeed import schedule as ds


class AllForwardsFirst(ds.PipeSchedule):
    """GPipe: the document's way to write a schedule. Backwards go from the last micro-batch to the first."""

    def steps(self) -> Iterator[list[ds.PipeInstruction]]:
        for m in range(self.micro_batches):
            cmds: list[ds.PipeInstruction] = []
            if self.is_first_stage or self.is_last_stage:
                cmds.append(ds.LoadMicroBatch(m))
            if self._valid_stage(self.prev_stage):
                cmds.append(ds.RecvActivation(m))
            cmds.append(ds.ForwardPass(m))
            if self._valid_stage(self.next_stage):
                cmds.append(ds.SendActivation(m))
            yield cmds
        for m in reversed(range(self.micro_batches)):
            if self._valid_stage(self.next_stage):
                yield [ds.RecvGrad(m)]
            yield [ds.BackwardPass(m)]
            if self._valid_stage(self.prev_stage):
                yield [ds.SendGrad(m)]
        yield [ds.ReduceTiedGrads(), ds.ReduceGrads(), ds.OptimizerStep()]
