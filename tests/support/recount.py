"""The times of a plan counted once more, µs by µs, from the words of docs/model.md alone: no graph, no routes."""

from dataclasses import dataclass, field

from rota import Cluster, Kind, Link, Op, Placement, Plan, Transfer
from rota.core.cluster import HOST
from rota.core.tasks import PerClass

_NEVER_US = 10**6


@dataclass
class Message:
    """One transfer, by the shared links that it uses and the times of its way."""

    transfer: Transfer
    shared: list[int]
    service_us: int
    duration_us: int
    handed_over_us: int = _NEVER_US
    sent_us: int = _NEVER_US

    @property
    def arrived_us(self) -> int:
        return self.sent_us + self.duration_us


@dataclass
class Recount:
    """What happens when. By (rank, op): its start and its end."""

    ops: dict[tuple[int, Op], tuple[int, int]] = field(default_factory=dict)
    messages: list[Message] = field(default_factory=list)

    @property
    def makespan_us(self) -> int:
        """Without step ends."""
        return max((end for _, end in self.ops.values()), default=0)


def link_between(cluster: Cluster, sender: int, receiver: int) -> Link:
    usual = Link() if HOST in (sender, receiver) else cluster.link
    return next((link for a, b, link in cluster.links if (a, b) == (sender, receiver)), usual)


def divided(num_bytes: int, rate: int | None) -> int:
    whole, part = divmod(num_bytes, rate) if rate else (0, 0)
    return whole + (part > 0)


def messages_of(plan: Plan) -> list[Message]:
    """All transfers of a step: rank by rank where both tasks have as many ranks, else from the first rank to all.

    Copies to the host, for O, and back, from L, are transfers of a rank to itself that hold nothing.
    """
    placement, found = plan.placement, []
    for edge in placement.edges:
        source, target = placement.tasks[edge.source], placement.tasks[edge.target]
        for i, receiver in enumerate(target.ranks):
            sender = source.ranks[i if len(source.ranks) == len(target.ranks) else 0]
            copies = source.stage == target.stage and sender == receiver
            if copies and target.kind == "O":
                ends = sender, HOST
            elif copies and source.kind == "L" and target.kind in ("B", "I"):
                ends = HOST, receiver
            elif sender != receiver:
                ends = sender, receiver
            else:
                continue
            for m in placement.microbatches(source.stage, plan.num_microbatches):
                ops = Op(source.stage, source.kind, m), Op(target.stage, target.kind, m)
                size = figure_of(placement, edge.num_bytes, m)
                transfer = Transfer(*ops, sender, receiver, 0 if HOST in ends else size)
                found.append(_message(placement.cluster, transfer, ends, size))
    return found


def figure_of(placement: Placement, figure: int, microbatch: int) -> int:
    """A figure's number for one micro-batch."""
    return figure.values[placement.class_of[microbatch]] if isinstance(figure, PerClass) else figure


def _message(cluster: Cluster, transfer: Transfer, ends: tuple[int, int], size: int) -> Message:
    sender, receiver = ends
    link = link_between(cluster, sender, receiver)
    uses = [i for i, each in enumerate(cluster.shared) if sender in each.senders and receiver in each.receivers]
    service_us = max([divided(size, cluster.shared[i].bytes_per_us) for i in uses], default=0)
    duration_us = link.latency_us + max(divided(size, link.bytes_per_us), service_us)
    return Message(transfer, uses if service_us else [], service_us, duration_us)


def recount(plan: Plan) -> Recount:
    """Let time pass. At each µs all ops that can start do; then shared links take what they may serve."""
    result = Recount(messages=messages_of(plan))
    done, free_us = [0] * plan.num_ranks, [0] * len(plan.placement.cluster.shared)
    num_served = [0] * len(free_us)
    for now in range(_NEVER_US):
        while any(_start_op(plan, result, done, rank, now) for rank in range(plan.num_ranks)):
            pass  # an op that takes no time may let others start now
        for message in sorted(result.messages, key=lambda message: message.handed_over_us):  # ties: as they are listed
            if message.handed_over_us <= now < message.sent_us and not message.shared:
                message.sent_us = message.handed_over_us
        _serve(plan, result, free_us, num_served, now)
        if all(count == len(order) for count, order in zip(done, plan.orders, strict=True)):
            return result
    raise AssertionError("the plan does not end")


def _start_op(plan: Plan, result: Recount, done: list[int], rank: int, now: int) -> bool:
    """Start the rank's next op if it can start now."""
    if done[rank] == len(plan.orders[rank]):
        return False
    op = plan.orders[rank][done[rank]]
    task = plan.placement.task(op.stage, op.kind)
    for mine in task.ranks:
        order = plan.orders[mine]
        if done[mine] == len(order) or order[done[mine]] != op:
            return False
        if done[mine] and result.ops[mine, order[done[mine] - 1]][1] > now:
            return False
    for edge in plan.placement.edges:
        if plan.placement.tasks[edge.target] == task:
            source = plan.placement.tasks[edge.source]
            made = result.ops.get((source.ranks[0], Op(source.stage, source.kind, op.microbatch)))
            if made is None or made[1] > now:
                return False
    if any(message.arrived_us > now for message in result.messages if message.transfer.target == op):
        return False
    end = now + figure_of(plan.placement, task.duration_us, op.microbatch)
    for mine in task.ranks:
        result.ops[mine, op] = now, end
        done[mine] += 1
    for message in result.messages:
        if message.transfer.source == op:
            message.handed_over_us = end
            if not message.shared:
                message.sent_us = end
    return True


def _serve(plan: Plan, result: Recount, free_us: list[int], num_served: list[int], now: int) -> None:
    """Each shared link takes what it may serve now."""
    waiting = [one for one in result.messages if one.shared and one.handed_over_us <= now and one.sent_us == _NEVER_US]
    passed: set[int] = set()  # links that something which came earlier waits for
    for message in sorted(waiting, key=lambda message: message.handed_over_us):  # stable: ties as they are listed
        ready = all(free_us[i] <= now for i in message.shared)
        if plan.service_orders:
            ready &= all(plan.service_orders[i][num_served[i]] == message.transfer for i in message.shared)
        else:
            ready &= passed.isdisjoint(message.shared)
            passed |= {*message.shared}
        if ready:
            message.sent_us = now
            for i in message.shared:
                free_us[i] = now + message.service_us
                num_served[i] += 1


def step_end_times(plan: Plan, counted: Recount) -> list[tuple[int, int, int, int]]:
    """When reductions and optimizer steps happen, told from the ops' times alone."""
    reductions, reduced = [], [0] * plan.num_ranks
    for i, rank in plan.step_end_ranks:
        end = plan.placement.step_ends[i]
        gradients = [op for op in plan.orders[rank] if op.stage == end.stage and op.kind in (Kind.B, Kind.W)]
        start = max([reduced[rank], *(counted.ops[rank, op][1] for op in gradients)])
        reduced[rank] = start + end.reduce_us
        reductions.append((start, reduced[rank]))
    optimized = [max(us, *(counted.ops[r, op][1] for op in plan.orders[r]), 0) for r, us in enumerate(reduced)]
    expected = []
    for (i, rank), times_us in zip(plan.step_end_ranks, reductions, strict=True):
        start = optimized[rank]
        optimized[rank] += plan.placement.step_ends[i].optimizer_us
        expected.append((*times_us, start, optimized[rank]))
    return expected
