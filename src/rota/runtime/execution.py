"""One plan on one rank: the loop over its actions, and the values between them.

receive ──▶ run op: take what it reads, compute, keep what it makes ──▶ send ──▶ receive ──▶ …

On the CPU the loop goes over the actions of `rota.core.programs.actions`. On a queued device it goes over the steps of
`rota.core.programs.device_steps`, the same actions with streams and events, which are proven not to hang.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any, Literal, NamedTuple, TypeAlias, final

import torch

from rota.core.errors import PipelineError
from rota.core.plan import Plan
from rota.core.programs.actions import Action, Message, ValueKey, compile_program, prefetch_receives
from rota.core.programs.device_steps import COMPUTE, Step, device_program
from rota.core.simulation import simulate
from rota.core.tasks import Kind, Op
from rota.models import Stages
from rota.runtime.channels import Channels, Passage
from rota.runtime.compute import Batch, Compute
from rota.runtime.device.protocol import Device, Mark, QueuedDevice, is_queued
from rota.runtime.faults.hang_report import Doing, is_in_a_collective
from rota.runtime.layouts import KnownLayouts, Layouts, Size
from rota.runtime.memory_watch import MemoryWatch
from rota.runtime.messages import Format, describe_value, flatten, hand_over, tensors_in
from rota.runtime.recorder import Marks, Record
from rota.runtime.transport import Transport
from rota.torch_internals import version_of

Read: TypeAlias = tuple[ValueKey, bool]  # (value, arrives by message)
Makes: TypeAlias = tuple[ValueKey, int, bool]  # (value, uses here, only its gradient is sent)
Do: TypeAlias = Callable[[Any, bool], None]  # (argument, send layouts)
Enqueue: TypeAlias = Callable[[Any, bool, Any], Mark]  # (argument, send layouts, stream); the result is behind it


class Hooks(NamedTuple):
    """What happens around the ops of a run.

    `before` an op runs, and `after` its outputs are sent. On a queued device `after` and `sums` (of the gradients of
    tied weights, by ranks) enqueue on the stream that they get, and return the mark behind. `watch` sees each op's end.
    """

    before: Mapping[Op, Callable[[], None]] = {}
    after: Mapping[Op, Callable[[Any], Mark]] = {}
    sums: Mapping[tuple[int, ...], Callable[[Any], Mark]] = {}
    watch: MemoryWatch | None = None


_NO_HOOKS = Hooks()


@final
@dataclass(frozen=True, slots=True)
class ThisRank:
    """What all runs of a rank share: its messages go by `transport`, on a queued device by `channels`.

    `tied`: the ranks of its tied weights, see `device_program`. `record` has the times of the last run.
    """

    rank: int
    device: Device
    transport: Transport
    record: Record
    channels: Channels | None = None
    tied: Sequence[tuple[int, ...]] = ()


class _Prepared(NamedTuple):
    """An op, what it reads and what it makes: the same in every step, so they are found once."""

    op: Op
    reads: list[Read]
    makes: list[Makes]
    lent: list[int]  # positions in `reads` of values that other ops on this rank read or send too


class _Enqueued(NamedTuple):
    """A step of a queued device's program, and how to enqueue it."""

    step: Step
    enqueue: Enqueue
    what: Any  # the argument of `enqueue`
    stream: str
    waits: tuple[int, ...]


