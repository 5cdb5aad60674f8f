"""What a search returns."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal, NamedTuple

from rota.core.plan import Plan
from rota.core.simulation import simulate
from rota.core.text import angle_repr, fitted, size_text, table_lines, time_text
from rota.core.timeline import Timeline

Objective = Literal["makespan", "span", "period"]
KEPT_SEQUENCE = "these micro-batches in this sequence"  #: every task takes them in turn
ANY_SEQUENCE = "these micro-batches in any sequence"


class Progress(NamedTuple):
    """How far a search is.

    Attributes:
        doing: The method at work.
        best: Of the best plan, in µs of the objective.
        bound: The proven lower bound, in µs of the objective.
        elapsed_s: Seconds since the search began.
    """

    doing: str
    best: float
    bound: float
    elapsed_s: float

    @property
    def gap(self) -> float:
        """(best - bound) / best; 0 where the plan is proven to be optimal."""
        return gap(self.best, self.bound)

    def __str__(self) -> str:
        best, bound = time_text(round(self.best)), time_text(round(self.bound))
        return f"{self.elapsed_s:5.1f} s  best {best}  bound {bound}  gap {self.gap:.2%}  {self.doing}"


def gap(value: float | Fraction, bound: float | Fraction) -> float:
    """By how much `value` may still be too long, as a fraction of it: 0 is proven optimal."""
    return float((value - bound) / value) if value > bound else 0.0


@dataclass(frozen=True, slots=True)
class NamedPlan:
    """A named schedule on the same placement.

    Attributes:
        name: The schedule, as in `rota.schedules.NAMED`.
        makespan_us: Its makespan.
        span_us: Its span.
        peak_bytes: Most bytes held, by the rank that holds most.
        fits: Whether it is within the memory limits.
    """

    name: str
    makespan_us: int
    span_us: int
    peak_bytes: int
    fits: bool


@dataclass(frozen=True)
class SearchResult:
    """A plan with its proof.

    Attributes:
        plan: The plan, which was checked.
        objective: What was minimized.
        value_us: Its value: makespan, span, or time per micro-batch in steady state, in µs.
        bound_us: A proven lower bound of the value; see `among`.
        why: The reason for the bound, in one line.
        how: The method that found the plan.
        period_us: Shortest time per micro-batch of the steady states found; None if none was found that keeps up with
            the plan.
        named: The named schedules on this placement, fastest first.
        elapsed_s: How long the search lasted.
        stopped_by: Ctrl-C, or an error of `progress`; empty if the search ended by itself.
        among: If micro-batches differ: the plans that the bound and the proof cover. Empty: all plans.
    """

    plan: Plan
    objective: Objective
    value_us: Fraction
    bound_us: Fraction
    why: str
    how: str
    period_us: Fraction | None
    named: tuple[NamedPlan, ...]
    elapsed_s: float
    stopped_by: str = ""
    among: str = ""

    @cached_property
    def timeline(self) -> Timeline:
        """The plan, simulated."""
        return simulate(self.plan)

    @property
    def makespan_us(self) -> int:
        """Makespan of the plan."""
        return self.timeline.makespan_us

    @property
    def span_us(self) -> int:
        """Longest busy window of a rank."""
        return self.timeline.span_us

    @property
    def peak_memory_bytes(self) -> tuple[int, ...]:
        """[num_ranks]: the most that each rank holds at any time."""
        return self.timeline.peak_memory_bytes

    @property
    def was_stopped(self) -> bool:
        """Whether Ctrl-C or an error ended the search."""
        return bool(self.stopped_by)

    @property
    def gap(self) -> float:
        """(value - bound) / value; 0 where the plan is proven to be optimal."""
        return gap(self.value_us, self.bound_us)

    @property
    def is_optimal(self) -> bool:
        """Whether the plan is proven to be the best possible."""
        return self.value_us <= self.bound_us

    def to_text(self, width: int | None = None) -> str:
        """What was found, how good it is and why, and the named schedules beside it, in lines of at most `width`."""
        proof = "proven optimal" if self.is_optimal else f"within {self.gap:.2%} of the optimum"
        stopped = f", stopped by {self.stopped_by}" if self.stopped_by else ""
        measure = "time per micro-batch" if self.objective == "period" else self.objective
        lines = [
            f"{measure} {_us(self.value_us)}, {proof} (found by {self.how}, {self.elapsed_s:.1f} s{stopped})",
            f"lower bound for {self.among or 'this placement'} {_us(self.bound_us)}: {self.why}",
            f"holds at most {size_text(max(self.peak_memory_bytes))} per rank",
        ]
        period_us = None if self.objective == "period" else self.period_us
        if period_us is not None:
            lines.append(f"steady state: {_us(period_us)} per micro-batch")
        return "\n".join([*(fitted(line, width) for line in lines), *self._named_lines(width)])

    def _named_lines(self, width: int | None) -> list[str]:
        """The named schedules on this placement, beside the plan."""
        measure = "span" if self.objective == "span" else "makespan"
        plan_us = self.span_us if measure == "span" else self.makespan_us
        rows = []
        for named in self.named:
            value_us = named.span_us if measure == "span" else named.makespan_us
            slower = f"{value_us / plan_us - 1:+.1%}" if plan_us else ""
            fits = "" if named.fits else "over the limit"
            rows.append((f"  {named.name}", time_text(value_us), slower, size_text(named.peak_bytes), fits))
        if not rows:
            return []
        header, optional = ("  schedule", measure, "vs. plan", "peak", ""), ("peak", "vs. plan")
        return table_lines(header, rows, left={"  schedule", ""}, width=width, optional=optional)

    def __str__(self) -> str:
        """One line; `to_text` has the rest."""
        proof = "proven optimal" if self.is_optimal else f"within {self.gap:.2%} of the optimum"
        return f"{self.plan}: {self.objective} {_us(self.value_us)}, {proof}"

    __repr__ = angle_repr


def _us(value: Fraction) -> str:
    """Exactly: 5,333 µs, or 16/3 µs (5.3)."""
    return f"{int(value):,} µs" if value.denominator == 1 else f"{value} µs ({float(value):,.1f})"
