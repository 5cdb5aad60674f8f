"""What ops, transfers and step ends took, as the placement that would have planned it so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from statistics import median_low

from rota.calibration.links import fitted
from rota.costs import Cluster, Link
from rota.errors import PlanError
from rota.placement import Placement, StepEnd
from rota.tasks import Kind, Op
from rota.timeline import Timeline


def calibrated(*timelines: Timeline) -> Placement:
    """The timelines' placement with the times that were measured; memory stays.

    A task takes the median of its ops (of several ranks the slowest counts), a link what fits its transfers best, a
    step end the median of what it took on its slowest rank. What no timeline has measured stays as planned: links that
    carried nothing, reductions and optimizer steps of no length.

    Raises PlanError where the timelines are not of one placement.
    """
    _refuse_others(timelines)
    placement = timelines[0].plan.placement
    medians = median_us(timelines)
    tasks = tuple(
        replace(task, duration_us=medians.get((task.stage, task.kind), task.duration_us)) for task in placement.tasks
    )
    return replace(placement, tasks=tasks, cluster=_cluster(timelines), step_ends=_step_ends(timelines))


def median_us(timelines: Iterable[Timeline]) -> dict[tuple[int, Kind], int]:
    """By stage and kind the median duration of the ops, a time that was measured."""
    seen: dict[tuple[int, Kind], list[int]] = {}
    for timeline in timelines:
        slowest: dict[Op, int] = {}
        for span in timeline.op_spans():
            assert isinstance(span.work, Op)
            slowest[span.work] = max(slowest.get(span.work, 0), span.duration_us)
        for op, us in slowest.items():
            seen.setdefault((op.stage, op.kind), []).append(us)
    return {task: median_low(times) for task, times in seen.items()}


def _cluster(timelines: Sequence[Timeline]) -> Cluster:
    cluster = timelines[0].plan.placement.cluster
    seen: dict[tuple[int, int], dict[int, list[int]]] = {}  # by sender and receiver, by size
    for timeline in timelines:
        for route, sent, arrived in zip(
            timeline.plan.placement.routes, timeline.sent_us, timeline.arrived_us, strict=True
        ):
            times = seen.setdefault((route.sender, route.receiver), {}).setdefault(route.num_bytes, [])
            times += [max(end - start, 0) for start, end in zip(sent, arrived, strict=True)]
    links: dict[tuple[int, int], Link] = {}
    for sender, receiver, link in cluster.links:
        links.setdefault((sender, receiver), link)  # of two for one pair the first counts
    for pair, by_size in seen.items():
        if any(by_size.values()):
            links[pair] = fitted(by_size, cluster.link_between(*pair))
    special = tuple((*pair, link) for pair, link in links.items() if link != cluster.link)
    return replace(cluster, links=special)


def _step_ends(timelines: Sequence[Timeline]) -> tuple[StepEnd, ...]:
    planned: dict[int, StepEnd] = {}
    seen: dict[int, list[tuple[int, int]]] = {}
    for timeline in timelines:
        placement = timeline.plan.placement
        slowest: dict[int, tuple[int, int]] = {}
        for (i, _), (a, b, c, d) in zip(timeline.plan.step_end_ranks, timeline.step_ends_us, strict=True):
            stage = placement.step_ends[i].stage
            reduce_us, optimizer_us = slowest.get(stage, (0, 0))
            slowest[stage] = max(reduce_us, b - a), max(optimizer_us, d - c)
        for end in placement.step_ends:
            planned.setdefault(end.stage, end)
            seen.setdefault(end.stage, []).append(slowest.get(end.stage, (0, 0)))
    return tuple(_step_end(planned[stage], seen) for stage in sorted(planned))


def _step_end(planned: StepEnd, seen: Mapping[int, Sequence[tuple[int, int]]]) -> StepEnd:
    """A run need not record what its own code does after the pipeline's step: then it stays as planned."""
    reduce_us, optimizer_us = (list(column) for column in zip(*seen[planned.stage], strict=True))
    return StepEnd(
        planned.stage,
        median_low(reduce_us) if any(reduce_us) else planned.reduce_us,
        median_low(optimizer_us) if any(optimizer_us) else planned.optimizer_us,
    )


def _refuse_others(timelines: Sequence[Timeline]) -> None:
    if not timelines:
        raise PlanError("there is no timeline to calibrate by; give one or more", "missing")
    shapes = [
        (
            [(task.stage, task.kind, task.ranks) for task in timeline.plan.placement.tasks],
            timeline.plan.placement.edges,
            timeline.num_ranks,
        )
        for timeline in timelines
    ]
    for i, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise PlanError(
                f"timeline {i + 1} is of another placement than the first: its stages, ranks or messages differ; "
                f"calibrate by timelines of one model, cut and placed alike",
                "unknown",
            )
