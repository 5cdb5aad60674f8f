"""Memory of a rank over time, from the times of its ops and transfers.

A rank holds its static bytes, the bytes that its ops hold, received bytes from the transfer's start to the end of the
op that reads them, sent bytes from the end of their op until the transfer ends, and `peak_bytes` while an op runs. At
one instant, ends free memory before starts allocate it; ops of duration 0 count one after the other, in the rank's
order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import add, itemgetter, lt, neg
from typing import NamedTuple

from rota.core.placement import Placement
from rota.core.plan import Plan
from rota.core.tasks import Amount, Kind, by_class, value_in

# Events at one instant come in this order.
_TRANSFER_ENDS, _OP_ENDS, _TRANSFER_STARTS, _OP = range(4)

Columns = Sequence[Sequence[int]]
Events = tuple[Sequence[int], Sequence[int]]  #: times and, beside them, changes in bytes


class RankTimes(NamedTuple):
    """The times that a rank's memory follows from: of its ops in order, and of transfers by route and position."""

    plan: Plan
    rank: int
    starts_us: Sequence[int]
    ends_us: Sequence[int]
    sent_us: Columns
    arrived_us: Columns


def events(times: RankTimes) -> list[tuple[int, int]]:
    """Changes of a rank's memory as (key, change in bytes), in ascending order; key // 4 is the time in µs."""
    kinds = _events_of_each_kind(times)
    keyed = [
        (4 * time + kind, change) for kind, columns in enumerate(kinds) for time, change in zip(*columns, strict=True)
    ]
    return sorted(keyed, key=itemgetter(0))  # stable: ops at one instant stay in the rank's order


def peak_bytes(times: RankTimes) -> int:
    """The largest number of bytes that a rank holds at any time."""
    kinds = _events_of_each_kind(times)
    at_us, changes = ([*chain.from_iterable(columns)] for columns in zip(*kinds, strict=True))
    held = most = times.plan.placement.static_bytes[times.rank]
    for i in sorted(range(len(at_us)), key=at_us.__getitem__):  # stable: at one instant the first kind comes first
        held += changes[i]
        if held > most:
            most = held
    return most


def _events_of_each_kind(times: RankTimes) -> tuple[Events, Events, Events, Events]:
    """What `events` returns, by kind, in the order of the kinds at one instant; each kind in the rank's order."""
    transfer_ends, transfer_starts = _transfer_events(times)
    at_start, at_end = _op_changes(times.plan, times.rank)
    starts_us, ends_us = times.starts_us, times.ends_us
    if all(map(lt, starts_us, ends_us)):
        return transfer_ends, (ends_us, at_end), transfer_starts, (starts_us, at_start)
    op_ends: list[tuple[int, int]] = []
    ops: list[tuple[int, int]] = []
    for start, end, taken, freed in zip(starts_us, ends_us, at_start, at_end, strict=True):
        ops.append((start, taken))
        (op_ends if end > start else ops).append((end, freed))
    return transfer_ends, _columns(op_ends), transfer_starts, _columns(ops)


def _columns(pairs: Sequence[tuple[int, int]]) -> Events:
    return [time for time, _ in pairs], [change for _, change in pairs]


def _transfer_events(times: RankTimes) -> tuple[Events, Events]:
    """The ends and the starts of a rank's transfers."""
    plan, rank, _, ends_us, sent_us, arrived_us = times
    end_of = dict(zip(plan.nodes[rank], ends_us, strict=True)) if plan.shared_transfers.first else {}
    freed: tuple[list[int], list[int]] = [], []
    taken: tuple[list[int], list[int]] = [], []
    for r, (route, starts, ends) in enumerate(zip(plan.placement.routes, sent_us, arrived_us, strict=True)):
        if rank not in (route.sender, route.receiver) or route.num_bytes == 0:
            continue
        sizes = plan.placement.column(route.num_bytes, plan.microbatches_on(r))
        if rank == route.sender and route.shared:  # the sender holds the bytes while they wait for the shared links
            nodes = range(plan.first_node[route.source], plan.first_node[route.source + 1])
            starts = [*map(min, map(end_of.__getitem__, nodes), starts)]
        taken[0].extend(starts)
        taken[1].extend(sizes)
        if rank == route.sender:  # the receiver's bytes are freed by the op that reads them
            freed[0].extend(ends)
            freed[1].extend(map(neg, sizes))
    return freed, taken


def _op_changes(plan: Plan, rank: int) -> tuple[list[int], list[int]]:
    """Changes at the start and at the end of each op, in the rank's order."""
    placement, num_classes = plan.placement, plan.placement.num_classes
    at_start: dict[int, int] = {}  # by variant
    at_end: dict[int, int] = {}
    for task, amounts in task_changes(placement, rank).items():
        first = placement.index[task] * num_classes
        for changes, amount in zip((at_start, at_end), amounts, strict=True):
            changes.update((first + c, value_in(amount, c)) for c in range(num_classes))
    variants = [*map(plan.variants.__getitem__, plan.nodes[rank])]
    return [*map(at_start.__getitem__, variants)], [*map(at_end.__getitem__, variants)]


def task_changes(placement: Placement, rank: int) -> dict[tuple[int, Kind], tuple[Amount, Amount]]:
    """(stage, kind) -> change of the bytes held on `rank` at the start and at the end of an op."""
    tasks = {i: task for i, task in enumerate(placement.tasks) if rank in task.ranks}
    received: dict[int, Amount] = dict.fromkeys(tasks, 0)
    for route in placement.routes:
        if route.receiver == rank:
            received[route.target] = by_class(add, received[route.target], route.num_bytes)
    changes = {}
    for i, task in tasks.items():
        amounts = task.held_bytes, task.peak_bytes
        at_start = by_class(lambda held, peak: max(held, 0) + peak, *amounts)
        at_end = by_class(lambda held, peak, read: min(held, 0) - peak - read, *amounts, received[i])
        changes[task.stage, task.kind] = at_start, at_end
    return changes


def is_op_event(key: int) -> bool:
    """Whether an event is the start or end of an op, rather than of a transfer."""
    return key % 4 in (_OP_ENDS, _OP)


def levels(static_bytes: int, events: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(time in µs, bytes held from then on): a step function; at one instant the last level counts."""
    level = static_bytes
    curve = {0: level}
    for key, change in events:
        level += change
        curve[key // 4] = level
    return list(curve.items())
