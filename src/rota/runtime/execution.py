"""One plan on one rank: the loop over its actions, and the values between them.

receive ──▶ run op: take what it reads, compute, keep what it makes ──▶ send ──▶ receive ──▶ …

On the CPU the loop goes over the actions of `rota.core.programs.actions`. On a queued device it goes over the steps of
`rota.core.programs.device_steps`, the same actions with streams and events, which are proven not to hang.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any, Literal, NamedTuple, final

import torch

from rota.core.errors import PipelineError
from rota.core.plan import Plan
from rota.core.programs.actions import Action, Message, Program, ValueKey, compile_program, prefetch_receives
from rota.core.programs.device_steps import COMPUTE, Step, device_program
from rota.core.simulation import simulate
from rota.core.tasks import Kind, Op, Transfer
from rota.core.timeline import Timeline
from rota.models import Stages
from rota.runtime.channels import Channels, Passage
from rota.runtime.compute import Batch, Compute
from rota.runtime.device.protocol import Device, Mark, QueuedDevice, is_queued
from rota.runtime.faults.hang_report import Doing, is_in_a_collective
from rota.runtime.layouts import KnownLayouts, Layouts, Size
from rota.runtime.memory_watch import MemoryWatch
from rota.runtime.messages import Format, describe_value, flatten, hand_over, tensors_in
from rota.runtime.recorder import Marks, Record
from rota.runtime.transport import Receive, Transport
from rota.torch_internals import version_of


class Hooks(NamedTuple):
    """What happens around the ops of a plan.

    `before` an op runs, and `after` its outputs are sent. On a queued device `after` and `sums` (of the gradients of
    tied weights, by ranks) enqueue on the stream that they get, and return the mark behind.
    """

    before: Mapping[Op, Callable[[], None]] = {}
    after: Mapping[Op, Callable[[Any], Mark]] = {}
    sums: Mapping[tuple[int, ...], Callable[[Any], Mark]] = {}


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


class Bound(NamedTuple):
    """An action, or a step of a queued device's program, and the function that does it."""

    what: Action | Step
    act: Callable[[], None]


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
        hooks: Hooks = _NO_HOOKS,
        sizes: Sequence[Size] = (),
        known: KnownLayouts | None = None,
    ) -> None:
        self.plan, self.compute, self.record = plan, compute, here.record
        self.trains = any(task.kind.makes_weight_gradients for task in plan.placement.tasks)
        self.marks = Marks()
        #: Whether the last run has reached its end.
        self.complete, self._is_settled = False, True
        self._stages, self._here, self._hooks = stages, here, hooks
        self._transport, self._device, self._channels = here.transport, here.device, here.channels
        self._order = plan.orders[here.rank]
        edge_index = {(edge.source, edge.target): i for i, edge in enumerate(stages.edges)}
        self._program = compile_program(plan, edge_index, here.rank)
        self._values_of = {op: _values_of(op, stages, edge_index) for op in self._order}
        modules = [stages[stage] for stage in plan.placement.stages_on(here.rank)]
        known = known if sizes and known is not None else KnownLayouts()
        self._layouts = Layouts(modules, sizes, known, self._keys_elsewhere())
        #: The formats of activations, as of the last run with layouts, or as the caller set them.
        self.formats = self._layouts.formats
        #: What a run does, by whether it learns layouts: then it waits for each, so it keeps the strict order.
        self._actions: dict[bool, list[Bound]] = {}
        self._slots: dict[ValueKey, int] = {}  # of values that are made here
        # --- the run that goes on, or the last one
        self._values: list[Any] = []  # by slot
        self._mark = here.device.mark
        self._at: Action | Step | None = None  # None before the first and after the last
        self._awaited = ""  # what the rank waits for outside of its actions
        self._steps: list[Step] = []
        #: By position in the program of a queued device: the mark behind each step; None if it has none, or none yet.
        self._behind: list[Mark] = []
        self.bind()

    def _keys_elsewhere(self) -> Iterator[ValueKey]:
        """The values that another rank makes or reads, and those of which only the gradient comes from there."""
        yield from (action.message.value for action in self._program.actions if action.message is not None)
        for op, (_, made) in self._values_of.items():
            yield from (key for key in made if op.kind is Kind.F and key[0] in self._program.unsent)

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
        self, batch: Batch, seed: int, with_layouts: bool, tick: Callable[[], None], watch: MemoryWatch | None = None
    ) -> None:
        """Run all actions; `with_layouts`: values are sent with their layouts. `tick` is called before each action.

        `watch` sees each op's end. On a queued device all actions have been enqueued when it returns.
        """
        actions = self._actions[with_layouts]
        self._begin(batch, with_layouts, actions)
        torch.clear_autocast_cache()  # it may hold weights from before an optimizer's step
        with self.compute.step(batch, seed), torch.set_grad_enabled(self.trains):
            for self._at, act in actions:
                tick()
                act()
                if watch is not None and self._at.what == "run":  # here, where the op's own variables are gone
                    watch.op_ended(_op_of(self._at))
        self._at = None
        (self._channels or self._transport).drain()
        if self.trains:
            edges = [edge[:2] for edge in self._stages.edges]
            self._transport.flags.end(edges, self._program.num_gradients_sent)
        if with_layouts:
            self._layouts.learn()
        self.complete, self._is_settled = True, False

    def _begin(self, batch: Batch, with_layouts: bool, actions: list[Bound]) -> None:
        self.marks, self.complete = Marks(), False
        self.record.microbatch_rows = batch.rows[0] if len({*batch.rows}) == 1 else None
        self._values[:] = [None] * len(self._slots)
        self._device.begin()
        (self._channels or self._transport).begin(self.marks, self.formats)
        if self._channels is not None:
            self._mark = partial(self._queue.mark_on, self._queue.stream(COMPUTE))
            self._steps = [what for what, _ in actions if isinstance(what, Step)]
            self._behind[:] = [None] * len(actions)
        if self.trains:
            self._transport.flags.begin(with_layouts)

    def settle(self) -> None:
        """Put the times of the last run into `record`. On a queued device the host waits for the run to end."""
        if not self._is_settled:
            self.record.settle(self.marks, self._device)
            self._is_settled, self._behind[:] = True, []

    # --- binding: each action becomes a function without arguments, once per plan -------------------------------------

    def bind(self) -> None:
        """Bind all actions, with the hooks as they are now."""
        if self._channels is None:
            self._actions = {with_layouts: [*self._host_actions(with_layouts)] for with_layouts in (False, True)}
            return
        timeline = simulate(self.plan)
        positions = {op: position for position, op in enumerate(self._order)}
        for with_layouts in (False, True):
            self._actions[with_layouts] = [*self._device_steps(timeline, positions, with_layouts)]

    def _host_actions(self, with_layouts: bool) -> Iterator[Bound]:
        strict = self._program.actions
        actions = strict if with_layouts else prefetch_receives(self.plan, self._program.rank, strict)
        uses, receives = _Uses(self._program, self._slots, self._values), dict[ValueKey, Receive]()
        after: Bound | None = None  # what follows the last op and its messages
        for action in actions:
            message = action.message
            if message is None:
                if after is not None:
                    yield after
                hook = self._hooks.after.get(action.op)
                after = None if hook is None else Bound(Action("reduce", action.op), partial(hook, None))
                takes = {key: receives[key].take for key in self._values_of[action.op][0] if key in receives}
                yield Bound(action, self._bind(action.op, takes, uses, with_layouts))
            elif action.what == "receive":
                receives[message.value] = self._transport.receive(message, with_layouts)
                yield Bound(action, receives[message.value].post)
            else:
                send = self._transport.sending(message, with_layouts)
                yield Bound(action, partial(_pass, uses.taker(message.value), send))
        if after is not None:
            yield after

    def _bind(
        self, op: Op, takes: Mapping[ValueKey, Callable[[], Any]], uses: _Uses, with_layouts: bool
    ) -> Callable[[], None]:
        """The function that runs an op. `takes`: of the values that arrive."""
        read, made = self._values_of[op]
        reads = [takes[key] if key in takes else uses.local_taker(key) for key in read]
        slots = [(i, slot) for i, key in enumerate(made) if (slot := uses.slot(key)) is not None]
        unsent = [(i, key) for i, key in enumerate(made) if op.kind is Kind.F and key[0] in self._program.unsent]
        unsent = unsent if with_layouts else []
        compute, values, before = self.compute.bind(op), self._values, self._hooks.before.get(op)
        if lent := self._lent(op):
            compute = partial(_refusing_writes, op, compute, lent)

        def run() -> None:
            if before is not None:
                before()
            received = [take() for take in reads]
            mark = self._mark
            start = mark()
            try:
                outputs = compute(received)
            except PipelineError:
                raise
            except Exception as error:
                self._add_place(error, op, received)
                raise
            self.marks.ends.append(mark())
            self.marks.starts.append(start)
            for i, slot in slots:
                values[slot] = outputs[i]
            for i, key in unsent:
                self.formats[key] = Format(flatten(outputs[i], f"stage {op.stage}")[1])

        return run

    def _lent(self, op: Op) -> list[int]:
        """The positions of values that F reads, and that other ops on this rank read or send too."""
        if op.kind is not Kind.F:
            return []
        read, _ = self._values_of[op]
        num_readers = [len(self._stages.outgoing(edge.source)) for edge in self._stages.incoming(op.stage)]
        uses, arriving = self._program.num_uses, self._program.arriving
        return [
            i
            for i, (key, n) in enumerate(zip(read, num_readers, strict=True))
            if key not in arriving and (n > 1 or uses[key[:2]] > 1)
        ]

    def _add_place(self, error: Exception, op: Op, received: list[Any]) -> None:
        """Add to the error which stage raised it, and what that stage received."""
        name = type(self._stages[op.stage]).__name__
        where = f"rota: in {op} on rank {self.record.rank}, stage {op.stage} ({name})"
        error.add_note(f"{where}, which received {', '.join(map(describe_value, received))}" if received else where)

    # --- binding, on a queued device ----------------------------------------------------------------------------------

    def _device_steps(self, timeline: Timeline, positions: dict[Op, int], with_layouts: bool) -> Iterator[Bound]:
        tied = self._here.tied
        program = device_program(timeline, self._program, tied=tied, allocates_early=not with_layouts)
        uses = _Uses(self._program, self._slots, self._values)
        under_way: defaultdict[Message, deque[Passage]] = defaultdict(deque)
        for position, step in enumerate(program.steps):
            made_at = positions[step.message.transfer.source] if step.what == "send" and step.message else -1
            enqueue = self._enqueueing(step, made_at, under_way, uses, with_layouts)
            yield Bound(step, partial(self._enqueue, position, step.stream, step.waits, enqueue))

    def _enqueue(self, position: int, name: str, waits: tuple[int, ...], enqueue: Callable[[Any], Mark]) -> None:
        """Let the stream of this name wait for earlier steps, and give it this one."""
        device, behind = self._queue, self._behind
        stream = device.stream(name)
        for before in waits:
            if (mark := behind[before]) is not None:
                device.wait(stream, mark)
        behind[position] = enqueue(stream)

    def _enqueueing(
        self, step: Step, made_at: int, under_way: Mapping[Message, deque[Passage]], uses: _Uses, with_layouts: bool
    ) -> Callable[[Any], Mark]:
        """What gives a step to its stream.

        `made_at`: see `Passage.position`. `under_way`: messages that were allocated or sent, but not ended.
        """
        channels, hooks, message = self._channels, self._hooks, step.message
        assert channels is not None
        match step.what:
            case "run":
                assert isinstance(step.subject, Op)
                arriving = (key for key in self._values_of[step.subject][0] if key in self._program.arriving)
                takes = {key: partial(channels.take, key) for key in arriving}
                return partial(self._enqueue_op, self._bind(step.subject, takes, uses, with_layouts))
            case "reduce":
                assert isinstance(step.subject, Op)
                return hooks.after.get(step.subject, _nothing)
            case "sum":
                assert isinstance(step.subject, tuple)
                assert not isinstance(step.subject, (Op, Transfer))
                return hooks.sums.get(step.subject, _nothing) if self.trains else _nothing
            case "join":
                return self._queue.record
        assert message is not None
        passages = under_way[message]
        if step.what in ("receive", "release"):
            return partial(channels.receive if step.what == "receive" else channels.release, passages.popleft())
        passages.append(channels.passage(message, made_at))
        if step.what == "allocate":
            return partial(channels.allocate, passages[-1], with_layouts)
        return partial(_pass_on, uses.taker(message.value), channels.sending(passages[-1], with_layouts))

    def _enqueue_op(self, run: Callable[[], None], _: Any) -> Mark:
        run()
        return self.marks.ends[-1]

    @property
    def _queue(self) -> QueuedDevice:
        assert is_queued(self._device)
        return self._device

    # --- what it does -------------------------------------------------------------------------------------------------

    def doing_on_device(self) -> Doing | None:
        """What the device does or waits for, if it has not ended what the host has enqueued. Any thread may ask."""
        if self._channels is None:
            return None
        steps, done = self._steps, [mark is None or self._queue.is_done(mark) for mark in [*self._behind]]
        first: dict[str, Step] = {}  # of each stream, those that it has not ended
        for step, is_done in zip(steps, done, strict=False):  # none is unfinished once the times are known
            if not is_done:
                first.setdefault(step.stream, step)
        if not first:
            return None
        at = ", ".join(f"{step} on {stream}" for stream, step in first.items())
        running = [step for step in first.values() if all(done[before] for before in step.waits)]
        if any(step.what == "run" and step.communicator is None for step in running):
            return Doing(False, f"has not ended on its device: {at}")
        return Doing(True, f"waits on its device for other ranks: {at}")

    def num_reached(self) -> int:
        """How many kernels of the last run a queued device has ended. Any thread may ask."""
        return sum(mark is not None and self._queue.is_done(mark) for mark in [*self._behind]) if self._channels else 0

    def awaits(self, words: str) -> None:
        """From now on the rank waits for what these words say, outside of its actions."""
        self._awaited = words

    def doing(self, frames: list[FrameType]) -> Doing:
        """What the run is doing, or what it waits for, by the stack of the thread that runs it."""
        at, oldest = self._at, self._transport.oldest
        if not isinstance(at, Step) and (on_device := self.doing_on_device()) is not None:
            return on_device
        if (message := self._transport.awaited(frames)) is not None:
            return Doing(True, f"waits for {message.transfer} from rank {message.transfer.sender}")
        if at is None and oldest is not None:
            return Doing(True, f"waits for rank {oldest.receiver} to receive {oldest}")
        waits = is_in_a_collective(frames)
        if at is None:
            return Doing(waits, f"waits for {self._awaited}" if waits else f"keeps others waiting for {self._awaited}")
        if isinstance(at, Step):
            return Doing(waits, f"enqueues {at}")
        if at.message is None:
            return Doing(waits, f"waits for other ranks in {at.op}" if waits else f"is at {at.op}")
        transfer = at.message.transfer
        return Doing(waits, f"is at {transfer} between rank {transfer.sender} and rank {transfer.receiver}")

    def last(self) -> str:
        """The last op that ended, or was enqueued."""
        num_ended = len(self.marks.ends)
        return f"after {self._order[num_ended - 1]}" if num_ended else "before its first op"


