"""A timeline as columns of small numbers, which deflate well; `page/timeline.js` and `page/memory.js` read them."""

from __future__ import annotations

import base64
import sys
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, final

from rota.accounting import Cause, Idle
from rota.core.tasks import Op, Transfer, values_of
from rota.core.timeline import StepEndWork, Timeline, task_changes

CAUSES = tuple(Cause)  # the page refers to a cause by its index here
_NO_WORK = -1


@final
class Columns:
    """Columns of numbers that become one text."""

    def __init__(self) -> None:
        self.types: list[tuple[str, int]] = []  # of each column: its type, as `array` writes it, and its length
        self._planes: list[bytes] = []

    def add(self, values: Iterable[int]) -> None:
        """Add a column in the smallest type that holds all values: all lowest bytes first, then all second ones."""
        column = _smallest(list(values))
        if sys.byteorder == "big":
            column.byteswap()
        raw = column.tobytes()
        self.types.append((column.typecode, len(column)))
        self._planes += [raw[plane :: column.itemsize] for plane in range(column.itemsize)]

    def text(self) -> str:
        """Return all columns, deflated, as base64."""
        return base64.b64encode(zlib.compress(b"".join(self._planes), 9)).decode()


def _smallest(values: list[int]) -> array[Any]:
    for code in "bhi":  # whole numbers of 1, 2 and 4 bytes
        try:
            return array(code, values)
        except OverflowError:
            continue
    return array("d", values)


def pack_timeline(timeline: Timeline, idle: Sequence[Idle], columns: Columns) -> dict[str, Any]:
    """Add the timeline's columns in the order in which the page reads them, and return the fields of its head."""
    plan, placement = timeline.plan, timeline.plan.placement
    changes = [task_changes(placement, rank) for rank in range(timeline.num_ranks)]
    slots = [(i, rank) for i, task in enumerate(placement.tasks) for rank in task.ranks]
    keys = [(task.stage, task.kind) for task in placement.tasks]
    tasks = [(stage, str(kind)) for stage, kind in keys]
    step_ends = [
        (span.rank, span.work, span.start_us, span.end_us)
        for span in timeline.step_end_spans()
        if isinstance(span.work, StepEndWork)
    ]
    _add_ops(timeline, {(*tasks[i], rank): slot for slot, (i, rank) in enumerate(slots)}, columns)
    _add_transfers(timeline, columns)
    columns.add(_critical_path(timeline, {(rank, work): j for j, (rank, work, _, _) in enumerate(step_ends)}))
    codes = {task: i for i, task in enumerate(tasks)}
    _add_idle(timeline, idle, codes, {work: j for j, (_, work, _, _) in enumerate(step_ends)}, columns)
    return {
        "makespan": timeline.makespan_us,
        "numMicrobatches": plan.num_microbatches,
        "numComponents": placement.num_components,
        "tasks": tasks,
        "classOf": placement.class_of,
        "chunks": placement.chunks,
        "slots": [
            (i, rank, *(_one_or_each(values_of(figure)) for figure in changes[rank][keys[i]])) for i, rank in slots
        ],
        "routes": [
            (
                *route[:4],
                _one_or_each(values_of(route.num_bytes)),
                placement.component_of[route.source],
                _one_or_each(values_of(route.service_us)),
                route.shared,
            )
            for route in placement.routes
        ],
        "links": [link.name for link in placement.cluster.shared],
        "limits": list(placement.cluster.limit_bytes),
        "static": list(placement.static_bytes),
        "stepEnds": [(rank, work.stage, work.what, start, end) for rank, work, start, end in step_ends],
    }


def _one_or_each(values: Sequence[int]) -> int | Sequence[int]:
    """Return a figure as the page reads it: one number, or one per class of micro-batches."""
    return values[0] if len({*values}) == 1 else values


