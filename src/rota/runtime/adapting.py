"""Another order for the same stages on the same ranks, when a rank has become slower, or faster again.

every step        when ops began and ended ──▶ kept for ten steps
every ten steps   all ranks' times ──▶ first rank: has a rank changed? ──▶ search, in a process beside the training
ten steps later   its answer ──▶ all ranks make it ready, and agree ──▶ the next step runs it
ten steps later   are its steps slower than those before? ──▶ in the same way, back to the order before

All ranks look after the same step, so they swap between the same two. Each step compares the plans that the ranks run.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Real
from statistics import median, quantiles
from typing import Any, NamedTuple, final

from rota.errors import PipelineError, RotaError
from rota.plan import Plan
from rota.runtime.background_search import Answer, BackgroundSearch
from rota.runtime.environment import given_least_gain
from rota.runtime.faults.changed_ranks import Change, changed_rank, compared, planned_us
from rota.runtime.json_messages import all_gather_json
from rota.runtime.meshes import Processes
from rota.runtime.recorder import Record
from rota.tasks import Kind
from rota.units import time_text

NUM_STEPS = 10  # that are looked at together
_MOST_DOUBLINGS = 6  # of the steps between two searches, while one follows another
_CALM = 8  # times that number of steps without a search: the next one need not wait


class Times(NamedTuple):
    """A rank's last steps, in µs: what all ops of each step took, the median by (stage, kind), and each step's time."""

    busy_us: list[float]
    of_tasks_us: dict[tuple[int, Kind], int]
    steps_us: list[float]


class _Trial(NamedTuple):
    """An order that all ranks run, and those before it: the plan, its steps, and both as predicted."""

    plan: Plan
    former: Plan
    former_steps_us: list[float]
    answer: Answer
    number: int  # of its first step


@final
class Adapting:
    """Looks for a rank that has changed, and swaps the plan. `after_step` is collective, every ten steps.

    Args:
        base: the pipeline's own plan.
        least_gain: by how much a step must get shorter, as a fraction of it.
        processes: the processes of all pipelines.
        prepare: makes a plan ready to run.
    """

    def __init__(self, base: Plan, least_gain: float, processes: Processes, prepare: Callable[[Plan], object]) -> None:
        self._processes, self._prepare = processes, prepare
        self._num_steps = 0
        self._spans: deque[_Step] = deque(maxlen=NUM_STEPS)
        #: What the steps run that are given no plan.
        self.plan = base
        self._watch = _Watch(base, least_gain) if processes.is_first else None
        self._proposed: Plan | None = None  # on the first rank, what all are to swap to

    def after_step(self, record: Record, number: int, step_us: float) -> None:
        """Step `number` has run `plan` and taken `step_us` on this rank, and `record` has the times of its ops."""
        self._num_steps += 1
        self._spans.append(_Step(self.plan, record.starts_ns, record.ends_ns, step_us))
        if self._num_steps % NUM_STEPS:
            return
        times = _times(self._spans, self._processes.rank)
        # What the first rank proposes goes with the times of the next look: a message of its own would cost each look.
        proposed = None if self._proposed is None else self._proposed.to_json()
        gathered = all_gather_json([*_to_json(times), proposed], self._processes.everyone)
        text = next(filter(None, (row[-1] for row in gathered)), None)
        of_all = [_from_json(row) for row in gathered]
        if text is not None:
            self._swap(text, number, steps_of(of_all))
        elif self._watch is not None:
            self._proposed = self._watch.look([[of_all[p] for p in of] for of in self._processes.pipelines], self.plan)

    def _swap(self, text: str, number: int, former_steps_us: list[float]) -> None:
        """All ranks make the plan ready; if one of them cannot, none runs it."""
        error = ""
        try:
            plan = Plan.from_json(text)
            self._prepare(plan)
        except RotaError as refused:
            error = str(refused)
        errors = all_gather_json(error, self._processes.everyone)
        former = self.plan
        if not any(errors):
            self.plan = plan
        self._spans.clear()
        self._proposed = None
        if self._watch is not None:
            self._watch.swapped(number, next(filter(None, errors), ""), former, former_steps_us)

    def close(self) -> None:
        """End a search that is still running."""
        if self._watch is not None:
            self._watch.search.close()


@final
class _Watch:
    """On the first rank: finds a rank that has changed, has orders searched for, and says what was done."""

    def __init__(self, base: Plan, least_gain: float) -> None:
        self.search = BackgroundSearch()
        self._base, self._least_gain = base, least_gain
        self._planned_us = planned_us(base)
        self._known_us = self._planned_us  # that orders were searched for last
        self._sought: tuple[Plan, Change] | None = None  # what the search is for, and why
        self._line = ""
        self._answer: Answer | None = None  # that all ranks are about to swap to; None: back to the order before
        self._trial: _Trial | None = None  # the order that has not been compared with the one before yet
        self._slower: list[Plan] = []  # whose orders were slower than those before
        self._num_looks, self._num_doublings, self._first_look = 0, 0, 0

    def look(self, pipelines: Sequence[Sequence[Times]], current: Plan) -> Plan | None:
        """The plan to swap to, if there is one. `pipelines`: of each its ranks' times."""
        self._num_looks += 1
        busy = [[times.busy_us for times in of] for of in pipelines]
        if self.search.is_running:
            return self._answered(busy, current)
        change = changed_rank(self._known_us, busy)
        if self._trial is not None and change is None:  # otherwise the steps before had other ranks
            return self._compared(self._trial, steps_of([times for of in pipelines for times in of]))
        if change is not None and self._num_looks >= self._first_look:
            sought = with_times(current, pipelines)
            own = replace(sought, orders=self._base.orders, service_orders=self._base.service_orders)
            self._trial = None
            self._sought = sought, compared(self._planned_us, busy, change)
            self.search.begin(sought, [own])
        return None

    def _answered(self, busy: list[list[list[float]]], current: Plan) -> Plan | None:
        answer = self.search.taken()
        if answer is None:
            return None
        assert self._sought is not None
        sought, change = self._sought
        self._known_us = planned_us(sought)
        self._wait()
        who = self._describe(change)
        if answer.plan is None:
            _report(f"{who}, but no other order was searched for: {answer.error}")
            return None
        if changed_rank(self._known_us, busy) is not None:
            return None  # it has changed again meanwhile: the next look begins another search
        if any(_is_same_order(answer.plan, slower) for slower in self._slower):
            _report(f"{who}; the order stays: {self._predicted(answer)} was slower than the previous order when it ran")
            return None
        if answer.plan.orders == current.orders or answer.gain < self._least_gain:
            bound = f", and none takes less than {time_text(answer.bound_us)}" if answer.bound_us else ""
            _report(
                f"{who}; the order stays: no other was found that saves {self._least_gain:.1%} of a step "
                f"({time_text(answer.before_us)} predicted, best {time_text(answer.makespan_us)}{bound})"
            )
            return None
        self._line, self._answer = f"{who}; {self._predicted(answer)},", answer
        return answer.plan

    def swapped(self, number: int, error: str, former: Plan, former_steps_us: list[float]) -> None:
        """All ranks run the plan that `look` returned from the step after `number`, unless there is an `error`.

        `former`: what they ran before, and how long its last steps took.
        """
        answer, self._answer = self._answer, None
        if error:
            _report(f"{self._line} is not run: {error}")
            return
        _report(f"{self._line} from step {number + 1} on")
        if answer is not None:
            assert answer.plan is not None
            self._trial = _Trial(answer.plan, former, former_steps_us, answer, number + 1)

    def _compared(self, trial: _Trial, steps_us: list[float]) -> Plan | None:
        """Say how long steps take with a new order, and as predicted; the order before, if they take longer."""
        self._trial = None
        before_us, after_us = median(trial.former_steps_us), median(steps_us)
        noise_us = max(_spread(trial.former_steps_us), _spread(steps_us))
        told = (
            f"the order since step {trial.number} takes {time_text(round(after_us))} per step instead of "
            f"{time_text(round(before_us))}, measured in {NUM_STEPS} steps each (predicted: "
            f"{time_text(trial.answer.makespan_us)} instead of {time_text(trial.answer.before_us)})"
        )
        if after_us <= before_us + noise_us:
            _report(told)
            return None
        self._slower.append(trial.plan)
        noise = time_text(round(noise_us))
        self._line = f"{told}, slower by more than the noise of {noise}: back to the previous order"
        return trial.former

    def _wait(self) -> None:
        """The more often orders are searched for, the longer nothing changes: ranks may be slow now and then."""
        calm = self._num_looks - self._first_look >= _CALM * 2**self._num_doublings
        self._num_doublings = 0 if calm else min(self._num_doublings + 1, _MOST_DOUBLINGS)
        self._first_look = self._num_looks + 2**self._num_doublings

    def _describe(self, change: Change) -> str:
        several = f" of replica {change.position}" if change.position else ""
        return (
            f"rank {change.rank}{several} takes {change.times_planned:.2f} times as long as planned, the others "
            f"{change.others:.2f} times"
        )

    def _predicted(self, answer: Answer) -> str:
        assert answer.plan is not None
        which = "the run's own order" if answer.plan.orders == self._base.orders else "another order"
        return (
            f"{which}, predicted {time_text(answer.makespan_us)} per step instead of "
            f"{time_text(answer.before_us)} ({answer.gain:.1%} less)"
        )


