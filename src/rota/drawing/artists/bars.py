"""The bars of a figure: ops, what is idle behind them, and the ends of the step."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb

from rota.drawing.artists.lanes import Lanes
from rota.drawing.artists.numbers import OpNumbers
from rota.drawing.artists.rows import Array, Rows, boxes
from rota.drawing.looks import LOOKS, key_of
from rota.timeline import Timeline

_IDLE_COLOR = "#EFEEEB"
_STEP_END = 0.62  # of a bar's height: from there down, as a reduction may run beside ops, whose numbers stay readable
_MARK = 0.11  # of a bar's height
_MARK_DARKNESS = 0.38
_LIGHTEST = 0.5  # how much white the last of a rank's stages gets
_DARK = 0.55  # luminance below which white is easier to read than black
_MOST_BOXES = 5_000  # beyond that many ops, or so many on one rank, bars are pixels, in SVG and PDF too
_MOST_ON_A_RANK = 200


class Ops(NamedTuple):
    """All ops, rank by rank in execution order, as columns; `colors` (n, 3)."""

    left: Array
    right: Array
    ranks: Array
    colors: Array


def op_columns(timeline: Timeline) -> Ops:
    left = np.array([time for times in timeline.starts_us for time in times], float)
    right = np.array([time for times in timeline.ends_us for time in times], float)
    lengths = [len(order) for order in timeline.plan.orders]
    return Ops(left, right, np.repeat(np.arange(timeline.num_ranks, dtype=float), lengths), _op_colors(timeline))


def op_artist(ops: Ops, rows: Rows) -> PolyCollection | Lanes:
    """The bars of all ops: boxes, or pixels where they are many."""
    if _are_many(ops):
        return Lanes(ops.left, ops.right, ops.ranks, ops.colors, rows)
    return _bars(ops.left, ops.right, ops.ranks + rows.bar_top, ops.ranks + rows.bar_bottom, ops.colors, seams=True)


def _are_many(ops: Ops) -> bool:
    on_a_rank = np.bincount(ops.ranks.astype(int), minlength=1).max(initial=0)
    return len(ops.left) > _MOST_BOXES or bool(on_a_rank > _MOST_ON_A_RANK)


def number_artist(timeline: Timeline, ops: Ops, rows: Rows) -> OpNumbers:
    """The ops' micro-batches."""
    dark = ops.colors @ np.array((0.299, 0.587, 0.114)) < _DARK
    microbatches = [str(op.microbatch) for order in timeline.plan.orders for op in order]
    return OpNumbers(ops.left, ops.right, ops.ranks, rows, microbatches, dark)


def mark_artist(timeline: Timeline, ops: Ops, rows: Rows) -> PolyCollection | None:
    """Dark lines along bars, by kind: a second cue beside the colour. None where bars are pixels."""
    if _are_many(ops):
        return None
    marks = [LOOKS[op.kind].marks for order in timeline.plan.orders for op in order]
    high = _MARK * (rows.bar_bottom - rows.bar_top)
    parts = []
    for place, top in (("top", rows.bar_top), ("bottom", rows.bar_bottom - high)):
        here = np.array([place in each for each in marks], bool)
        left, right, ranks = ops.left[here], ops.right[here], ops.ranks[here]
        parts.append(boxes(left, right, ranks + top, ranks + top + high))
    corners: Any = np.concatenate(parts)
    marked = PolyCollection(corners, facecolors=(0, 0, 0, _MARK_DARKNESS), edgecolors="none")
    marked.set_antialiased(False)
    marked.set_zorder(1.2)
    return marked


def row_artist(timeline: Timeline, rows: Rows) -> PolyCollection:
    """A pale band a rank, which shows where it is idle."""
    ranks = np.arange(timeline.num_ranks, dtype=float)
    left, right = np.zeros_like(ranks), np.full_like(ranks, timeline.makespan_us)
    band = _bars(left, right, ranks + rows.bar_top, ranks + rows.bar_bottom, _IDLE_COLOR, seams=False)
    band.set_zorder(0.9)
    return band


def step_end_artist(timeline: Timeline, rows: Rows) -> PolyCollection:
    """Reductions and optimizer steps, as strips along the lower edge of their bars."""
    spans = list(timeline.step_end_spans())
    left, right = np.array([(span.start_us, span.end_us) for span in spans], float).reshape(-1, 2).T
    ranks = np.array([span.rank for span in spans], float)
    colors = [to_rgb(LOOKS[key_of(span.work)].color) for span in spans]
    top = rows.bar_top + _STEP_END * (rows.bar_bottom - rows.bar_top)
    strips = _bars(left, right, ranks + top, ranks + rows.bar_bottom, colors, seams=True)
    strips.set_zorder(1.5)
    return strips


def _bars(left: Array, right: Array, top: Array, bottom: Array, colors: Any, seams: bool) -> PolyCollection:
    edges = "white" if seams else "none"
    corners = boxes(left, right, top, bottom)
    return PolyCollection(corners, facecolors=colors, edgecolors=edges, linewidths=0.6, antialiaseds=seams)


def _op_colors(timeline: Timeline) -> Array:
    """The colour of every op's kind, the lighter the higher its stage among those of its rank: (n, 3)."""
    colors = []
    for rank, order in enumerate(timeline.plan.orders):
        stages = timeline.plan.placement.stages_on(rank)
        white = {stage: _LIGHTEST * i / max(1, len(stages) - 1) for i, stage in enumerate(stages)}
        mixed = {
            (stage, kind): tuple(part + (1 - part) * white[stage] for part in to_rgb(LOOKS[kind].color))
            for stage, kind in {(op.stage, op.kind) for op in order}
        }
        colors += [mixed[stage, kind] for stage, kind, _ in order]
    return np.array(colors, float).reshape(-1, 3)
