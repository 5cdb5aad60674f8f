"""Receives are posted some ops before the op that reads the value, as far as the plan's memory allows.

    strict    … 1F1  send 1F1  receive 1B0  1F2  send 1F2  receive 1F3  1B0 …
    early     … receive 1B0  1F1  send 1F1  receive 1F3  1F2  send 1F2  1B0 …

Data that is received early is there when it is needed, and its sender does not wait. Only receives move; sends and ops
stay. Posting a receive does not wait, so the proof of `Plan.wire_order` still holds. The messages from one rank to
another have the same order on both sides; the messages back are ordered separately.
"""

from __future__ import annotations

from collections.abc import Sequence

from rota.core.memory import is_op_event
from rota.core.plan import Plan
from rota.core.programs.actions import Action
from rota.core.simulation import simulate

NUM_OPS_AHEAD = 2  # mostly one in each direction; more would need more memory for buffers


def prefetch_receives(plan: Plan, rank: int, strict: Sequence[Action]) -> list[Action]:
    """The rank's actions with each receive up to `NUM_OPS_AHEAD` ops before its reader.

    If the rank has a memory limit, no receive is so early that its buffer and what the plan holds exceed it.
    """
    headroom_bytes = _headroom_bytes(plan, rank)
    position = {op: i for i, op in enumerate(plan.orders[rank])}
    floor = [0] * plan.num_ranks  # by sender: the op before which its last receive was posted, to keep their order
    placed: list[tuple[int, int, Action]] = []  # (number of ops before it, 0: moved here, 1: the op, 2: others, action)
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
    """The first op from which `num_bytes` fit beside all ops until `planned`; subtracts them from the headroom."""
    if headroom_bytes is None:
        return earliest
    before = planned
    while before > earliest and headroom_bytes[before - 1] >= num_bytes:
        before -= 1
    for op in range(before, planned):
        headroom_bytes[op] -= num_bytes
    return before


def _headroom_bytes(plan: Plan, rank: int) -> list[int] | None:
    """The least free memory from the end of the op before to the start of the next one, by op; None without a limit."""
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
