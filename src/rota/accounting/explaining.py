"""Idle time in words: how much by which cause, where it is worst, and what would help."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rota import notebook
from rota.accounting.causes import Cause, Idle
from rota.accounting.helping import Suggestion, as_seen, suggestions
from rota.accounting.idling import idle
from rota.plan import Plan, Transfer
from rota.simulation import simulate, timeline_of
from rota.tasks import Op
from rota.timeline import StepEndWork, Timeline
from rota.units import count_text, time_text

_WORST = 8  # stretches that are told
_MOST_ROWS = 16  # ranks that the table shows: of more, the idlest

_STEP_END = {"reduce": "reduction", "optimizer": "optimizer step"}

#: What each cause says, for one who reads it the first time.
WORDS = {
    Cause.STEP_END: "gradients are reduced, or the optimizer steps",
    Cause.SLOWER: "ops upstream take longer than planned",
    Cause.CORES: "more ranks are busy than the machine has cores",
    Cause.ORDER: "another op was ready, but the plan has it later",
    Cause.MEMORY: "another op was ready, but would not fit in memory",
    Cause.WARM_UP: "the first micro-batches have not come this far",
    Cause.WAITING: "the next op waits for an op of another rank",
    Cause.TRANSFER: "what the next op reads is on its way",
    Cause.LAUNCH: "the next op is ready and has not started yet",
    Cause.DRAIN: "this rank is done, others are not",
}


@dataclass(frozen=True, slots=True)
class Stretch:
    """All idle time of one rank with one cause and one thing waited for, such as transfers of 1F to 2F."""

    rank: int
    cause: Cause
    waits_for: str
    total_us: int
    times: int


@dataclass(frozen=True)
class Explanation:
    """Why the ranks of a timeline are idle. `model_us`: the makespan that the suggestions' gains are taken from.

    That is of the plan with the median times of the timeline: what a simulated timeline itself takes, and a measured
    one without launch gaps and ops slower than most.
    """

    timeline: Timeline
    idles: tuple[Idle, ...]
    model_us: int
    suggestions: tuple[Suggestion, ...]

    @cached_property
    def by_rank(self) -> tuple[dict[Cause, int], ...]:
        """µs of each cause, for each rank."""
        totals: tuple[dict[Cause, int], ...] = tuple({} for _ in range(self.timeline.num_ranks))
        for one in self.idles:
            totals[one.rank][one.cause] = totals[one.rank].get(one.cause, 0) + one.duration_us
        return totals

    @cached_property
    def by_cause(self) -> dict[Cause, int]:
        """µs of each cause on all ranks, the worst first."""
        totals = {cause: sum(of_rank.get(cause, 0) for of_rank in self.by_rank) for cause in Cause}
        return {cause: us for cause, us in sorted(totals.items(), key=lambda entry: -entry[1]) if us}

    @cached_property
    def worst(self) -> tuple[Stretch, ...]:
        """What ranks wait for, the longest in all first."""
        sums: dict[tuple[int, Cause, str], list[int]] = {}
        for one in self.idles:
            sums.setdefault((one.rank, one.cause, _task_of(one.waits_for)), []).append(one.duration_us)
        found = [Stretch(*key, sum(each), len(each)) for key, each in sums.items()]
        return tuple(sorted(found, key=lambda stretch: (-stretch.total_us, stretch.rank)))

    def to_text(self) -> str:
        """What `rota explain` prints."""
        timeline, total = self.timeline, sum(self.timeline.idle_us)
        makespan = time_text(timeline.makespan_us)
        lines = [f"{count_text(timeline.num_ranks, 'rank')}, makespan {makespan}, idle {timeline.bubble_fraction:.1%}"]
        if not total:
            return "\n".join([*lines, "No rank is idle."])
        lines += ["", "Why, on all ranks together:"]
        width = max(len(f"{us:,}") for us in self.by_cause.values())
        for cause, us in self.by_cause.items():
            lines.append(f"  {us:>{width},} µs {us / total:>6.1%}  {cause:<9} {WORDS[cause]}")
        lines += ["", *self._table(), "", "The longest waits:"]
        for stretch in self.worst[:_WORST]:
            times = f", {stretch.times} times" if stretch.times > 1 else ""
            lines.append(f"  rank {stretch.rank}: {stretch.total_us:,} µs {_told(stretch)}{times}")
        return "\n".join([*lines, "", *self._helps()])

    def _table(self) -> list[str]:
        """A row a rank, a column a cause, in % of the makespan."""
        makespan, causes = self.timeline.makespan_us, list(self.by_cause)
        ranks = list(range(self.timeline.num_ranks))
        if len(ranks) > _MOST_ROWS:
            idle_us = self.timeline.idle_us
            ranks = sorted(sorted(ranks, key=lambda rank: -idle_us[rank])[:_MOST_ROWS])
        shown = f"the {_MOST_ROWS} idlest ranks, " if len(ranks) < self.timeline.num_ranks else ""
        lines = [f"By rank ({shown}% of the makespan):", "  rank   idle" + "".join(f"{c:>9}" for c in causes)]
        for rank in ranks:
            cells = (f"{self.by_rank[rank].get(cause, 0) / makespan:>9.1%}" for cause in causes)
            lines.append(f"  {rank:>4} {self.timeline.idle_us[rank] / makespan:>6.1%}" + "".join(cells))
        return lines

    def _helps(self) -> list[str]:
        lines, lost = [], self.timeline.makespan_us - self.model_us
        if lost > 0:
            lines.append(
                f"The plan with the median times takes {self.model_us:,} µs; {lost:,} µs more are launch gaps, "
                f"later arrivals and ops slower than most."
            )
        if not self.suggestions:
            return [*lines, "Nothing that was tried would help: other orders, even stages, faster transfers."]
        lines.append(f"What would help, each alone (simulated, against {self.model_us:,} µs):")
        for one in self.suggestions:
            share = f"{-one.gain_us / self.model_us:+.1%}"
            lines.append(f"  {-one.gain_us:>+10,} µs {share:>7}  {one.words}")
        return lines

    def _repr_html_(self) -> str:
        return notebook.document(self.timeline.to_snippet(), notebook.preformatted(self.to_text()))

    def to_json(self) -> str:
        """The totals, the worst stretches and the suggestions."""
        fields: dict[str, Any] = {
            "makespan_us": self.timeline.makespan_us,
            "idle_us": list(self.timeline.idle_us),
            "by_cause_us": {str(cause): us for cause, us in self.by_cause.items()},
            "by_rank_us": [{str(cause): us for cause, us in of_rank.items()} for of_rank in self.by_rank],
            "worst": [
                {"rank": s.rank, "cause": str(s.cause), "waits_for": s.waits_for, "us": s.total_us, "times": s.times}
                for s in self.worst[:_WORST]
            ],
            "model_us": self.model_us,
            "suggestions": [one._asdict() for one in self.suggestions],
        }
        return json.dumps(fields, indent=2, ensure_ascii=False) + "\n"


def explain(
    timeline: Timeline | Plan, planned: Timeline | Plan | None = None, num_cores: int | None = None
) -> Explanation:
    """Why the ranks of `timeline` are idle, and what would help; see `idle`. Raises PlanError as that does."""
    timeline = timeline_of(timeline)
    idles = idle(timeline, planned, num_cores)
    model = as_seen(timeline)
    return Explanation(timeline, idles, simulate(model).makespan_us, suggestions(model))


def _task_of(work: Op | Transfer | StepEndWork | None) -> str:
    """What is waited for, without its micro-batch."""
    if isinstance(work, Op):
        return f"{work.stage}{work.kind}"
    if isinstance(work, Transfer):
        return f"{_task_of(work.source)}→{_task_of(work.target)}"
    return "" if work is None else f"stage {work.stage}'s {_STEP_END[work.what]}"


def _told(stretch: Stretch) -> str:
    what = stretch.waits_for
    return {
        Cause.SLOWER: f"because {what} takes longer than planned",
        Cause.CORES: f"because {what} shares its core",
        Cause.ORDER: f"waiting for {what}, while an op that the plan put later was ready",
        Cause.MEMORY: f"waiting for {what}, while an op that would not fit in memory was ready",
        Cause.STEP_END: f"at the step's end: {what}",
        Cause.WARM_UP: f"before its first op, waiting for {what}",
        Cause.WAITING: f"waiting for {what}",
        Cause.TRANSFER: f"while {what} is on its way",
        Cause.LAUNCH: f"before {what} starts, which is ready",
        Cause.DRAIN: f"after its last op, until {what} ends the step",
    }[stretch.cause]