@final
class _Uses:
    """Who reads the values that a rank makes, in the order in which its actions are bound; the last use lets go."""

    def __init__(self, program: Program, slots: dict[ValueKey, int], values: list[Any]) -> None:
        self._num_uses, self._slots, self._values = program.num_uses, slots, values
        self._left: dict[ValueKey, int] = {}

    def slot(self, made: ValueKey) -> int | None:
        """Where a value is kept that is made now; None if it is neither read nor sent here."""
        self._left[made] = self._num_uses.get(made[:2], 0)
        return self._slots.setdefault(made, len(self._slots)) if self._left[made] else None

    def taker(self, key: ValueKey) -> Callable[[], Any]:
        """What gives the value to its next user."""
        self._left[key] -= 1
        slot = self._slots[key]
        return partial(self._values.__getitem__, slot) if self._left[key] else partial(_take, self._values, slot)

    def local_taker(self, key: ValueKey) -> Callable[[], Any]:
        """What gives it to a stage on the same rank."""
        return self.taker(key) if key[1] else partial(_handed_over, self.taker(key))


def _take(values: list[Any], slot: int) -> Any:
    value, values[slot] = values[slot], None
    return value


def _handed_over(take: Callable[[], Any]) -> Any:
    return hand_over(take())


def _pass(take: Callable[[], Any], send: Callable[[Any], None]) -> None:
    send(take())


