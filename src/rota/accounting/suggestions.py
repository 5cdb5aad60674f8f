"""What would make a step shorter. Each change is simulated; its gain is the simulated one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import add, sub
from statistics import mean
from typing import NamedTuple

from rota.calibration.measured_times import median_us, step_ends_us, with_durations
from rota.calibration.planning_again import autoplan_command
from rota.costs import Link
from rota.errors import RotaError
from rota.figures import each
from rota.placement import Placement, StepEnd
from rota.plan import Plan
from rota.schedules import NAMED
from rota.simulation import simulate
from rota.tasks import Kind
from rota.timeline import Timeline
from rota.units import size_text, time_text
from rota.usage import Usage

_SLOW_STAGE = 1.02  # a stage is slow if it takes more than this times the mean
_SEARCHED, _MAX_SEARCHED_OPS = ("zb_auto",), 2_000  # families that search are tried up to this size


class Suggestion(NamedTuple):
    """A change that would make the step shorter.

    Attributes:
        words: What to change.
        gain_us: By how much the makespan is shorter.
        makespan_us: The simulated makespan with the change.
        command: The command that makes it; "" if there is none.
    """

    words: str
    gain_us: int
    makespan_us: int
    command: str = ""


def with_measured_times(timeline: Timeline) -> Plan:
    """The timeline's plan with each task's median time, and the longest time over its ranks of each step end."""
    plan, longest = timeline.plan, step_ends_us(timeline)
    tasks = with_durations(plan.placement.tasks, median_us([timeline]))
    ends = tuple(StepEnd(end.stage, *longest.get(end.stage, (0, 0))) for end in plan.placement.step_ends)
    return replace(plan, placement=replace(plan.placement, tasks=tasks, step_ends=ends))


def suggestions(plan: Plan) -> tuple[Suggestion, ...]:
    """Changes that shorten the step, the largest gain first. Each is tried alone."""
    before_us = simulate(plan).makespan_us
    cuts = [(words, simulate(changed).makespan_us) for words, changed in _other_cuts(plan)]
    tried = [(words, simulate(changed).makespan_us) for words, changed in _changes(plan)]
    found = [Suggestion(words, before_us - after, after, autoplan_command(plan)) for words, after in cuts]
    found += [Suggestion(words, before_us - after, after) for words, after in [*tried, *_other_orders(plan, before_us)]]
    return tuple(sorted((one for one in found if one.gain_us > 0), key=lambda one: -one.gain_us))


def _other_cuts(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """(description, plan) of work moved between stages; the orders stay."""
    yield from ((words, replace(plan, placement=moved)) for words, moved in _rebalanced(plan.placement, plan.usage))


def _changes(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """(description, plan) of changes to the costs; the orders stay."""
    placement = plan.placement
    alone = placement.cluster.gap_us, 0  # what occupies ranks where messages cost nothing
    if any(route.duration_us != 0 for route in placement.routes) or any(us != alone for us in placement.occupied_us):
        free = replace(placement, cluster=replace(placement.cluster, link=Link(), links=(), shared=()))
        yield "transfers that take no time", replace(plan, placement=free, service_orders=())
    if placement.step_ends:
        ends = tuple(StepEnd(end.stage, 0, 0) for end in placement.step_ends)
        words = "reductions and optimizer steps that take no time"
        yield words, replace(plan, placement=replace(placement, step_ends=ends))


# --- work moved between stages ----------------------------------------------------------------------------------------


def _rebalanced(placement: Placement, usage: Usage | None) -> Iterator[tuple[str, Placement]]:
    """(description, placement): some of the slowest stage's work moved to its faster neighbour; all stages equal.

    Only whole layers can be moved: nothing is advised where the slowest stage is ahead of the mean by less than half a
    layer of its own, if `usage` says how many it has.
    """
    tasks = placement.average.tasks
    loads = {stage: sum(task.duration_us for task in tasks if task.stage == stage) for stage in placement.stages}
    slow, average = max(loads, key=loads.__getitem__), mean(loads.values())
    # A placement with copies of the stages (X) lists the copies in the same order.
    num_layers = () if usage is None else usage.num_layers
    layers = num_layers[slow % len(num_layers)] if num_layers else None
    if loads[slow] <= _SLOW_STAGE * average or layers == 1:
        return
    if layers is not None and loads[slow] - average < loads[slow] / layers / 2:
        return
    several = "" if layers else ", if it has more than one layer"
    of_model = f" ({usage.span_text(slow % (len(usage.cuts) + 1))})" if usage is not None else ""
    slow_text = f"stage {slow}{of_model} takes {loads[slow] / average - 1:.0%} longer than the mean: "
    neighbours = {b if a == slow else a for a, b in placement.stage_edges if slow in (a, b)}
    if neighbours:
        fast = min(neighbours, key=loads.__getitem__)
        moved_us = (loads[slow] - loads[fast]) / 2
        part = "of its work"
        if layers is not None:
            count = round(moved_us / (loads[slow] / layers))
            moved_us, part = loads[slow] * count / layers, f"of its work, {count} of its {layers} layers,"
        if moved_us >= 1:
            fraction = moved_us / loads[slow]
            words = f"{slow_text}move {time_text(int(moved_us))} ({fraction:.0%}) {part} to stage {fast}{several}"
            yield words, _moved(placement, slow, fast, fraction)
    yield f"{slow_text}cut the model so that all stages take equal time{several}", _all_equal(placement)


def _moved(placement: Placement, slow: int, fast: int, fraction: float) -> Placement:
    """Move a fraction of each task of stage `slow` to the task of the same kind of stage `fast`."""
    moved = {
        task.kind: each(lambda us: round(us * fraction), task.duration_us)
        for task in placement.tasks
        if task.stage == slow
    }
    by_stage = {slow: sub, fast: add}
    times = [
        each(by_stage[task.stage], task.duration_us, moved.get(task.kind, 0))
        if task.stage in by_stage
        else task.duration_us
        for task in placement.tasks
    ]
    return _with_times(placement, times)


def _all_equal(placement: Placement) -> Placement:
    means = {
        kind: each(lambda *us: round(mean(us)), *(task.duration_us for task in placement.tasks if task.kind is kind))
        for kind in {task.kind for task in placement.tasks}
    }
    return _with_times(placement, [means[task.kind] for task in placement.tasks])


def _with_times(placement: Placement, times_us: list[int]) -> Placement:
    tasks = zip(placement.tasks, times_us, strict=True)
    return replace(placement, tasks=tuple(replace(task, duration_us=time) for task, time in tasks))


# --- other orders -----------------------------------------------------------------------------------------------------


def _other_orders(plan: Plan, before_us: int) -> Iterator[tuple[str, int]]:
    """The fastest named schedule that fits, and the fastest that would fit with memory for one more micro-batch."""
    best: dict[bool, tuple[str, int]] = {}  # fits -> (description, makespan)
    for name, family in NAMED.items():
        if name in _SEARCHED and plan.num_ops > _MAX_SEARCHED_OPS:
            continue
        try:
            timeline = simulate(family(plan.placement, plan.num_microbatches))
        except RotaError:  # not defined for this placement
            continue
        if timeline.makespan_us >= best.get(True, ("", before_us))[1]:
            continue
        if (excess := _excess_bytes(timeline)) is None:
            continue
        words = f"the order of {name}"
        if excess:
            words = f"memory for one more micro-batch ({size_text(excess)} over the limit), in {words}"
        if timeline.makespan_us < best.get(not excess, ("", before_us))[1]:
            best[not excess] = words, timeline.makespan_us
    yield from best.values()


def _excess_bytes(timeline: Timeline) -> int | None:
    """The largest excess over a rank's limit; None if it is more than one micro-batch holds there."""
    worst, placement = 0, timeline.plan.placement
    for rank, limit in enumerate(placement.cluster.limit_bytes):
        if limit is not None:
            excess = timeline.peak_memory_bytes[rank] - limit
            if excess > _microbatch_bytes(placement, rank):
                return None
            worst = max(worst, excess)
    return worst


def _microbatch_bytes(placement: Placement, rank: int) -> int:
    """Bytes that the forwards of one micro-batch, the largest, hold on a rank."""
    return max(
        sum(max(task.held_bytes, 0) for task in each.tasks if task.kind is Kind.F and rank in task.ranks)
        for each in placement.classes
    )
