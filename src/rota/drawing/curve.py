"""Memory against time as a curve. Matplotlib is imported when something is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rota.drawing.saving import save_drawing
from rota.units import SIZE_UNITS, time_unit

if TYPE_CHECKING:
    import os

    from matplotlib.axes import Axes

_FOUND, _BOUND = "#0072B2", "#999999"


def save_frontier(
    points: Sequence[tuple[int, float]], bounds: Sequence[tuple[int, float]], path: str | os.PathLike[str]
) -> None:
    """Found and proven (memory limit in bytes, µs a micro-batch) into a PNG, SVG or PDF file.

    Raises RotaError where Matplotlib is missing or the suffix is another.
    """
    save_drawing(lambda figure: draw_frontier(points, bounds, figure.add_subplot()), (8.0, 4.5), path)


def draw_frontier(points: Sequence[tuple[int, float]], bounds: Sequence[tuple[int, float]], ax: Axes) -> None:
    """As stairs: what fits into less memory fits into more."""
    length, unit = time_unit(round(max(us for _, us in points)))
    largest = max(limit for limit, _ in [*points, *bounds])
    size, size_unit = next((u for u in SIZE_UNITS if largest >= u[0]), SIZE_UNITS[-1])
    further = largest * 1.08
    for curve, color, label in ((points, _FOUND, "found"), (bounds, _BOUND, "no steady state is below")):
        x = [limit / size for limit, _ in curve] + [further / size]
        y = [us / length for _, us in curve] + [curve[-1][1] / length]
        ax.step(x, y, where="post", color=color, label=label)
    ax.plot([limit / size for limit, _ in points], [us / length for _, us in points], "o", color=_FOUND, markersize=4)
    ax.set_xlabel(f"memory limit of a rank ({size_unit})")
    ax.set_ylabel(f"time a micro-batch ({unit})")
    ax.set_ylim(bottom=0)
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
