"""The frontier of memory against time as a figure. Matplotlib is imported only when something is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rota.core.units import SIZE_UNITS, time_unit
from rota.drawing.saving import save_figure

if TYPE_CHECKING:
    import os

    from matplotlib.axes import Axes

_FOUND, _BOUND = "#0072B2", "#999999"


def save_frontier(
    points: Sequence[tuple[int, float]], bounds: Sequence[tuple[int, float]], path: str | os.PathLike[str]
) -> None:
    """Save the figure of `draw_frontier` to a file.

    Args:
        points: What was found: (memory limit in bytes, µs per micro-batch), by rising limit.
        bounds: Proven lower bounds, in the same form.
        path: A file that ends in .png, .svg or .pdf.

    Raises:
        RotaError: If Matplotlib is missing, or the suffix is another one.
    """
    save_figure(lambda figure: draw_frontier(points, bounds, figure.add_subplot()), (8.0, 4.5), path)


def draw_frontier(points: Sequence[tuple[int, float]], bounds: Sequence[tuple[int, float]], ax: Axes) -> None:
    """Draw time per micro-batch against the memory limit, as steps: what fits into less memory fits into more.

    Args:
        points: What was found: (memory limit in bytes, µs per micro-batch), by rising limit.
        bounds: Proven lower bounds, in the same form.
        ax: The axes to draw on.
    """
    unit_us, time_name = time_unit(round(max(us for _, us in points)))
    largest_bytes = max(limit for limit, _ in [*points, *bounds])
    unit_bytes, size_name = next((unit for unit in SIZE_UNITS if largest_bytes >= unit[0]), SIZE_UNITS[-1])
    right_bytes = largest_bytes * 1.08  # how far the last step extends
    for curve, color, label in ((points, _FOUND, "found"), (bounds, _BOUND, "lower bound of the steady state")):
        x = [limit / unit_bytes for limit, _ in curve] + [right_bytes / unit_bytes]
        y = [us / unit_us for _, us in curve] + [curve[-1][1] / unit_us]
        ax.step(x, y, where="post", color=color, label=label)
    x, y = [limit / unit_bytes for limit, _ in points], [us / unit_us for _, us in points]
    ax.plot(x, y, "o", color=_FOUND, markersize=4)
    ax.set_xlabel(f"memory limit per rank ({size_name})")
    ax.set_ylabel(f"time per micro-batch ({time_name})")
    ax.set_ylim(bottom=0)
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
