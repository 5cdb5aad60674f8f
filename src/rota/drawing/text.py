"""A timeline as text: a one-line summary, and a chart for the terminal with one line per rank.

       |0 µs   |200    |400    |600    |800   bubble  peak
rank 0 F0──F1──········B0═══════····B1══════   33.3%  2 GB
rank 1 ····F0──B0══════F1───B1══════········   33.3%  1 GB
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter, itemgetter
from statistics import median
from typing import TypeAlias

from rota.core.errors import RotaError
from rota.core.plan import Plan
from rota.core.simulation import timeline_of
from rota.core.tasks import Op
from rota.core.text import count_text, size_text, time_text, time_unit
from rota.core.timeline import Span, Timeline
from rota.drawing.looks import LOOKS, Work, look_key, look_keys, utilisation

_MIN_WIDTH = 20
_MIN_CHART = 32  # columns; the table beside a narrower chart has fewer columns
_MIN_TICK = 8  # columns from one tick to the next
_MOST_UNSEEN = 0.25  # of the ops, in a chart of a whole step that tells enough
_LEGIBLE = 4  # columns that most names need
_LEAST = 2  # columns per op, on average, in a chart of a whole step: with fewer, kinds and numbers run together
_IDLE = "·"

_Busy: TypeAlias = Sequence[Sequence[Span]]
_Charts: TypeAlias = Sequence[Sequence[Work | None]]


def to_text(timeline: Timeline | Plan, width: int = 80, color: bool = False, *, may_cut: bool = False) -> str:
    """Return a chart with time from left to right; every column shows what fills most of its time.

    An op shows as much of its name as fits: stage, kind and micro-batch (2F0), without the stage (F0), or its kind.
    If most ops of a rank are too narrow for a micro-batch, these show only the pattern of their kind. Ops that are too
    narrow for a column are counted in the legend.

    Args:
        timeline: What to draw. A plan is simulated first.
        width: The number of columns that no line exceeds, 20 or more.
        color: Whether to add ANSI colours (256 colours).
        may_cut: Whether to draw only the beginning of a step if more than a quarter of its ops would be hidden or there
            are fewer than two columns per op, so wide that most have their names. The table beside the chart is about
            the whole step.

    Returns:
        Lines of text, without a newline at the end.

    Raises:
        RotaError: If the width is too small.
    """
    if width < _MIN_WIDTH:
        raise RotaError(f"a width of {width} columns is too small for a chart: give {_MIN_WIDTH} or more")
    timeline = timeline_of(timeline)
    digits = len(str(timeline.num_ranks - 1))
    names = [" " * (6 + digits), *(f"rank {rank:>{digits}} " for rank in range(timeline.num_ranks))]
    table = _table(timeline, width - len(names[0]) - _MIN_CHART)
    num_columns = width - len(names[0]) - len(table[0])
    busy, end_us = _busy_spans(timeline), timeline.makespan_us
    charts = [_fill(spans, end_us, num_columns) for spans in busy]
    num_ops, all_columns = timeline.plan.num_ops, timeline.num_ranks * num_columns
    if may_cut and (all_columns < _LEAST * num_ops or _MOST_UNSEEN * num_ops < _num_unseen(busy, charts)):
        end_us = _legible_us(busy, num_columns, end_us)
        busy = [[s._replace(end_us=min(s.end_us, end_us)) for s in spans if s.start_us < end_us] for spans in busy]
        charts = [_fill(spans, end_us, num_columns) for spans in busy]
    stages = map(timeline.plan.placement.stages_on, range(timeline.num_ranks))
    rows = [_axis(end_us, num_columns), *(_row(*work, color) for work in zip(charts, stages, strict=True))]

    ranks, facts = count_text(timeline.num_ranks, "rank"), summary(timeline).split(" · ")
    header = [ranks, timeline.plan.step_text, *facts, f"span {time_text(timeline.span_us)}"]
    lines = [*_flow(header, " · ", width), ""]
    if end_us < timeline.makespan_us:
        drawn = f"drawn: the first {time_text(end_us)} of {time_text(timeline.makespan_us)}"
        lines[-1:] = [*_flow([drawn, "all of it: rota show PLAN -o plan.html"], "; ", width), ""]
    lines += [name + row + entry for name, row, entry in zip(names, rows, table, strict=True)]
    if links := [f"shared link {name}: {share:.1%} busy" for name, share in utilisation(timeline) if share]:
        lines += ["", *_flow(links, " · ", width)]
    return "\n".join([*lines, "", *_legend(timeline, busy, charts, width, color)])


def summary(timeline: Timeline, bound_us: float | None = None) -> str:
    """Return one line for titles: "makespan 3.3 ms · bubble 27.3% · within 2.1% of the optimum".

    `bound_us` is a proven lower bound of the makespan; without it the last part is missing.
    """
    parts = [f"makespan {time_text(timeline.makespan_us)}", f"bubble {timeline.bubble_fraction:.1%}"]
    if bound_us is not None:
        gap_us = timeline.makespan_us - bound_us
        gap = f"within {gap_us / timeline.makespan_us:.1%} of the optimum" if gap_us > 0 else "proven optimal"
        parts.append(gap)
    return " · ".join(parts)


def _legend(timeline: Timeline, busy: _Busy, charts: _Charts, width: int, color: bool) -> list[str]:
    entries = {f"{key[0]}{LOOKS[key].fill} {LOOKS[key].word}": key for key in look_keys(timeline)}
    unseen = _num_unseen(busy, charts)
    hidden = [f"{count_text(unseen, 'op')} not shown"] if unseen else []
    lines = _flow([*entries, f"{_IDLE} idle", *hidden], "   ", width)
    if color:
        for entry, key in entries.items():
            lines = [line.replace(entry, _paint(entry[:2], key) + entry[2:]) for line in lines]
    return lines


def _flow(parts: Iterable[str], separator: str, width: int) -> list[str]:
    lines = [""]
    for part in parts:
        longer = lines[-1] + separator + part if lines[-1] else part
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines.append(part[:width])
    return lines


def _table(timeline: Timeline, width: int) -> list[str]:
    """Return a header and one entry per rank, of equal length: bubble, peak memory and limit, of these what fits."""
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
        wider = [f"{line}  {cell:>{longest}}" for line, cell in zip(lines, column, strict=True)]
        if len(wider[0]) <= width:
            lines = wider
    return lines


# --- the chart --------------------------------------------------------------------------------------------------------


def _axis(makespan_us: int, num_columns: int) -> str:
    """Return ticks with their times, each at the column of its time; the first one has the unit."""
    unit_us, unit = time_unit(makespan_us)
    steps = (digit * 10**power for power in range(20) for digit in (1, 2, 5))
    step = next(step for step in steps if step * num_columns >= _MIN_TICK * makespan_us)
    line = f"|0 {unit}"
    for time in range(step, makespan_us, step):
        tick = f"|{time / unit_us:g}"
        column = time * num_columns // makespan_us
        if column + len(tick) <= num_columns:
            line = line.ljust(column) + tick
    return line.ljust(num_columns)


def _row(columns: Sequence[Work | None], stages: Sequence[int], color: bool) -> str:
    """Return one row: consecutive columns of one op show its name, then the filling.

    A name has the stage if the rank has several of them and there is room (2F0), else only the micro-batch (F0), else
    only the kind (F). Where most ops are too narrow for a name, those show the filling instead of the kind.
    """
    runs = [(work, len(list(run))) for work, run in groupby(columns)]
    fits = [length >= len(f"{work.kind}{work.microbatch}") for work, length in runs if isinstance(work, Op)]
    least = 0 if 2 * sum(fits) < len(fits) else 1  # letters of an op without room
    row, after = "", ""
    for work, length in reversed(runs):
        cells = _IDLE * length if work is None else _cells(work, length, len(stages) > 1, least, after)
        after = cells[0]
        shade = stages.index(work.stage) % 2 if isinstance(work, Op) else 0  # neighbours on this rank differ
        row = (_paint(cells, None if work is None else look_key(work), shade) if color else cells) + row
    return row


def _cells(work: Work, length: int, with_stage: bool, least: int, after: str) -> str:
    """Return `length` characters for an op, a reduction or an optimizer step, before a cell that shows `after`."""
    key = look_key(work)
    names = [key, key[0]]
    if isinstance(work, Op):
        names = [*([str(work)] if with_stage else []), f"{key}{work.microbatch}", key[:least]]
    room = length - after.isdigit()  # digits of two names need filling between them: F0─3F1
    name = next((name for name in names if len(name) <= room), names[-1])
    return name.ljust(length, LOOKS[key].fill)


def _fill(spans: Sequence[Span], makespan_us: int, num_columns: int) -> list[Work | None]:
    """Return for each column the work that fills most of it, None if most of it is idle.

    Kinds compete, not ops: of many short ops, the column shows the kind with the most time, by its longest op.
    """
    # In units of 1 / num_columns µs, a column is makespan_us wide, so that everything stays a whole number.
    columns: list[dict[str, list[tuple[int, Work]]]] = [{} for _ in range(num_columns)]
    for span in spans:
        start, end = span.start_us * num_columns, span.end_us * num_columns
        for i in range(start // makespan_us, -(-end // makespan_us)) if start < end else ():
            length = min(end, (i + 1) * makespan_us) - max(start, i * makespan_us)
            columns[i].setdefault(look_key(span.work), []).append((length, span.work))
    filled: list[Work | None] = []
    for by_key in columns:
        totals = {key: sum(length for length, _ in works) for key, works in by_key.items()}
        totals[_IDLE] = makespan_us - sum(totals.values())
        most = max(totals, key=totals.__getitem__)  # of equals the first: work, not idle time
        filled.append(None if most == _IDLE else max(by_key[most], key=itemgetter(0))[1])
    return filled


def _num_unseen(busy: _Busy, charts: _Charts) -> int:
    """Return how many ops fill most of no column."""
    shown = sum(isinstance(work, Op) for columns in charts for work in set(columns))
    return sum(isinstance(span.work, Op) and not span.work.kind.is_copy for spans in busy for span in spans) - shown


def _legible_us(busy: _Busy, num_columns: int, makespan_us: int) -> int:
    """Return how much of the step fits into the columns if an op of median length has `_LEGIBLE` of them."""
    op_us = median(span.end_us - span.start_us for spans in busy for span in spans if isinstance(span.work, Op))
    return max(1, min(round(op_us * num_columns / _LEGIBLE), makespan_us))


def _busy_spans(timeline: Timeline) -> list[list[Span]]:
    """Return what each rank does, without overlaps: of the ends of the step, only the parts beside which no op runs."""
    spans: list[list[Span]] = [[] for _ in range(timeline.num_ranks)]
    for span in timeline.op_spans():
        spans[span.rank].append(span)
    for span in timeline.step_end_spans():
        spans[span.rank] += _gaps(span, spans[span.rank])
    return spans


def _gaps(span: Span, others: Iterable[Span]) -> list[Span]:
    """Return the pieces of `span` that overlap no other span."""
    pieces, start = [], span.start_us
    for other in sorted(others, key=attrgetter("start_us")):
        if start < min(other.start_us, span.end_us):
            pieces.append(span._replace(start_us=start, end_us=min(other.start_us, span.end_us)))
        start = max(start, other.end_us)
    if start < span.end_us:
        pieces.append(span._replace(start_us=start))
    return pieces


def _paint(cells: str, key: str | None, shade: int = 0) -> str:
    """Return the cells in ANSI colours: black on a shade of the kind's colour; idle cells are dim."""
    return f"\x1b[{f'30;48;5;{LOOKS[key].terminal_colors[shade]}' if key else '2'}m{cells}\x1b[0m"