def _add_ops(timeline: Timeline, slot_of: dict[tuple[int, str, int], int], columns: Columns) -> None:
    """Add the number of ops per rank; per op its slot, micro-batch, time since the previous op, and duration."""
    orders = timeline.plan.orders
    times = list(zip(timeline.starts_us, timeline.ends_us, strict=True))
    columns.add(len(order) for order in orders)
    columns.add(slot_of[op.stage, op.kind, rank] for rank, order in enumerate(orders) for op in order)
    columns.add(_deltas(op.microbatch for order in orders for op in order))
    columns.add(start - previous for starts, ends in times for start, previous in zip(starts, (0, *ends), strict=False))
    columns.add(end - start for starts, ends in times for start, end in zip(starts, ends, strict=True))


def _add_transfers(timeline: Timeline, columns: Columns) -> None:
    """Add per transfer the time from its producer's end to its start, and its duration."""
    plan = timeline.plan
    ends = [dict(zip(*pair, strict=True)) for pair in zip(plan.nodes, timeline.ends_us, strict=True)]
    producer_ends = (
        ends[route.sender][node]
        for route in plan.placement.routes
        for node in range(plan.first_node[route.source], plan.first_node[route.source + 1])
    )
    sent, arrived = list(chain(*timeline.sent_us)), chain(*timeline.arrived_us)
    columns.add(start - end for start, end in zip(sent, producer_ends, strict=True))
    columns.add(end - start for start, end in zip(sent, arrived, strict=True))


def _critical_path(timeline: Timeline, step_ends: dict[tuple[int, object], int]) -> list[int]:
    """Return the numbers of the critical path's ops and step ends; step ends are numbered after all ops.

    Transfers are left out: they are between ops on different ranks.
    """
    orders = timeline.plan.orders
    first = [*accumulate(map(len, orders), initial=0)]
    position = [{op: i for i, op in enumerate(order)} for order in orders]
    numbers = []
    for span in timeline.critical_path():
        if isinstance(span.work, Op):
            numbers.append(first[span.rank] + position[span.rank][span.work])
        elif (span.rank, span.work) in step_ends:  # one without a duration is not in the list
            numbers.append(first[-1] + step_ends[span.rank, span.work])
    return numbers


def _add_idle(
    timeline: Timeline,
    idle: Sequence[Idle],
    tasks: dict[tuple[int, str], int],
    step_ends: dict[StepEndWork, int],
    columns: Columns,
) -> None:
    """Add the number of idle intervals per rank; per interval its cause, duration, and what it waits for.

    A duration of 0 means that the interval ends where the rank is busy again.
    """
    routes = {route[:4]: len(tasks) + r for r, route in enumerate(timeline.plan.placement.routes)}
    first_step_end = len(tasks) + len(routes)

    def code(work: Op | Transfer | StepEndWork | None) -> tuple[int, int]:
        """Return the number of a task, route or step end, in this order, and the micro-batch."""
        match work:
            case Op():
                return tasks[work.stage, work.kind], work.microbatch
            case Transfer():
                source, target = (tasks[op.stage, op.kind] for op in (work.source, work.target))
                return routes[source, target, work.sender, work.receiver], work.source.microbatch
            case StepEndWork():
                return (first_step_end + step_ends[work] if work in step_ends else _NO_WORK), 0
        return _NO_WORK, 0

    counts = Counter(interval.rank for interval in idle)
    columns.add(counts[rank] for rank in range(timeline.num_ranks))
    columns.add(CAUSES.index(interval.cause) for interval in idle)
    continues = [(b.rank, b.start_us) == (a.rank, a.end_us) for a, b in pairwise(idle)] + [False]
    columns.add(interval.duration_us if more else 0 for interval, more in zip(idle, continues, strict=False))
    for works in ([interval.waits_for for interval in idle], [interval.ready for interval in idle]):
        codes = [code(work) for work in works]
        columns.add(task for task, _ in codes)
        columns.add(_deltas(microbatch for _, microbatch in codes))


def _deltas(values: Iterable[int]) -> list[int]:
    """Return the first value, and the difference of each one from the previous; `summed` in the page reverses it."""
    return [after - before for before, after in pairwise([0, *values])]
