"""Writes docs/pictures/device_order.png, what docs/accelerators.md shows: `make docs`."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Rectangle

from rota import Cluster, Costs, Kind, Op, place
from rota.core.programs.device_steps import DeviceProgram, Step, device_programs
from rota.drawing.looks import LOOKS
from rota.schedules import one_f_one_b

PICTURE = Path(__file__).parent / "pictures" / "device_order.png"
ROWS = {
    (0, "compute"): (0.0, "rank 0   compute (your stream)"),
    (0, "channel 0→1"): (1.0, "channel 0→1"),
    (0, "channel 1→0"): (2.0, "channel 1→0"),
    (1, "channel 0→1"): (3.6, "rank 1   channel 0→1"),
    (1, "channel 1→0"): (4.6, "channel 1→0"),
    (1, "compute"): (5.6, "compute (your stream)"),
}
MESSAGE, EVENT, MEETING = "#DDD9D0", "#6B6F76", "#B5503C"
HEIGHT, WIDTH = 0.62, 0.78


def main() -> None:
    plan = one_f_one_b(place(Costs.uniform(2, 10, 20), Cluster.uniform(2, latency_us=5)), 3)
    column = {action: x for x, action in enumerate(plan.wire_order)}
    figure, axes = plt.subplots(figsize=(12, 4.9), dpi=150)
    for program in device_programs(plan, replicas=False):
        places = places_of(program, column)
        for i, step in enumerate(program.steps):
            draw_step(axes, step, *places[i])
            for before in step.waits:
                if step.has_kernel:
                    draw_event(axes, places[before], places[i], program.steps[before])
    for action, x in column.items():
        if not isinstance(action, Op):
            rows = [ROWS[rank, f"channel {action.sender}→{action.receiver}"][0] for rank in (0, 1)]
            axes.plot([x, x], [rows[0] + HEIGHT / 2, rows[1] - HEIGHT / 2], color=MEETING, lw=2.2, zorder=1)
    for y, name in ROWS.values():
        axes.axhline(y, color="#E6E4E0", lw=1, zorder=0)
        axes.text(-0.8, y, name, ha="right", va="center", fontsize=9.5)
    legend(axes, len(column))
    axes.set_xlim(-0.7, len(column) - 0.3)
    axes.set_ylim(7.1, -0.7)
    axes.axis("off")
    figure.savefig(PICTURE, bbox_inches="tight", pad_inches=0.12, facecolor="white")


def places_of(program: DeviceProgram, column: dict[object, int]) -> list[tuple[float, float]]:
    """Where each step is: kernels in the column of their place in the global order, allocations before the next one."""
    places: list[tuple[float, float]] = []
    following = 0.0
    for step in reversed(program.steps):
        if step.has_kernel:
            following = float(column[step.subject])
        places.append((following if step.has_kernel else following - 0.5, ROWS[program.rank, step.stream][0]))
    return places[::-1]


def draw_step(axes: Axes, step: Step, x: float, y: float) -> None:
    if step.what == "allocate":
        axes.plot(x, y, "o", color="white", markeredgecolor=EVENT, markersize=5.5, zorder=3)
    elif step.what in ("run", "send", "receive"):
        is_op = isinstance(step.subject, Op)
        color = LOOKS[step.subject.kind].color if isinstance(step.subject, Op) else MESSAGE
        ink = "white" if color == LOOKS[Kind.F].color else "black"
        axes.add_patch(
            Rectangle(
                (x - WIDTH / 2, y - HEIGHT / 2), WIDTH, HEIGHT, facecolor=color, edgecolor=EVENT, lw=0.7, zorder=2
            )
        )
        look = {"color": ink, "fontsize": 9 if is_op else 6.5}
        axes.text(x, y, str(step.subject) if is_op else step.what, ha="center", va="center", zorder=4, **look)


def draw_event(axes: Axes, source: tuple[float, float], target: tuple[float, float], before: Step) -> None:
    start = (source[0] + (WIDTH / 2 if before.has_kernel else 0.07), source[1])
    end = (target[0] - WIDTH / 2, target[1])
    style, depth = ("solid", 1.5) if before.has_kernel else ((0, (2, 2)), 3)  # an allocation is beside an op's box
    arrow = FancyArrowPatch(
        start, end, arrowstyle="-|>", mutation_scale=9, color=EVENT, lw=1, ls=style, shrinkA=0, shrinkB=0, zorder=depth
    )
    axes.add_patch(arrow)


def legend(axes: Axes, right: int) -> None:
    y = 6.75
    axes.annotate("", (1.1, y), (0, y), arrowprops={"arrowstyle": "-|>", "color": EVENT})
    axes.text(1.3, y, "event: waits for", va="center", fontsize=9)
    axes.plot([4.4, 4.4], [y - 0.25, y + 0.25], color=MEETING, lw=2.2)
    axes.text(4.7, y, "a send and its receive meet", va="center", fontsize=9)
    axes.plot(9.2, y, "o", color="white", markeredgecolor=EVENT, markersize=5.5)
    axes.text(9.5, y, "buffer allocated", va="center", fontsize=9)
    axes.text(right - 0.6, y, "order of enqueuing, on all ranks  ⟶", va="center", ha="right", fontsize=9)


if __name__ == "__main__":
    main()
