"""The answer of autoplan: the best plan, others beside it, and why each of them is slower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from rota import notebook
from rota.plan import Plan
from rota.planning.candidate import Request
from rota.planning.evaluation import Found, Misfit
from rota.planning.reasons import why_slower
from rota.timeline import Timeline
from rota.units import count_text, size_text, time_text

_LEGEND = (
    "▸ the plan   · 1F1B on equal layers, to compare with   ranks: per pipeline x replicas",
    "micro-batches: per replica x rows of each   again: stages that recompute their forwards",
    "bubble: idle share of step x ranks   gap: share of the step that another order could save, at most",
    "memory: on the fullest rank",
)
_MOST_ROWS = 6
_MOST_ALIKE = 2  # rows with the same ranks and replicas


class Counts(NamedTuple):
    """How many layouts: all, those that cannot beat the best, do not fit, or were left out; and how many plans."""

    layouts: int
    slower: int
    too_large: int
    left: int
    plans: int


class Confirmed(NamedTuple):
    """A plan with its stages' measured costs, and its step's time by the layers' costs."""

    before_us: int
    found: Found


@dataclass(frozen=True)
class Answer:
    """What `autoplan` found.

    Attributes:
        request: The arguments of the call.
        candidates: The best plan of each kind, fastest first.
        usual: 1F1B on equal layers, with the sizes of the best plan; None for inference.
        counts: Numbers of layouts and plans that were tried.
        bound_us: A lower bound on the step time of every layout.
        elapsed_s: Seconds that the search took.
        stopped_by: What ended the search or the measuring early: Ctrl-C, or an error of `progress`; else "".
        ran_out: Whether layouts were left out for lack of time.
        confirmed: The candidates whose own stages were measured.
        is_unmeasured: Whether Ctrl-C came before any of them was measured.
        tolerance: The part of a step by which plans may differ and count as equally fast.
        one_process: The model as it is, on one process, as measured.
        predicted_because: Why steps are predicted and were not run: "" where they were.
        remarks: What else to know about the figures.
    """

    request: Request
    candidates: tuple[Found, ...]
    usual: Found | Misfit | None
    counts: Counts
    bound_us: int
    elapsed_s: float
    stopped_by: str = ""
    ran_out: bool = False
    confirmed: tuple[Confirmed, ...] = ()
    is_unmeasured: bool = False
    tolerance: float = 0.0
    one_process: Found | None = None
    predicted_because: str = "no model was given to run"
    remarks: tuple[str, ...] = ()

    @property
    def was_stopped(self) -> bool:
        """Whether Ctrl-C or an error of `progress` ended the search early."""
        return bool(self.stopped_by)

    @property
    def best(self) -> Found:
        """The fastest plan, with its candidate."""
        return self.candidates[0]

    @property
    def plan(self) -> Plan:
        """The fastest plan."""
        return self.best.plan

    @property
    def timeline(self) -> Timeline:
        """The simulated timeline of the fastest plan."""
        return self.best.timeline

    @property
    def rows_per_s(self) -> float:
        """Rows per second of the fastest plan, over all replicas."""
        return rows_per_s(self.request, self.best)

    @property
    def shown(self) -> tuple[Found, ...]:
        """The best six, at most two of them with the same numbers of ranks and replicas."""
        shown: list[Found] = []
        for found in self.candidates:
            layout = found.candidate.layout
            sizes = layout.num_ranks, layout.num_replicas
            others = [other.candidate.layout for other in shown]
            if sum((o.num_ranks, o.num_replicas) == sizes for o in others) < _MOST_ALIKE:
                shown.append(found)
        return tuple(shown[:_MOST_ROWS])

    def to_text(self) -> str:
        """The best plan, a table of the best few, and why each of the others is slower."""
        return "\n".join([*self.assumptions, *self.body])

    @property
    def assumptions(self) -> list[str]:
        """What the figures leave out, one line each: nothing where all was measured."""
        request, lines = self.request, []
        if request.machine.num_ranks > 1 and not request.machine.prices_transfers:
            lines.append("transfers are counted as free; give --link or --links")
        if request.machine.num_ranks > 1 and not request.may_replicate:
            lines.append(
                "replicas are not offered, as the cost of their all-reduces is unknown; give --link with a rate, or "
                "--links"
            )
        if request.estimated_for:
            lines.append(f"all times are estimates ({request.estimated_for}): nothing was measured")
        return lines

    @property
    def body(self) -> list[str]:
        """The lines of `to_text` after the assumptions."""
        return [*self._headline(), "", *self._table(), "", *self._search()]

    def _headline(self) -> list[str]:
        best, layout = self.best, self.best.candidate.layout
        used, ranks = layout.num_ranks * layout.num_replicas, self.request.machine.num_ranks
        sizes = [b - a for a, b in pairwise(best.candidate.boundaries)]
        several = f"{layout.shape}, {layout.stages_per_rank} per rank" if layout.stages_per_rank > 1 else layout.shape
        again = sorted(best.candidate.recomputed)
        return [
            f"{time_text(best.step_us)} per step{self._source()}, {_rate(self.rows_per_s)} rows/s: {best.schedule}",
            *self._predicted(),
            f"  ranks       {layout.num_ranks} x {count_text(layout.num_replicas, 'replica')}, {used} of {ranks}",
            f"  stages      {layout.num_stages} ({several}), layers {_runs(sizes)}",
            f"  step        {count_text(layout.num_microbatches, 'micro-batch', 'es')} per replica, of "
            f"{count_text(layout.rows, 'row')} each",
            f"  recomputed  {_runs(again) if again else 'nothing'}",
            f"  memory      {memory_text(best)} on rank {_fullest(best)}",
        ]

    def _source(self) -> str:
        """Where the time of the best plan's step comes from."""
        steps = self.best.steps
        if steps is None:
            return " (estimated)" if self.request.estimated_for else " (predicted)"
        return f" measured here ({count_text(len(steps.steps_us), 'step')}, the middle half within {steps.spread:.1%})"

    def _predicted(self) -> list[str]:
        """The predictions of the best plan's step beside what was measured; or why nothing was."""
        if self.best.steps is None:
            return [f"  predicted   nothing was run: {self.predicted_because}"] if self.predicted_because else []
        before = [one.before_us for one in self.confirmed if one.found is self.best]
        by_layers = f"; {time_text(before[0])} by the layers' figures" if before else ""
        return [f"  predicted   {time_text(self.best.makespan_us)} by its ops as they ran in plan order{by_layers}"]

    def _table(self) -> list[str]:
        lines = [
            "        step    rows/s  schedule           ranks  stages  micro-batches  again  bubble    gap     memory"
        ]
        rows = list(self.shown)
        for found in rows:
            lines += self._row(found, "▸" if found is self.best else " ")
        if isinstance(self.usual, Found) and not any(map(self.usual.is_as, [self.best, *rows])):
            lines += self._row(self.usual, "·")
        elif isinstance(self.usual, Misfit):
            held = size_text(self.usual.num_bytes)
            lines.append(f"· 1F1B on equal layers does not fit: rank {self.usual.rank} would hold {held}")
        return [*lines, "", *_LEGEND]

    def _row(self, found: Found, mark: str) -> list[str]:
        layout = found.candidate.layout
        stages = layout.num_stages
        gap = max(found.makespan_us - found.bound_us, 0) / found.makespan_us if found.makespan_us else 0.0
        cells = (
            f"{mark} {time_text(found.step_us):>10}{_rate(rows_per_s(self.request, found)):>10}  {found.schedule:<16}"
            f"{f'{layout.num_ranks} x {layout.num_replicas}':>8}{stages:>8}"
            f"{f'{layout.num_microbatches} x {layout.rows}':>15}{len(found.candidate.recomputed) or '-':>7}"
            f"{found.timeline.bubble_fraction:>8.1%}{gap:>7.1%}  {memory_text(found):>9}"
        )
        equal = "1F1B on equal layers: " if mark == "·" else ""
        reason = equal + why_slower(found, self.best) if found is not self.best else ""
        return [cells.rstrip(), *([f"      {reason}"] if reason else [])]

    def _search(self) -> list[str]:
        counts = self.counts
        stopped = ", out of time" if self.ran_out else ""
        if self.stopped_by:
            stopped = f", stopped by {self.stopped_by}"
        left = f", {counts.left:,} were not tried" if counts.left else ""
        lines = [
            f"{counts.layouts:,} layouts ({counts.slower:,} cannot be faster by their bounds, {counts.too_large:,} do "
            f"not fit{left}), {counts.plans:,} plans simulated in {self.elapsed_s:.1f} s{stopped}",
            *self._bounds(),
        ]
        if self.tolerance:
            lines.append(
                f"plans whose steps differ by less than {self.tolerance:.1%} count as equally fast: the simplest of "
                f"them is recommended"
            )
        if self.is_unmeasured:
            lines.append("the plan's own stages were not measured: its times are added up from the layers'")
        for before_us, found in self.confirmed:
            name = f"{found.schedule} on {ranks_text(found)}"
            ran = "" if found.steps is None else f"{time_text(found.steps.median_us)} per step as run, "
            lines.append(
                f"stages of {name} measured: {ran}{time_text(found.makespan_us)} as simulated, {time_text(before_us)} "
                f"by the layers' figures"
            )
        return [*lines, *self._alone(), *self.remarks]

    def _bounds(self) -> list[str]:
        """The lower bound on all layouts, by the figures that it was made of."""
        if not self.confirmed:
            return [f"lower bound on the step of every layout, by its work alone: {time_text(self.bound_us)}"]
        # The measured stages say nothing about layouts whose stages were not measured.
        before = [one.before_us for one in self.confirmed if one.found is self.best]
        beside = f", and this plan {time_text(before[0])}" if before else ""
        return [
            f"by the layers' figures, which are no bound on what was measured, no layout takes less than "
            f"{time_text(self.bound_us)}{beside}"
        ]

    def _alone(self) -> list[str]:
        """How the best plan compares with one process."""
        alone, best = self.one_process, self.best
        if alone is None or alone.steps is None or best.steps is None:
            return []
        takes = f"one process, without a pipeline, takes {time_text(alone.step_us)} per step"
        if best.num_processes == 1:
            others = [one.found for one in self.confirmed if one.found.steps and one.found is not best]
            several = [found for found in others if found.num_processes > 1]
            if not several:
                return []
            other = min(several, key=lambda found: found.step_us)
            return [
                f"one process is faster: {other.schedule} on {ranks_text(other)} takes "
                f"{time_text(other.step_us)}{_short_ops(other)}"
            ]
        if alone.step_us < best.step_us:
            decided = self.request.pipeline_ranks
            but = f"holds {size_text(alone.peak_bytes)}" if decided is None else ""
            but = but or f"a pipeline of {count_text(decided or 1, 'rank')} was asked for"
            return [f"{takes}, less than this plan, but {but}{_short_ops(best)}"]
        return [f"{takes}: the plan is {alone.step_us / best.step_us:.2f} times as fast"]

    def _repr_html_(self) -> str:
        """The best plan as a picture, and the table."""
        return notebook.document(self.timeline.to_snippet("Best plan"), notebook.preformatted(self.to_text()))


