"""The answer of autoplan: the best plan, others beside it, and why each of them is slower."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import NamedTuple

from rota.accounting.snippets import snippet
from rota.core import notebook
from rota.core.cluster import Cluster
from rota.core.plan import Plan
from rota.core.tables import fitted, table_lines
from rota.core.timeline import Timeline
from rota.core.units import angle_repr, count_text, size_text, time_text
from rota.planning.candidate import Request
from rota.planning.choosing import LEAST_TOLERANCE, why_preferred
from rota.planning.evaluation import SEARCHED, Found, Misfit
from rota.planning.plan_text import (
    details,
    fullest,
    inflation,
    layout_text,
    memory_text,
    ranks_text,
    short_ops,
    times_of,
)
from rota.planning.reasons import NEGLIGIBLE, why_slower

_HEADER = (
    "",
    "step",
    "rows/s",
    "schedule",
    "ranks",
    "stages",
    "micro-batches",
    "recomputed",
    "bubble",
    "gap",
    "memory",
)
_OPTIONAL = ("gap", "recomputed", "stages", "bubble", "micro-batches")  # the first to go on a narrow terminal
_LEGEND = {
    "ranks": "ranks: per pipeline x replicas",
    "micro-batches": "micro-batches: per replica x rows of each",
    "recomputed": "recomputed: stages whose forwards run again before their backwards",
    "bubble": "bubble: idle share of the step",
    "gap": "gap: the most that another order of the same ops could save",
    "memory": "memory: of the fullest rank",
}
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


class OnSharedCores(NamedTuple):
    """Steps on this machine, where it has fewer cores than the plan has ranks: of the best plan and of one process."""

    num_cores: int
    step_us: int
    one_process_us: int


@dataclass(frozen=True)
class Answer:
    """What `autoplan` found.

    Attributes:
        request: The arguments of the call.
        candidates: The best plan of each kind, fastest first.
        usual: 1F1B with the same number of layers in each stage, and the sizes of the best plan; None for inference.
        counts: Numbers of layouts and plans that were tried.
        bound_us: A lower bound on the step time of every layout.
        elapsed_s: Seconds that the search took.
        stopped_by: What ended the search or the measuring early: Ctrl-C, or an error of `progress`; else "".
        ran_out: Whether layouts were left out for lack of time.
        confirmed: The candidates whose own stages were measured.
        is_unmeasured: Whether Ctrl-C came before any of them was measured.
        tolerance: How far measured or predicted differences between plans may be off, as a part of a step;
            `choosing.recommended` says which plans count as equally fast.
        num_rounds: How many rounds of steps the tolerance is from: those that all plans near the fastest have.
        one_process: The model as it is, on one process: as measured where steps of the best plan were, else as
            predicted from its layers. None where steps of the others alone were run, and for inference.
        links_because: Why links that could be measured here were not; "" where they were, or were not asked for.
        predicted_because: Why steps are predicted and were not run: "" where they were.
        on_shared_cores: Steps that were run although ranks share cores; None where each has one, or nothing was run.
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
    num_rounds: int = 0
    one_process: Found | None = None
    links_because: str = ""
    predicted_because: str = "no model was given to run"
    on_shared_cores: OnSharedCores | None = None
    remarks: tuple[str, ...] = ()

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
        return self.request.batch_rows * 1e6 / max(self.best.step_us, 1)

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

    def to_text(self, width: int | None = None) -> str:
        """The best plan, a table of the best few, and why each of the others is slower.

        Args:
            width: The number of characters that a line may have; None: any.

        Returns:
            Lines without a newline at the end.
        """
        above = [
            *self._free_transfers(),
            *self._verdict(),
            *self._further_assumptions(),
            *details(self.best, self.request.machine.num_ranks),
            "",
        ]
        below = ["", *self._search()]
        if width is not None:
            above, below = _wrapped(above, width), _wrapped(below, width)
        return "\n".join([*above, *self._table(width), *below])

    @property
    def assumptions(self) -> list[str]:
        """What the figures leave out, one sentence each: nothing where all was measured."""
        return [*self._free_transfers(), *self._further_assumptions()]

    def _free_transfers(self) -> list[str]:
        """What comes even before the best plan: with links that cost time, another plan could be the best."""
        machine = self.request.machine
        is_free = machine.num_ranks > 1 and not machine.prices_transfers
        because = f", because links were not measured ({self.links_because})" if self.links_because else ""
        return [f"Transfers are counted as free{because}; give --link or --links"] if is_free else []

    def _further_assumptions(self) -> list[str]:
        """What else the figures leave out, one line each: nothing where all was measured."""
        request, lines = self.request, []
        if request.machine.num_ranks > (request.pipeline_ranks or 1) and not request.may_replicate:
            remedy = (
                "the links have no rate: measure them again with `rota profile links`, or give --link with a rate"
                if isinstance(request.machine.link, Cluster)
                else "give --link with a rate, or --links"
            )
            lines.append(f"Replicas are not considered, because the cost of their all-reduces is unknown; {remedy}")
        if request.estimated_for:
            lines.append(f"All times are {request.estimated_for}; nothing was measured")
        return lines

    def _verdict(self) -> list[str]:
        """What to run, how fast it is, also beside the usual ways to train, and the memory that it needs."""
        best = self.best
        name = "found by search" if best.schedule == SEARCHED else best.schedule
        return [
            f"Best plan ({name}, {ranks_text(best)}): {_rate(self.rows_per_s)} rows/s, "
            f"{time_text(best.step_us)} per step{self._source()}",
            *self._compared(),
            *self._faster(),
            f"  memory      {memory_text(best)} on rank {fullest(best)}, the fullest",
            *self._predicted(),
        ]

    def _compared(self) -> list[str]:
        """The best plan beside one process, and beside 1F1B on equal layers."""
        lines, best, alone = [], self.best, self.one_process
        if alone is not None and alone.steps is not None and best.steps is not None and best.num_processes > 1:
            lines.append(f"  vs. one process              {_times_here(alone.step_us, best.step_us)}")
        if (here := self.on_shared_cores) is not None:
            lines.append(
                f"  vs. one process              {_times_here(here.one_process_us, here.step_us)}: with "
                f"{count_text(best.num_processes, 'rank')} on {count_text(here.num_cores, 'core')}, a step took "
                f"{time_text(here.step_us)}, in one process {time_text(here.one_process_us)}"
            )
        usual = self._usual
        if isinstance(usual, Found) and usual.is_as(best):
            lines.append("  vs. 1F1B with equal layers   the same plan")
        elif isinstance(usual, Found):
            source = ", according to the layers' times" if self._is_unmeasured(usual) else ""
            ratio = _times(self._comparable_us(usual) / max(best.step_us, 1))
            lines.append(f"  vs. 1F1B with equal layers   {ratio}{source}")
        return lines

    @property
    def _usual(self) -> Found | Misfit | None:
        """1F1B with equal layers, with the figures that it has among the candidates if it is one of them."""
        usual = self.usual
        if not isinstance(usual, Found):
            return usual
        return next((found for found in self.candidates if found.is_as(usual)), usual)

    def _faster(self) -> list[str]:
        """Why the best plan is not the fastest, where another one's step is shorter."""
        fastest = min(self.shown, key=lambda found: found.step_us)
        if fastest.step_us >= (1 - NEGLIGIBLE) * self.best.step_us:
            return []
        return [
            f"  why best    {fastest.schedule} takes {time_text(fastest.step_us)}, but "
            f"{why_preferred(self.best, fastest, self.tolerance if fastest.steps is None else LEAST_TOLERANCE)}"
        ]

    def _by_layers_us(self, found: Found) -> int:
        """The plan's simulated step by the layers' figures, which all plans have: stages were measured of some only."""
        return next((one.before_us for one in self.confirmed if one.found.is_as(found)), found.makespan_us)

    def _is_unmeasured(self, found: Found) -> bool:
        """Whether a plan's figures are the layers', while those of the best plan are of its stages."""
        measured = [any(one.found.is_as(other) for one in self.confirmed) for other in (found, self.best)]
        return measured == [False, True]

    def _comparable_us(self, found: Found) -> int:
        """A plan's step beside the best one's: one that was not measured is as much slower as the layers say."""
        if not self._is_unmeasured(found):
            return found.step_us
        return round(self.best.step_us * self._by_layers_us(found) / max(self._by_layers_us(self.best), 1))

    def _source(self) -> str:
        """Where the time of the best plan's step comes from."""
        steps = self.best.steps
        if steps is None:
            if self._before_us is not None:
                return " (predicted from stage times)"
            return " (estimated)" if self.request.estimated_for else " (predicted)"
        count = count_text(len(steps.steps_us), "step")
        return f" (measured: median of {count}, interquartile range {steps.spread:.1%})"

    def _predicted(self) -> list[str]:
        """The predictions of the best plan's step beside what was measured; or why nothing was."""
        lines = []
        if self._before_us is not None:
            stages, layers = time_text(self.best.makespan_us), time_text(self._before_us)
            lines.append(f"  predicted   {stages} from {times_of(self.best)}, {layers} from layer times")
        if self.best.steps is None and self.predicted_because:
            label = "not run" if self.on_shared_cores is None else "cores"
            lines.append(f"  {label:<12}{self.predicted_because}")
        return lines

    @property
    def _before_us(self) -> int | None:
        """The best plan's step by the layers' times; None if it has no other figures."""
        return next((one.before_us for one in self.confirmed if one.found is self.best), None)

    def _table(self, width: int | None) -> list[str]:
        shown, usual = [(found, "▸" if found is self.best else "") for found in self.shown], self._usual
        misfit = []
        if isinstance(usual, Found) and not any(usual.is_as(found) for found, _ in shown):
            shown.append((usual, "·"))
        elif isinstance(usual, Misfit):
            held = size_text(usual.num_bytes)
            misfit = [f"·  1F1B with equal layers does not fit: rank {usual.rank} would hold {held}"]
        rows = [self._cells(found, mark) for found, mark in shown]
        head, *lines = table_lines(_HEADER, rows, left={"", "schedule"}, width=width, optional=_OPTIONAL)
        reasons = [fitted(self._reason(found, mark), width) for found, mark in shown]
        both = [line for pair in zip(lines, reasons, strict=True) for line in pair if line]
        marks = ["▸ best plan", *("· 1F1B with equal layers" for _, mark in shown if mark == "·")]
        legend = ["   ".join(marks), *(text for name, text in _LEGEND.items() if name in head)]
        if "stages" in head and any(found.candidate.layout.has_copies for found, _ in shown):
            legend.append("stages x 2: bidirectional, every stage is on two ranks, so all weights are held twice")
        if any(self._is_unmeasured(found) for found, _ in shown):
            legend.append("~: not measured; scaled by what the layers' times predict")
        return [head, *both, *(fitted(line, width) for line in (*misfit, "", *legend))]

    def _cells(self, found: Found, mark: str) -> tuple[str, ...]:
        """A row of the table."""
        layout = found.candidate.layout
        gap = max(found.makespan_us - found.bound_us, 0) / found.makespan_us if found.makespan_us else 0.0
        about = "~" if self._is_unmeasured(found) else ""
        step_us = self._comparable_us(found)
        return (
            mark,
            about + time_text(step_us),
            about + _rate(self.request.batch_rows * 1e6 / max(step_us, 1)),
            found.schedule,
            f"{layout.num_ranks} x {layout.num_replicas}",
            f"{layout.num_stages} x 2" if layout.has_copies else str(layout.num_stages),
            f"{layout.num_microbatches} x {layout.rows}",
            str(len(found.candidate.recomputed) or "-"),
            f"{found.timeline.bubble_fraction:.1%}",
            f"{gap:.1%}",
            memory_text(found),
        )

    def _reason(self, found: Found, mark: str) -> str:
        """Why a row of the table is slower than the best plan."""
        if found is self.best:
            return ""
        equal = "1F1B with equal layers: " if mark == "·" else ""
        if self._is_unmeasured(found):
            slower = self._by_layers_us(found) / max(self._by_layers_us(self.best), 1) - 1
            return f"      {equal}{slower:+.1%} according to its layers' times; its stages were not measured"
        return f"      {equal}{why_slower(found, self.best)}"

    def _search(self) -> list[str]:
        counts = self.counts
        stopped = ", out of time" if self.ran_out else ""
        if self.stopped_by:
            stopped = f", stopped by {self.stopped_by}"
        left = f", {counts.left:,} were not tried" if counts.left else ""
        plans = f"{count_text(counts.plans, 'plan')} simulated in {self.elapsed_s:.1f} s{stopped}"
        lines = [
            f"Search: {count_text(counts.layouts, 'layout')} ({counts.slower:,} proven slower, "
            f"{counts.too_large:,} do not fit{left}), {plans}",
            self._bound(),
        ]
        if self.tolerance:
            lines.append(self._equally_fast())
        if self.is_unmeasured:
            lines.append("The plan's stages were not measured; its times are the sums of its layers' times")
        for before_us, found in self.confirmed:
            ran = "" if found.steps is None else f"{time_text(found.steps.median_us)} per step as run, "
            lines.append(
                f"Measured {layout_text(found)}: {ran}{time_text(found.makespan_us)} from {times_of(found)}, "
                f"{time_text(before_us)} from layer times{inflation(found)}"
            )
        return [*lines, *self._alone(), *self.remarks]

    def _equally_fast(self) -> str:
        """Which plans count as equally fast, and which of them is recommended."""
        simplest = (
            "Rota recommends the simplest of them (the fewest processes and recomputed stages, a named schedule, a "
            "whole backward, the fewest stages per rank, then the fewest copies of the model), of equally simple ones "
            "the one that needs the least memory"
        )
        if self.best.steps is None:
            return f"Plans whose steps differ by at most {self.tolerance:.1%} count as equally fast; {simplest}"
        return (
            f"Trial steps ({count_text(self.num_rounds, 'round')}) measure differences to within {self.tolerance:.1%}. "
            f"A plan that took over {LEAST_TOLERANCE:.0%} longer than another in every round is not recommended; plans "
            f"that differ by less than these rounds can tell count as equally fast; {simplest}"
        )

    @property
    def bound_holds(self) -> str:
        """For what, and by which figures, `bound_us` is a lower bound."""
        if not self.confirmed:
            return "for every layout, from its work alone"
        # The measured stages say nothing about layouts whose stages were not measured.
        return "for every layout according to the layers' times, not to measured steps"

    def _bound(self) -> str:
        """The lower bound on all layouts, by the figures that it was made of."""
        layers = "" if self._before_us is None else time_text(self._before_us)
        beside = f"; compare it with {layers}, the best plan's step from layer times" if layers else ""
        return f"Lower bound {self.bound_holds}: {time_text(self.bound_us)} per step{beside}"

    def _alone(self) -> list[str]:
        """How the best plan compares with one process, as measured or as predicted from the layers."""
        alone, best = self.one_process, self.best
        if alone is None:
            return []
        is_run = best.steps is not None
        alone_us = alone.step_us if is_run else alone.makespan_us
        is_faster = "One process is faster" if is_run else "One process is predicted to be faster"
        if best.num_processes == 1:
            plans = [one.found for one in self.confirmed if one.found.steps] if is_run else self.candidates
            several = [found for found in plans if found.num_processes > 1]
            if not several:
                return []
            other = min(several, key=lambda found: found.step_us if is_run else self._by_layers_us(found))
            takes = time_text(other.step_us if is_run else self._by_layers_us(other))
            return [
                f"{is_faster} than several{' here' * is_run}: {other.schedule} on {ranks_text(other)} takes "
                f"{takes}{short_ops(other)}"
            ]
        if alone_us >= (best.step_us if is_run else self._by_layers_us(best)):
            return []
        decided, limit = self.request.pipeline_ranks, self.request.machine.limits[0]
        but = "the search did not get to it"
        if decided is not None:
            but = f"a pipeline of {count_text(decided, 'rank')} was asked for"
        elif is_run or (limit is not None and alone.peak_bytes > limit):
            but = f"holds {size_text(alone.peak_bytes)}"
        return [f"{is_faster} ({time_text(alone_us)} per step), but {but}{short_ops(best)}"]

    def __str__(self) -> str:
        """One line; `to_text` has the rest."""
        return f"{self.best.schedule}: {time_text(self.best.step_us)} per step, {_rate(self.rows_per_s)} rows/s"

    __repr__ = angle_repr

    def _repr_html_(self) -> str:
        """The best plan as a picture, and the table."""
        return notebook.document(snippet(self.timeline, "Best plan"), notebook.preformatted(self.to_text()))


def _rate(rows_per_s: float) -> str:
    """52,981.3 -> "53,000", and 3.14159 -> "3.14"."""
    rounded = float(f"{rows_per_s:.3g}")
    return f"{rounded:,.0f}" if rounded >= 100 else f"{rounded:g}"


def _wrapped(lines: list[str], width: int) -> list[str]:
    """The lines, the long ones of them in several."""
    return [part for line in lines for part in textwrap.wrap(line, width, subsequent_indent="    ") or [""]]


def _times(ratio: float) -> str:
    return f"{ratio:.2f} times as fast"


def _times_here(one_process_us: int, step_us: int) -> str:
    """How fast steps are beside those of one process, both as run on this machine."""
    faster = "; one process is faster here" if one_process_us < step_us else ""
    return f"{_times(one_process_us / max(step_us, 1))}{faster}"
