"""Random placements with shared links, and an event-by-event recount of their plans."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product
from typing import NamedTuple

from rota.cluster import Cluster, Link, SharedLink
from rota.placement import Edge, Placement, StepEnd
from rota.plan import Plan
from rota.tasks import Kind, Op, Task, Transfer

_KINDS = (Kind.F, Kind.B, Kind.I, Kind.W)


def wired_cluster(chooser: random.Random, num_ranks: int, limits: bool = False) -> Cluster:
    """Up to two shared links, which some transfers use both."""

    def some() -> tuple[int, ...]:
        return tuple(chooser.sample(range(num_ranks), chooser.randint(1, num_ranks)))

    def link() -> Link:
        rate = chooser.choice((None, 1, 2, 4))
        return Link(chooser.choice((0, 0, 1, 3)), rate)

    every = tuple(range(num_ranks))
    names = [(f"link {i}", chooser.choice((1, 2, 3))) for i in range(chooser.choice((1, 1, 2)))]
    shared = [
        SharedLink(name, rate, *((every, every) if chooser.random() < 0.5 else (some(), some())))
        for name, rate in names
    ]
    pairs = [
        (chooser.randrange(num_ranks), chooser.randrange(num_ranks), link()) for _ in range(chooser.choice((0, 2)))
    ]
    most = [chooser.choice((None, chooser.randint(4, 16))) if limits else None for _ in every]
    return Cluster(tuple(most), link(), tuple(pairs), tuple(shared))


def wired_placement(chooser: random.Random, most_tasks: int = 6, limits: bool = False) -> Placement:
    """A DAG of tasks, some on several ranks or without length, some edges with bytes, some edges twice."""
    num_ranks = chooser.randint(2, 4)
    names = chooser.sample([*product(range(3), _KINDS)], chooser.randint(2, most_tasks))
    tasks = []
    for stage, kind in sorted(names):
        ranks = chooser.sample(range(num_ranks), chooser.choice((1, 1, 1, 1, 2)))
        held, peak = chooser.choice((0, 0, 1, 2, -1)), chooser.choice((0, 0, 0, 1))
        tasks.append(Task(stage, kind, tuple(ranks), chooser.choice((0, 1, 2, 3, 5)), held, peak))
    pairs = [(a, b) for b in range(len(tasks)) for a in range(b)]
    edges = [Edge(a, b, chooser.choice((0, 1, 2, 4))) for a, b in pairs if chooser.random() < 0.6]
    if edges and chooser.random() < 0.1:
        edges.append(chooser.choice(edges))
    stages = sorted({task.stage for task in tasks})
    ends = [StepEnd(stage, chooser.randint(0, 3), chooser.randint(0, 3)) for stage in stages if chooser.random() < 0.3]
    cluster = wired_cluster(chooser, num_ranks, limits)
    return Placement(tuple(tasks), tuple(edges), cluster, step_ends=tuple(ends))


def transfers_by_link(plan: Plan) -> list[list[Transfer]]:
    """For each shared link all transfers of the step that use it."""
    return [
        [plan.placement.transfer(r, m) for r, route in enumerate(plan.placement.routes) if link in route.shared
         for m in plan.microbatches_on(r)]
        for link in range(len(plan.placement.cluster.shared))
    ]  # fmt: skip


class Recount(NamedTuple):
    """What an event-by-event run of a plan ends with."""

    makespan_us: int
    span_us: int
    peak_bytes: list[int]


def recount(plan: Plan) -> Recount | None:
    """Runs a plan by the rules as they are written down, one event after another; None where it gets stuck.

    Nothing here uses the plan's graph. A rank begins its next op when the op before it
    is over, and all that it reads has arrived. A transfer is handed over at that moment, and served in the given order,
    or else first come, first served.
    """
    placement, cluster = plan.placement, plan.placement.cluster
    tasks, index = placement.tasks, placement.index
    hops = _hops(placement)
    ends = {end.stage: end for end in placement.step_ends}
    begun: dict[Op, int] = {}  # op -> when it begins; it ends at `over`
    over: dict[Op, int] = {}
    arrived: dict[tuple[int, int], int] = {}  # (hop, micro-batch) -> µs
    served: dict[tuple[int, int], int] = {}  # (hop, micro-batch) -> when service began
    next_op, free = [0] * len(plan.orders), [0] * len(plan.orders)
    next_service, link_free = [0] * len(cluster.shared), [0] * len(cluster.shared)
    waiting: list[tuple[int, int, int]] = []  # (handed over, hop, micro-batch), first come first served
    queues = _queues(plan, hops)
    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(plan.orders):
            while next_op[rank] < len(order):
                op = order[next_op[rank]]
                task = tasks[index[op[:2]]]
                together = all(
                    next_op[q] < len(plan.orders[q]) and plan.orders[q][next_op[q]] == op for q in task.ranks
                )
                inputs = _arrivals(placement, hops, op, over, arrived)
                if not together or inputs is None:
                    break
                start = max([free[q] for q in task.ranks] + inputs)
                begun[op], over[op] = start, start + task.duration_us
                for q in task.ranks:
                    next_op[q], free[q] = next_op[q] + 1, over[op]
                for h, hop in enumerate(hops):
                    if hop.source == index[op[:2]] and not hop.links:
                        arrived[h, op.microbatch] = over[op] + hop.duration_us
                    elif hop.source == index[op[:2]]:
                        waiting.append((over[op], h, op.microbatch))
                moved = True
        if queues is None:  # first come: only when no op can go on is it certain who came first
            if not moved and waiting:
                ready, h, m = min(waiting)
                waiting.remove((ready, h, m))
                start = max([ready, *(link_free[i] for i in hops[h].links)])
                served[h, m], arrived[h, m] = start, start + hops[h].duration_us
                for i in hops[h].links:
                    link_free[i] = start + hops[h].service_us
                moved = True
            continue
        for ready, h, m in sorted(waiting):
            if all(queues[i][next_service[i]] == (h, m) for i in hops[h].links):
                start = max([ready, *(link_free[i] for i in hops[h].links)])
                served[h, m], arrived[h, m] = start, start + hops[h].duration_us
                for i in hops[h].links:
                    link_free[i] = start + hops[h].service_us
                    next_service[i] += 1
                waiting.remove((ready, h, m))
                moved = True
    if any(n < len(order) for n, order in zip(next_op, plan.orders, strict=True)) or waiting:
        return None
    windows = [over[order[-1]] - begun[order[0]] for order in plan.orders if order]
    last = [_after_step_ends(plan, rank, ends, over, free[rank]) for rank in range(len(plan.orders))]
    peaks = [_peak(plan, rank, hops, begun, over, served, arrived) for rank in range(len(plan.orders))]
    return Recount(max(last, default=0), max(windows, default=0), peaks)


class Hop(NamedTuple):
    """A message from one rank to another."""

    source: int
    target: int
    sender: int
    receiver: int
    num_bytes: int
    duration_us: int
    service_us: int
    links: list[int]


def _hops(placement: Placement) -> list[Hop]:
    hops = []
    for source, target, num_bytes in placement.edges:
        a, b = placement.tasks[source].ranks, placement.tasks[target].ranks
        for i, receiver in enumerate(b):
            sender = a[i] if len(a) == len(b) else a[0]
            if sender == receiver:
                continue
            link = _link(placement.cluster, sender, receiver)
            used = [
                i for i, s in enumerate(placement.cluster.shared) if sender in s.senders and receiver in s.receivers
            ]
            slowest = min((placement.cluster.shared[i].bytes_per_us for i in used), default=1)
            service = -(-num_bytes // slowest) if used else 0
            alone = link.latency_us + (-(-num_bytes // link.bytes_per_us) if link.bytes_per_us else 0)
            links = used if service else []
            hops.append(
                Hop(source, target, sender, receiver, num_bytes, max(alone, link.latency_us + service), service, links)
            )
    return hops


def _link(cluster: Cluster, sender: int, receiver: int) -> Link:
    return next((link for a, b, link in cluster.links if (a, b) == (sender, receiver)), cluster.link)


def _arrivals(
    placement: Placement, hops: list[Hop], op: Op, over: dict[Op, int], arrived: dict[tuple[int, int], int]
) -> list[int] | None:
    """When each input of the op is there; None where one is not known yet."""
    task, found = placement.index[op[:2]], []
    for h, hop in enumerate(hops):
        if hop.target == task:
            if (h, op.microbatch) not in arrived:
                return None
            found.append(arrived[h, op.microbatch])
    for source, target, _ in placement.edges:
        if target == task:
            made = placement.tasks[source]
            before = Op(made.stage, made.kind, op.microbatch)
            if before not in over:
                return None
            found.append(over[before])
    return found


def _queues(plan: Plan, hops: list[Hop]) -> list[list[tuple[int, int]]] | None:
    """For each shared link its (hop, micro-batch) in the plan's order; None: first come, first served."""
    if not plan.service_orders:
        return None
    index, queues = plan.placement.index, []
    for link, order in enumerate(plan.service_orders):
        queue: list[tuple[int, int]] = []
        for t in order:
            ends = index[t.source[:2]], index[t.target[:2]], t.sender, t.receiver, t.num_bytes
            same = [(h, t.source.microbatch) for h, hop in enumerate(hops) if hop[:5] == ends and link in hop.links]
            queue.append(next(each for each in same if each not in queue))
        queues.append([*queue, (-1, -1)])
    return queues


