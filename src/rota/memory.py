"""Memory of a rank over time, from the times of its ops and transfers.

A rank holds its static bytes, the bytes that its ops hold, received bytes from the transfer's start to the end of the
op that reads them, sent bytes from when they are handed over (the end of their op and of what sending costs after it)
until the transfer ends, and `peak_bytes` while an op runs. At one instant, ends free memory before starts allocate it;
ops of duration 0 count one after the other, in the rank's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from operator import itemgetter

from rota.placement import Placement
from rota.plan import Plan
from rota.tasks import Kind

# Events at one instant sort in this order. A key is 4 * time + one of these: plain integers sort fast.
_TRANSFER_ENDS, _OP_ENDS, _TRANSFER_STARTS, _OP = range(4)

Columns = Sequence[Sequence[int]]


def events(
    plan: Plan, rank: int, starts_us: Sequence[int], ends_us: Sequence[int], sent_us: Columns, arrived_us: Columns
) -> list[tuple[int, int]]:
    """Changes of a rank's memory, sorted by time.

    Args:
        plan: The plan.
        rank: The rank.
        starts_us: Start of each op of the rank.
        ends_us: End of each op of the rank.
        sent_us: Start of each transfer, by route and position.
        arrived_us: End of each transfer, by route and position.

    Returns:
        (key, change in bytes); key // 4 is the time in µs.
    """
    result = _op_events(plan, rank, starts_us, ends_us)
    in_order = len(result)
    end_of = dict(zip(plan.nodes[rank], ends_us, strict=True)) if plan.first_service else {}
    for r, (route, starts, ends) in enumerate(zip(plan.placement.routes, sent_us, arrived_us, strict=True)):
        if rank not in (route.sender, route.receiver) or route.num_bytes == 0:
            continue
        sizes = plan.placement.column(route.num_bytes, plan.microbatches_on(r))
        if rank == route.sender and route.shared:  # the sender holds the bytes while they wait for the shared links
            costs_us = plan.occupied_columns_us[route.source][1]
            nodes = range(plan.first_node[route.source], plan.first_node[route.source + 1])
            starts = [
                min(end_of[node] + later, start) for node, later, start in zip(nodes, costs_us, starts, strict=True)
            ]
        result += [(4 * start + _TRANSFER_STARTS, size) for start, size in zip(starts, sizes, strict=True)]
        if rank == route.sender:  # the receiver's bytes are freed by the op that reads them
            result += [(4 * end + _TRANSFER_ENDS, -size) for end, size in zip(ends, sizes, strict=True)]
    if len(result) > in_order:
        result.sort(key=itemgetter(0))  # stable: ops at one instant stay in the rank's order
    return result


def _op_events(plan: Plan, rank: int, starts_us: Sequence[int], ends_us: Sequence[int]) -> list[tuple[int, int]]:
    changes = [task_changes(placement, rank) for placement in plan.placement.classes]
    result = []
    for (stage, kind, microbatch), start, end in zip(plan.orders[rank], starts_us, ends_us, strict=True):
        at_start, at_end = changes[plan.placement.class_in(microbatch)][stage, kind]
        result.append((4 * start + _OP, at_start))
        result.append((4 * end + (_OP_ENDS if end > start else _OP), at_end))
    return result


def task_changes(placement: Placement, rank: int) -> dict[tuple[int, Kind], tuple[int, int]]:
    """(stage, kind) -> change of the bytes held on `rank` at the start and at the end of an op; of one class."""
    received = dict.fromkeys(range(len(placement.tasks)), 0)
    for route in placement.routes:
        if route.receiver == rank:
            received[route.target] += route.num_bytes
    return {
        (task.stage, task.kind): (
            max(task.held_bytes, 0) + task.peak_bytes,
            min(task.held_bytes, 0) - task.peak_bytes - received[i],
        )
        for i, task in enumerate(placement.tasks)
    }


def is_op_event(key: int) -> bool:
    """Whether an event is the start or end of an op, rather than of a transfer."""
    return key % 4 in (_OP_ENDS, _OP)


def peak_bytes(static_bytes: int, events: Sequence[tuple[int, int]]) -> int:
    """The largest number of bytes held at any time."""
    return static_bytes + max(accumulate((change for _, change in events), initial=0))


def levels(static_bytes: int, events: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(time in µs, bytes held from then on): a step function; at one instant the last level counts."""
    curve = {0: static_bytes}
    level = static_bytes
    for key, change in events:
        level += change
        curve[key // 4] = level
    return list(curve.items())
