"""What would make a step shorter: each change is simulated, and its gain is the simulated one; or uneven ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from operator import add, sub
from statistics import mean
from typing import NamedTuple

from rota.calibration.best_plan import OVERLOADED
from rota.calibration.measured_times import median_us, step_ends_us, with_durations
from rota.calibration.spread import Spread, copies, have_same_layers, rank_loads, with_equal_copies
from rota.core.copies import without_copies
from rota.core.errors import RotaError
from rota.core.placement import Placement
from rota.core.plan import Plan, Usage
from rota.core.simulation import simulate
from rota.core.tasks import Amount, Kind, StepEnd, by_class, scalar
from rota.core.text import exact_size_text, size_text, time_text
from rota.core.timeline import Timeline
from rota.schedules import NAMED

_SLOW_STAGE = 1.02  # a stage is slow if it takes more than this times the mean


class Suggestion(NamedTuple):
    """A change that would make the step shorter.

    Attributes:
        words: What to change.
        gain_us: By how much the makespan is shorter.
        makespan_us: The simulated makespan with the change.
        commands: The commands that make it, in order; none if there are none.
        what: What is changed: "cut", "order", "memory" (with an order), "transfers" or "step ends".
        is_certain: Whether it helps with all times that the measured ops leave possible.
    """

    words: str
    gain_us: int
    makespan_us: int
    commands: tuple[str, ...] = ()
    what: str = ""
    is_certain: bool = True


class _Change(NamedTuple):
    """A change, which makes a plan of one with the same orders and any times."""

    what: str
    words: str
    changed: Callable[[Plan], Plan]


def with_measured_times(timeline: Timeline) -> Plan:
    """The timeline's plan with each task's median time, and the longest time over its ranks of each step end."""
    plan, longest = timeline.plan, step_ends_us(timeline)
    tasks = with_durations(plan.placement.tasks, median_us([timeline]))
    ends = tuple(StepEnd(end.stage, *longest.get(end.stage, (0, 0))) for end in plan.placement.step_ends)
    return replace(plan, placement=replace(plan.placement, tasks=tasks, step_ends=ends))


def advice(timeline: Timeline, spread: Spread) -> list[Suggestion]:
    """Changes that shorten the simulated step, each tried alone, the largest gain first.

    Those that do not help with all times of ops that `spread` leaves possible are not certain.
    """
    plan, before_us, commands = timeline.plan, timeline.makespan_us, _commands_to_cut(timeline.plan)
    loads = _loads(plan.placement)
    is_certain = spread.is_exact or spread.longest_part(_loads, loads.index(max(loads)))
    suggestions = [
        Suggestion(words, gain_us, before_us - gain_us, commands, "cut", is_certain)
        for words, gain_us in _gains_of_cuts(plan)
    ][: None if is_certain else 1]
    for change in (*_changes(plan), *_other_orders(plan, before_us)):
        after_us = simulate(change.changed(plan)).makespan_us
        if after_us < before_us:
            holds = spread.holds(plan, change.changed)
            suggestions.append(Suggestion(change.words, before_us - after_us, after_us, (), change.what, holds))
    return sorted(suggestions, key=lambda suggestion: -suggestion.gain_us)


def _changes(plan: Plan) -> Iterator[_Change]:
    """Changes to the costs; the orders stay."""
    placement = plan.placement
    if any(route.duration_us != 0 for route in placement.routes if not route.is_copy):
        yield _Change("transfers", "transfers that take no time", _with_free_transfers)
    if any(route.is_copy for route in placement.routes):
        yield _Change("copies", "copies to and from the host that take no time", _without_copies)
    if placement.step_ends:
        yield _Change("step ends", "reductions and optimizer steps that take no time", _with_free_step_ends)


def _with_free_transfers(plan: Plan) -> Plan:
    placement = replace(plan.placement, cluster=plan.placement.cluster.with_free_transfers())
    return replace(plan, placement=placement, service_orders=())


def _without_copies(plan: Plan) -> Plan:
    orders = tuple(tuple(op for op in order if not op.kind.is_copy) for order in plan.orders)
    return replace(plan, placement=without_copies(plan.placement), orders=orders, service_orders=())


def _with_free_step_ends(plan: Plan) -> Plan:
    ends = tuple(StepEnd(end.stage, 0, 0) for end in plan.placement.step_ends)
    return replace(plan, placement=replace(plan.placement, step_ends=ends))


# --- work moved between stages ----------------------------------------------------------------------------------------


def _gains_of_cuts(plan: Plan) -> Iterator[tuple[str, int]]:
    """(description, gain in µs) of work moved between stages; the orders stay.

    Copies of a stage have the same layers: they count as equally long, and work is moved in all of them at once.
    """
    if have_same_layers(plan.placement):
        return
    equal = replace(plan, placement=with_equal_copies(plan.placement))
    before_us = simulate(equal).makespan_us
    for words, moved in _rebalanced(equal.placement, plan.usage):
        gain_us = before_us - simulate(replace(equal, placement=moved)).makespan_us
        if gain_us > 0:
            yield words, gain_us


def _loads(placement: Placement) -> list[float]:
    """The work of each stage per micro-batch in µs; of copies, the mean."""
    tasks = with_equal_copies(placement).average.tasks
    loads: dict[int, float] = dict.fromkeys(placement.stages[: copies(placement)], 0)
    for task in tasks:
        if task.stage in loads:
            loads[task.stage] += scalar(task.duration_us)
    return [*loads.values()]


def _stages_text(placement: Placement, index: int) -> str:
    stages = placement.stages[index :: copies(placement)]
    return f"stage {stages[0]}" if len(stages) == 1 else f"stages {' and '.join(map(str, stages))}"


def _rebalanced(placement: Placement, usage: Usage | None) -> Iterator[tuple[str, Placement]]:
    """(description, placement): some of the slowest stage's work moved to its faster neighbour; all stages equal.

    Only whole layers can be moved: nothing is advised where the slowest stage is ahead of the mean by less than half a
    layer of its own, if `usage` says how many it has.
    """
    stages, period, loads = placement.stages, copies(placement), _loads(placement)
    load, average = max(loads), mean(loads)
    index = loads.index(load)
    num_layers = () if usage is None else usage.num_layers
    layers = num_layers[index % len(num_layers)] if num_layers else None
    is_slow = load > _SLOW_STAGE * average and layers != 1
    if not is_slow or (layers is not None and load - average < load / layers / 2):
        return
    several = "" if layers else ", if it has more than one layer"
    of_model = f" ({usage.span_text(index % (len(usage.cuts) + 1))})" if usage is not None else ""
    verb = "takes" if period == len(stages) else "take"
    slow_text = f"{_stages_text(placement, index)}{of_model} {verb} {load / average - 1:.0%} longer than the mean: "
    position = {stage: i % period for i, stage in enumerate(stages)}
    edges = {(position[a], position[b]) for a, b in placement.stage_edges}
    neighbours = {b if a == index else a for a, b in edges if index in (a, b)} - {index}
    if neighbours:
        fast = min(neighbours, key=loads.__getitem__)
        moved_us = (load - loads[fast]) / 2
        part = "of its work"
        if layers is not None:
            count = round(moved_us / (load / layers))
            moved_us, part = load * count / layers, f"of its work, {count} of its {layers} layers,"
        if moved_us >= 1:
            fraction, target = moved_us / load, _stages_text(placement, fast)
            words = f"{slow_text}move {time_text(int(moved_us))} ({fraction:.0%}) {part} to {target}{several}"
            moved = placement
            for first in range(0, len(stages), period):  # in each copy
                moved = _moved(moved, stages[first + index], stages[first + fast], fraction)
            yield words, moved
    yield f"{slow_text}cut the model so that all stages take equal time{several}", _all_equal(placement)


def _moved(placement: Placement, slow: int, fast: int, fraction: float) -> Placement:
    """Move a fraction of each task of stage `slow` to the task of the same kind of stage `fast`."""
    durations_us: dict[tuple[int, Kind], Amount] = {}
    for task in placement.tasks:
        if task.stage == slow:
            moved_us = by_class(lambda us: round(us * fraction), task.duration_us)
            durations_us[slow, task.kind] = by_class(sub, task.duration_us, moved_us)
            if (other := placement.task(fast, task.kind)) is not None:
                durations_us[fast, task.kind] = by_class(add, other.duration_us, moved_us)
    return replace(placement, tasks=with_durations(placement.tasks, durations_us))


def _all_equal(placement: Placement) -> Placement:
    amounts: dict[Kind, list[Amount]] = {}
    for task in placement.tasks:
        amounts.setdefault(task.kind, []).append(task.duration_us)
    means = {kind: by_class(lambda *us: round(mean(us)), *column) for kind, column in amounts.items()}
    tasks = (replace(task, duration_us=means[task.kind]) for task in placement.tasks)
    return replace(placement, tasks=tuple(tasks))


def _commands_to_cut(plan: Plan) -> tuple[str, ...]:
    """What cuts the model again: MODEL.py stands for its file, ROWS for the rows of a step where they are unknown."""
    usage, rows = plan.usage, plan.microbatch_rows
    if usage is not None and usage.is_estimate:
        return ()
    num_ranks, limits = plan.num_ranks * plan.num_replicas, {*plan.placement.cluster.limit_bytes}
    limit = limits.pop() if len(limits) == 1 else None
    links = plan.placement.routes
    return (
        "rota profile MODEL.py -o profile.json",
        *((f"rota profile links --processes {num_ranks} -o cluster.json",) if links else ()),
        f"rota autoplan --profile profile.json{' --links cluster.json' if links else ''} --ranks {num_ranks}"
        f"{'' if limit is None else f' --memory {exact_size_text(limit)}'}"
        f" --batch {'ROWS' if rows is None else rows * plan.num_microbatches * plan.num_replicas} -o better.json",
    )


def imbalance(timeline: Timeline, spread: Spread) -> str:
    """What it costs that one rank has much more work than the mean; "" if none has, or none for sure.

    "" too where all ranks hold the same layers: they do the same work, whatever the cuts.
    """
    work_us = timeline.busy_us
    average_us = mean(work_us)
    busiest = work_us.index(max(work_us))
    if work_us[busiest] <= OVERLOADED * average_us or have_same_layers(timeline.plan.placement):
        return ""
    if not spread.is_exact and not spread.longest_part(rank_loads, busiest):
        return ""
    return (
        f"The work of the ranks is uneven: rank {busiest} has {work_us[busiest] / average_us - 1:.0%} more than the "
        f"mean. A step takes at least as long as its work, {time_text(work_us[busiest])}; with as much work in all, "
        f"but the same on every rank, it could take {time_text(int(average_us))} at best. Try fewer stages, of more "
        f"layers each, or more places to cut, inside the blocks (`--cuts`, or rota.CutPoint in the model)."
    )


# --- other orders -----------------------------------------------------------------------------------------------------


def _other_orders(plan: Plan, before_us: int) -> Iterator[_Change]:
    """The fastest named schedule that fits, and the fastest that would fit with memory for one more micro-batch."""
    best: dict[bool, tuple[_Change, int]] = {}  # fits -> (change, makespan)
    for name, family in NAMED.items():
        try:
            timeline = simulate(family(plan.placement, plan.num_microbatches))
        except RotaError:  # not defined for this placement
            continue
        makespan_us = timeline.makespan_us
        if makespan_us >= before_us or (True in best and makespan_us >= best[True][1]):
            continue
        if (excess := _excess_bytes(timeline)) is None:
            continue
        if (not excess) not in best or makespan_us < best[not excess][1]:
            words = f"the order of {name}"
            if excess:
                words = f"memory for one more micro-batch ({size_text(excess)} over the limit), in {words}"
            change = _Change("memory" if excess else "order", words, partial(_in_order_of, timeline.plan))
            best[not excess] = change, makespan_us
    yield from (change for change, _ in best.values())


def _in_order_of(other: Plan, plan: Plan) -> Plan:
    return replace(other, placement=plan.placement)


def _excess_bytes(timeline: Timeline) -> int | None:
    """The largest excess over a rank's limit; None if it is more than one micro-batch holds there."""
    worst, placement = 0, timeline.plan.placement
    for rank, limit in enumerate(placement.cluster.limit_bytes):
        excess = 0 if limit is None else timeline.peak_memory_bytes[rank] - limit
        if excess > _microbatch_bytes(placement, rank):
            return None
        worst = max(worst, excess)
    return worst


def _microbatch_bytes(placement: Placement, rank: int) -> int:
    """Bytes that the forwards of one micro-batch, the largest, hold on a rank."""
    return max(
        sum(max(scalar(task.held_bytes), 0) for task in alike.tasks if task.kind is Kind.F and rank in task.ranks)
        for alike in placement.classes
    )
