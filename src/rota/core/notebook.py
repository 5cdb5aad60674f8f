"""Small static pictures for notebooks: HTML that needs no script, no file and no library.

A plan or timeline has one row per rank and one bar per op.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

from rota.core.units import time_text

#: Okabe and Ito's palette, which colour-blind people can tell apart; F and B differ in lightness too.
COLORS = {
    "F": "#0072B2",
    "B": "#E69F00",
    "I": "#D55E00",
    "W": "#009E73",
    "R": "#56B4E9",
    "reduce": "#CC79A7",
    "optimizer": "#666666",
}

MOST_BARS = 3_000
_GAP_OPACITY = 0.35
_WIDTH, _ROW, _GAP, _LABEL, _AXIS = 900.0, 18, 4, 60, 16
_NUM_TICKS = 8  # at most
_TEXT_WIDTH = 6.5  # of one character, in the picture's units
_STYLE = "font:13px system-ui,sans-serif;line-height:1.5"

Columns = Sequence[Sequence[int]]


class Gap(NamedTuple):
    """Idle time of a rank, with the name and the color of its cause."""

    start_us: int
    end_us: int
    cause: str
    color: str


class Bar(NamedTuple):
    """Work of a rank from `start_us` to `end_us`; `kind` is a key of COLORS, `opacity` is from 0 to 1."""

    start_us: int
    end_us: int
    kind: str
    label: str
    note: str
    opacity: float = 1.0


def op_bars(orders: Sequence[Sequence[tuple[int, str, int]]], starts_us: Columns, ends_us: Columns) -> list[list[Bar]]:
    """Bars for the ops (stage, kind, micro-batch) of each rank; later stages of a rank are paler."""
    rows = []
    for order, starts, ends in zip(orders, starts_us, ends_us, strict=True):
        stages = sorted({op[0] for op in order})
        white = white_shares(stages)
        row = []
        for op, start, end in zip(order, starts, ends, strict=True):
            row.append(Bar(start, end, str(op[1]), str(op[2]), str(op), 1 - white[op[0]]))
        rows.append(row)
    return rows


def white_shares(stages: Sequence[int]) -> dict[int, float]:
    """How pale the ops of each of a rank's stages are, from 0 for the first to 0.5 for the last."""
    return {stage: 0.5 * i / max(1, len(stages) - 1) for i, stage in enumerate(stages)}


def document(*parts: str) -> str:
    """Parts of HTML, one below the other."""
    return f'<div style="{_STYLE}">{"".join(parts)}</div>'


def heading(name: str, facts: Iterable[str]) -> str:
    """A name and facts, in one line."""
    return f"<div><b>{escape(name)}</b> · {escape(' · '.join(facts))}</div>"


def preformatted(text: str) -> str:
    """Text in a fixed-width font."""
    return f'<pre style="margin:4px 0;line-height:1.3">{escape(text)}</pre>'


def chart(rows: Sequence[Sequence[Bar]], until_us: int, gaps: Sequence[Sequence[Gap]] = ()) -> str:
    """One row per rank, from 0 to `until_us`, with an axis and a legend; `gaps` are the ranks' idle intervals.

    With more bars than `MOST_BARS`, a line that says how to draw them.
    """
    if (num_bars := sum(map(len, rows))) > MOST_BARS:
        return f"<div>{num_bars:,} ops are too many for a notebook: draw them by rota.drawing.save(…, 'x.html')</div>"
    parts = []
    for rank, row in enumerate(rows):
        top = rank * (_ROW + _GAP)
        parts.append(f'<text x="0" y="{top + 13}">rank {rank}</text>')
        parts.append(f'<rect x="{_LABEL}" y="{top}" width="{_WIDTH:g}" height="{_ROW}" opacity="0.08"/>')
        for start, end, cause, color in gaps[rank] if gaps else ():
            gap = Bar(start, end, cause, "", f"idle, {cause}", _GAP_OPACITY)
            parts.append(_bar(gap, color, top, until_us or 1))
        parts += [_bar(bar, COLORS[bar.kind], top, until_us or 1) for bar in row]
    height = len(rows) * (_ROW + _GAP)
    kinds = {bar.kind for row in rows for bar in row}
    keys = "".join(_key(kind, color) for kind, color in COLORS.items() if kind in kinds)
    causes = {gap.cause: gap.color for row in gaps for gap in row}
    if causes:
        keys += "</div><div>idle: " + "".join(_key(*cause, _GAP_OPACITY) for cause in sorted(causes.items()))
    width = f"{_WIDTH + _LABEL:g}"
    return (
        f'<svg viewBox="0 0 {width} {height + _AXIS}" width="100%" style="max-width:{width}px" role="img" '
        f'aria-label="{len(rows)} ranks over {time_text(until_us)}" fill="currentColor" font-size="11">'
        f"{''.join(parts)}{_axis(height, until_us or 1)}</svg><div>{keys}</div>"
    )


def _key(word: str, color: str, opacity: float = 1.0) -> str:
    """A word of the legend."""
    style = f"color:{color}" + (f";opacity:{opacity}" if opacity < 1 else "")
    return f'<span style="margin-right:12px"><span style="{style}">■</span> {escape(word)}</span>'


def _bar(bar: Bar, color: str, top: int, until_us: int) -> str:
    """A bar, and its label if there is room."""
    start, end, kind, label, note, opacity = bar
    left, width = _LABEL + start / until_us * _WIDTH, (end - start) / until_us * _WIDTH
    if width <= 0:
        return ""
    fill = f'fill="{color}"' + (f' opacity="{opacity:.2f}"' if opacity < 1 else "")
    box = (
        f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{_ROW}" {fill}>'
        f"<title>{escape(note)}: {start:,} to {end:,} µs</title></rect>"
    )
    if not label or width <= _TEXT_WIDTH * (len(label) + 1):
        return box
    at = f'x="{left + width / 2:.2f}" y="{top + 13}" text-anchor="middle" pointer-events="none"'
    return f'{box}<text {at} fill="{"#000" if kind in "BR" or opacity < 1 else "#fff"}">{escape(label)}</text>'


def _axis(top: int, until_us: int) -> str:
    """Times below the rows, at 1, 2 or 5 times a power of ten µs."""
    steps = (digit * 10**power for power in range(20) for digit in (1, 2, 5))
    step = next(step for step in steps if step * _NUM_TICKS >= until_us)
    return "".join(
        f'<text x="{_LABEL + time / until_us * _WIDTH:.2f}" y="{top + 12}" opacity="0.7" '
        f'text-anchor="{"start" if time == 0 else "middle"}">{time_text(time) if time else "0"}</text>'
        for time in range(0, until_us - step // 4, step)
    )