def rows_per_s(request: Request, found: Found) -> float:
    """Rows per second of all replicas together."""
    return request.batch_rows * 1e6 / max(found.step_us, 1)


def _rate(rows_per_s: float) -> str:
    """14130.2 -> "14,130", and 3.14159 -> "3.142"."""
    return f"{rows_per_s:,.0f}" if rows_per_s >= 1000 else f"{rows_per_s:.4g}"


def ranks_text(found: Found) -> str:
    """How many ranks a plan is for, and of how many replicas if there are several."""
    layout = found.candidate.layout
    ranks = count_text(layout.num_ranks, "rank")
    return ranks if layout.num_replicas == 1 else f"{ranks} x {layout.num_replicas} replicas"


def _short_ops(found: Found) -> str:
    """Says that a plan's ops are shorter than its messages, if they are."""
    placement = found.plan.placement
    if not placement.routes:
        return ""
    op_us = median(task.duration_us for task in placement.tasks)
    message_us = median(
        route.duration_us + link.send_cost_us(route.num_bytes) + link.receive_cost_us(route.num_bytes)
        for route in placement.routes
        for link in [placement.cluster.link_between(route.sender, route.receiver)]
    )
    if op_us >= message_us:
        return ""
    return f"; its ops take {time_text(round(op_us))}, less than their messages, {time_text(round(message_us))}"


def _fullest(found: Found) -> int:
    """The rank with the largest share of its limit; without limits the one that holds most."""
    limits = found.plan.placement.cluster.limit_bytes
    peaks = found.timeline.peak_memory_bytes
    shares = [peak / limit if limit else float(peak) for peak, limit in zip(peaks, limits, strict=True)]
    return shares.index(max(shares))


def memory_text(found: Found) -> str:
    """The peak memory of the fullest rank, and its limit."""
    rank = _fullest(found)
    limit = found.plan.placement.cluster.limit_bytes[rank]
    peak = size_text(found.timeline.peak_memory_bytes[rank])
    return peak if limit is None else f"{peak} of {size_text(limit)}"


def _runs(numbers: Sequence[int]) -> str:
    """The numbers, shortened if there are many."""
    text = " ".join(map(str, numbers[:32]))
    return text + (f" … ({len(numbers)})" if len(numbers) > 32 else "")
