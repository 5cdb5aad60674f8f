"""A report of idle time: how much by each cause, the longest waits, and what would help."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean
from typing import Any

from rota.accounting.causes import DESCRIPTIONS, Cause, Idle
from rota.accounting.delays import contention_of
from rota.accounting.idle_time import idle
from rota.accounting.suggestions import Suggestion, advice, imbalance, with_measured_times
from rota.calibration.spread import Spread
from rota.core.plan import Plan
from rota.core.simulation import simulate, timeline_of
from rota.core.tasks import Kind, Op, Transfer
from rota.core.text import angle_repr, count_text, fitted, time_text
from rota.core.timeline import StepEndWork, Timeline

_NUM_WAITS = 8  # longest waits in a report
_MAX_ROWS = 16  # ranks in the table; if there are more, the idlest
_TABLE_LEFT, _TABLE_COLUMN = 20, 9  # characters: of rank, work and idle, and of each cause

_STEP_END = {"reduce": "reduction", "optimizer": "optimizer step"}


@dataclass(frozen=True, slots=True)
class Stretch:
    """All idle time of one rank with one cause and one task waited for, such as transfers from 1F to 2F.

    Attributes:
        rank: The idle rank.
        cause: Why it is idle.
        waits_for: What it waits for, without micro-batches.
        tasks: (stage, kind) of each op that `waits_for` names: one for an op, two for a transfer.
        total_us: Idle time in µs.
        times: Number of intervals.
    """

    rank: int
    cause: Cause
    waits_for: str
    tasks: tuple[tuple[int, Kind], ...]
    total_us: int
    times: int


@dataclass(frozen=True)
class Explanation:
    """Why the ranks of a timeline are idle.

    Attributes:
        timeline: What is explained.
        idles: Every idle interval with its cause, sorted by rank and start.
        model_us: Makespan in µs of the plan simulated with the median times of the timeline's ops, and messages as
            planned; suggestions are compared with it. For a simulated timeline it is its own makespan; for a measured
            one it lacks late starts, late messages, and ops slower than the median. It assumes a core per rank.
        work_us: Work of each rank in µs, with the median times of the timeline's ops.
        suggestions: Changes that would shorten the step, the largest gain first.
        num_cores: CPU cores that all ranks shared; None if they shared none, or it is not known.
        doubts: What the measured ops are too far apart to tell, in words.
        imbalance: What it costs that the ranks' work is uneven, in words, where no other cut is suggested; "" if it is
            even.
    """

    timeline: Timeline
    idles: tuple[Idle, ...]
    model_us: int
    work_us: tuple[int, ...]
    suggestions: tuple[Suggestion, ...]
    num_cores: int | None = None
    doubts: tuple[str, ...] = ()
    imbalance: str = ""

    def __str__(self) -> str:
        """One line."""
        idle = f"idle {self.timeline.bubble_fraction:.1%}"
        most = "".join(f", most of it by {cause}" for cause in [*self.by_cause][:1])
        return f"Explanation of {count_text(self.timeline.num_ranks, 'rank')}: {idle}{most}"

    __repr__ = angle_repr

    @cached_property
    def by_rank(self) -> tuple[dict[Cause, int], ...]:
        """Idle time in µs by cause, per rank."""
        totals: tuple[dict[Cause, int], ...] = tuple({} for _ in range(self.timeline.num_ranks))
        for rank, start_us, end_us, cause, *_ in self.idles:
            totals[rank][cause] = totals[rank].get(cause, 0) + end_us - start_us
        return totals

    @cached_property
    def by_cause(self) -> dict[Cause, int]:
        """Idle time in µs by cause, over all ranks, the largest first."""
        totals = {cause: sum(on_rank.get(cause, 0) for on_rank in self.by_rank) for cause in Cause}
        return {cause: us for cause, us in sorted(totals.items(), key=lambda entry: -entry[1]) if us}

    @cached_property
    def worst(self) -> tuple[Stretch, ...]:
        """What ranks wait for, the longest total first."""
        sums: dict[tuple[int, Cause, str, tuple[tuple[int, Kind], ...]], list[int]] = {}
        for interval in self.idles:
            key = interval.rank, interval.cause, _name_of(interval.waits_for), _tasks_of(interval.waits_for)
            sums.setdefault(key, []).append(interval.duration_us)
        stretches = (Stretch(*key, sum(durations_us), len(durations_us)) for key, durations_us in sums.items())
        return tuple(sorted(stretches, key=lambda stretch: (-stretch.total_us, stretch.rank)))

    @cached_property
    def lost_to_cores_us(self) -> int:
        """Time in µs that the ops of all ranks waited for a core, at fair shares of the cores."""
        cores = contention_of(self.timeline, self.num_cores)
        return sum(cores.lost_us(span.start_us, span.end_us) for span in self.timeline.op_spans()) if cores else 0

    def to_text(self, width: int | None = None) -> str:
        """The report that `rota explain` prints, in lines of at most `width` characters; None: of any length."""
        timeline, total = self.timeline, sum(self.timeline.idle_us)
        makespan = time_text(timeline.makespan_us)
        lines = [f"{count_text(timeline.num_ranks, 'rank')}, makespan {makespan}, idle {timeline.bubble_fraction:.1%}"]
        usage = timeline.plan.usage
        if usage is not None and usage.is_estimate:
            lines.append(f"Its planned times are {usage.note}; nothing was measured.")
        lines += self._core_lines()
        if not total:
            return "\n".join(fitted(line, width) for line in [*lines, "No rank is idle."])
        lines += ["", "Causes, summed over all ranks, and in % of their time in the step:"]
        texts = [time_text(us) for us in self.by_cause.values()]
        digits, step_us = max(map(len, texts)), timeline.num_ranks * timeline.makespan_us
        for (cause, us), time in zip(self.by_cause.items(), texts, strict=True):
            before = f"  {time:>{digits}} {us / step_us:>6.1%}  {cause:<9} "
            note = " (*)" if cause is Cause.ORDER else ""
            lines += fitted(before + DESCRIPTIONS[cause] + note, width, len(before)).split("\n")
        lines += self._order_lines()
        lines += ["", *self._table(width), "", "The longest waits:"]
        for stretch in self.worst[:_NUM_WAITS]:
            times = f", {stretch.times} times" if stretch.times > 1 else ""
            lines.append(f"  rank {stretch.rank}: {time_text(stretch.total_us)} {_describe(stretch)}{times}")
        lines += _key_lines(self.worst[:_NUM_WAITS])
        lines += ["", *self._suggestion_lines()]
        return "\n".join(fitted(line, width) for line in lines)

    def _core_lines(self) -> list[str]:
        """What it means that there were fewer cores than ranks."""
        lost_us, busy_us = self.lost_to_cores_us, sum(self.timeline.busy_us)
        if not lost_us:
            return []
        ranks, cores = count_text(self.timeline.num_ranks, "rank"), count_text(self.num_cores or 0, "core")
        return [
            f"{ranks} shared {cores}: of the {time_text(busy_us)} that all ops took together, they waited "
            f"{time_text(lost_us)} ({lost_us / busy_us:.0%}) for a core. Use no more ranks than cores before you judge "
            f"the ranks' work and idle times below."
        ]

    def _order_lines(self) -> list[str]:
        """What another order could gain, where ORDER is a cause."""
        if Cause.ORDER not in self.by_cause:
            return []
        gains_us = [suggestion.gain_us for suggestion in self.suggestions if suggestion.what == "order"]
        gain = "gains nothing"
        if gains_us:
            gain = f"shortens the step by {gains_us[0] / self.model_us:.1%} (see below)"
        elif any("the order of" in doubt for doubt in self.doubts):
            gain = "is not certain to gain anything (see below)"
        return [
            f"  (*) This does not mean that another order is faster: the best of the named schedules that fit {gain}."
        ]

    def _table(self, width: int | None) -> list[str]:
        """One row per rank, one column per cause, in % of the makespan; several tables where they are too wide."""
        makespan, causes = self.timeline.makespan_us, list(self.by_cause)
        idle_us = self.timeline.idle_us
        ranks = sorted(sorted(range(len(idle_us)), key=lambda rank: -idle_us[rank])[:_MAX_ROWS])
        shown = f"the {_MAX_ROWS} idlest ranks, " if len(ranks) < len(idle_us) else ""
        average_us = mean(self.work_us) or 1
        lines = [
            f"By rank ({shown}work, by the median time of each op, in % of the mean rank's; the others in % of the "
            f"makespan):"
        ]
        at_once = len(causes) if width is None else max((width - _TABLE_LEFT) // _TABLE_COLUMN, 1)
        for first in range(0, len(causes), at_once):
            columns = causes[first : first + at_once]
            lines.append("  rank   work   idle" + "".join(f"{cause:>{_TABLE_COLUMN}}" for cause in columns))
            for rank in ranks:
                cells = (f"{self.by_rank[rank].get(cause, 0) / makespan:>{_TABLE_COLUMN}.1%}" for cause in columns)
                work = f"{self.work_us[rank] / average_us:>6.0%}"
                lines.append(f"  {rank:>4} {work} {idle_us[rank] / makespan:>6.1%}" + "".join(cells))
        return lines

    def _suggestion_lines(self) -> list[str]:
        lines, lost = [], self.timeline.makespan_us - self.model_us
        model, shared_cores = time_text(self.model_us), bool(self.lost_to_cores_us)
        if shared_cores:
            lines.append(
                f"With a core per rank, and the median of each op's measured times (which include waiting for a core), "
                f"the plan takes {model}."
            )
        elif lost > 0:
            lines.append(
                f"With the median time of each op, and messages as planned, the plan takes {model}; the other "
                f"{time_text(lost)} went to ops that ran longer than the median, to ops that started late although "
                f"they were ready, and to messages that took longer than planned."
            )
        if self.imbalance:
            lines.append(self.imbalance)
        doubts = [f"Too uncertain to advise: {doubt}." for doubt in self.doubts]
        if not self.suggestions:
            helps = "is certain to help" if doubts else "would help"
            tried = f"other orders, {'' if shared_cores else 'balanced stages, '}faster transfers"
            where = ", even with a core per rank" if shared_cores else ""
            return [*lines, *doubts, f"None of the changes tried {helps}{where}: {tried}."]
        core = ", with a core per rank" if shared_cores else ""
        lines.append(f"What would help, each change on its own (simulated{core}, against {model}):")
        for suggestion in self.suggestions:
            gain, share = f"-{time_text(suggestion.gain_us)}", f"{-suggestion.gain_us / self.model_us:+.1%}"
            lines.append(f"  {gain:>9} {share:>7}  {suggestion.words}")
        lines += doubts
        if commands := next((change.commands for change in self.suggestions if change.commands), ()):
            lines += ["To cut again:", *(f"  {command}" for command in commands)]
            if self.timeline.plan.usage is None or not self.timeline.plan.usage.is_estimate:
                lines.append("Run them where the plan is to run: they measure the machine that they run on.")
        return lines

    def to_json(self) -> str:
        """The totals, the longest waits and the suggestions, as JSON."""
        fields: dict[str, Any] = {
            "makespan_us": self.timeline.makespan_us,
            "idle_us": list(self.timeline.idle_us),
            "by_cause_us": {str(cause): us for cause, us in self.by_cause.items()},
            "work_us": list(self.work_us),
            "by_rank_us": [{str(cause): us for cause, us in on_rank.items()} for on_rank in self.by_rank],
            "worst": [
                {"rank": s.rank, "cause": str(s.cause), "waits_for": s.waits_for, "us": s.total_us, "times": s.times}
                for s in self.worst[:_NUM_WAITS]
            ],
            "model_us": self.model_us,
            "num_cores": self.num_cores,
            "lost_to_cores_us": self.lost_to_cores_us,
            "suggestions": [suggestion._asdict() for suggestion in self.suggestions],
            "doubts": list(self.doubts),
            "imbalance": self.imbalance,
        }
        return json.dumps(fields, indent=2, ensure_ascii=False) + "\n"


def explain(
    timeline: Timeline | Plan, planned: Timeline | Plan | None = None, num_cores: int | None = None
) -> Explanation:
    """Explain why ranks are idle, and what would help.

    Args:
        timeline: What happened. A plan is simulated.
        planned: What should have happened; see `idle`.
        num_cores: Number of cores, if all ranks share one machine; see `idle`. None: as recorded by the run.

    Returns:
        Idle time by cause, the longest waits, and suggestions with their simulated gains.

    Raises:
        PlanError: `planned` lacks an op of `timeline`.
    """
    timeline = timeline_of(timeline)
    num_cores = num_cores or timeline.num_cores
    idles = idle(timeline, planned, num_cores)
    model = simulate(with_measured_times(timeline))
    spread = Spread.of([timeline], model.plan.placement)
    changes = advice(model, spread)
    uneven = ""
    if num_cores is not None and timeline.num_ranks > num_cores:
        # Ops' times contain waiting for a core, so they do not tell which rank or stage has more work.
        changes = [change for change in changes if change.what != "cut"]
    elif not any(change.what == "cut" and change.is_certain for change in changes):
        uneven = imbalance(model, spread)
    return Explanation(
        timeline,
        idles,
        model.makespan_us,
        model.busy_us,
        tuple(change for change in changes if change.is_certain),
        num_cores,
        tuple(
            f"{change.words}: {change.gain_us / model.makespan_us:.1%} shorter with the median times, but not with all "
            f"times that the measured ops allow"
            for change in changes
            if not change.is_certain
        ),
        uneven,
    )


def _tasks_of(work: Op | Transfer | StepEndWork | None) -> tuple[tuple[int, Kind], ...]:
    """(stage, kind) of the ops that the name of this work has."""
    ops = (work,) if isinstance(work, Op) else (work.source, work.target) if isinstance(work, Transfer) else ()
    return tuple((op.stage, op.kind) for op in ops)


def _name_of(work: Op | Transfer | StepEndWork | None) -> str:
    """The name of an op, transfer or step end, without its micro-batch."""
    if isinstance(work, StepEndWork):
        return f"stage {work.stage}'s {_STEP_END[work.what]}"
    return "→".join(f"{stage}{kind}" for stage, kind in _tasks_of(work))


def _key_lines(stretches: Sequence[Stretch]) -> list[str]:
    """What the names of tasks and transfers in these stretches mean, with one of them as the example."""
    stages: dict[Kind, int] = {}
    for stage, kind in (task for stretch in stretches for task in stretch.tasks):
        stages.setdefault(kind, stage)
    if not stages:
        return []
    (first, stage), *others = stages.items()
    keys = [f"{stage}{first}: {first.word} of stage {stage}", *(f"{kind}: {kind.word}" for kind, _ in others)]
    if transfer := next((stretch.waits_for for stretch in stretches if len(stretch.tasks) > 1), None):
        keys.append(f"{transfer}: transfer between the two")
    return [f"  ({'; '.join(keys)})"]


def _describe(stretch: Stretch) -> str:
    what = stretch.waits_for
    return {
        Cause.SLOWER: f"because {what} takes longer than planned",
        Cause.CORES: f"because {what} shares its core",
        Cause.ORDER: f"waiting for {what}, while an op that the plan put later was ready",
        Cause.MEMORY: f"waiting for {what}, while an op that would not fit in memory was ready",
        Cause.STEP_END: f"at the step's end: {what}",
        Cause.WARM_UP: f"before its first op, waiting for {what}",
        Cause.WAITING: f"waiting for {what}",
        Cause.SHARED_LINK: f"while {what} waits for a shared link",
        Cause.TRANSFER: f"while {what} is in transit",
        Cause.COPY: f"while {what} is copied",
        Cause.LAUNCH: f"before {what} started, although it was ready",
        Cause.DRAIN: f"after its last op, until {what} ends the step",
    }[stretch.cause]