def _pass_on(take: Callable[[], Any], send: Callable[[Any, Any], Mark], stream: Any) -> Mark:
    return send(take(), stream)


def _nothing(_: Any) -> None:
    pass


def _values_of(op: Op, stages: Stages, edge_index: dict[tuple[int, int], int]) -> tuple[list[ValueKey], list[ValueKey]]:
    """The values that an op reads and makes."""
    if op.kind in (Kind.R, Kind.W):
        return [], []
    back = op.kind is not Kind.F
    incoming, outgoing = (
        [(edge_index[edge[:2]], back, op.microbatch) for edge in edges]
        for edges in (stages.incoming(op.stage), stages.outgoing(op.stage))
    )
    return (outgoing, incoming) if back else (incoming, outgoing)


def _op_of(what: Action | Step) -> Op:
    op = what.op if isinstance(what, Action) else what.subject
    assert isinstance(op, Op)
    return op


def _refusing_writes(
    op: Op, compute: Callable[[list[Any]], list[Any]], lent: list[int], received: list[Any]
) -> list[Any]:
    """Compute an op, and refuse that it writes into values that others read too."""
    versions = _versions(received, lent)
    outputs = compute(received)
    if versions != _versions(received, lent):
        raise PipelineError(
            f"stage {op.stage} writes into what it receives, which other stages read too; let it begin with an "
            f"operation that is not in place"
        )
    return outputs


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