def least_gain_of(adapt: float | None, base: Plan) -> float | None:
    """By what fraction a new order must shorten a step; None if nobody asks for one, or `base` cannot be swapped.

    `adapt`: as `Pipeline` was given it; None: as `rota run --adapt` says.

    Raises:
        PipelineError: it is not a fraction, or micro-batches differ, so that each batch needs a plan of its own.
    """
    least_gain = given_least_gain() if adapt is None else adapt
    if least_gain is None:
        return None
    if isinstance(least_gain, bool) or not isinstance(least_gain, Real) or not 0 < least_gain < 1:
        raise PipelineError(f"adapt={least_gain!r}; give the least gain as a fraction of a step, such as 0.03, or None")
    if not base.placement.is_alike:
        raise PipelineError("adapt is for plans whose micro-batches are alike, but this plan's differ; leave it out")
    if base.num_ranks == 1:  # nobody to compare with
        return None
    return float(least_gain)


def with_times(plan: Plan, pipelines: Sequence[Sequence[Times]]) -> Plan:
    """The plan with the measured times of its tasks; of several pipelines, and of several ranks, the slowest counts."""
    measured: dict[tuple[int, Kind], int] = {}
    for of in pipelines:
        for times in of:
            for task, us in times.of_tasks_us.items():
                measured[task] = max(measured.get(task, 0), us)
    tasks = tuple(
        replace(task, duration_us=measured.get((task.stage, task.kind), task.duration_us))
        for task in plan.placement.tasks
    )
    return replace(plan, placement=replace(plan.placement, tasks=tasks))


