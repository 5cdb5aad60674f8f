"""A timeline as a chart for the terminal: one line a rank, time from left to right.

       |0 µs   |200    |400    |600    |800   bubble  peak
rank 0 F0──F1──········B0═══════····B1══════   33.3%  2 GB
rank 1 ····F0──B0══════F1───B1══════········   33.3%  1 GB
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter, itemgetter

from rota.drawing.looks import LOOKS, Work, key_of, shown
from rota.errors import RotaError
from rota.plan import Plan
from rota.simulation import timeline_of
from rota.tasks import Op
from rota.timeline import Span, Timeline
from rota.units import count_text, size_text, time_text, time_unit

_MIN_WIDTH = 20
_MIN_CHART = 32  # columns below which the table goes under the chart
_TICK = 8  # columns at least from one tick to the next
_IDLE = "·"


def to_text(timeline: Timeline | Plan, width: int = 80, color: bool = False) -> str:
    """No line is wider than `width` columns (20 or more). Every column shows what fills most of its time.

    A plan is simulated first. An op too narrow for its name shows its kind; those too narrow for a column are
    counted in the legend. `color` adds ANSI colours of 256. Raises RotaError if the width is too small.
    """
    if width < _MIN_WIDTH:
        raise RotaError(f"a width of {width} columns is too small for a chart: give {_MIN_WIDTH} or more")
    timeline = timeline_of(timeline)
    digits = len(str(timeline.num_ranks - 1))
    names = [" " * (6 + digits), *(f"rank {rank:>{digits}} " for rank in range(timeline.num_ranks))]
    table = _table(timeline, width - len(names[0]) - 1)
    beside = width - len(names[0]) - len(table[0]) - 2 >= _MIN_CHART
    num_columns = width - len(names[0]) - (len(table[0]) + 2 if beside else 0)
    charts = [_fill(spans, timeline.makespan_us, num_columns) for spans in _busy_spans(timeline)]
    several = [len(timeline.plan.placement.stages_on(rank)) > 1 for rank in range(timeline.num_ranks)]
    rows = [_row(columns, stages, color) for columns, stages in zip(charts, several, strict=True)]
    rows = [_axis(timeline.makespan_us, num_columns), *rows]

    lines = [*_flow(_summary(timeline), " · ", width), ""]
    if beside:
        lines += [f"{name}{row}  {entry}" for name, row, entry in zip(names, rows, table, strict=True)]
    else:
        lines += [name + row for name, row in zip(names, rows, strict=True)]
        lines += ["", *(f"{name} {entry}" for name, entry in zip(names, table, strict=True))]
    return "\n".join([*lines, "", *_legend(timeline, charts, width, color)])


def _summary(timeline: Timeline) -> list[str]:
    return [
        count_text(timeline.num_ranks, "rank"),
        count_text(timeline.plan.num_microbatches, "micro-batch", "es"),
        f"makespan {time_text(timeline.makespan_us)}",
        f"bubble {timeline.bubble_fraction:.1%}",
        f"span {time_text(timeline.span_us)}",
    ]


def _legend(timeline: Timeline, charts: Iterable[Iterable[Work | None]], width: int, color: bool) -> list[str]:
    entries = {f"{key[0]}{LOOKS[key].fill} {LOOKS[key].word}": key for key in shown(timeline)}
    unseen = sum(map(len, timeline.plan.orders)) - sum(isinstance(w, Op) for columns in charts for w in set(columns))
    told = [f"{count_text(unseen, 'op')} unseen"] if unseen else []
    lines = _flow([*entries, f"{_IDLE} idle", *told], "   ", width)
    if color:
        for entry, key in entries.items():
            lines = [line.replace(entry, _paint(entry[:2], key) + entry[2:]) for line in lines]
    return lines


def _flow(parts: Iterable[str], separator: str, width: int) -> list[str]:
    """Parts side by side, in as many lines as they need."""
    lines = [""]
    for part in parts:
        longer = lines[-1] + separator + part if lines[-1] else part
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(part[:width])
    return lines


def _table(timeline: Timeline, width: int) -> list[str]:
    """A head and one entry a rank, of equal length: bubble, and peak memory and limit where there are any."""
    makespan = timeline.makespan_us or 1
    columns = [["bubble", *(f"{idle / makespan:.1%}" for idle in timeline.idle_us)]]
    if any(timeline.peak_memory_bytes):
        columns.append(["peak", *map(size_text, timeline.peak_memory_bytes)])
        limits = timeline.plan.placement.cluster.limit_bytes
        if any(limit is not None for limit in limits):
            columns.append(["limit", *("-" if limit is None else size_text(limit) for limit in limits)])
    lines = [""] * (timeline.num_ranks + 1)
    for column in columns:
        longest = max(map(len, column))
        wider = [
            f"{line}  {cell:>{longest}}" if line else f"{cell:>{longest}}"
            for line, cell in zip(lines, column, strict=True)
        ]
        if len(wider[0]) <= width:
            lines = wider
    return lines


# --- the chart --------------------------------------------------------------------------------------------------------


def _axis(makespan_us: int, num_columns: int) -> str:
    """A tick and its time at the column in which it falls; the first one tells the unit."""
    unit_us, unit = time_unit(makespan_us)
    steps = (digit * 10**power for power in range(20) for digit in (1, 2, 5))
    step = next(step for step in steps if step * num_columns >= _TICK * makespan_us)
    line = f"|0 {unit}"
    for time in range(step, makespan_us, step):
        tick = f"|{time / unit_us:g}"
        column = time * num_columns // makespan_us
        if column + len(tick) <= num_columns:
            line = line.ljust(column) + tick
    return line.ljust(num_columns)


def _row(columns: Sequence[Work | None], several_stages: bool, color: bool) -> str:
    """Columns with the same work become one stretch: its name, or its kind if that is too long, and filling."""
    stretches = [(work, len(list(run))) for work, run in groupby(columns)]
    # Stages are told if that is possible for most ops. Ops told with them (2F0) need filling between them.
    room = [length > len(str(work)) for work, length in stretches if isinstance(work, Op)]
    with_stages = several_stages and 2 * sum(room) > len(room)
    row = ""
    for work, length in stretches:
        cells = _IDLE * length if work is None else _cells(work, length, with_stages)
        row += _paint(cells, None if work is None else key_of(work)) if color else cells
    return row


def _cells(work: Work, length: int, with_stage: bool) -> str:
    key = key_of(work)
    name = key if not isinstance(work, Op) else str(work) if with_stage else f"{key}{work.microbatch}"
    return (name if len(name) + with_stage <= length else key[0]).ljust(length, LOOKS[key].fill)


def _fill(spans: Sequence[Span], makespan_us: int, num_columns: int) -> list[Work | None]:
    """For each column the work that fills most of it, None where most is idle.

    Kinds compete, not ops: among many short ops the kind that takes most of the time is seen, by its longest op.
    """
    # In units of 1 / num_columns µs a column is makespan_us wide, so that everything stays a whole number.
    columns: list[dict[str, list[tuple[int, Work]]]] = [{} for _ in range(num_columns)]
    for span in spans:
        start, end = span.start_us * num_columns, span.end_us * num_columns
        for i in range(start // makespan_us, -(-end // makespan_us)) if start < end else ():
            part = min(end, (i + 1) * makespan_us) - max(start, i * makespan_us)
            columns[i].setdefault(key_of(span.work), []).append((part, span.work))
    filled: list[Work | None] = []
    for parts in columns:
        totals = {key: sum(part for part, _ in works) for key, works in parts.items()}
        idle = makespan_us - sum(totals.values())
        most = max(totals, key=totals.__getitem__, default=None)
        if most is None or totals[most] < idle:
            filled.append(None)
        else:
            filled.append(max(parts[most], key=itemgetter(0))[1])
    return filled


def _busy_spans(timeline: Timeline) -> list[list[Span]]:
    """What each rank does, nothing beside anything else: of what ends the step, only what no op runs beside."""
    spans: list[list[Span]] = [[] for _ in range(timeline.num_ranks)]
    for span in timeline.op_spans():
        spans[span.rank].append(span)
    for span in timeline.step_end_spans():
        spans[span.rank] += _gaps(span, spans[span.rank])
    return spans


def _gaps(span: Span, others: Iterable[Span]) -> list[Span]:
    """The pieces of `span` in which there is none of the others."""
    pieces, start = [], span.start_us
    for other in sorted(others, key=attrgetter("start_us")):
        if start < min(other.start_us, span.end_us):
            pieces.append(span._replace(start_us=start, end_us=min(other.start_us, span.end_us)))
        start = max(start, other.end_us)
    if start < span.end_us:
        pieces.append(span._replace(start_us=start))
    return pieces


def _paint(cells: str, key: str | None) -> str:
    """Black on the colour of a kind; idle cells are dim."""
    return f"\x1b[{f'30;48;5;{LOOKS[key].terminal_color}' if key else '2'}m{cells}\x1b[0m"
