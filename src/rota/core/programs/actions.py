"""What one rank does, step by step: its ops, the receives before them and the sends after them, in the plan's order.

    plan.wire_order    … 0F1   0F1→1F1   1F0   1F0→2F0   2F1→1B… …        all ranks, one global order
    rank 1             …       receive   run   send      receive …        its own actions, in that order

`prefetch_receives` moves the receives forward, so that the data travels while ops run. Only receives move; sends and
ops stay. Posting a receive does not wait, so the proof of `Plan.wire_order` still holds. The messages from one rank to
another have the same order on both sides; the messages back are ordered separately.

    strict             … 1F1  send 1F1  receive 1B0  1F2  send 1F2  receive 1F3  1B0 …
    prefetched         … receive 1B0  1F1  send 1F1  receive 1F3  1F2  send 1F2  1B0 …
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from rota.core.placement import Placement
from rota.core.plan import Plan
from rota.core.simulation import simulate
from rota.core.tasks import Kind, Op, Transfer
from rota.core.timeline import is_op_event

NUM_OPS_AHEAD = 2  # mostly one in each direction; more would need more memory for buffers

# A value of a step: (index of the stage edge, whether it is the edge's gradient, micro-batch).
ValueKey = tuple[int, bool, int]


@dataclass(frozen=True, slots=True)
class Message:
    """A transfer seen from this rank. `value` is the key of the value that travels; `column` is (route, position)."""

    transfer: Transfer
    value: ValueKey
    column: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Action:
    """Post a receive, run an op, send, or reduce gradients; `op` is the op that reads, runs, or made what travels."""

    what: Literal["receive", "run", "send", "reduce"]
    op: Op
    message: Message | None = None


@dataclass(slots=True)
class Program:
    """One rank's actions, in the global order.

    `arriving`: values that come by message. `num_uses`: by (edge, is gradient), how often a value made here is sent or
    read here. `unsent`: edges whose values stay on this rank, though messages have their gradients.
    `num_gradients_sent`: by edge, the messages with gradients that are sent here.
    """

    rank: int
    actions: list[Action] = field(default_factory=list)
    arriving: set[ValueKey] = field(default_factory=set)
    num_uses: dict[tuple[int, bool], int] = field(default_factory=dict)
    unsent: set[int] = field(default_factory=set)
    num_gradients_sent: Counter[int] = field(default_factory=Counter)


def compile_program(plan: Plan, edge_index: dict[tuple[int, int], int], rank: int) -> Program:
    """The program of `rank`; `edge_index` numbers the (source, target) stage edges."""
    return compile_programs(plan, edge_index, [rank])[0]


def compile_programs(plan: Plan, edge_index: dict[tuple[int, int], int], ranks: Iterable[int]) -> list[Program]:
    """The programs of some ranks, in one pass over the plan's order."""
    columns = {
        plan.placement.transfer(route, m): (route, k)
        for route in range(len(plan.placement.routes))
        for k, m in enumerate(plan.microbatches_on(route))
    }
    programs = {rank: Program(rank) for rank in ranks}
    for action in plan.wire_order:
        if isinstance(action, Op):
            run = Action("run", action)
            for rank in plan.placement.tasks[plan.placement.index[action.stage, action.kind]].ranks:
                if rank in programs:
                    programs[rank].actions.append(run)
            continue
        if action.sender == action.receiver:
            continue  # a copy to the host or back, which its ops begin and await
        message = Message(action, value_key(action.source, action.target, edge_index), columns[action])
        if (sender := programs.get(action.sender)) is not None:
            sender.actions.append(Action("send", action.source, message))
        if (receiver := programs.get(action.receiver)) is not None:
            receiver.arriving.add(message.value)
            receiver.actions.append(Action("receive", action.target, message))
    for program in programs.values():
        program.num_uses = _num_uses(plan.placement, edge_index, program.rank)
        values = {a.message.value[:2] for a in program.actions if a.message}
        sent = (action.message.value for action in program.actions if action.what == "send" and action.message)
        program.num_gradients_sent = Counter(edge for edge, is_gradient, _ in sent if is_gradient)
        program.unsent = {edge for edge, is_gradient in values if is_gradient and (edge, False) not in values}
    return [*programs.values()]


def _num_uses(placement: Placement, edge_index: dict[tuple[int, int], int], rank: int) -> dict[tuple[int, bool], int]:
    """How often the value that `rank` makes for an edge is sent or read here: 0 if only the task's first rank sends."""
    sender = {(route.source, route.target, route.receiver): route.sender for route in placement.routes}
    uses: dict[tuple[int, bool], int] = {}
    for edge in placement.edges:
        source, target = placement.tasks[edge.source], placement.tasks[edge.target]
        if source.stage != target.stage:
            key = value_key(Op(source.stage, source.kind, 0), Op(target.stage, target.kind, 0), edge_index)
            senders = [sender.get((edge.source, edge.target, receiver), receiver) for receiver in target.ranks]
            uses[key[:2]] = senders.count(rank)
    return uses


def value_key(a: Op, b: Op, edge_index: dict[tuple[int, int], int]) -> ValueKey:
    """The key of what `a` makes for `b`: an activation travels forward along its stage edge, a gradient backward."""
    if a.kind is Kind.F:
        return edge_index[a.stage, b.stage], False, a.microbatch
    return edge_index[b.stage, a.stage], True, a.microbatch


def last_gradients(plan: Plan, rank: int) -> dict[int, Op]:
    """For each stage on `rank` the op after which its weights' gradients are complete, in the order of these ops."""
    last: dict[int, Op] = {}
    for op in plan.orders[rank]:
        if op.kind.makes_weight_gradients:
            last.pop(op.stage, None)
            last[op.stage] = op
    return last


# --- receives before they are due -------------------------------------------------------------------------------------


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
