"""One plan on one rank: the loop over its actions, and the values between them.

receive ──▶ run op: take what it reads, compute, keep what it makes ──▶ send ──▶ receive ──▶ …

On the CPU the loop goes over the actions of `rota.core.programs.actions`. On a queued device it goes over the steps of
`rota.core.programs.device_steps`, the same actions with streams and events, which are proven not to hang.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar, final

import torch
from torch import nn

from rota.core.errors import PipelineError
from rota.core.plan import Plan
from rota.core.programs.actions import Action, Message, ValueKey, compile_program
from rota.core.programs.device_steps import COMPUTE, Step, device_program
from rota.core.programs.prefetch_receives import prefetch_receives
from rota.core.simulation import simulate
from rota.core.tasks import Kind, Op
from rota.models import Stages
from rota.runtime.channels import Channels, Passage
from rota.runtime.compute import Batch, RunsOps
from rota.runtime.device.protocol import Device, Mark, QueuedDevice
from rota.runtime.faults.stack_location import Doing, is_in_a_collective
from rota.runtime.known_layouts import KnownLayouts, Size, as_layout
from rota.runtime.memory_watch import MemoryWatch
from rota.runtime.messages import Format, describe_value, flatten, hand_over, tensors_in
from rota.runtime.microbatches import structure
from rota.runtime.precision import ambient_autocast
from rota.runtime.recorder import Marks, Record
from rota.runtime.transport import Transport
from rota.torch_internals import version_of

Read: TypeAlias = tuple[ValueKey, bool]  # (value, arrives by message)
Makes: TypeAlias = tuple[ValueKey, int, bool]  # (value, uses here, only its gradient is sent)
Do: TypeAlias = Callable[[Any, bool], None]  # (argument, send layouts)
Enqueue: TypeAlias = Callable[[Any, bool, Any], Mark]  # (argument, send layouts, stream); the result is behind it
C = TypeVar("C", bound=RunsOps)

_INPUTS = "inputs"  # a place in `KnownLayouts`; the others are edges
_MANY_CHANGES = 3  # consecutive
_CHANGING = (
    f"rota: an int, bool or text in the inputs has changed in {_MANY_CHANGES} consecutive steps. Shapes may "
    f"depend on it, so in such a step the ranks send each other all shapes again, which makes it slower; give it as a "
    f"float, or as a tensor with a row per example, if no shape depends on it"
)


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
class Execution(Generic[C]):
    """Runs `plan` on rank `rank`, once per `run`; `compute` does the ops.

    Its messages go by `transport`, on a queued device by `channels`. `tied`: for `device_program`. `sizes`: of each
    micro-batch, as all ranks know them, such as (rows, length). `known`: what was learned of layouts at such sizes.
    """

    def __init__(
        self,
        stages: Stages,
        plan: Plan,
        rank: int,
        transport: Transport,
        compute: C,
        device: Device,
        channels: Channels | None = None,
        tied: Sequence[tuple[int, ...]] = (),
        sizes: Sequence[Size] = (),
        known: KnownLayouts | None = None,
    ) -> None:
        self.plan, self.local = plan, plan.placement.stages_on(rank)
        self.trains = any(task.kind.makes_weight_gradients for task in plan.placement.tasks)
        self.compute = compute
        self.record, self.marks = Record(rank), Marks()
        self.complete, self._is_settled = False, True
        self.watch: MemoryWatch | None = None
        #: `before` runs right before an op, `after` once its outputs are sent; on a queued device, `after` and `sums`
        #: (of the gradients of tied weights, by ranks) enqueue on the stream that they get, and return the mark behind.
        self.before: Mapping[Op, Callable[[], None]] = {}
        self.after: Mapping[Op, Callable[[Any], Mark]] = {}
        self.sums: Mapping[tuple[int, ...], Callable[[Any], Mark]] = {}
        edge_index = {(edge.source, edge.target): i for i, edge in enumerate(stages.edges)}
        self._stages, self._transport, self._device, self._channels = stages, transport, device, channels
        self._program = compile_program(plan, edge_index, rank)
        self._edges = [edge[:2] for edge in stages.edges]
        sent = (action.message.value for action in self._program.actions if action.what == "send" and action.message)
        self._num_gradients = Counter(edge for edge, is_gradient, _ in sent if is_gradient)
        self._positions = {op: position for position, op in enumerate(plan.orders[rank])}
        self._prepared = {op: self._prepare(op, stages, edge_index) for op in plan.orders[rank]}
        #: Each action with the function that does it and its argument. A run with layouts waits for each layout, so it
        #: keeps the strict order.
        self._strict, self._early = self._host_actions() if channels is None else ([], [])
        self._strict_steps, self._early_steps = self._device_steps(tied) if channels is not None else ([], [])
        self._take = (channels or transport).take
        self._mark = device.mark
        #: By position in the program of a queued device: the mark behind each step; None if it has none, or none yet.
        self._behind: list[Mark] = []
        self._steps: list[_Enqueued] = []
        self._step: Step | None = None
        #: The formats of activations, as of the last run with layouts, or as the caller set them.
        self.formats: dict[ValueKey, Format] = {}
        self._sizes, self._known = sizes, KnownLayouts() if known is None else known
        self._crossing = sorted({(key[0], key[2]) for key in self._keys_elsewhere()}) if sizes else []
        self._modules = [stages[stage] for stage in self.local]
        self._parameters = [parameter for module in self._modules for parameter in module.parameters()]
        self._given: list[Any] = []  # the shapes of the last inputs, and what they held besides tensors
        self._plain: list[Any] = []
        self._num_plain_changes, self._has_warned = 0, False
        self._made: dict[ValueKey, tuple[Any, int]] = {}  # with how often it will still be used
        self._action: Action | None = None  # None before the first and after the last
        #: The op of the last run that raised.
        self.failed: Op | None = None
        #: What the rank waits for outside of its actions, for messages.
        self.awaited = ""

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
            of_op = self._prepared.get(step.subject) if step.what == "run" else None  # type: ignore[arg-type]
            return enqueue[step.what], of_op or step.subject
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

    def is_new(self, batch: Batch) -> Literal[0, 1, 2]:
        """0: this rank knows the layouts of all its messages; 1: not all; 2: what all ranks know is to be forgotten."""
        context = (
            [module.training for module in self._modules],
            [parameter.requires_grad for parameter in self._parameters],
            ambient_autocast(),
        )
        is_known = self._layouts_are_known(batch, context) and (self._transport.flags.are_known or not self.trains)
        level: Literal[0, 1] = 0 if is_known else 1
        is_same, self._known.context = context == self._known.context, context
        return level if is_same else 2

    def _layouts_are_known(self, batch: Batch, context: object) -> bool:
        if self._sizes:
            given = [*map(_given, batch.inputs)]
            self._given = given
            return self._find_formats(given)
        plain: list[Any] = []
        given = [structure(value, plain) for value in (batch.inputs[:1] if batch.alike else batch.inputs)]
        is_same, is_plain_same = (given, context) == (self._given, self._known.context), plain == self._plain
        self._given, self._plain = given, plain
        self._num_plain_changes = self._num_plain_changes + 1 if is_same and not is_plain_same else 0
        if self._num_plain_changes == _MANY_CHANGES and not self._has_warned:
            self._has_warned = True
            print(_CHANGING, file=sys.stderr, flush=True)
        return is_same and is_plain_same

    def _find_formats(self, given: list[Any]) -> bool:
        """Whether the sizes of the micro-batches tell all layouts; if so, they are in `formats`."""
        known, sizes = self._known, self._sizes
        for m, of_inputs in enumerate(given):
            if known.layout_at(_INPUTS, sizes[m]) != of_inputs:
                return False
        for edge, m in self._crossing:
            form = known.format_at(edge, sizes[m])
            if form is None:
                return False
            self.formats[edge, False, m] = form
        return True

    def _learn(self) -> None:
        """Take note of all layouts, after a run with them."""
        for m, given in enumerate(self._given):
            self._known.learn(_INPUTS, self._sizes[m], given)
        for edge, m in self._crossing:
            self._known.learn(edge, self._sizes[m], self.formats[edge, False, m].layout)

    def forget_layouts(self) -> None:
        """What is called on all ranks before they learn all layouts again."""
        self._known.forget()

    def forget(self) -> None:
        """Make the next run exchange layouts again, as the failed run may not have done so."""
        self._known.context = None
        self._transport.flags.are_known = False

    # --- one run ------------------------------------------------------------------------------------------------------

    def run(self, batch: Batch, seed: int, with_layouts: bool, tick: Callable[[], None]) -> None:
        """Run all actions; `with_layouts`: values are sent with their layouts. `tick` is called before each action.

        On a queued device they have been enqueued when it returns.
        """
        self._begin(batch, seed, with_layouts)
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
        if with_layouts and self._sizes:
            self._learn()
        self.complete, self._is_settled = True, False

    def _begin(self, batch: Batch, seed: int, with_layouts: bool) -> None:
        self.marks = Marks()
        self._device.begin()
        if self._channels is None:
            self._transport.formats = self.formats
            self._transport.sent, self._transport.through = self.marks.sent, self.marks.through
        else:
            self._channels.begin(self.marks, self.formats)
        self.complete, self.failed = False, None
        self.record.microbatch_rows = batch.rows[0] if len({*batch.rows}) == 1 else None
        self._made.clear()
        if self.trains:
            self._transport.flags.begin(with_layouts)
        self.compute.begin(batch, seed)

    def _act(self, actions: list[tuple[Action, Do, Any]], with_layouts: bool, tick: Callable[[], None]) -> None:
        hooked = bool(self.before or self.after or self.watch is not None)
        due: Callable[[Any], Mark] = _nothing
        for action, do, what in actions:
            self._action = action
            tick()
            if not hooked or action.what != "run":
                do(what, with_layouts)
                continue
            due(None)
            self.before.get(action.op, _nothing)()
            do(what, with_layouts)
            due = self.after.get(action.op, _nothing)
            if self.watch is not None:  # here, where the op's own variables are gone
                self.watch.op_ended(action.op)
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
            self.failed = op
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

    # --- on a queued device -------------------------------------------------------------------------------------------

    def _enqueue(self, steps: list[_Enqueued], with_layouts: bool, tick: Callable[[], None]) -> None:
        device = self._queue
        wait, streams = device.wait, {name: device.stream(name) for name in {each.stream for each in steps}}
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
        if self.before:
            self.before.get(prepared.op, _nothing)()
        self._run(prepared, with_layouts)
        if self.watch is not None:
            self.watch.op_ended(prepared.op)
        return self.marks.ends[-1]

    def _enqueue_send(self, passage: Passage, with_layouts: bool, stream: Any) -> Mark:
        value = self._use(passage.value)
        if passage.value[1]:
            return self._channel.send_gradients(passage, value, stream)
        return self._channel.send_value(passage, value, with_layouts, stream)

    def _reduce(self, op: Op, with_layouts: bool, stream: Any) -> Mark:  # noqa: ARG002
        return self.after.get(op, _nothing)(stream)

    def _sum(self, ranks: tuple[int, ...], with_layouts: bool, stream: Any) -> Mark:  # noqa: ARG002
        return self.sums.get(ranks, _nothing)(stream)

    def _join(self, _: None, with_layouts: bool, stream: Any) -> Mark:  # noqa: ARG002
        return self._queue.record(stream)

    @property
    def _queue(self) -> QueuedDevice:
        assert self._channels is not None
        return self._device  # type: ignore[return-value]

    @property
    def _channel(self) -> Channels:
        assert self._channels is not None
        return self._channels

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
        for each, is_done in zip(steps, done, strict=False):  # none is unfinished once the times are known
            if not is_done:
                first.setdefault(each.stream, (each.step, not all(done[before] for before in each.waits)))
        return [*first.values()]

    # --- values -------------------------------------------------------------------------------------------------------

    def _from_here(self, key: ValueKey) -> Any:
        value = self._use(key)
        return value if key[1] else hand_over(value)

    def _use(self, key: ValueKey) -> Any:
        """A value that was made here; its last use releases it."""
        value, num_uses = self._made.pop(key)
        if num_uses > 1:
            self._made[key] = value, num_uses - 1
        return value

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
            return Doing(waits, f"waits for {self.awaited}" if waits else f"keeps others waiting for {self.awaited}")
        if action.what == "run":
            return Doing(waits, f"waits for other ranks in {action.op}" if waits else f"is at {action.op}")
        assert action.message is not None
        transfer = action.message.transfer
        return Doing(waits, f"is at {transfer} between rank {transfer.sender} and rank {transfer.receiver}")

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of the stages on this rank."""
        return (parameter for module in self._modules for parameter in module.parameters())

    def last(self) -> str:
        """The last op that ended, or was enqueued."""
        num_ended = len(self.marks.ends)
        return f"after {self.plan.orders[self.record.rank][num_ended - 1]}" if num_ended else "before its first op"


def _nothing(*_: object) -> None:
    pass


def _given(value: Any) -> Any:
    """The shapes of a micro-batch's inputs, and what they hold besides tensors, as `KnownLayouts` compares them."""
    plain: list[Any] = []
    return as_layout(structure(value, plain)), as_layout(plain)


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
