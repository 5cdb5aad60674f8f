"""A schedule of instructions as a Plan: the instructions of every stage are read, and sends are matched to receives.

An instruction names a buffer, not a micro-batch. Each micro-batch is followed through the slots of its buffer:

    LoadMicroBatch ──▶ input, label ──ForwardPass──▶ output ──▶ SendActivation
    RecvActivation ──▶ input                         activations ┐
    SendGrad ◀── gradient of the input ◀──BackwardPass───────────┴── gradient ◀── RecvGrad

The n-th send of a stage is matched to the n-th receive of its neighbour.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TypeAlias, final

from rota.compat.deepspeed import schedule as ds
from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.errors import ScheduleError
from rota.core.placement import Placement
from rota.core.placing import place
from rota.core.plan import Plan
from rota.core.simulation import check
from rota.core.tasks import Kind, Op

#: Returns the schedule of one stage: a `PipeSchedule` subclass, or anything that is called like one.
MakeSchedule: TypeAlias = Callable[[int, int, int], ds.PipeSchedule]

_SLOTS = ("input", "label", "output", "activations", "gradient", "gradient of the input")
_STEP_ENDS = (ds.ReduceTiedGrads, ds.ReduceGrads, ds.OptimizerStep)


def to_plan(schedule: MakeSchedule, micro_batches: int, stages: int, placement: Placement | None = None) -> Plan:
    """Return the plan of a schedule.

    Args:
        schedule: Called with (micro_batches, stages, stage_id), it returns the schedule of that stage.
        micro_batches: The number of micro-batches per step.
        stages: The number of stages.
        placement: A chain with F and B, one stage per rank. None: forward 1 µs, backward 2 µs.

    Returns:
        The plan, which has been checked. A schedule without backwards becomes a plan without backwards.

    Raises:
        ScheduleError: If the instructions of the stages do not fit together.
        PlanError: If the plan is not complete, or waits in a cycle.
    """
    readers: list[_StageReader] = []
    for stage_id in range(stages):
        arriving = readers[-1].sent_activations if readers else []
        readers.append(_StageReader(schedule(micro_batches, stages, stage_id), arriving))
    for reader, following in pairwise(readers):
        reader.refuse_unmatched(following)
    if placement is None:
        placement = place(Costs.uniform(stages), Cluster.uniform(stages))
    if not any(reader.trains for reader in readers):
        placement = placement.forward_only()
    plan = Plan(placement, micro_batches, tuple(tuple(reader.ops) for reader in readers))
    check(plan)
    return plan


@final
class _StageReader:
    """Reads one stage's instructions; `arriving` has the micro-batches that the previous stage sends, in order."""

    def __init__(self, schedule: ds.PipeSchedule, arriving: list[int]) -> None:
        self.schedule, self.arriving = schedule, arriving
        self.ops: list[Op] = []
        self.sent_activations: list[int] = []
        self.sent_grads: list[int] = []
        self.received_grads: list[int] = []
        self._num_received = self._num_loaded = 0
        self._ended = False
        self._step, self._instruction = 0, ds.PipeInstruction()
        self._slots: dict[tuple[int, str], int] = {}  # (buffer, slot) -> the micro-batch in it
        steps = [[*instructions] for instructions in schedule]
        self.trains = any(isinstance(instruction, ds.BackwardPass) for step in steps for instruction in step)
        for self._step, instructions in enumerate(steps):
            for self._instruction in instructions:
                self._read(self._instruction)

    def _read(self, instruction: ds.PipeInstruction) -> None:
        if isinstance(instruction, _STEP_ENDS):
            self._ended = True
            return
        handlers = {
            ds.LoadMicroBatch: self._load,
            ds.RecvActivation: self._receive,
            ds.ForwardPass: self._forward,
            ds.SendActivation: self._send,
            ds.RecvGrad: self._receive_grad,
            ds.BackwardPass: self._backward,
            ds.SendGrad: self._send_grad,
        }
        handler = next((handler for kind, handler in handlers.items() if isinstance(instruction, kind)), None)
        if handler is None or not isinstance(instruction, ds.BufferOpInstruction):
            raise self._wrong(f"is not one of {', '.join(kind.__name__ for kind in handlers)}, so no plan can have it")
        buffer, num_buffers = instruction.buffer_id, self.schedule.num_pipe_buffers()
        if not 0 <= buffer < num_buffers:
            raise self._wrong(f"names a buffer that does not exist: num_pipe_buffers() is {num_buffers}")
        handler(buffer)

    def _load(self, buffer: int) -> None:
        if self.schedule.is_first_stage:
            self._put(buffer, "input", self._num_loaded)
        if self.schedule.is_last_stage:
            self._put(buffer, "label", self._num_loaded)
        self._num_loaded += 1

    def _receive(self, buffer: int) -> None:
        if self._num_received == len(self.arriving):
            raise self._wrong(
                f"is receive {self._num_received + 1}, but stage {self.schedule.prev_stage} sends {len(self.arriving)} "
                f"activations; send as many as are received"
            )
        self._put(buffer, "input", self.arriving[self._num_received])
        self._num_received += 1

    def _forward(self, buffer: int) -> None:
        m = self._take(buffer, "input", "LoadMicroBatch" if self.schedule.is_first_stage else "RecvActivation")
        if self.schedule.is_last_stage:
            label = self._take(buffer, "label", "LoadMicroBatch")
            if label != m:
                raise self._wrong(f"has the input of micro-batch {m}, but the labels of {label}; load them alike")
        else:
            self._put(buffer, "output", m)
        if self.trains:
            self._put(buffer, "activations", m)
        self.ops.append(Op(self.schedule.stage_id, Kind.F, m))

    def _send(self, buffer: int) -> None:
        if self.schedule.is_last_stage:
            raise self._wrong("has no stage to send to; the last stage sends only gradients")
        self.sent_activations.append(self._take(buffer, "output", "ForwardPass"))

    def _receive_grad(self, buffer: int) -> None:
        m = self._slots.get((buffer, "activations"))
        if self.schedule.is_last_stage or m is None:
            raise self._wrong("has no forward to receive a gradient for; yield ForwardPass for this buffer first")
        self._put(buffer, "gradient", m)
        self.received_grads.append(m)

    def _backward(self, buffer: int) -> None:
        if self._ended:
            raise self._wrong("comes after the gradients were reduced; put ReduceGrads and OptimizerStep last")
        if not self.schedule.is_last_stage:
            self._take(buffer, "gradient", "RecvGrad")
        m = self._take(buffer, "activations", "ForwardPass")
        if not self.schedule.is_first_stage:
            self._put(buffer, "gradient of the input", m)
        self.ops.append(Op(self.schedule.stage_id, Kind.B, m))

    def _send_grad(self, buffer: int) -> None:
        self.sent_grads.append(self._take(buffer, "gradient of the input", "BackwardPass"))

    def _put(self, buffer: int, slot: str, m: int) -> None:
        """Put a micro-batch into a slot, which must be free; for an input, all slots but the label must be free."""
        slots = [name for name in _SLOTS if name != "label"] if slot == "input" else [slot]
        occupied = next((name for name in slots if (buffer, name) in self._slots), None)
        if occupied is not None:
            held = self._slots[buffer, occupied]
            raise self._wrong(f"overwrites the {occupied} of micro-batch {held}, still needed; use another buffer")
        self._slots[buffer, slot] = m

    def _take(self, buffer: int, slot: str, producer: str) -> int:
        if (buffer, slot) not in self._slots:
            raise self._wrong(f"finds no {slot} in its buffer; yield {producer} for this buffer first")
        return self._slots.pop((buffer, slot))

    def refuse_unmatched(self, following: _StageReader) -> None:
        """Raise ScheduleError unless this stage and the next one receive all that they send each other, in order."""
        a, b = self.schedule.stage_id, following.schedule.stage_id
        if following._num_received < len(self.sent_activations):
            raise ScheduleError(
                f"{self._name}: stage {a} sends {len(self.sent_activations)} activations, stage {b} receives "
                f"{following._num_received}; add RecvActivation there"
            )
        sent, received = following.sent_grads, self.received_grads
        if len(sent) != len(received):
            raise ScheduleError(
                f"{self._name}: stage {b} sends {len(sent)} gradients, stage {a} receives {len(received)}; give "
                f"each SendGrad its RecvGrad"
            )
        for i, (m, expected) in enumerate(zip(sent, received, strict=True)):
            if m != expected:
                raise ScheduleError(
                    f"{self._name}: gradient {i} that stage {b} sends is of micro-batch {m}, but stage {a} expects "
                    f"micro-batch {expected}; give both the same order"
                )

    @property
    def _name(self) -> str:
        return type(self.schedule).__name__

    def _wrong(self, problem: str) -> ScheduleError:
        return ScheduleError(
            f"{self._name}, stage {self.schedule.stage_id}, step {self._step}: {self._instruction} {problem}"
        )
