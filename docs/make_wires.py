"""Writes docs/pictures/wires.png, what docs/model.md shows: `make docs`."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from rota import Cluster, Kind, Link, Op, Placement, Plan, SharedLink, Task, Timeline, simulate
from rota.core.tasks import Edge
from rota.drawing.looks import LOOKS

PICTURE = Path(__file__).parent / "pictures" / "wires.png"
MESSAGE, GAP, SERVICE, WAITING, LINE = "#DDD9D0", "#F4F2EE", "#6B6F76", "#332288", "#6B6F76"
ROWS = {0: 0.0, 1: 1.0, "host": 2.0, 2: 3.0, 3: 4.0}  # senders above the link that they share, receivers below
HALF = 0.28
BEHIND = 0.5  # the bars, which have 1


def main() -> None:
    timeline = simulate(two_senders())
    figure, axes = plt.subplots(figsize=(12, 4.2), dpi=150)
    for rank, order in enumerate(timeline.plan.orders):
        for op, start, end in zip(order, timeline.starts_us[rank], timeline.ends_us[rank], strict=True):
            draw_op(axes, rank, op, start, end)
    for r in range(len(timeline.plan.placement.routes)):
        draw_transfer(axes, timeline, r)
    axes.set_yticks([*ROWS.values()], ["rank 0", "rank 1", "host (shared)", "rank 2", "rank 3"])
    axes.set_ylim(max(ROWS.values()) + 0.6, -0.6)
    axes.set_xlim(-1, timeline.makespan_us + 1)
    axes.set_xlabel("time (µs)")
    axes.tick_params(axis="y", length=0)
    for side in ("left", "top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(PICTURE, bbox_inches="tight")


def two_senders() -> Plan:
    """Ranks 0 and 1 send 60 bytes each to ranks 2 and 3, over a host that moves 5 bytes per µs."""
    tasks = tuple(Task(stage, Kind.F, (stage,), 16 + 2 * (stage == 1)) for stage in range(4))
    host = SharedLink("host", 5, (0, 1), (2, 3))
    cluster = Cluster((None,) * 4, Link(8, 10), shared=(host,))
    placement = Placement(tasks, (Edge(0, 2, 60), Edge(1, 3, 60)), cluster)  # two data streams
    return Plan(placement, 2, tuple((Op(stage, Kind.F, stage % 2),) for stage in range(4)))


def draw_op(axes: Axes, rank: int, op: Op, start: int, end: int) -> None:
    """An op."""
    box(axes, rank, start, end, LOOKS[op.kind].color, str(op), "white")


def draw_transfer(axes: Axes, timeline: Timeline, r: int) -> None:
    """A transfer: handed over, waiting, served, on its way."""
    route = timeline.plan.placement.routes[r]
    if not route.shared:
        return
    (handed_over,), (sent,), (arrived,) = timeline.handed_over_us(r), timeline.sent_us[r], timeline.arrived_us[r]
    from_y, to_y, link = ROWS[route.sender] + HALF, ROWS[route.receiver] - HALF, ROWS["host"]
    served = sent + route.service_us
    axes.plot([handed_over, handed_over], [from_y, link - HALF], color=LINE, linewidth=0.9, zorder=BEHIND)
    if sent > handed_over:
        axes.plot([handed_over, sent], [link - HALF] * 2, color=WAITING, linewidth=2.2, linestyle=(0, (1, 1)))
        axes.text(
            (handed_over + sent) / 2, link - HALF - 0.06, "waits", color=WAITING, ha="center", va="bottom", size=8
        )
    size = f"{route.num_bytes} bytes: {route.service_us} µs"
    box(axes, "host", sent, served, SERVICE, size, "white")
    axes.plot([served, arrived], [link + HALF, to_y], color=LINE, linewidth=0.9, zorder=BEHIND)
    if ROWS[route.receiver] == link + 1:  # elsewhere the line crosses another rank's bar
        axes.text((served + arrived) / 2 + 0.6, (link + to_y) / 2 + 0.1, "latency", color=LINE, size=8)


def box(axes: Axes, row: int | str, left: float, right: float, color: str, text: str, ink: str = "black") -> None:
    if right > left:
        y = ROWS[row]
        axes.add_patch(Rectangle((left, y - HALF), right - left, 2 * HALF, facecolor=color, edgecolor="white"))
        axes.text((left + right) / 2, y, text, color=ink, ha="center", va="center", size=8 if right - left > 4 else 6)


if __name__ == "__main__":
    main()
