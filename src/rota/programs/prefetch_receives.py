"""Receives are posted some ops before the op that reads, as far as the plan's memory allows.

    strict    … 1F1  send 1F1  receive 1B0  1F2  send 1F2  receive 1F3  1B0 …
    early     … receive 1B0  1F1  send 1F1  receive 1F3  1F2  send 1F2  1B0 …

Data that is received early is there when it is needed, and its sender does not wait. Only receives move; sends and ops
stay. Posting a receive waits for nothing, so the proof of `Plan.wire_order` still holds. The messages from one rank to
another are in one order on both sides; the messages back are ordered separately.
"""

from __future__ import annotations

from collections.abc import Sequence

from rota.memory import is_op_event
from rota.plan import Plan
from rota.programs.actions import Action
from rota.simulation import simulate

NUM_OPS_AHEAD = 2  # mostly one in either direction; no more, since buffers are memory


def prefetch_receives(plan: Plan, rank: int, strict: Sequence[Action]) -> list[Action]:
    """The rank's actions with each receive up to `NUM_OPS_AHEAD` ops before its reader.

    Where the rank has a limit, not so early that its buffer, on top of what the plan holds then, would exceed it.
    """
    headroom_bytes = _headroom_bytes(plan, rank)
    position = {op: i for i, op in enumerate(plan.orders[rank])}
    floor = [0] * plan.num_ranks  # for each sender, before which op its last receive was posted: they keep their order
    placed: list[tuple[int, int, Action]] = []  # behind how many ops, in three groups: moved here, the op, the rest
    num_ops = 0
    for action in strict:
        if action.what == "receive":
            assert action.message is not None
            transfer = action.message.transfer
            earliest = max(position[action.op] - NUM_OPS_AHEAD, floor[transfer.sender])
            before = _first_fitting(min(earliest, num_ops), num_ops, transfer.num_bytes, headroom_bytes)
            floor[transfer.sender] = before
            placed.append((before, 0, action) if before < num_ops else (num_ops - 1, 2, action))
        elif action.what == "run":
            placed.append((num_ops, 1, action))
            num_ops += 1
        else:
            placed.append((num_ops - 1, 2, action))
    return [action for *_, action in sorted(placed, key=lambda entry: entry[:2])]


def _first_fitting(earliest: int, planned: int, num_bytes: int, headroom_bytes: list[int] | None) -> int:
    """Before which op to post: the first from where `num_bytes` fit beside all ops until `planned`; takes them."""
    if headroom_bytes is None:
        return earliest
    before = planned
    while before > earliest and headroom_bytes[before - 1] >= num_bytes:
        before -= 1
    for op in range(before, planned):
        headroom_bytes[op] -= num_bytes
    return before


def _headroom_bytes(plan: Plan, rank: int) -> list[int] | None:
    """For each op how much is free, at the least, from the end of the op before to the start of the next one.

    None where the rank has no limit.
    """
    limit = plan.placement.cluster.limit_bytes[rank]
    if limit is None:
        return None
    level = plan.placement.static_bytes[rank]
    headroom_bytes = [limit - level] * len(plan.orders[rank])
    num_op_events = 0  # each op has two, its start and its end, in the rank's order
    for key, change in simulate(plan).memory_events(rank):
        level += change
        num_op_events += is_op_event(key)
        for op in {max(num_op_events - 1, 0) // 2, num_op_events // 2}:
            headroom_bytes[op : op + 1] = [min(left, limit - level) for left in headroom_bytes[op : op + 1]]
    return headroom_bytes
