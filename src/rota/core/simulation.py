"""Simulate a plan: its timeline if every op and transfer takes exactly its planned time."""

from __future__ import annotations

from operator import add, itemgetter

from rota.core.plan import Plan
from rota.core.timeline import Timeline


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
        made = tuple(ends[first:after])
        if (served := plan.services.first.get(r)) is not None:
            made = tuple(starts[served : served + after - first])
        sent.append(made)
        if route.duration_us != 0:
            made = tuple(map(add, made, plan.placement.column(route.duration_us, plan.microbatches_on(r))))
        arrived.append(made)
    after_ops = plan.num_ops + 2 * len(plan.step_end_ranks)
    step_ends = [
        (starts[node], ends[node], starts[node + 1], ends[node + 1]) for node in range(plan.num_ops, after_ops, 2)
    ]
    return Timeline(
        plan,
        tuple(_pick(starts, nodes) for nodes in plan.nodes),
        tuple(_pick(ends, nodes) for nodes in plan.nodes),
        tuple(sent),
        tuple(arrived),
        tuple(step_ends),
    )


def timeline_of(given: Plan | Timeline) -> Timeline:
    """A timeline unchanged, or a plan's simulated timeline, for functions that accept either."""
    return simulate(given) if isinstance(given, Plan) else given


def _pick(values: list[int], nodes: tuple[int, ...]) -> tuple[int, ...]:
    if len(nodes) < 2:  # itemgetter with one index returns no tuple
        return tuple(values[node] for node in nodes)
    picked: tuple[int, ...] = itemgetter(*nodes)(values)
    return picked