def _after_step_ends(plan: Plan, rank: int, ends: dict[int, StepEnd], over: dict[Op, int], free_us: int) -> int:
    """Reductions in the order of the stages' last gradients, then the optimizer steps."""
    own = []
    for i, end in enumerate(plan.placement.step_ends):
        if rank in plan.placement.gradient_ranks(end.stage):
            makers = [op for op in plan.orders[rank] if op.stage == end.stage and op.kind.makes_weight_gradients]
            place = plan.orders[rank].index(makers[-1]) if makers else -1
            own.append((place, i, over[makers[-1]] if makers else 0, end))
    reduced = 0
    for _, _, made_us, end in sorted(own, key=lambda entry: entry[:2]):
        reduced = max(reduced, made_us) + end.reduce_us
    return max(free_us, reduced) + sum(end.optimizer_us for *_, end in own)


def _peak(
    plan: Plan, rank: int, hops: list[Hop], begun: dict[Op, int], over: dict[Op, int],
    served: dict[tuple[int, int], int], arrived: dict[tuple[int, int], int],
) -> int:  # fmt: skip
    """The level after each change; at one instant, ends of transfers and ops come before starts of both."""
    placement, changes = plan.placement, []
    for place, op in enumerate(plan.orders[rank]):
        task = placement.tasks[placement.index[op[:2]]]
        start, end = begun[op], over[op]
        read = sum(h.num_bytes for h in hops if h.target == placement.index[op[:2]] and h.receiver == rank)
        changes.append((start, 3, place, 0, max(task.held_bytes, 0) + task.peak_bytes))
        freed = min(task.held_bytes, 0) - task.peak_bytes - read
        changes.append((end, 1, place, 1, freed) if end > start else (end, 3, place, 1, freed))
    for h, hop in enumerate(hops):
        source = placement.tasks[hop.source]
        for m in placement.microbatches(source.stage, plan.num_microbatches):
            made = over[Op(source.stage, source.kind, m)]
            if hop.sender == rank:
                changes += [(made, 2, 0, 0, hop.num_bytes), (arrived[h, m], 0, 0, 0, -hop.num_bytes)]
            if hop.receiver == rank:
                changes.append((served.get((h, m), made), 2, 0, 0, hop.num_bytes))
    level = most = placement.static_bytes[rank]
    for *_, change in sorted(changes):
        level += change
        most = max(most, level)
    return most


def every_service_order(plan: Plan) -> Iterator[Plan]:
    """The plan with all orders of service, each transfer's micro-batches in any order."""
    for orders in product(*(permutations(transfers) for transfers in transfers_by_link(plan))):
        yield replace(plan, service_orders=orders)
