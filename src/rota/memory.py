"""Memory of a rank over time, from the times of its ops and transfers.

A rank holds its static bytes, the bytes that its ops hold, received bytes from the transfer's start to the end of the
op that reads them, sent bytes from when they are handed over (the end of their op and of what sending costs after it)
until the transfer ends, and `peak_bytes` while an op runs. At one instant, ends free memory before starts allocate it;
ops of duration 0 count one after the other, in the rank's order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from operator import add, neg

from rota.figures import each
from rota.placement import Placement
from rota.plan import Plan
from rota.tasks import Kind

# Events at one instant sort in this order. A key is 4 * time + one of these: plain integers sort fast.
_TRANSFER_ENDS, _OP_ENDS, _TRANSFER_STARTS, _OP = range(4)

Columns = Sequence[Sequence[int]]


def events(
    plan: Plan, rank: int, starts_us: Sequence[int], ends_us: Sequence[int], sent_us: Columns, arrived_us: Columns
) -> tuple[Iterator[int], Iterator[int]]:
    """Changes of a rank's memory, by time.

    Args:
        plan: The plan.
        rank: The rank.
        starts_us: Start of each op of the rank.
        ends_us: End of each op of the rank.
        sent_us: Start of each transfer, by route and position.
        arrived_us: End of each transfer, by route and position.

    Returns:
        Keys, in ascending order, and beside them the changes in bytes; key // 4 is the time in µs.
    """
    keys, changes = _op_events(plan, rank, starts_us, ends_us)
    end_of = dict(zip(plan.nodes[rank], ends_us, strict=True)) if plan.first_service else {}
    for r, (route, starts, ends) in enumerate(zip(plan.placement.routes, sent_us, arrived_us, strict=True)):
        if rank not in (route.sender, route.receiver) or route.num_bytes == 0:
            continue
        sizes = plan.placement.column(route.num_bytes, plan.microbatches_on(r))
        if rank == route.sender and route.shared:  # the sender holds the bytes while they wait for the shared links
            costs_us = plan.occupied_columns_us[route.source][1]
            nodes = range(plan.first_node[route.source], plan.first_node[route.source + 1])
            handed_over = map(add, map(end_of.__getitem__, nodes), costs_us)
            starts = [*map(min, handed_over, starts)]
        keys += [4 * start + _TRANSFER_STARTS for start in starts]
        changes += sizes
        if rank == route.sender:  # the receiver's bytes are freed by the op that reads them
            keys += [4 * end + _TRANSFER_ENDS for end in ends]
            changes += map(neg, sizes)
    in_order = sorted(range(len(keys)), key=keys.__getitem__)  # stable: ops at one instant stay in the rank's order
    return map(keys.__getitem__, in_order), map(changes.__getitem__, in_order)


def _op_events(plan: Plan, rank: int, starts_us: Sequence[int], ends_us: Sequence[int]) -> tuple[list[int], list[int]]:
    """Keys and changes of the start and end of each op, in the rank's order."""
    placement, index = plan.placement, plan.placement.index
    at_start: dict[int, int] = {}  # by node
    at_end: dict[int, int] = {}
    for task, figures in task_changes(placement, rank).items():
        t = index[task]
        nodes, batches = range(plan.first_node[t], plan.first_node[t + 1]), plan.microbatches_of(t)
        for changes, figure in zip((at_start, at_end), figures, strict=True):
            changes.update(zip(nodes, placement.column(figure, batches), strict=True))
    keys, both = [0] * (2 * len(starts_us)), [0] * (2 * len(starts_us))
    keys[::2] = [4 * start + _OP for start in starts_us]
    keys[1::2] = [4 * end + (_OP_ENDS if end > start else _OP) for start, end in zip(starts_us, ends_us, strict=True)]
    both[::2], both[1::2] = (map(changes.__getitem__, plan.nodes[rank]) for changes in (at_start, at_end))
    return keys, both


def task_changes(placement: Placement, rank: int) -> dict[tuple[int, Kind], tuple[int, int]]:
    """(stage, kind) -> change of the bytes held on `rank` at the start and at the end of an op, as figures."""
    here = {i: task for i, task in enumerate(placement.tasks) if rank in task.ranks}
    received = dict.fromkeys(here, 0)
    for route in placement.routes:
        if route.receiver == rank:
            received[route.target] = each(add, received[route.target], route.num_bytes)
    return {
        (task.stage, task.kind): (
            each(lambda held, peak: max(held, 0) + peak, task.held_bytes, task.peak_bytes),
            each(lambda held, peak, read: min(held, 0) - peak - read, task.held_bytes, task.peak_bytes, received[i]),
        )
        for i, task in here.items()
    }


def is_op_event(key: int) -> bool:
    """Whether an event is the start or end of an op, rather than of a transfer."""
    return key % 4 in (_OP_ENDS, _OP)


def peak_bytes(static_bytes: int, changes: Iterable[int]) -> int:
    """The largest number of bytes held at any time."""
    return max(accumulate(changes, initial=static_bytes))


def levels(static_bytes: int, events: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(time in µs, bytes held from then on): a step function; at one instant the last level counts."""
    curve = {0: static_bytes}
    level = static_bytes
    for key, change in events:
        level += change
        curve[key // 4] = level
    return list(curve.items())
