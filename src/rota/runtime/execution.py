"""One plan on one rank: the loop over its actions, and the values between them.

receive ──▶ run op: take what it reads, compute, keep what it makes ──▶ send ──▶ receive ──▶ …

On the CPU the loop goes over the actions of `rota.core.programs.actions`. On a queued device it goes over the steps of
`rota.core.programs.device_steps`, the same actions with streams and events, which are proven not to hang.
"""

from __future__ import annotations

import traceback
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
from rota.models import Stages, collect_losses
from rota.runtime.channels import Channels, OnStream, Passage
from rota.runtime.compute import Batch, Compute
from rota.runtime.device.protocol import Device, Mark, is_queued
from rota.runtime.faults.hang_report import Doing, is_in_a_collective
from rota.runtime.gradients.forward_backward import refuse_modes_without_gradients
from rota.runtime.layouts import KnownLayouts, Layouts, Size
from rota.runtime.memory_watch import MemoryWatch
from rota.runtime.messages import Format, describe_value, flatten, hand_over, tensors_in
from rota.runtime.recorder import Marks, Record
from rota.runtime.transport import Transport
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
        self.is_queued = here.channels is not None
        #: What a queued device did when `look` asked last, and how many kernels of the last run it had ended.
        self.on_device: Doing | None = None
        self.num_reached = 0
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
        #: The formats of activations, as of the last run that learned them, or as the caller set them.
        self.formats = self._layouts.formats
        #: What a run does, by whether it learns layouts: then it waits for each, so it keeps the strict order.
        self._actions: dict[bool, list[Bound]] = {}
        self._slots: dict[ValueKey, int] = {}  # of values that are made here
        # --- the run that goes on, or the last one
        self._values: list[Any] = []  # by slot
        self._mark = here.device.mark
        self._at: Action | Step | None = None  # None before the first and after the last
        self._awaited = ""  # what the rank waits for outside of its actions
        self._steps: list[Bound] = []
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
        self, batch: Batch, seed: int, learns: bool, tick: Callable[[], None], watch: MemoryWatch | None = None
    ) -> None:
        """Run all actions. If it `learns`, values are sent with their layouts. `tick` is called before each action.

        `watch` sees each op's end. On a queued device all actions have been enqueued when it returns.
        """
        if self.trains:
            refuse_modes_without_gradients()
        actions = self._actions[learns]
        self._begin(batch, learns, actions)
        torch.clear_autocast_cache()  # it may hold weights from before an optimizer's step
        with collect_losses() as added, torch.set_grad_enabled(self.trains):
            self.compute.begin(batch, seed, learns, added)
            try:
                for self._at, act in actions:
                    tick()
                    act()
                    if watch is not None and self._at.what == "run":  # here, where the op's own variables are gone
                        watch.op_ended(_op_of(self._at))
            except PipelineError:
                raise
            except Exception as error:
                self._explain(error)
                raise
            finally:
                added.losses.clear()
        self._at = None
        (self._channels or self._transport).drain()
        if self.trains:
            edges = [edge[:2] for edge in self._stages.edges]
            self._transport.flags.end(edges, self._program.num_gradients_sent)
        if learns:
            self._layouts.learn()
        self.complete, self._is_settled = True, False

    def _begin(self, batch: Batch, learns: bool, actions: list[Bound]) -> None:
        self._behind[:] = []  # before its marks are used again
        if not self._is_settled:  # nobody has asked for the times of the step before
            self._device.reuse(self.marks.on_device)
        self.marks, self.complete, self._is_settled = Marks(), False, True
        self.record.microbatch_rows = batch.rows[0] if len({*batch.rows}) == 1 else None
        self._values[:] = [None] * len(self._slots)
        self._device.begin()
        (self._channels or self._transport).begin(self.marks)
        if is_queued(self._device) and self._channels is not None:
            self._mark = partial(self._device.mark_on, self._device.stream(COMPUTE))
            self._steps = actions
            self._behind[:] = [None] * len(actions)
        if self.trains:
            self._transport.flags.begin(learns)

    def settle(self) -> None:
        """Put the times of the last run into `record`. On a queued device the host waits for the run to end."""
        if not self._is_settled:
            self.record.settle(self.marks, self._device)
            self._is_settled, self._behind[:] = True, []

    def _explain(self, error: Exception) -> None:
        """Raises PipelineError if an op's error is told by how the op was run; else adds its place to the error."""
        at = self._at
        if at is None or at.what != "run":
            return
        op = _op_of(at)
        if (refusal := self.compute.explain(op, error)) is not None:
            raise refusal from error
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        received = next((frame.f_locals.get("received") for frame in frames if frame.f_code.co_name == "run_op"), None)
        name = type(self._stages[op.stage]).__name__
        where = f"rota: in {op} on rank {self.record.rank}, stage {op.stage} ({name})"
        error.add_note(f"{where}, which received {', '.join(map(describe_value, received))}" if received else where)

    # --- binding: each action becomes a function without arguments, once per plan -------------------------------------

    def bind(self) -> None:
        """Bind all actions, with the hooks as they are now."""
        if self._channels is None:
            self._actions = {learns: [*self._host_actions(learns)] for learns in (False, True)}
            return
        timeline = simulate(self.plan)
        for learns in (False, True):
            self._actions[learns] = [*self._device_steps(self._channels, timeline, learns)]

    def _host_actions(self, learns: bool) -> Iterator[Bound]:
        strict = self._program.actions
        actions = strict if learns else prefetch_receives(self.plan, self._program.rank, strict)
        uses, takes = _Uses(self._program, self._slots, self._values), dict[ValueKey, Callable[[], Any]]()
        after: Bound | None = None  # what follows the last op and its messages
        for action in actions:
            message = action.message
            if message is None:
                if after is not None:
                    yield after
                hook = self._hooks.after.get(action.op)
                after = None if hook is None else Bound(Action("reduce", action.op), partial(hook, None))
                yield Bound(action, self._bind(action.op, takes, uses, learns))
            elif action.what == "receive":
                post, takes[message.value] = self._transport.receiving(message, self.formats, learns)
                yield Bound(action, post)
            else:
                send = self._transport.sending(message, self.formats, learns)
                yield Bound(action, partial(_pass, uses.taker(message.value), send))
        if after is not None:
            yield after

    def _bind(
        self, op: Op, takes: Mapping[ValueKey, Callable[[], Any]], uses: _Uses, learns: bool
    ) -> Callable[[], None]:
        """The function that runs an op. `takes`: of the values that arrive."""
        read, made = self._values_of[op]
        reads = [takes[key] if key in takes else uses.local_taker(key) for key in read]
        slots = [(i, slot) for i, key in enumerate(made) if (slot := uses.slot(key)) is not None]
        compute = self.compute.bind(op)
        if lent := self._lent(op):
            compute = partial(_refusing_writes, op, compute, lent)
        unsent = [(i, key) for i, key in enumerate(made) if op.kind is Kind.F and key[0] in self._program.unsent]
        if unsent and learns:
            compute = partial(self._learn_unsent, compute, unsent, f"stage {op.stage}")
        run = self._run_op(compute, reads, slots)
        before = self._hooks.before.get(op)
        return run if before is None else partial(_one_after_the_other, before, run)

    def _run_op(
        self, compute: Callable[[list[Any]], list[Any]], reads: list[Callable[[], Any]], slots: list[tuple[int, int]]
    ) -> Callable[[], None]:
        values = self._values

        def run_op() -> None:
            received = [take() for take in reads]
            mark, marks = self._mark, self.marks
            start = mark()
            outputs = compute(received)
            marks.ends.append(mark())
            marks.starts.append(start)
            for i, slot in slots:
                values[slot] = outputs[i]

        return run_op

    def _learn_unsent(
        self,
        compute: Callable[[list[Any]], list[Any]],
        unsent: list[tuple[int, ValueKey]],
        where: str,
        received: list[Any],
    ) -> list[Any]:
        outputs = compute(received)
        for i, key in unsent:
            self.formats[key] = Format(flatten(outputs[i], where)[1])
        return outputs

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

    # --- binding, on a queued device ----------------------------------------------------------------------------------

    def _device_steps(self, channels: Channels, timeline: Timeline, learns: bool) -> Iterator[Bound]:
        program = device_program(timeline, self._program, tied=self._here.tied, allocates_early=not learns)
        uses = _Uses(self._program, self._slots, self._values)
        takes = {key: channels.taking(key) for key in self._program.arriving}
        positions = {op: position for position, op in enumerate(self._order)}
        under_way: defaultdict[Message, deque[Passage]] = defaultdict(deque)  # allocated or sent, but not ended
        for position, step in enumerate(program.steps):
            message = step.message
            enqueue: OnStream
            if message is None:
                enqueue = self._enqueueing(step, takes, uses, learns)
            elif step.what == "allocate":
                under_way[message].append(channels.passage(message, -1))
                enqueue = channels.allocating(under_way[message][-1], self.formats, learns)
            elif step.what == "send":
                under_way[message].append(channels.passage(message, positions[message.transfer.source]))
                take = uses.taker(message.value)
                enqueue = channels.sending(under_way[message][-1], take, self.formats, learns)
            else:
                ending = channels.receiving if step.what == "receive" else channels.releasing
                enqueue = ending(under_way[message].popleft())
            yield Bound(step, self._in_stream(position, step, enqueue))

    def _enqueueing(
        self, step: Step, takes: Mapping[ValueKey, Callable[[], Any]], uses: _Uses, learns: bool
    ) -> OnStream:
        """What gives a step without a message to its stream."""
        assert is_queued(self._device)
        if step.what == "join":
            return self._device.record
        if step.what == "sum":
            assert isinstance(step.subject, tuple)
            assert not isinstance(step.subject, (Op, Transfer))
            return self._hooks.sums.get(step.subject, _nothing) if self.trains else _nothing
        op = _op_of(step)
        if step.what == "reduce":
            return self._hooks.after.get(op, _nothing)
        run = self._bind(op, takes, uses, learns)

        def enqueue(_: Any) -> Mark:
            run()
            return self.marks.ends[-1]

        return enqueue

    def _in_stream(self, position: int, step: Step, enqueue: OnStream) -> Callable[[], None]:
        """What lets the stream of a step wait for earlier steps, and gives it this one."""
        assert is_queued(self._device)
        stream_of, wait, behind = self._device.stream, self._device.wait, self._behind
        name, waits = step.stream, step.waits

        def act() -> None:
            stream = stream_of(name)
            for before in waits:
                mark = behind[before]
                if mark is not None:
                    wait(stream, mark)
            behind[position] = enqueue(stream)

        return act

    # --- what it does -------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Ask a queued device what it has reached. Any thread may call it; a device that is stuck may never answer."""
        if is_queued(self._device):
            behind = [*self._behind]
            done = [mark is None or self._device.is_done(mark) for mark in behind]
            self.num_reached = sum(done) - behind.count(None)
            self.on_device = self._doing_on_device(done)

    def _doing_on_device(self, done: list[bool]) -> Doing | None:
        """What the device does or waits for, if it has not ended what the host has enqueued."""
        steps = self._steps
        first: dict[str, Step] = {}  # of each stream, those that it has not ended
        for (step, _), is_done in zip(steps, done, strict=False):  # none is unfinished once the times are known
            if not is_done and isinstance(step, Step):
                first.setdefault(step.stream, step)
        if not first:
            return None
        at = ", ".join(f"{step} on {stream}" for stream, step in first.items())
        running = [step for step in first.values() if all(done[before] for before in step.waits)]
        if any(step.what == "run" and step.communicator is None for step in running):
            return Doing(False, f"has not ended on its device: {at}")
        return Doing(True, f"waits on its device for other ranks: {at}")

    def awaits(self, words: str) -> None:
        """From now on the rank waits for what these words say, outside of its actions."""
        self._awaited = words

    def doing(self, frames: list[FrameType]) -> Doing:
        """What the run is doing, or what it waits for, by the stack of the thread that runs it."""
        at, oldest = self._at, self._transport.oldest
        if not isinstance(at, Step) and self.on_device is not None:
            return self.on_device
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


def _one_after_the_other(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()


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
