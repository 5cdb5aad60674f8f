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


def save_frontier(points: Sequence[tuple[int, float, float]], path: str | os.PathLike[str]) -> None:
    """Points (memory limit in bytes, µs a micro-batch, proven lower bound in µs) into a PNG, SVG or PDF file.

    Raises RotaError where Matplotlib is missing or the suffix is another.
    """
    save_drawing(lambda ax: draw_frontier(points, ax), (8.0, 4.5), path)


def draw_frontier(points: Sequence[tuple[int, float, float]], ax: Axes) -> None:
    """As stairs: between two points memory buys nothing."""
    limits, found, bounds = zip(*points, strict=True)
    length, unit = time_unit(round(max(found)))
    size, size_unit = next((u for u in SIZE_UNITS if limits[-1] >= u[0]), SIZE_UNITS[-1])
    x = [limit / size for limit in limits]
    x = [*x, x[-1] + (0.08 * (x[-1] - x[0]) or 1)]
    ax.step(x, [us / length for us in (*found, found[-1])], where="post", color=_FOUND, label="found")
    ax.plot(x[:-1], [us / length for us in found], "o", color=_FOUND, markersize=4)
    ax.step(x, [us / length for us in (*bounds, bounds[-1])], where="post", color=_BOUND, label="no plan is below")
    ax.set_xlabel(f"memory limit of a rank ({size_unit})")
    ax.set_ylabel(f"time a micro-batch ({unit})")
    ax.set_ylim(bottom=0)
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
