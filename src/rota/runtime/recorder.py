"""When everything happened on each rank, on one clock, as a measured Timeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import msgspec

from rota.core import reading
from rota.core.plan import Plan
from rota.core.reading import Positive, Whole
from rota.core.tasks import Op
from rota.core.timeline import Timeline

if TYPE_CHECKING:  # the launcher reads records without torch
    from rota.runtime.device.protocol import Device, Mark

Column: TypeAlias = tuple[int, int]  # (route, position), see `rota.core.programs.actions.Message`
Pair: TypeAlias = tuple[int, int]  # the ranks of a channel, the sender first


@dataclass(slots=True)
class Marks:
    """The moments of a step in which ops, messages and reductions began and ended, see `Record`.

    On a queued device, messages are in `sends` and `receives`, in the order of their kernels: (column, channel, what
    the kernel waits for, the mark behind it). A send waits for the op with this position in `ends`, a receive for the
    mark behind the allocation of its buffers. A mark less is a call of the device less.
    """

    starts: list[Mark] = field(default_factory=list)
    ends: list[Mark] = field(default_factory=list)
    sent: dict[Column, Mark] = field(default_factory=dict)
    through: dict[Column, Mark] = field(default_factory=dict)
    sends: list[tuple[Column, Pair, int, Mark]] = field(default_factory=list)
    receives: list[tuple[Column, Pair, Mark, Mark]] = field(default_factory=list)
    reductions: dict[int, tuple[Mark, Mark]] = field(default_factory=dict)

    @property
    def on_device(self) -> list[Mark]:
        """Those of ops, and of messages on a queued device."""
        of_messages = [mark for *_, allocated, end in self.receives for mark in (allocated, end)]
        return [*self.starts, *self.ends, *of_messages, *(end for *_, end in self.sends)]


_Ns: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Record(msgspec.Struct):
    """One rank's last step, in ns of its own monotonic clock; `offset_ns` added gives rank 0's clock.

    `messages` that this rank sent are (route, position, sent, through), see `Timeline`. `received` are (route,
    position, when this rank was ready to receive, when it had the message): known only where the device has run a
    kernel for it. `reductions` are (stage, start, end).
    `microbatch_rows`: rows of each micro-batch's inputs; None if they differ, or if this rank reads no inputs.
    `num_cores`: CPU cores that all ranks share; None if they share none.
    """

    rank: Whole
    offset_ns: int = 0
    starts_ns: list[_Ns] = []
    ends_ns: list[_Ns] = []
    messages: list[tuple[Whole, Whole, _Ns, _Ns]] = []
    received: list[tuple[Whole, Whole, _Ns, _Ns]] = []
    reductions: list[tuple[Whole, _Ns, _Ns]] = []
    microbatch_rows: Whole | None = None
    num_cores: Positive | None = None

    def settle(self, marks: Marks, device: Device) -> None:
        """Take the times of a step's marks. On a queued device the host waits for the last of them."""
        self.starts_ns, self.ends_ns = device.times_ns(marks.starts), device.times_ns(marks.ends)
        sent_ns, through_ns = device.times_ns([*marks.sent.values()]), device.times_ns([*marks.through.values()])
        through = dict(zip(marks.through, through_ns, strict=True))
        self.messages = [(*column, sent, through[column]) for column, sent in zip(marks.sent, sent_ns, strict=True)]
        self.messages += _on_channels(marks.sends, [self.ends_ns[op] for _, _, op, _ in marks.sends], device)
        allocated_ns = device.times_ns([allocated for _, _, allocated, _ in marks.receives])
        self.received = [*_on_channels(marks.receives, allocated_ns, device)]
        begun_ns = device.times_ns([begun for begun, _ in marks.reductions.values()])
        ended_ns = device.times_ns([ended for _, ended in marks.reductions.values()])
        self.reductions = [*zip(marks.reductions, begun_ns, ended_ns, strict=True)]

    def to_fields(self) -> Any:
        """The record as JSON fields."""
        return msgspec.to_builtins(self)

    @classmethod
    def from_fields(cls, fields: Any, path: str = "record") -> Record:
        """The record that `to_fields` wrote. Raises FormatError, which names the field."""
        return reading.Field(path, fields).read(cls)


