"""`deepspeed.runtime.pipe.schedule`: what each stage does, as steps of instructions on numbered buffers.

TrainSchedule, 3 stages, 4 micro-batches: the forward of micro-batch m is in step 2m + stage, its backward in step
2m + 2·stages - stage - 1, and results are sent in the step that follows.

    step      0   1   2   3   4   5   6   7   8   9   10  11
    stage 0   F0  .   F1  .   F2  B0  F3  B1  .   B2  .   B3
    stage 1   .   F0  .   F1  B0  F2  B1  F3  B2  .   B3  .
    stage 2   .   .   F0  B0  F1  B1  F2  B2  F3  B3  .   .

`rota.compat.deepspeed.to_plan` makes a Plan of any schedule written this way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from rota.compat.deepspeed.utils import _is_even as _is_even, _is_odd as _is_odd, call_to_str as call_to_str


class PipeInstruction:
    """One instruction of a stage; keyword arguments become attributes."""

    def __init__(self, **kwargs: Any) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        for key, value in kwargs.items():
            setattr(self, key, value)

    def __repr__(self) -> str:
        return call_to_str(self.name, **self.kwargs)


class OptimizerStep(PipeInstruction):
    """Update the weights, and clear the gradients."""


class ReduceGrads(PipeInstruction):
    """Average the gradients over the replicas of the stage."""


class ReduceTiedGrads(PipeInstruction):
    """Sum the gradients of tied weights over the stages that hold them."""


class BufferOpInstruction(PipeInstruction):
    """An instruction for one of the stage's buffers, each of which holds one micro-batch at a time."""

    buffer_id: int

    def __init__(self, buffer_id: int, **kwargs: Any) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Take the next micro-batch: its inputs on the first stage, its labels on the last."""


class ForwardPass(BufferOpInstruction):
    """Run the stage on the buffer's input."""


class BackwardPass(BufferOpInstruction):
    """Compute the gradients of the buffer's forward."""


class SendActivation(BufferOpInstruction):
    """Send the buffer's output to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Receive an input from the previous stage."""


class SendGrad(BufferOpInstruction):
    """Send the gradient of the buffer's input to the previous stage."""


class RecvGrad(BufferOpInstruction):
    """Receive the gradient of the buffer's output from the next stage."""


class PipeSchedule(ABC):
    """The instructions of one stage. Subclass it and implement `steps`.

    Each iteration starts from the beginning.

    Args:
        micro_batches: The number of micro-batches per step.
        stages: The number of stages.
        stage_id: The stage whose instructions are yielded, from 0.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        self.micro_batches = micro_batches
        self.stages = stages
        self.stage_id = stage_id
        self.prev_stage = stage_id - 1
        self.next_stage = stage_id + 1

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield a list of instructions for each step."""

    def num_pipe_buffers(self) -> int:
        """Return the number of buffers that the stage needs."""
        return self.micro_batches

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        return iter(self.steps())

    @property
    def stage(self) -> int:
        """The stage, from 0."""
        return self.stage_id

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return self.stages

    @property
    def num_micro_batches(self) -> int:
        """The number of micro-batches per step."""
        return self.micro_batches

    @property
    def is_first_stage(self) -> bool:
        """Whether this is the first stage."""
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this is the last stage."""
        return self.stage_id == self.stages - 1

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _valid_stage(self, stage_id: int) -> bool:
        return 0 <= stage_id < self.stages

    def _buffer_idx(self, micro_batch_id: int) -> int:
        if not self._valid_micro_batch(micro_batch_id):
            raise ValueError(
                f"micro-batch {micro_batch_id} has no buffer: micro-batches are 0 to {self.micro_batches - 1}"
            )
        return micro_batch_id % self.num_pipe_buffers()


class InferenceSchedule(PipeSchedule):
    """Forwards only; each stage is one micro-batch behind the previous one."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each step."""
        for step_id in range(self.micro_batches + self.stages - 1):
            current, previous = step_id - self.stage_id, step_id - self.stage_id - 1
            arrives, leaves = self._valid_micro_batch(current), self._valid_micro_batch(previous)
            exchange: list[PipeInstruction] = []
            if leaves and self._valid_stage(self.next_stage):
                exchange.append(SendActivation(self._buffer_idx(previous)))
            if arrives and self._valid_stage(self.prev_stage):
                exchange.append(RecvActivation(self._buffer_idx(current)))
            if _is_odd(self.stage_id):  # of two neighbours one sends while the other receives
                exchange.reverse()
            if not arrives:
                yield exchange
                continue
            loads = [LoadMicroBatch(self._buffer_idx(current))] if self.is_first_stage or self.is_last_stage else []
            yield [*loads, *exchange, ForwardPass(self._buffer_idx(current))]

    def num_pipe_buffers(self) -> int:
        """Return 2: one micro-batch is computed while the next one arrives."""
        return 2


class TrainSchedule(PipeSchedule):
    """1F1B, with the fewest micro-batches in flight that keep the last stage busy. It ends with the optimizer step."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each step."""
        num_steps = 2 * (self.micro_batches + self.stages - 1)
        for step_id in range(num_steps):
            micro_batch_id, is_forward = self._step_to_micro_batch(step_id)
            previous, _ = self._step_to_micro_batch(step_id - 1)  # in the other direction
            commands: list[PipeInstruction] = []
            # Each pair of neighbours exchanges a gradient first, then an activation.
            if is_forward and self._valid_stage(self.prev_stage):
                commands += self._buffer_op(SendGrad, previous) + self._buffer_op(RecvActivation, micro_batch_id)
            if not is_forward and self._valid_stage(self.next_stage):
                commands += self._buffer_op(RecvGrad, micro_batch_id) + self._buffer_op(SendActivation, previous)
            if is_forward and (self.is_first_stage or self.is_last_stage):
                commands += self._buffer_op(LoadMicroBatch, micro_batch_id)
            commands += self._buffer_op(ForwardPass if is_forward else BackwardPass, micro_batch_id)
            if step_id == num_steps - 1:
                commands += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            yield commands

    def num_pipe_buffers(self) -> int:
        """Return the number of micro-batches in flight, but at least 2, so that one can arrive during a computation."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def _buffer_op(self, instruction: type[BufferOpInstruction], micro_batch_id: int) -> list[PipeInstruction]:
        """Return the instruction for the micro-batch's buffer in a list, which is empty for an invalid micro-batch."""
        valid = self._valid_micro_batch(micro_batch_id)
        return [instruction(self._buffer_idx(micro_batch_id))] if valid else []

    def _step_to_micro_batch(self, step_id: int) -> tuple[int, bool]:
        """Return the micro-batch of a step, which may be invalid, and whether the step is a forward."""
        is_forward = _is_even(step_id - self.stage_id)
        first_step = self.stage_id if is_forward else 2 * self.stages - self.stage_id - 1
        return (step_id - first_step) // 2, is_forward


class DataParallelSchedule(PipeSchedule):
    """The whole model on each rank; gradients are accumulated over the micro-batches."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yield the instructions of each step."""
        for micro_batch_id in range(self.micro_batches):
            commands: list[PipeInstruction] = [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0)]
            if micro_batch_id == self.micro_batches - 1:
                commands += [ReduceGrads(), OptimizerStep()]
            yield commands

    def num_pipe_buffers(self) -> int:
        """Return 1: micro-batches do not overlap."""
        return 1
