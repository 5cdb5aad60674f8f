"""Timelines as a run would measure them: ops and transfers that take what they take, and start when they get to it."""

import random
from collections.abc import Callable
from dataclasses import replace

from rota import Op, Plan, Timeline, simulate
from rota.core.tasks import amount_of


def measured_like(plan: Plan, chooser: random.Random, longest_us: int = 30) -> Timeline:
    """A random timeline in which nothing starts before what it needs is there; the ranks of a task start apart."""
    planned = plan.earliest
    free = [0] * plan.num_ranks
    times: dict[tuple[int, Op], tuple[int, int]] = {}
    routes = plan.placement.routes
    sent: dict[tuple[int, int], tuple[int, int]] = {}
    for node in planned.sequence:
        if node >= plan.num_ops:
            continue
        op = plan.op(node)
        t, k = plan.placement.index[op.stage, op.kind], op.microbatch // plan.placement.num_components
        for rank in plan.placement.tasks[t].ranks:
            ready = free[rank]
            for edge in (edge for edge in plan.placement.edges if edge.target == t):
                source = plan.placement.tasks[edge.source]
                came = [
                    sent[i, k][1]
                    for i, route in enumerate(routes)
                    if (route.source, route.target, route.receiver) == (edge.source, t, rank)
                ]
                here = times.get((rank, Op(source.stage, source.kind, op.microbatch)), (0, 0))[1]
                ready = max(ready, here, *came)
            start = ready + chooser.choice((0, 0, chooser.randint(0, longest_us)))
            free[rank] = start + chooser.randint(0, longest_us)
            times[rank, op] = start, free[rank]
            for i, route in enumerate(routes):
                if (route.source, route.sender) == (t, rank):
                    begun = free[rank] + chooser.choice((0, 0, chooser.randint(0, longest_us)))
                    sent[i, k] = begun, begun + chooser.randint(0, longest_us)
    step_ends = []
    for _, rank in plan.step_end_ranks:
        a = free[rank] + chooser.randint(0, 3)
        b = a + chooser.randint(0, longest_us)
        c = b + chooser.randint(0, 3)
        step_ends.append((a, b, c, c + chooser.randint(0, longest_us)))
    count = [after - first for first, after in zip(plan.first_node, plan.first_node[1:], strict=False)]
    return Timeline(
        plan,
        *(tuple(tuple(times[r, op][side] for op in order) for r, order in enumerate(plan.orders)) for side in (0, 1)),
        *(
            tuple(tuple(sent[i, k][side] for k in range(count[r.source])) for i, r in enumerate(routes))
            for side in (0, 1)
        ),
        tuple(step_ends),
    )


def timed(plan: Plan, duration_us: Callable[[Op], int]) -> Timeline:
    """The timeline of a run in which each op takes the given time, and everything else what is planned."""
    every = range(plan.num_microbatches)
    tasks = tuple(
        replace(task, duration_us=amount_of(duration_us(Op(task.stage, task.kind, m)) for m in every))
        for task in plan.placement.tasks
    )
    truth = simulate(replace(plan, placement=replace(plan.placement, tasks=tasks, class_of=tuple(every))))
    return replace(truth, plan=plan)
