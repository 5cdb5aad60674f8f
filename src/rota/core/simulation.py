"""Simulate a plan: its timeline if all takes exactly its planned time. Refuse a plan that must not run."""

from __future__ import annotations

from operator import add

from rota.core.errors import PlanError
from rota.core.plan import Plan
from rota.core.text import size_text
from rota.core.timeline import Timeline, is_op_event


def simulate(plan: Plan) -> Timeline:
    """Simulate a plan. Each op starts as soon as its inputs have arrived and its ranks are free.

    The time is linear in the number of ops. Memory limits are ignored (`rota.check` enforces them); the timeline
    reports how much memory would be held.

    Args:
        plan: The plan.

    Returns:
        The start and end of every op, transfer, reduction and optimizer step.

    Raises:
        PlanError: Ops are missing or misplaced, or the orders wait in a cycle.
    """
    earliest = plan.earliest
    starts, ends = earliest.starts_us, earliest.ends_us
    sent, arrived = [], []
    for r, route in enumerate(plan.placement.routes):
        first, after = plan.first_node[route.source], plan.first_node[route.source + 1]
        served = plan.shared_transfers.first.get(r)
        times_us = tuple(ends[first:after] if served is None else starts[served : served + after - first])
        sent.append(times_us)
        if route.duration_us != 0:
            times_us = tuple(map(add, times_us, plan.placement.column(route.duration_us, plan.microbatches_on(r))))
        arrived.append(times_us)
    after_ops = plan.num_ops + 2 * len(plan.step_end_ranks)
    step_ends = [
        (starts[node], ends[node], starts[node + 1], ends[node + 1]) for node in range(plan.num_ops, after_ops, 2)
    ]
    return Timeline(
        plan,
        tuple(tuple(map(starts.__getitem__, nodes)) for nodes in plan.nodes),
        tuple(tuple(map(ends.__getitem__, nodes)) for nodes in plan.nodes),
        tuple(sent),
        tuple(arrived),
        tuple(step_ends),
    )


def timeline_of(work: Plan | Timeline) -> Timeline:
    """A timeline unchanged, or a plan's simulated timeline, for functions that accept either."""
    return simulate(work) if isinstance(work, Plan) else work


def check(plan: Plan) -> None:
    """Check that a plan can run. A plan that passes cannot hang; see `Plan.wire_order` for the reason.

    Args:
        plan: The plan.

    Raises:
        PlanError: The plan must not run. `error.reason` is "unknown", "wrong rank", "duplicate" or "missing" if a rank
            does not run exactly the ops that are placed on it, or a shared link does not serve exactly the transfers
            that use it; "chunks" if a rank runs chunks of a sample out of order; "cycle" if the orders contradict the
            dependencies; "memory" if a rank would hold more than its limit.
    """
    timeline = simulate(plan)
    for rank, limit in enumerate(plan.placement.cluster.limit_bytes):
        if limit is not None and timeline.peak_memory_bytes[rank] > limit:
            raise PlanError(_overflow(timeline, rank, limit), "memory")


def _overflow(timeline: Timeline, rank: int, limit: int) -> str:
    """Where `rank` first exceeds its limit, and what to do."""
    level = static = timeline.plan.placement.static_bytes[rank]
    if static > limit:
        return (
            f"rank {rank} holds {_size(static)} before its first op (parameters, gradients, optimizer), over its limit "
            f"of {_size(limit)}; give it fewer layers or raise the limit"
        )
    op_events = 0
    for key, change in timeline.memory_events(rank):
        level += change
        op_events += is_op_event(key)
        if level > limit:
            break
    running = max(op_events - 1, 0) // 2  # every op has two events, in the rank's order
    return (
        f"rank {rank} would hold {_size(level)} at {timeline.plan.orders[rank][running]}, over its limit of "
        f"{_size(limit)} (its peak is {_size(timeline.peak_memory_bytes[rank])}); start fewer forwards before the "
        f"backwards, make micro-batches smaller, or raise the limit"
    )


def _size(num_bytes: int) -> str:
    """A size rounded for reading, and exact for setting a limit."""
    return f"{size_text(num_bytes)} ({num_bytes} bytes)"
