"""The answer of autoplan: the best plan, others beside it, and why each of them is slower."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from rota.core.cluster import Cluster
from rota.core.plan import Plan
from rota.core.text import angle_repr, count_text, fitted, size_text, table_lines, time_text
from rota.core.timeline import Timeline
from rota.planning.choosing import LEAST_TOLERANCE, SEARCHED, Contender, why_preferred
from rota.planning.evaluation import Misfit
from rota.planning.plan_text import NEGLIGIBLE, details, fullest, memory_text, ranks_text, short_ops, why_slower
from rota.planning.request import Request

_HEADER = (
    *("", "step", "rows/s", "schedule", "ranks", "stages", "micro-batches", "recomputed", "bubble", "gap", "memory"),
)
_OPTIONAL = ("gap", "recomputed", "stages", "bubble", "micro-batches")  # the first to go on a narrow terminal
_LEGEND = (
    "ranks: per pipeline x replicas; micro-batches: per replica x rows of each; bubble: idle share of the step; "
    "gap: the most that another order of the same ops could save; memory: of the fullest rank"
)
_MOST_ROWS = 4
_MOST_ALIKE = 2  # rows with the same ranks and replicas


class Counts(NamedTuple):
    """How many layouts: all, those that cannot beat the best, do not fit, or were left out; and how many plans."""

    layouts: int
    slower: int
    too_large: int
    left: int
    plans: int


@dataclass(frozen=True)
class Answer:
    """What `autoplan` found.

    Attributes:
        request: The arguments of the call.
        candidates: The best plan of each kind, the recommended one first, then the fastest first.
        usual: 1F1B with the same number of layers in each stage, and the sizes of the best plan; None for inference.
        counts: Numbers of layouts and plans that were tried.
        bound_us: A lower bound on the step time of every layout, by the layers' times.
        elapsed_s: Seconds that the search took.
        stopped_by: What ended the search or the measuring early: Ctrl-C, or an error of `progress`; else "".
        ran_out: Whether layouts were left out for lack of time.
        tolerance: How far measured or predicted differences between plans may be off, as a part of a step;
            `choosing.recommended` says which plans count as equally fast.
        num_rounds: How many rounds of steps the tolerance is from: those that all plans near the fastest have.
        one_process: The model as it is, on one process: as measured where steps of the best plan were, else as
            predicted from its layers. None where steps of the others alone were run, and for inference.
        links_because: Why links that could be measured here were not; "" where they were, or were not asked for.
        predicted_because: Why steps are predicted and were not run: "" where they were.
        remarks: What else to know about the figures.
    """

    request: Request
    candidates: tuple[Contender, ...]
    usual: Contender | Misfit | None
    counts: Counts
    bound_us: int
    elapsed_s: float
    stopped_by: str = ""
    ran_out: bool = False
    tolerance: float = 0.0
    num_rounds: int = 0
    one_process: Contender | None = None
    links_because: str = ""
    predicted_because: str = "no model was given to run"
    remarks: tuple[str, ...] = ()

    @property
    def best(self) -> Contender:
        """The recommended plan, with its candidate."""
        return self.candidates[0]

    @property
    def plan(self) -> Plan:
        """The recommended plan."""
        return self.best.plan

    @property
    def timeline(self) -> Timeline:
        """The simulated timeline of the recommended plan."""
        return self.best.timeline

    @property
    def rows_per_s(self) -> float:
        """Rows per second of the recommended plan, over all replicas."""
        return self.request.batch_rows * 1e6 / max(self.best.step_us, 1)

    @property
    def assumptions(self) -> list[str]:
        """What the figures leave out, one sentence each: nothing where all was measured."""
        return [*_free_transfers(self), *_further_assumptions(self)]

    @property
    def bound_holds(self) -> str:
        """For what, and by which figures, `bound_us` is a lower bound."""
        if self.best.layers_us is None:
            return "for every layout, from its work alone"
        # The measured stages say nothing about layouts whose stages were not measured.
        return "for every layout according to the layers' times, not to measured steps"

    def to_text(self, width: int | None = None) -> str:
        """The best plan, a table of the best few, and why each of the others is slower.

        Args:
            width: The number of characters that a line may have; None: any.

        Returns:
            Lines without a newline at the end.
        """
        above = [*_free_transfers(self), *_verdict(self), *_further_assumptions(self)]
        above += [*details(self.best, self.request.machine.num_ranks), ""]
        below = ["", *_search(self)]
        if width is not None:
            above, below = _wrapped(above, width), _wrapped(below, width)
        return "\n".join([*above, *_table(self, width), *below])

    def __str__(self) -> str:
        """One line; `to_text` has the rest."""
        return f"{self.best.schedule}: {time_text(self.best.step_us)} per step, {_rate(self.rows_per_s)} rows/s"

    __repr__ = angle_repr


# --- the verdict ------------------------------------------------------------------------------------------------------


def _free_transfers(answer: Answer) -> Iterator[str]:
    """What comes even before the best plan: with links that cost time, another plan could be the best."""
    machine = answer.request.machine
    if machine.num_ranks > 1 and not machine.prices_transfers:
        because = f", because links were not measured ({answer.links_because})" if answer.links_because else ""
        yield f"Transfers are counted as free{because}; give --link or --links"


def _further_assumptions(answer: Answer) -> Iterator[str]:
    """What else the figures leave out, one line each: nothing where all was measured."""
    request = answer.request
    if request.machine.num_ranks > (request.choices.pipeline_ranks or 1) and not request.may_replicate:
        remedy = "give --link with a rate, or --links"
        if isinstance(request.machine.link, Cluster):
            remedy = "the links have no rate: measure them again with `rota profile links`, or give --link with a rate"
        yield f"Replicas are not considered, because the cost of their all-reduces is unknown; {remedy}"
    if request.estimated_for:
        yield f"All times are {request.estimated_for}; nothing was measured"


def _verdict(answer: Answer) -> Iterator[str]:
    """What to run, how fast it is, also beside the usual ways to train, and the memory that it needs."""
    best = answer.best
    name = "found by search" if best.schedule == SEARCHED else best.schedule
    if best.steps is not None:
        count = count_text(len(best.steps.steps_us), "step")
        source = f"measured: median of {count}, interquartile range {best.steps.spread:.1%}"
    elif best.layers_us is not None:
        source = "predicted from stage times"
    else:
        source = "estimated" if answer.request.estimated_for else "predicted"
    yield (
        f"Best plan ({name}, {ranks_text(best)}): {_rate(answer.rows_per_s)} rows/s, "
        f"{time_text(best.step_us)} per step ({source})"
    )
    yield from _compared(answer)
    fastest = min(_shown(answer), key=lambda plan: plan.step_us)
    if fastest.step_us < (1 - NEGLIGIBLE) * best.step_us:
        tolerance = answer.tolerance if fastest.steps is None else LEAST_TOLERANCE
        why = why_preferred(best, fastest, tolerance)
        yield f"  why best    {fastest.schedule} takes {time_text(fastest.step_us)}, but {why}"
    yield f"  memory      {memory_text(best)} on rank {fullest(best)}, the fullest"
    if best.layers_us is not None:
        times = "stage times" if best.steps is None else "op times measured in plan order"
        yield (
            f"  predicted   {time_text(best.makespan_us)} from {times}, {time_text(best.layers_us)} from layer times"
        )
    if best.steps is None and answer.predicted_because:
        yield f"  not run     {answer.predicted_because}"


def _compared(answer: Answer) -> Iterator[str]:
    """The best plan beside one process, and beside 1F1B on equal layers."""
    best, alone = answer.best, answer.one_process
    if alone is not None and alone.steps is not None and best.steps is not None and best.num_processes > 1:
        faster = "; one process is faster here" if alone.step_us < best.step_us else ""
        yield f"  vs. one process              {_times(alone.step_us / max(best.step_us, 1))}{faster}"
    usual = answer.usual
    if isinstance(usual, Contender) and usual.is_as(best):
        yield "  vs. 1F1B with equal layers   the same plan"
    elif isinstance(usual, Contender):
        source = ", according to the layers' times" if _is_unmeasured(answer, usual) else ""
        yield f"  vs. 1F1B with equal layers   {_times(_comparable_us(answer, usual) / max(best.step_us, 1))}{source}"


def _is_unmeasured(answer: Answer, plan: Contender) -> bool:
    """Whether a plan's figures are the layers', while those of the best plan are of its stages."""
    return plan.layers_us is None and answer.best.layers_us is not None


def _comparable_us(answer: Answer, plan: Contender) -> int:
    """A plan's step beside the best one's: one that was not measured is as much slower as the layers say."""
    if not _is_unmeasured(answer, plan):
        return plan.step_us
    return round(answer.best.step_us * plan.by_layers_us / max(answer.best.by_layers_us, 1))


# --- the table --------------------------------------------------------------------------------------------------------


def _shown(answer: Answer) -> list[Contender]:
    """The best few plans, at most two of them with the same numbers of ranks and replicas."""
    shown: list[Contender] = []
    for plan in answer.candidates:
        division = plan.candidate.layout.division
        if sum(other.candidate.layout.division == division for other in shown) < _MOST_ALIKE:
            shown.append(plan)
    return shown[:_MOST_ROWS]


def _table(answer: Answer, width: int | None) -> list[str]:
    shown, usual = [(plan, "▸" if plan is answer.best else "") for plan in _shown(answer)], answer.usual
    below = []
    if isinstance(usual, Contender) and not any(usual.is_as(plan) for plan, _ in shown):
        shown.append((usual, "·"))
    elif isinstance(usual, Misfit):
        held = size_text(usual.num_bytes)
        below = [f"·  1F1B with equal layers does not fit: rank {usual.rank} would hold {held}"]
    rows = [_cells(answer, plan, mark) for plan, mark in shown]
    head, *lines = table_lines(_HEADER, rows, left={"", "schedule"}, width=width, optional=_OPTIONAL)
    reasons = [fitted(_reason(answer, plan, mark), width) for plan, mark in shown]
    both = [line for pair in zip(lines, reasons, strict=True) for line in pair if line]
    below.append(f"▸ best plan; {'· 1F1B with equal layers; ' if shown[-1][1] == '·' else ''}{_LEGEND}")
    if any(plan.candidate.layout.has_copies for plan, _ in shown):
        below.append("stages x 2: bidirectional, every stage is on two ranks, so all weights are held twice")
    if any(_is_unmeasured(answer, plan) for plan, _ in shown):
        below.append("~: not measured; scaled by what the layers' times predict")
    return [head, *both, *(below if width is None else _wrapped(below, width))]


def _cells(answer: Answer, plan: Contender, mark: str) -> tuple[str, ...]:
    layout = plan.candidate.layout
    gap = max(plan.makespan_us - plan.bound_us, 0) / plan.makespan_us if plan.makespan_us else 0.0
    about = "~" if _is_unmeasured(answer, plan) else ""
    step_us = _comparable_us(answer, plan)
    return (
        mark,
        about + time_text(step_us),
        about + _rate(answer.request.batch_rows * 1e6 / max(step_us, 1)),
        plan.schedule,
        f"{layout.num_ranks} x {layout.num_replicas}",
        f"{layout.num_stages} x 2" if layout.has_copies else str(layout.num_stages),
        f"{layout.num_microbatches} x {layout.rows}",
        str(len(plan.candidate.recomputed) or "-"),
        f"{plan.timeline.bubble_fraction:.1%}",
        f"{gap:.1%}",
        memory_text(plan),
    )


def _reason(answer: Answer, plan: Contender, mark: str) -> str:
    """Why a row of the table is slower than the best plan."""
    if plan is answer.best:
        return ""
    equal = "1F1B with equal layers: " if mark == "·" else ""
    if _is_unmeasured(answer, plan):
        slower = plan.by_layers_us / max(answer.best.by_layers_us, 1) - 1
        return f"      {equal}{slower:+.1%} according to its layers' times; its stages were not measured"
    return f"      {equal}{why_slower(plan, answer.best)}"


# --- the search -------------------------------------------------------------------------------------------------------


def _search(answer: Answer) -> Iterator[str]:
    counts = answer.counts
    stopped = ", out of time" if answer.ran_out else ""
    if answer.stopped_by:
        stopped = f", stopped by {answer.stopped_by}"
    left = f", {counts.left:,} were not tried" if counts.left else ""
    yield (
        f"Search: {count_text(counts.layouts, 'layout')} ({counts.slower:,} proven slower, {counts.too_large:,} do not "
        f"fit{left}), {count_text(counts.plans, 'plan')} simulated in {answer.elapsed_s:.1f} s{stopped}"
    )
    layers_us = answer.best.layers_us
    beside = f"; compare it with {time_text(layers_us)}, the best plan's step from layer times" if layers_us else ""
    yield f"Lower bound {answer.bound_holds}: {time_text(answer.bound_us)} per step{beside}"
    if answer.tolerance and len(answer.candidates) > 1:
        precision = f"Predicted differences of up to {answer.tolerance:.1%} count as none"
        if answer.best.steps is not None:
            rounds = count_text(answer.num_rounds, "round")
            precision = f"Trial steps ({rounds}) measure differences to within {answer.tolerance:.1%}"
        yield f"{precision}; of equally fast plans, the simplest is recommended"
    yield from _alone(answer)
    yield from answer.remarks


def _alone(answer: Answer) -> Iterator[str]:
    """How the best plan compares with one process, as measured or as predicted from the layers."""
    alone, best = answer.one_process, answer.best
    if alone is None:
        return
    is_run = best.steps is not None
    is_faster = "One process is faster" if is_run else "One process is predicted to be faster"

    def step_us(plan: Contender) -> int:
        return plan.step_us if is_run else plan.by_layers_us

    if best.num_processes == 1:
        several = [plan for plan in answer.candidates if plan.num_processes > 1]
        if several:
            other = min(several, key=step_us)
            yield (
                f"{is_faster} than several{' here' * is_run}: {other.schedule} on {ranks_text(other)} takes "
                f"{time_text(step_us(other))}{short_ops(other)}"
            )
    elif step_us(alone) < step_us(best):
        asked, limit = answer.request.choices.pipeline_ranks, answer.request.machine.limits[0]
        but = "the search did not get to it"
        if asked is not None:
            but = f"a pipeline of {count_text(asked, 'rank')} was asked for"
        elif is_run or (limit is not None and alone.peak_bytes > limit):
            but = f"holds {size_text(alone.peak_bytes)}"
        yield f"{is_faster} ({time_text(step_us(alone))} per step), but {but}{short_ops(best)}"


def _rate(rows_per_s: float) -> str:
    """52,981.3 -> "53,000", and 3.14159 -> "3.14"."""
    rounded = float(f"{rows_per_s:.3g}")
    return f"{rounded:,.0f}" if rounded >= 100 else f"{rounded:g}"


def _wrapped(lines: list[str], width: int) -> list[str]:
    """The lines, the long ones of them in several."""
    return [part for line in lines for part in textwrap.wrap(line, width, subsequent_indent="    ") or [""]]


def _times(ratio: float) -> str:
    return f"{ratio:.2f} times as fast"
