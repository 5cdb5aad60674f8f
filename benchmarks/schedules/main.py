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
    """For each family and each column (costs x sizes): bubble, and activations as a share of 1F1B's."""
    results: dict[str, list[tuple[float, float] | None]] = {}
    for forward, inputs, weight, transfer in COSTS.values():
        for num_ranks, num_microbatches in SIZES:
            costs = Costs.uniform(num_ranks, forward, inputs, weight, activation_bytes=4096)
            cluster = Cluster.uniform(num_ranks, latency_us=transfer)
            rows = {row.name: row for row in compare_schedules(costs, cluster, num_microbatches)}
            one_f_one_b = rows["1f1b"].activation_bytes or 1
            for name in (family.name for family in FAMILIES if family.name in rows):
                bubble, activation_bytes = rows[name].bubble_fraction, rows[name].activation_bytes
                known = bubble is not None and activation_bytes is not None
                results.setdefault(name, []).append((bubble, activation_bytes / one_f_one_b) if known else None)
    return results


def to_table(results: dict[str, list[tuple[float, float] | None]]) -> str:
    columns = [f"{costs} {p}×{m}" for costs in COSTS for p, m in SIZES]
    lines = ["| schedule | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, cells in results.items():
        texts = ["-" if cell is None else f"{cell[0]:.1%} ({cell[1]:.2g}×)" for cell in cells]
        lines.append(f"| {name} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


def draw(results: dict[str, list[tuple[float, float] | None]], path: Path) -> None:
    """A cell a family and column: coloured by bubble; in it the bubble in %, below it the activations, 1F1B = 1."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Best on average first; families that are not defined everywhere by what there is.
    mean = {name: sum(cell[0] for cell in cells if cell) / sum(map(bool, cells)) for name, cells in results.items()}
    names = sorted(results, key=mean.__getitem__)
    figure = Figure(figsize=(13, 9), layout="constrained")
    FigureCanvasAgg(figure)
    ax = figure.subplots()
    bubbles = [[100 * cell[0] if cell else float("nan") for cell in results[name]] for name in names]
    image = ax.imshow(bubbles, cmap="cividis_r", aspect="auto", vmin=0)
    for row, name in enumerate(names):
        for column, cell in enumerate(results[name]):
            dark = cell is not None and 100 * cell[0] > 17
            text = f"{100 * cell[0]:.1f}\n{cell[1]:.2g}×" if cell else "–"
            ax.text(column, row, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")
    ax.set_yticks(range(len(names)), names)
    ax.set_xticks(range(len(COSTS) * len(SIZES)), [f"{p}×{m}" for _ in COSTS for p, m in SIZES])
    ax.tick_params(length=0)
    ax.xaxis.tick_top()
    for panel, costs in enumerate(COSTS):
        ax.axvline(panel * len(SIZES) - 0.5, color="white", lw=4)
        middle = (panel + 0.5) * len(SIZES) - 0.5
        ax.annotate(
            costs, (middle, 1), (0, 22), xycoords=("data", "axes fraction"), textcoords="offset points", ha="center"
        )
    figure.colorbar(image, label="bubble, % of makespan × ranks", shrink=0.5)
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