def _on_channels(
    kernels: Sequence[tuple[Column, Pair, Any, Mark]], ready_ns: list[int], device: Device
) -> Iterator[tuple[int, int, int, int]]:
    """When each kernel began and ended: it begins once it is ready and the one before it on its channel has ended."""
    free_ns: dict[Pair, int] = {}
    ends_ns = device.times_ns([end for *_, end in kernels])
    for (column, channel, _, _), ready, end in zip(kernels, ready_ns, ends_ns, strict=True):
        yield *column, max(ready, free_ns.get(channel, ready)), end
        free_ns[channel] = end


def merge(plan: Plan, records: list[Record]) -> Timeline:
    """The records of all ranks as one timeline that begins with the first op.

    Measured reductions are shown even if the plan's costs have none: they become step ends of zero length in the plan.
    A rank knows when it sent a message, and not how long the message then waited for shared links; see
    `SharedTransfers.starts_us` for how that is found.
    """
    records = sorted(records, key=lambda record: record.rank)
    reduced = {stage for record in records for stage, _, _ in record.reductions}
    plan = replace(plan, placement=plan.placement.with_step_ends(reduced))
    rows = next((record.microbatch_rows for record in records if record.microbatch_rows is not None), None)
    if plan.microbatch_rows is not None and rows is not None:
        plan = replace(plan, placement=replace(plan.placement, microbatch_rows=rows))
    origin = min(record.starts_ns[0] + record.offset_ns for record in records if record.starts_ns)

    def us(record: Record, time_ns: int) -> int:
        return max((time_ns + record.offset_ns - origin + 500) // 1000, 0)

    starts = tuple(tuple(us(r, t) for t in r.starts_ns) for r in records)
    ends = tuple(tuple(us(r, t) for t in r.ends_ns) for r in records)
    start_of = {
        (rank, op): start
        for rank, (order, started) in enumerate(zip(plan.orders, starts, strict=True))
        for op, start in zip(order, started, strict=True)
    }
    sent_and_through = {(r, k): times for record in records for r, k, *times in record.messages}
    on_device = {(r, k): times for record in records for r, k, *times in record.received}
    sent, arrived = [], []
    for r, route in enumerate(plan.placement.routes):
        target, sender, receiver = plan.placement.tasks[route.target], records[route.sender], records[route.receiver]
        batches = plan.placement.microbatches(target.stage, plan.num_microbatches)
        begun = [us(sender, sent_and_through[r, k][0]) for k in range(len(batches))]
        through = [us(sender, sent_and_through[r, k][1]) for k in range(len(batches))]
        for k in range(len(batches)):
            if (r, k) in on_device:  # a kernel on both sides: it moves data once both have begun
                ready, received = (us(receiver, time_ns) for time_ns in on_device[r, k])
                begun[k], through[k] = max(begun[k], ready), received
        # A sender may learn late that its message is through, but it arrived before the op that reads it started.
        read = [start_of[route.receiver, Op(target.stage, target.kind, m)] for m in batches]
        sent.append(tuple(begun))
        arrived.append(tuple(max(b, min(t, s)) for b, t, s in zip(begun, through, read, strict=True)))
    reductions = [_in_turn({s: (us(r, a), us(r, b)) for s, a, b in r.reductions}) for r in records]
    step_ends = []
    for i, rank in plan.step_end_ranks:
        free = max([*ends[rank][-1:], *(end for _, end in reductions[rank].values())], default=0)
        step_ends.append((*reductions[rank].get(plan.placement.step_ends[i].stage, (free, free)), free, free))
    served = plan.shared_transfers.starts_us(sent, arrived)
    return Timeline(plan, starts, ends, served, tuple(arrived), tuple(step_ends), records[0].num_cores)


def _in_turn(begun_and_done: dict[int, tuple[int, int]]) -> dict[int, tuple[int, int]]:
    """Reductions one after another, in the order they began, as they share a link: the earlier one gets an overlap."""
    in_turn: dict[int, tuple[int, int]] = {}
    before = 0
    for stage, (begun, done) in sorted(begun_and_done.items(), key=lambda item: item[1]):
        in_turn[stage] = max(begun, before), max(done, before)
        before = in_turn[stage][1]
    return in_turn
