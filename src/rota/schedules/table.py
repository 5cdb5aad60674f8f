"""All named schedules side by side, on the same costs."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from statistics import mean

from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.errors import PlanError, RotaError
from rota.core.simulation import check, simulate
from rota.core.text import fitted, size_text, table_lines, time_text
from rota.schedules.families import FAMILIES, Family, Sizes


@dataclass(frozen=True, slots=True)
class Row:
    """A schedule's figures; those that are unknown are None.

    Attributes:
        name: The schedule.
        stages_per_rank: Stages per rank.
        makespan_us: Time of a step.
        span_us: Longest busy window of a rank.
        bubble_fraction: Idle share of makespan × ranks.
        activation_bytes: The most that any rank holds above its static bytes.
        formula: The family's formula for the bubble.
        formula_us: Its value for these sizes and the ranks' mean costs.
        bubble_us: The idle time of the rank that idles least, as simulated.
        fits: Whether it is within every rank's limit.
        problem: Why there are no figures, or why it does not fit.
    """

    name: str
    stages_per_rank: int
    makespan_us: int | None = None
    span_us: int | None = None
    bubble_fraction: float | None = None
    activation_bytes: int | None = None
    formula: str = ""
    formula_us: float | None = None
    bubble_us: int | None = None
    fits: bool = False
    problem: str = ""


def compare_schedules(
    costs: Costs,
    cluster: Cluster,
    num_microbatches: int,
    families: Iterable[Family] = FAMILIES,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Row]:
    """Every family on the same costs, the fastest that fits first.

    Args:
        costs: A chain of one stage per rank; it is cut and split as each family needs.
        cluster: One rank per stage.
        num_microbatches: Micro-batches per step.
        families: What to compare.
        progress: Called with each family's name.

    Returns:
        One row per family.

    Raises:
        PlacementError: The costs' edges are not a chain.
    """
    costs = costs.as_chain()
    rows = []
    for family in families:
        if family.name in ("forward_only", "seq1f1b"):  # no step, or another kind of step
            continue
        progress(family.name)
        rows.append(_row(family, costs, cluster, num_microbatches))
    last = max((row.makespan_us or 0 for row in rows), default=0) + 1
    return sorted(rows, key=lambda row: (not row.fits, row.makespan_us or last, row.activation_bytes or 0))


def best(rows: Iterable[Row]) -> Row | None:
    """The fastest row that fits; of equally fast ones, the one that holds least. None if no row fits."""
    fitting = [row for row in rows if row.fits and row.makespan_us is not None]
    return min(fitting, key=lambda row: (row.makespan_us, row.activation_bytes), default=None)


def _row(family: Family, costs: Costs, cluster: Cluster, num_microbatches: int) -> Row:
    try:
        placement = family.place(family.costs_from(costs), cluster)
        timeline = simulate(family(placement, num_microbatches))
    except RotaError as error:
        return Row(family.name, family.stages_per_rank, problem=str(error))
    try:
        check(timeline.plan)
        problem = ""
    except PlanError as error:
        problem = str(error)
    held = max(peak - static for peak, static in zip(timeline.peak_memory_bytes, placement.static_bytes, strict=True))
    return Row(
        family.name,
        len(placement.stages_on(0)),
        timeline.makespan_us,
        timeline.span_us,
        timeline.bubble_fraction,
        held,
        family.bubble.text if family.bubble else "",
        _published_us(family, costs),
        (timeline.span_us if family.of_span else timeline.makespan_us) - max(timeline.busy_us),
        not problem,
        problem,
    )


def _published_us(family: Family, costs: Costs) -> float | None:
    if family.bubble is None:
        return None
    forward, backward = mean(costs.forward_us), mean(costs.backward_us)
    weight = mean(costs.weight_us) if costs.weight_us is not None else backward // 2
    whole = backward + weight if costs.weight_us is not None else backward
    sizes = Sizes(costs.num_stages, family.stages_per_rank, forward, whole, weight)
    return family.bubble.us(sizes)


_HEADER = (
    *("", "schedule", "stages", "makespan", "span", "bubble", "peak"),
    *("vs. 1f1b", "formula", "idle (paper)", "idle", " "),
)
_OPTIONAL = ("formula", "idle (paper)", "idle", "span", "vs. 1f1b", "stages")  # the first to go on a narrow terminal
_NOTES = {
    "stages": "stages: per rank",
    "makespan": "makespan: time of one step",
    "span": "span: the longest time from a rank's first op to its last",
    "bubble": "bubble: idle share of the step",
    "peak": "peak: activations of the fullest rank, without weights",
    "vs. 1f1b": "vs. 1f1b: that peak as a share of 1f1b's",
    "idle": "idle: of the rank that idles least, as simulated",
    "idle (paper)": "idle (paper): the same by the formula of the schedule's paper",
}


def to_text(rows: list[Row], limit_bytes: int | None = None, width: int | None = None) -> str:
    """The table that `rota plan all` prints.

    Args:
        rows: Of `compare_schedules`.
        limit_bytes: The limit of each rank, for the last line.
        width: The number of characters that a line may have; None: any.

    Returns:
        Lines without a newline at the end.
    """
    one_f_one_b = next((row.activation_bytes for row in rows if row.name == "1f1b"), None)
    winner = best(rows)
    planned = [row for row in rows if row.makespan_us is not None]
    cells = [_cells(row, row is winner, one_f_one_b) for row in planned]
    lines = table_lines(_HEADER, cells, left={"", "schedule", "formula", " "}, width=width, optional=_OPTIONAL)
    columns = re.split(r" {2,}", lines[0].strip())
    notes = [text for name, text in _NOTES.items() if name in columns]
    lines += ["", *(textwrap.fill(note, width or 120) for note in notes)]
    if missing := [row for row in rows if row.makespan_us is None]:
        names = max(len(row.name) for row in missing)
        lines += ["", "Not possible here:"]
        for row in missing:
            problem = row.problem.removeprefix(f"{row.name}: ")  # errors of a schedule begin with its name
            lines.append(fitted(f"  {row.name:<{names}}  {problem}", width, names + 4))
    if winner is not None:
        within = "" if limit_bytes is None else f" within {size_text(limit_bytes)} per rank"
        lines += ["", f"▸ fastest{within}: {winner.name}, {time_text(winner.makespan_us or 0)} per step"]
    return "\n".join(lines)


def _cells(row: Row, is_best: bool, one_f_one_b: int | None) -> tuple[str, ...]:
    assert row.makespan_us is not None
    assert row.span_us is not None
    assert row.activation_bytes is not None
    return (
        "▸" if is_best else "",
        row.name,
        str(row.stages_per_rank),
        time_text(row.makespan_us),
        time_text(row.span_us),
        f"{row.bubble_fraction:.1%}",
        size_text(row.activation_bytes),
        f"{row.activation_bytes / one_f_one_b:.0%}" if one_f_one_b else "-",
        row.formula,
        "" if row.formula_us is None else time_text(round(row.formula_us)),
        "" if row.bubble_us is None else time_text(row.bubble_us),
        "" if row.fits else "over the limit",
    )


def to_json(rows: list[Row]) -> str:
    """A list of objects with the fields of `Row`; `best` marks the fastest that fits."""
    winner = best(rows)
    return json.dumps([{**asdict(row), "best": row is winner} for row in rows], indent=1) + "\n"
