"""A placement with the measured times of ops, transfers and step ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from statistics import linear_regression, median, median_low

from rota.core.cluster import HOST, Cluster, Link
from rota.core.errors import PlanError
from rota.core.placement import Placement
from rota.core.tasks import Amount, Kind, Op, StepEnd, Task, amount_of, value_in
from rota.core.timeline import Timeline


def calibrated(*timelines: Timeline) -> Placement:
    """The timelines' placement with measured times instead of planned ones.

    A task gets the median duration of its ops (on several ranks, that of the slowest), a link the latency and rate that
    fit its transfers best, and a step end the median of its time on its slowest rank. What no timeline measured stays
    as planned: links without transfers, reductions and optimizer steps of length 0. Memory, the rates of shared links,
    what messages cost their ranks, and gaps between ops also stay as planned: they are not part of the durations of ops
    and transfers.

    Args:
        timelines: One or more timelines of plans of one placement.

    Returns:
        The first timeline's placement with measured times.

    Raises:
        PlanError: There is no timeline, or they are not of one placement.
    """
    _require_one_placement(timelines)
    placement = timelines[0].plan.placement
    tasks = with_durations(placement.tasks, median_us(timelines))
    return replace(placement, tasks=tasks, cluster=_cluster(timelines), step_ends=_step_ends(timelines))


def median_us(timelines: Iterable[Timeline]) -> dict[tuple[int, Kind], Amount]:
    """(stage, kind) -> the median of its ops' durations in µs; of several ranks the slowest counts.

    Where micro-batches differ, it is one per class, a `rota.core.tasks.PerClass`; a class that none had is as
    planned.
    """
    timelines = [*timelines]
    tasks = (task for timeline in timelines for task in timeline.plan.placement.tasks)
    planned = {(task.stage, task.kind): task.duration_us for task in tasks}
    return {
        task: amount_of(
            round(median(times[c])) if c in times else value_in(planned[task], c)
            for c in range(timelines[0].plan.placement.num_classes)
        )
        for task, times in op_times_us(timelines).items()
    }


def op_times_us(timelines: Iterable[Timeline]) -> dict[tuple[int, Kind], dict[int, list[int]]]:
    """(stage, kind) -> class of micro-batches -> durations of its ops in µs; of several ranks the slowest counts."""
    times: dict[tuple[int, Kind], dict[int, list[int]]] = {}
    for timeline in timelines:
        slowest: dict[Op, int] = {}
        for span in timeline.op_spans():
            assert isinstance(span.work, Op)
            slowest[span.work] = max(slowest.get(span.work, 0), span.duration_us)
        for op, us in slowest.items():
            by_class = times.setdefault((op.stage, op.kind), {})
            by_class.setdefault(timeline.plan.placement.class_in(op.microbatch), []).append(us)
    return times


def with_durations(tasks: Iterable[Task], durations_us: Mapping[tuple[int, Kind], Amount]) -> tuple[Task, ...]:
    """The tasks with the given durations by (stage, kind); others stay as they are."""
    return tuple(
        replace(task, duration_us=durations_us.get((task.stage, task.kind), task.duration_us)) for task in tasks
    )


def step_ends_us(timeline: Timeline) -> dict[int, tuple[int, int]]:
    """Stage -> durations of its longest reduction and its longest optimizer step on any rank."""
    longest: dict[int, tuple[int, int]] = {}
    for (i, _), (a, b, c, d) in zip(timeline.plan.step_end_ranks, timeline.step_ends_us, strict=True):
        stage = timeline.plan.placement.step_ends[i].stage
        reduce_us, optimizer_us = longest.get(stage, (0, 0))
        longest[stage] = max(reduce_us, b - a), max(optimizer_us, d - c)
    return longest


def _cluster(timelines: Sequence[Timeline]) -> Cluster:
    cluster = timelines[0].plan.placement.cluster
    measured: dict[tuple[int, int], dict[int, list[int]]] = {}  # (sender, receiver) -> bytes -> µs
    for timeline in timelines:
        placement = timeline.plan.placement
        for r in range(len(placement.routes)):
            by_size = measured.setdefault(placement.ends_of(r), {})
            batches = timeline.plan.microbatches_on(r)
            for m, start, end in zip(batches, timeline.sent_us[r], timeline.arrived_us[r], strict=True):
                by_size.setdefault(placement.value(placement.moved_bytes(r), m), []).append(max(end - start, 0))
    links: dict[tuple[int, int], Link] = {}
    for sender, receiver, link in cluster.links:
        links.setdefault((sender, receiver), link)  # the first entry of a pair counts
    for pair, by_size in measured.items():
        if any(by_size.values()):
            rates = [cluster.shared[i].bytes_per_us for i in cluster.shared_between(*pair)]
            links[pair] = fit_link(by_size, cluster.link_between(*pair), min(rates, default=None))
    special = tuple((*pair, link) for pair, link in links.items() if link != cluster.link or HOST in pair)
    return replace(cluster, links=special)


def _step_ends(timelines: Sequence[Timeline]) -> tuple[StepEnd, ...]:
    """The median of each measured time; as planned if a run does not record what its code does after the step."""
    planned: dict[int, StepEnd] = {}
    measured: dict[int, list[tuple[int, int]]] = {}
    for timeline in timelines:
        longest = step_ends_us(timeline)
        for end in timeline.plan.placement.step_ends:
            planned.setdefault(end.stage, end)
            measured.setdefault(end.stage, []).append(longest.get(end.stage, (0, 0)))
    result = []
    for stage, end in sorted(planned.items()):
        reductions_us, optimizers_us = zip(*measured[stage], strict=True)
        reduce_us = round(median(reductions_us)) if any(reductions_us) else end.reduce_us
        optimizer_us = round(median(optimizers_us)) if any(optimizers_us) else end.optimizer_us
        result.append(StepEnd(stage, reduce_us, optimizer_us))
    return tuple(result)


def _require_one_placement(timelines: Sequence[Timeline]) -> None:
    if not timelines:
        raise PlanError("no timelines to calibrate with; give one or more", "missing")
    shapes = [
        (
            [(task.stage, task.kind, task.ranks) for task in timeline.plan.placement.tasks],
            timeline.plan.placement.edges,
            timeline.plan.placement.num_classes,
            timeline.num_ranks,
        )
        for timeline in timelines
    ]
    for i, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise PlanError(
                f"timeline {i + 1} is of another placement than the first: its stages, ranks or messages differ; "
                f"calibrate with timelines of one model with the same cuts and placement",
                "unknown",
            )


# --- links ------------------------------------------------------------------------------------------------------------


def fit_link(by_size: Mapping[int, Sequence[int]], planned: Link, shared_rate: int | None = None) -> Link:
    """The link that fits measured transfers best, by the sum of absolute deviations from the median per size.

    With only one size, latency and rate cannot be separated: the rate stays as planned, unless it is too slow. What
    messages cost their ranks stays as planned.

    Args:
        by_size: Bytes -> durations in µs of the transfers of that size; at least one.
        planned: The planned link.
        shared_rate: Bytes per µs of the slowest link that the transfers share with others; None: they share none.
    """
    points = [(size, median_low(times), len(times)) for size, times in sorted(by_size.items()) if times]
    links = []
    for rate in (planned.bytes_per_us, *_rates(points), None):
        slowest = shared_rate if rate is None else min(rate, shared_rate or rate)
        latencies = [us - Link(0, slowest).transfer_us(size) for size, us, count in points for _ in range(count)]
        link = Link(max(median_low(latencies), 0), slowest)
        error = sum(count * abs(us - link.transfer_us(size)) for size, us, count in points)
        links.append((error, replace(planned, latency_us=link.latency_us, bytes_per_us=rate)))
    return min(links, key=itemgetter(0))[1]


def _rates(points: Sequence[tuple[int, int, int]]) -> list[int]:
    """Candidate rates in bytes per µs: least squares over the sizes, or the rate that the only size needs."""
    if len(points) == 1:
        size, us, _ = points[0]
        return [-(-size // us)] if size and us else []
    sizes, times_us = zip(*((size, us) for size, us, count in points for _ in range(count)), strict=True)
    per_byte = linear_regression(sizes, times_us).slope
    if per_byte < 1e-15:
        return []
    rate = 1 / per_byte
    return sorted({max(int(rate), 1), int(rate) + 1, max(round(rate), 1)})
