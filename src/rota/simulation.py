"""Plan -> Timeline: what happens if every op and transfer takes exactly what the placement says."""

from __future__ import annotations

from operator import itemgetter

from rota.plan import Plan
from rota.timeline import Timeline


def simulate(plan: Plan) -> Timeline:
    """Everything starts as soon as its inputs and its ranks are free; linear in the number of ops.

    Raises PlanError if ops are missing or misplaced, or if the orders wait in a cycle. Memory limits are for
    `check`; the timeline tells how much would be held.
    """
    earliest = plan.earliest
    starts, ends = earliest.starts_us, earliest.ends_us
    sent, arrived = [], []
    for route in plan.placement.routes:
        first, after = plan.first_node[route.source], plan.first_node[route.source + 1]
        made = tuple(ends[first:after])
        sent.append(made)
        arrived.append(tuple([end + route.duration_us for end in made]) if route.duration_us else made)
    step_ends = [
        (starts[node], ends[node], starts[node + 1], ends[node + 1]) for node in range(plan.num_ops, len(starts), 2)
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
    """A timeline as it is; a plan simulated. For functions that take either."""
    return simulate(given) if isinstance(given, Plan) else given


def _pick(values: list[int], nodes: tuple[int, ...]) -> tuple[int, ...]:
    if len(nodes) < 2:  # itemgetter of one index gives no tuple
        return tuple(values[node] for node in nodes)
    picked: tuple[int, ...] = itemgetter(*nodes)(values)
    return picked