@final
class Execution:
    """Runs `plan` on this rank, once per `run`; `compute` does the ops.

    `sizes`: of each micro-batch, as all ranks know them, such as (rows, length). `known`: what was learned of layouts
    at such sizes.
    """

    def __init__(
        self,
        stages: Stages,
        plan: Plan,
        compute: Compute,
        here: ThisRank,
        sizes: Sequence[Size] = (),
        known: KnownLayouts | None = None,
    ) -> None:
        self.plan, self.compute, self.record = plan, compute, here.record
        self.trains = any(task.kind.makes_weight_gradients for task in plan.placement.tasks)
        self.marks = Marks()
        #: Whether the last run has reached its end.
        self.complete, self._is_settled = False, True
        self._stages, self._transport, self._device, self._channels = stages, here.transport, here.device, here.channels
        edge_index = {(edge.source, edge.target): i for i, edge in enumerate(stages.edges)}
        self._edges = [edge[:2] for edge in stages.edges]
        self._order = plan.orders[here.rank]
        self._positions = {op: position for position, op in enumerate(self._order)}
        self._program = compile_program(plan, edge_index, here.rank)
        sent = (action.message.value for action in self._program.actions if action.what == "send" and action.message)
        self._num_gradients = Counter(edge for edge, is_gradient, _ in sent if is_gradient)
        self._prepared = {op: self._prepare(op, stages, edge_index) for op in self._order}
        # Each action with the function that does it and its argument. A run with layouts waits for each layout, so it
        # keeps the strict order.
        self._strict, self._early = self._host_actions() if here.channels is None else ([], [])
        self._strict_steps, self._early_steps = self._device_steps(here.tied) if here.channels is not None else ([], [])
        self._take = (here.channels or here.transport).take
        self._mark = here.device.mark
        modules = [stages[stage] for stage in plan.placement.stages_on(here.rank)]
        known = known if sizes and known is not None else KnownLayouts()
        self._layouts = Layouts(modules, sizes, known, self._keys_elsewhere())
        # --- the run that goes on, or the last one
        self._hooks = Hooks()
        self._made: dict[ValueKey, tuple[Any, int]] = {}  # with how often it will still be used
        self._action: Action | None = None  # None before the first and after the last
        self._awaited = ""  # what the rank waits for outside of its actions
        #: By position in the program of a queued device: the mark behind each step; None if it has none, or none yet.
        self._behind: list[Mark] = []
        self._steps: list[_Enqueued] = []
        self._step: Step | None = None

    def _prepare(self, op: Op, stages: Stages, edge_index: dict[tuple[int, int], int]) -> _Prepared:
        incoming = [edge_index[e[:2]] for e in stages.incoming(op.stage)]
        outgoing = [edge_index[e[:2]] for e in stages.outgoing(op.stage)]
        back = op.kind is not Kind.F
        reads, makes = (outgoing, incoming) if back else (incoming, outgoing)
        if op.kind in (Kind.R, Kind.W):
            reads, makes = [], []
        num_uses, unsent = self._program.num_uses, self._program.unsent
        keys = [(edge, back, op.microbatch) for edge in reads]
        num_readers = [len(stages.outgoing(edge.source)) for edge in stages.incoming(op.stage)] if not back else []
        lent = [
            i
            for i, n in enumerate(num_readers)
            if keys[i] not in self._program.arriving and (n > 1 or num_uses[keys[i][:2]] > 1)
        ]
        return _Prepared(
            op,
            [(key, key in self._program.arriving) for key in keys],
            [((e, back, op.microbatch), num_uses.get((e, back), 0), not back and e in unsent) for e in makes],
            lent,
        )

    # --- the lists ----------------------------------------------------------------------------------------------------

    def _host_actions(self) -> Iterator[list[tuple[Action, Do, Any]]]:
        strict = self._program.actions
        for actions in (strict, prefetch_receives(self.plan, self._program.rank, strict)):
            yield [(action, *self._doing_of(action)) for action in actions]

    def _doing_of(self, action: Action) -> tuple[Do, Any]:
        if action.message is None:
            return self._run, self._prepared[action.op]
        if action.what == "receive":
            return self._transport.post, action.message
        return (self._send_gradients if action.message.value[1] else self._send_value), action.message

    def _device_steps(self, tied: Sequence[tuple[int, ...]]) -> Iterator[list[_Enqueued]]:
        timeline = simulate(self.plan)
        for is_early in (False, True):
            program = device_program(timeline, self._program, tied=tied, allocates_early=is_early)
            under_way: defaultdict[Message, deque[Passage]] = defaultdict(deque)
            yield [
                _Enqueued(step, *self._enqueueing_of(step, under_way), step.stream, step.waits)
                for step in program.steps
            ]

    def _enqueueing_of(self, step: Step, under_way: Mapping[Message, deque[Passage]]) -> tuple[Enqueue, Any]:
        """How to enqueue a step, and the argument. `under_way`: messages that were allocated or sent, but not ended."""
        channels = self._channel
        enqueue: dict[str, Enqueue] = {
            "allocate": channels.allocate,
            "receive": channels.receive,
            "run": self._enqueue_op,
            "send": self._enqueue_send,
            "release": channels.release,
            "reduce": self._reduce,
            "sum": self._sum,
            "join": self._join,
        }
        if step.message is None:
            if step.what == "run" and isinstance(step.subject, Op):
                return enqueue["run"], self._prepared[step.subject]
            return enqueue[step.what], step.subject
        passages = under_way[step.message]
        if step.what not in ("allocate", "send"):
            return enqueue[step.what], passages.popleft()
        position = self._positions[step.message.transfer.source] if step.what == "send" else -1
        passages.append(channels.passage(step.message, position))
        return enqueue[step.what], passages[-1]

    def _keys_elsewhere(self) -> Iterator[ValueKey]:
        """The values that another rank makes or reads, and those of which only the gradient comes from there."""
        yield from (action.message.value for action in self._program.actions if action.message is not None)
        yield from (key for made in self._prepared.values() for key, _, is_unsent in made.makes if is_unsent)

    @property
    def formats(self) -> dict[ValueKey, Format]:
        """The formats of activations, as of the last run with layouts, or as the caller set them."""
        return self._layouts.formats

    def is_new(self, batch: Batch) -> Literal[0, 1, 2]:
        """0: this rank knows the layouts of all its messages; 1: not all; 2: what all ranks know is to be forgotten."""
        are_known, is_same_context = self._layouts.find(batch)
        if not is_same_context:
            return 2
        return 0 if are_known and (self._transport.flags.are_known or not self.trains) else 1

    def forget_layouts(self) -> None:
        """What is called on all ranks before they learn all layouts again."""
        self._layouts.known.forget()

    def forget(self) -> None:
        """Make the next run exchange layouts again, as the failed run may not have done so."""
        self._layouts.known.context = None
        self._transport.flags.are_known = False

    # --- one run ------------------------------------------------------------------------------------------------------

    def run(
        self, batch: Batch, seed: int, with_layouts: bool, tick: Callable[[], None], hooks: Hooks = _NO_HOOKS
    ) -> None:
        """Run all actions; `with_layouts`: values are sent with their layouts. `tick` is called before each action.

        On a queued device they have been enqueued when it returns.
        """
        self._begin(batch, seed, with_layouts, hooks)
        torch.clear_autocast_cache()  # it may hold weights from before an optimizer's step
        with torch.set_grad_enabled(self.trains):
            if self._channels is None:
                self._act(self._strict if with_layouts else self._early, with_layouts, tick)
            else:
                self._enqueue(self._strict_steps if with_layouts else self._early_steps, with_layouts, tick)
        self._action = self._step = None
        (self._channels or self._transport).drain()
        if self.trains:
            self._transport.flags.end(self._edges, self._num_gradients)
        if with_layouts:
            self._layouts.learn()
        self.complete, self._is_settled = True, False

    def _begin(self, batch: Batch, seed: int, with_layouts: bool, hooks: Hooks) -> None:
        self.marks, self._hooks = Marks(), hooks
        self._device.begin()
        if self._channels is None:
            self._transport.begin(self.marks, self.formats)
        else:
            self._channels.begin(self.marks, self.formats)
        self.complete = False
        self.record.microbatch_rows = batch.rows[0] if len({*batch.rows}) == 1 else None
        self._made.clear()
        if self.trains:
            self._transport.flags.begin(with_layouts)
        self.compute.begin(batch, seed)

    def _act(self, actions: list[tuple[Action, Do, Any]], with_layouts: bool, tick: Callable[[], None]) -> None:
        before, after, _, watch = self._hooks
        hooked = bool(before or after or watch is not None)
        due: Callable[[Any], Mark] = _nothing
        for action, do, what in actions:
            self._action = action
            tick()
            if not hooked or action.what != "run":
                do(what, with_layouts)
                continue
            due(None)
            before.get(action.op, _nothing)()
            do(what, with_layouts)
            due = after.get(action.op, _nothing)
            if watch is not None:  # here, where the op's own variables are gone
                watch.op_ended(action.op)
        due(None)

    def settle(self) -> None:
        """Put the times of the last run into `record`. On a queued device the host waits for the run to end."""
        if not self._is_settled:
            self.record.settle(self.marks, self._device)
            self._is_settled, self._behind = True, []

    def _run(self, prepared: _Prepared, with_layouts: bool) -> None:
        op, reads, makes, lent = prepared
        take, mark = self._take, self._mark
        received = [take(key) if arrives else self._from_here(key) for key, arrives in reads]
        versions = _versions(received, lent) if lent else None
        start = mark()
        try:
            made = self.compute.run(op, received)
        except Exception as error:
            if not isinstance(error, PipelineError):
                self._add_place(error, op, received)
            raise
        self.marks.ends.append(mark())
        self.marks.starts.append(start)
        if lent and versions != _versions(received, lent):
            raise PipelineError(
                f"stage {op.stage} writes into what it receives, which other stages read too; let it begin with an "
                f"operation that is not in place"
            )
        for (key, num_uses, is_unsent), value in zip(makes, made, strict=True):
            if num_uses:
                self._made[key] = value, num_uses
            if with_layouts and is_unsent:
                self.formats[key] = Format(flatten(value, f"stage {op.stage}")[1])

    def _add_place(self, error: Exception, op: Op, received: list[Any]) -> None:
        """Add to the error which stage raised it, and what that stage received."""
        name = type(self._stages[op.stage]).__name__
        where = f"rota: in {op} on rank {self.record.rank}, stage {op.stage} ({name})"
        given = f", which received {', '.join(map(describe_value, received))}" if received else ""
        error.add_note(f"{where}{given}")

    def _send_value(self, message: Message, with_layouts: bool) -> None:
        self._transport.send_value(message, self._use(message.value), with_layouts)

    def _send_gradients(self, message: Message, with_layouts: bool) -> None:  # noqa: ARG002 - flags know
        self._transport.send_gradients(message, self._use(message.value))

    def _from_here(self, key: ValueKey) -> Any:
        value = self._use(key)
        return value if key[1] else hand_over(value)

    def _use(self, key: ValueKey) -> Any:
        """A value that was made here; its last use releases it."""
        value, num_uses = self._made.pop(key)
        if num_uses > 1:
            self._made[key] = value, num_uses - 1
        return value

    # --- on a queued device -------------------------------------------------------------------------------------------

    def _enqueue(self, steps: list[_Enqueued], with_layouts: bool, tick: Callable[[], None]) -> None:
        device = self._queue
        wait, streams = device.wait, {name: device.stream(name) for name in {step.stream for step in steps}}
        self._mark = partial(device.mark_on, device.stream(COMPUTE))
        self._steps, self._behind = steps, [None] * len(steps)
        behind = self._behind
        for position, (step, enqueue, what, name, waits) in enumerate(steps):
            self._step = step
            tick()
            stream = streams[name]
            for before in waits:
                if (mark := behind[before]) is not None:
                    wait(stream, mark)
            behind[position] = enqueue(what, with_layouts, stream)

    def _enqueue_op(self, prepared: _Prepared, with_layouts: bool, stream: Any) -> Mark:  # noqa: ARG002 - is current
        before, _, _, watch = self._hooks
        if before:
            before.get(prepared.op, _nothing)()
        self._run(prepared, with_layouts)
        if watch is not None:
            watch.op_ended(prepared.op)
        return self.marks.ends[-1]

    def _enqueue_send(self, passage: Passage, with_layouts: bool, stream: Any) -> Mark:
        value = self._use(passage.value)
        if passage.value[1]:
            return self._channel.send_gradients(passage, value, stream)
        return self._channel.send_value(passage, value, with_layouts, stream)

    def _reduce(self, op: Op, with_layouts: bool, stream: Any) -> Mark:  # noqa: ARG002
        return self._hooks.after.get(op, _nothing)(stream)

    def _sum(self, ranks: tuple[int, ...], with_layouts: bool, stream: Any) -> Mark:  # noqa: ARG002
        return self._hooks.sums.get(ranks, _nothing)(stream)

    def _join(self, _: None, with_layouts: bool, stream: Any) -> Mark:  # noqa: ARG002
        return self._queue.record(stream)

    @property
    def _queue(self) -> QueuedDevice:
        assert is_queued(self._device)
        return self._device

    @property
    def _channel(self) -> Channels:
        assert self._channels is not None
        return self._channels

    # --- what it does -------------------------------------------------------------------------------------------------

    def doing_on_device(self) -> Doing | None:
        """What the device does or waits for, if it has not ended what the host has enqueued. Any thread may ask."""
        unfinished = self._unfinished() if self._channels is not None else []
        return _doing_on_device(unfinished) if unfinished else None

    def num_reached(self) -> int:
        """How many kernels of the last run a queued device has ended. Any thread may ask."""
        return sum(mark is not None and self._queue.is_done(mark) for mark in [*self._behind]) if self._channels else 0

    def _unfinished(self) -> list[tuple[Step, bool]]:
        """The first step of each stream that the device has not ended, and whether it waits for another one's."""
        steps, done = self._steps, [mark is None or self._queue.is_done(mark) for mark in [*self._behind]]
        first: dict[str, tuple[Step, bool]] = {}
        for enqueued, is_done in zip(steps, done, strict=False):  # none is unfinished once the times are known
            if not is_done:
                waits = not all(done[before] for before in enqueued.waits)
                first.setdefault(enqueued.stream, (enqueued.step, waits))
        return [*first.values()]

    def awaits(self, words: str) -> None:
        """From now on the rank waits for what these words say, outside of its actions."""
        self._awaited = words

    def doing(self, frames: list[FrameType]) -> Doing:
        """What the run is doing, or what it waits for, by the stack of the thread that runs it."""
        action, oldest = self._action, self._transport.oldest
        if self._step is None and (on_device := self.doing_on_device()) is not None:
            return on_device
        if (message := self._transport.awaited(frames)) is not None:
            return Doing(True, f"waits for {message.transfer} from rank {message.transfer.sender}")
        if action is None and oldest is not None:
            return Doing(True, f"waits for rank {oldest.receiver} to receive {oldest}")
        waits = is_in_a_collective(frames)
        if self._step is not None:
            return Doing(waits, f"enqueues {self._step}")
        if action is None:
            return Doing(waits, f"waits for {self._awaited}" if waits else f"keeps others waiting for {self._awaited}")
        if action.what == "run":
            return Doing(waits, f"waits for other ranks in {action.op}" if waits else f"is at {action.op}")
        assert action.message is not None
        transfer = action.message.transfer
        return Doing(waits, f"is at {transfer} between rank {transfer.sender} and rank {transfer.receiver}")

    def last(self) -> str:
        """The last op that ended, or was enqueued."""
        num_ended = len(self.marks.ends)
        return f"after {self._order[num_ended - 1]}" if num_ended else "before its first op"


def _nothing(*_: object) -> None:
    pass


def _doing_on_device(unfinished: list[tuple[Step, bool]]) -> Doing:
    """What a device does that has not ended all that its host has enqueued."""
    running = [step for step, waits in unfinished if not waits]
    at = ", ".join(f"{step} on {step.stream}" for step, _ in unfinished)
    if any(step.what == "run" and step.communicator is None for step in running):
        return Doing(False, f"has not ended on its device: {at}")
    return Doing(True, f"waits on its device for other ranks: {at}")


def _versions(received: list[Any], lent: list[int]) -> list[int]:
    """How often each tensor of the lent values has been written to."""
    return [version_of(tensor) for i in lent for tensor in tensors_in(received[i])]


def forwards_of(plan: Plan) -> Plan:
    """The plan's forwards only, in its order. Forwards wait only for forwards, so they cannot wait in a cycle."""
    orders = tuple(tuple(op for op in order if op.kind is Kind.F) for order in plan.orders)
    served = tuple(
        tuple(transfer for transfer in order if transfer.source.kind is transfer.target.kind is Kind.F)
        for order in plan.service_orders
    )
    return replace(plan, placement=plan.placement.forward_only(), orders=orders, service_orders=served)
