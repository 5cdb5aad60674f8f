"""What a rank does in each step of a plan, as functions without arguments that are bound once.

action of the plan ──▶ Bound(action, act): receive | run an op: take what it reads, compute, keep what it makes | send

On the CPU these are the actions of `rota.core.programs.actions`; on a queued device the steps of
`rota.core.programs.device_steps`, the same actions with streams and events, which are proven not to hang.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias, final

from rota.core.errors import PipelineError
from rota.core.plan import Plan
from rota.core.programs.actions import Action, Message, Program, ValueKey, compile_program, prefetch_receives
from rota.core.programs.device_steps import COMPUTE, Step, device_program
from rota.core.simulation import simulate
from rota.core.tasks import Kind, Op, Transfer
from rota.core.timeline import Timeline
from rota.models import Stages
from rota.runtime.channels import Channels, OnStream, Passage
from rota.runtime.compute import Compute
from rota.runtime.device.protocol import Device, Mark, is_queued
from rota.runtime.gradients.offloading import Offloading
from rota.runtime.gradients.recompute import versions_in
from rota.runtime.messages import Format, flatten, hand_over
from rota.runtime.recorder import Marks, Record
from rota.runtime.transport import Transport

Take: TypeAlias = Callable[[], Any]  # gives a value to an op or to a message


class Hooks(NamedTuple):
    """What happens around the ops of a plan.

    `before` an op runs, and `after` its outputs are sent. On a queued device `after` and `sums` (of the gradients of
    tied weights, by ranks) enqueue on the stream that they get, and return the mark behind.
    """

    before: Mapping[Op, Callable[[], None]] = {}
    after: Mapping[Op, Callable[[Any], Mark]] = {}
    sums: Mapping[tuple[int, ...], Callable[[Any], Mark]] = {}


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
@dataclass(slots=True)
class RunState:
    """Of the run that goes on, or the last one.

    `mark`: marks this moment behind the ops. `compute`: the stream of ops on a queued device. `values`: by slot, what
    ops have made for others on this rank. `behind`: by position in the program of a queued device, the mark behind each
    step; None if it has none, or none yet.
    """

    mark: Callable[[], Mark]
    marks: Marks = field(default_factory=Marks)
    compute: Any = None
    values: list[Any] = field(default_factory=list)
    behind: list[Mark] = field(default_factory=list)


@final
class BoundActions:
    """Binds the actions of `plan` on this rank, which run on `run`; `compute` does the ops."""

    def __init__(self, stages: Stages, plan: Plan, compute: Compute, here: ThisRank, run: RunState) -> None:
        self._stages, self._plan, self._compute, self._here, self._run = stages, plan, compute, here, run
        self._trains = any(task.kind.makes_weight_gradients for task in plan.placement.tasks)
        edge_index = {(edge.source, edge.target): i for i, edge in enumerate(stages.edges)}
        self.order, self.program = plan.orders[here.rank], compile_program(plan, edge_index, here.rank)
        self._values_of = {op: _values_of(op, stages, edge_index) for op in self.order}
        self._hooks = Hooks()
        #: Of activations, by (edge, False, micro-batch), as of the last run that learned them.
        self.formats: dict[ValueKey, Format] = {}
        self.slots: dict[ValueKey, int] = {}  # of values that are made here
        self._copies = plan.placement.copies_on(here.rank)
        modules = {stage: stages[stage] for stage, _ in self._copies}
        #: None where this rank offloads nothing.
        self.offloading = Offloading(plan.placement, modules) if modules else None

    def keys_elsewhere(self) -> Iterator[ValueKey]:
        """The values that another rank makes or reads, and those of which only the gradient comes from there."""
        yield from (action.message.value for action in self.program.actions if action.message is not None)
        for op, (_, made) in self._values_of.items():
            yield from (key for key in made if op.kind is Kind.F and key[0] in self.program.unsent)

    def bind(self, hooks: Hooks) -> dict[bool, list[Bound]]:
        """What a run does, by whether it learns layouts: then it waits for each, so it keeps the strict order."""
        self._hooks = hooks
        if self._here.channels is None:
            return {learns: [*self._host_actions(learns)] for learns in (False, True)}
        timeline = simulate(self._plan)
        return {learns: [*self._device_steps(self._here.channels, timeline, learns)] for learns in (False, True)}

    def _host_actions(self, learns: bool) -> Iterator[Bound]:
        strict = self.program.actions
        actions = strict if learns else prefetch_receives(self._plan, self.program.rank, strict)
        uses, takes = _Uses(self.program, self.slots, self._run.values), dict[ValueKey, Take]()
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
                post, takes[message.value] = self._here.transport.receiving(message, self.formats, learns)
                yield Bound(action, post)
            else:
                send = self._here.transport.sending(message, self.formats, learns)
                yield Bound(action, partial(_pass, uses.taker(message.value), send))
        if after is not None:
            yield after

    def _bind(self, op: Op, takes: Mapping[ValueKey, Take], uses: _Uses, learns: bool) -> Callable[[], None]:
        """The function that runs an op. `takes`: of the values that arrive."""
        read, made = self._values_of[op]
        reads = [takes[key] if key in takes else uses.local_taker(key) for key in read]
        slots = [(i, slot) for i, key in enumerate(made) if (slot := uses.slot(key)) is not None]
        compute = self._offloaded(op) or self._compute.bind(op)
        if lent := self._lent(op):
            compute = partial(_refusing_writes, op, compute, lent)
        unsent = [(i, key) for i, key in enumerate(made) if op.kind is Kind.F and key[0] in self.program.unsent]
        if unsent and learns:
            compute = partial(self._learn_unsent, compute, unsent, f"stage {op.stage}")
        run = self._run_op(compute, reads, slots)
        wait = self.offloading.waiting(op) if self.offloading is not None else None
        for before in filter(None, (wait, self._hooks.before.get(op))):
            run = partial(_one_after_the_other, before, run)
        return run

    def _offloaded(self, op: Op) -> Callable[[list[Any]], list[Any]] | None:
        """What an op does if it is one of those that offload, or the forward before them; else None."""
        if self.offloading is None:
            return None
        if op.kind is Kind.F and (op.stage, Kind.O) in self._copies:
            inputs = partial(self._compute.inputs_of, op)
            copied = self._timed(op._replace(kind=Kind.O))
            return self.offloading.saving(op, self._compute.bind(op), inputs, copied)
        if op.kind is Kind.O:
            return self.offloading.offloaded(op)
        return self.offloading.loading(op, self._timed(op)) if op.kind is Kind.L else None

    def _timed(self, op: Op) -> Callable[[Callable[[Any], None], Any], None]:
        """What runs the copy of O or L in another thread, and marks its begin and its end."""
        state, column = self._run, (self._copies[op[:2]], op.microbatch // self._plan.placement.num_components)

        def run(copy: Callable[[Any], None], saved: Any) -> None:
            mark, marks = state.mark, state.marks
            marks.sent[column] = mark()
            copy(saved)
            marks.through[column] = mark()

        return run

    def _run_op(
        self, compute: Callable[[list[Any]], list[Any]], reads: list[Take], slots: list[tuple[int, int]]
    ) -> Callable[[], None]:
        values, state = self._run.values, self._run

        def run_op() -> None:
            received = [take() for take in reads]
            mark, marks = state.mark, state.marks
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
        uses, arriving = self.program.num_uses, self.program.arriving
        return [
            i
            for i, (key, n) in enumerate(zip(read, num_readers, strict=True))
            if key not in arriving and (n > 1 or uses[key[:2]] > 1)
        ]

    # --- on a queued device -------------------------------------------------------------------------------------------

    def _device_steps(self, channels: Channels, timeline: Timeline, learns: bool) -> Iterator[Bound]:
        program = device_program(timeline, self.program, tied=self._here.tied, allocates_early=not learns)
        uses = _Uses(self.program, self.slots, self._run.values)
        takes = {key: channels.taking(key) for key in self.program.arriving}
        positions = {op: position for position, op in enumerate(self.order)}
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

    def _enqueueing(self, step: Step, takes: Mapping[ValueKey, Take], uses: _Uses, learns: bool) -> OnStream:
        """What gives a step without a message to its stream."""
        assert is_queued(self._here.device)
        if step.what == "join":
            return self._here.device.record
        if step.what == "sum":
            assert isinstance(step.subject, tuple)
            assert not isinstance(step.subject, (Op, Transfer))
            return self._hooks.sums.get(step.subject, _nothing) if self._trains else _nothing
        op = op_of(step)
        if step.what == "reduce":
            return self._hooks.after.get(op, _nothing)
        run = self._bind(op, takes, uses, learns)

        def enqueue(_: Any) -> Mark:
            run()
            return self._run.marks.ends[-1]

        return enqueue

    def _in_stream(self, position: int, step: Step, enqueue: OnStream) -> Callable[[], None]:
        """What lets the stream of a step wait for earlier steps, and gives it this one."""
        assert is_queued(self._here.device)
        run, wait, waits = self._run, self._here.device.wait, step.waits
        behind, own = run.behind, None if step.stream == COMPUTE else self._here.device.stream(step.stream)

        def act() -> None:
            stream = run.compute if own is None else own
            for before in waits:
                mark = behind[before]
                if mark is not None:
                    wait(stream, mark)
            behind[position] = enqueue(stream)

        return act


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

    def taker(self, key: ValueKey) -> Take:
        """What gives the value to its next user."""
        self._left[key] -= 1
        slot = self._slots[key]
        return partial(self._values.__getitem__, slot) if self._left[key] else partial(_take, self._values, slot)

    def local_taker(self, key: ValueKey) -> Take:
        """What gives it to a stage on the same rank."""
        return self.taker(key) if key[1] else partial(_handed_over, self.taker(key))


def _take(values: list[Any], slot: int) -> Any:
    value, values[slot] = values[slot], None
    return value


def _handed_over(take: Take) -> Any:
    return hand_over(take())


def _pass(take: Take, send: Callable[[Any], None]) -> None:
    send(take())


def _one_after_the_other(first: Callable[[], None], second: Callable[[], None]) -> None:
    first()
    second()


def _nothing(_: Any) -> None:
    pass


def _values_of(op: Op, stages: Stages, edge_index: dict[tuple[int, int], int]) -> tuple[list[ValueKey], list[ValueKey]]:
    """The values that an op reads and makes."""
    if op.kind in (Kind.R, Kind.W) or op.kind.is_copy:
        return [], []
    back = op.kind is not Kind.F
    incoming, outgoing = (
        [(edge_index[edge[:2]], back, op.microbatch) for edge in edges]
        for edges in (stages.incoming(op.stage), stages.outgoing(op.stage))
    )
    return (outgoing, incoming) if back else (incoming, outgoing)


def op_of(what: Action | Step) -> Op:
    """The op that runs, or whose gradients are reduced."""
    op = what.op if isinstance(what, Action) else what.subject
    assert isinstance(op, Op)
    return op


def _refusing_writes(
    op: Op, compute: Callable[[list[Any]], list[Any]], lent: list[int], received: list[Any]
) -> list[Any]:
    """Compute an op, and refuse that it writes into values that others read too."""
    values = [received[i] for i in lent]
    versions = versions_in(values)
    outputs = compute(received)
    if versions != versions_in(values):
        raise PipelineError(
            f"stage {op.stage} writes into what it receives, which other stages read too; let it begin with an "
            f"operation that is not in place"
        )
    return outputs