def steps_of(of_all: Sequence[Times]) -> list[float]:
    """How long each step took: as on the rank that began it last, so without waiting for others to begin."""
    return [min(step) for step in zip(*(times.steps_us for times in of_all), strict=True)]


def _spread(steps_us: Sequence[float]) -> float:
    """The interquartile range."""
    first, _, last = quantiles(steps_us, n=4)
    return last - first


def _is_same_order(one: Plan, other: Plan) -> bool:
    return (one.orders, one.service_orders) == (other.orders, other.service_orders)


class _Step(NamedTuple):
    """A step of a rank: what it ran, when its ops began and ended, and its time."""

    plan: Plan
    starts_ns: list[int]
    ends_ns: list[int]
    step_us: float


def _times(steps: Sequence[_Step], rank: int) -> Times:
    busy_us = [(sum(step.ends_ns) - sum(step.starts_ns)) / 1000 for step in steps]
    durations: dict[tuple[int, Kind], list[int]] = {}
    for step in steps:
        for op, start, end in zip(step.plan.orders[rank], step.starts_ns, step.ends_ns, strict=True):
            durations.setdefault((op.stage, op.kind), []).append(end - start)
    of_tasks_us = {task: round(median(ns) / 1000) for task, ns in durations.items()}
    return Times(busy_us, of_tasks_us, [step.step_us for step in steps])


def _to_json(times: Times) -> list[Any]:
    """The times as JSON, to which `after_step` appends the plan that the rank proposes."""
    return [times.busy_us, [[*task, us] for task, us in times.of_tasks_us.items()], times.steps_us]


def _from_json(row: list[Any]) -> Times:
    busy_us, of_tasks, steps_us, _ = row
    return Times(busy_us, {(stage, Kind(kind)): us for stage, kind, us in of_tasks}, steps_us)


def _report(line: str) -> None:
    print(f"rota: {line}", file=sys.stderr, flush=True)
