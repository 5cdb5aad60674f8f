"""Refuse a plan that is incomplete, out of order, could hang or would not fit in memory, before it runs."""

from __future__ import annotations

from rota.core.errors import PlanError
from rota.core.memory import is_op_event
from rota.core.plan import Plan
from rota.core.simulation import simulate
from rota.core.timeline import Timeline
from rota.core.units import size_text


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
