"""Every family over sizes and costs: bubble and memory on one simulator, as one table and one picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from rota import Cluster, Costs
from rota.schedules import FAMILIES, compare_schedules

#: F, I, W of a rank and the transfer time, in µs: equal, and two of the papers' measured ones.
COSTS = {"1:1:1": (1000, 1000, 1000, 0), "GPT 1.5B": (18500, 18100, 9300, 600), "GPT 28B": (29850, 29770, 18870, 470)}
SIZES = ((4, 8), (8, 16), (8, 32), (16, 32), (16, 64))


def measure() -> dict[str, list[tuple[float, float] | None]]:
    """For each family and each column (costs x sizes) bubble fraction and activations as a share of 1F1B's."""
    names = [family.name for family in FAMILIES if family.name != "forward_only"]
    results: dict[str, list[tuple[float, float] | None]] = {name: [] for name in names}
    for forward, inputs, weight, transfer in COSTS.values():
        for num_ranks, num_microbatches in SIZES:
            costs = Costs.uniform(num_ranks, forward, inputs, weight, activation_bytes=4096)
            cluster = Cluster.uniform(num_ranks, latency_us=transfer)
            rows = {row.name: row for row in compare_schedules(costs, cluster, num_microbatches)}
            one_f_one_b = rows["1f1b"].activation_bytes or 1
            for name in names:
                row = rows[name]
                known = row.bubble_fraction is not None and row.activation_bytes is not None
                results[name].append((row.bubble_fraction, row.activation_bytes / one_f_one_b) if known else None)  # type: ignore[operator, arg-type]
    return results


def to_table(results: dict[str, list[tuple[float, float] | None]]) -> str:
    columns = [f"{costs} {p}×{m}" for costs in COSTS for p, m in SIZES]
    lines = ["| schedule | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, cells in results.items():
        texts = ["-" if cell is None else f"{cell[0]:.1%} ({cell[1]:.2g}×)" for cell in cells]
        lines.append(f"| {name} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def draw(results: dict[str, list[tuple[float, float] | None]], path: Path) -> None:
    """Bubble against memory, a panel for each costs, a mark a family (sizes joined by a line)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(COSTS), sharey=True)
    markers = "osD^v<>Pph*X8dHs"
    for panel, (costs, ax) in enumerate(zip(COSTS, axes, strict=True)):
        for i, (name, cells) in enumerate(results.items()):
            part = [cell for cell in cells[panel * len(SIZES) : (panel + 1) * len(SIZES)] if cell is not None]
            memory, bubble = [cell[1] for cell in part], [100 * cell[0] for cell in part]
            ax.plot(memory, bubble, marker=markers[i % len(markers)], color=f"C{i % 10}", alpha=0.7, lw=0.6, label=name)
        ax.set(title=costs, xlabel="activations, 1F1B = 1", xscale="log")
        ax.set_xticks([0.25, 0.5, 1, 2, 4], ["¼", "½", "1", "2", "4"])
    axes[0].set_ylabel("bubble, % of makespan × ranks")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--picture", type=Path, help="also draw it, as a PNG")
    arguments = parser.parse_args()
    results = measure()
    print(to_table(results))
    if arguments.picture:
        draw(results, arguments.picture)


if __name__ == "__main__":
    main()
