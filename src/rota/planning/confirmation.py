"""`confirm`: measures the best candidates before one is recommended: their own stages, and real steps of them.

answer by the layers' figures ─▶ stages of the finalists, measured: do they fit? ─▶ steps of the finalists, and of one
process, run in turn on real processes ─▶ the simplest of those that are as fast, by what was measured
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rota.calibration import calibrated
from rota.core.checking import check
from rota.core.errors import NothingFitsError, PipelineError, PlanError
from rota.core.units import count_text, time_text
from rota.models import Stages, split
from rota.planning.answer import Answer, Confirmed, OnSharedCores
from rota.planning.choosing import LEAST_TOLERANCE, NOISY, chosen, spread_between
from rota.planning.deadline import Deadline
from rota.planning.evaluation import Found
from rota.planning.layout_bounds import placement_bound_us
from rota.planning.plan_text import layout_text
from rota.planning.step_times import StepTimes, difference
from rota.planning.trials import Trial, is_far, least_s, run_trials
from rota.profiling import profile
from rota.profiling.forked import why_not_here
from rota.profiling.other_programs import OtherPrograms
from rota.profiling.places import accelerators_of
from rota.runtime.environment import num_cores, shared_cores
from rota.runtime.host_memory import total_bytes
from rota.runtime.losses import LossFn

_MOST = 3  # candidates
_MATTER = 3  # plans that are run before there are second starts: the best, the best divided differently, one process
_ROUNDS = 3  # of steps: candidates that divide the processes as others do are measured if time is left for so many
_KEPT_FOR_STEPS = 0.5  # of the time, where steps follow
_REPEATS, _REPEATS_BEFORE_STEPS = 7, 3  # of a stage's measurement: where steps follow, those have its times
_DISAGREE = 1.5  # times that one prediction of a step is another, from which on the answer says so
_MOST_PER_CORE = 8  # processes with which a step is run where there are fewer cores than ranks
_LOADED = 0.10  # spread of steps, or missing cores, above which the machine is busy with something else

MakeBatch = Callable[[int], tuple[Any, Any]]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def confirm(
    answer: Answer,
    model: nn.Module | Stages,
    make_batch: MakeBatch,
    loss_fn: LossFn | None,
    make_optimizer: MakeOptimizer | None = None,
    report: Callable[[str], None] = lambda _: None,
    *,
    time_limit_s: float = 60.0,
    elsewhere: str = "",
) -> Answer:
    """The same answer, with its best candidates measured as they will run.

    Their stages are measured first, and what does not fit by that is left out. Then steps of each are run on this
    machine, with one process per rank, of 1F1B on equal layers, and of the whole model on one process. With little
    time, the best of them and one process come first, and may be started only once; a remark says so. The simplest of
    the plans that are as fast by these steps becomes the best, and its plan is checked. A remark says so if the machine
    was busy with something else: steps of one plan differed by more than a tenth, or other programs used the same
    cores. With more ranks than cores, only steps of the best plan and of one process are run, to compare the two here.

    Ctrl-C ends the measuring: what was measured by then counts; if nothing was, the answer stays as it was and says so.
    An answer that Ctrl-C ended is not measured.

    Args:
        answer: What `autoplan` found.
        model: The model, or its stages made by hand, on the CPU.
        make_batch: Makes inputs and targets of one micro-batch, given its rows.
        loss_fn: Makes the loss of an output and a target; None: no loss.
        make_optimizer: Makes an optimizer of a list of parameters; None: no optimizer.
        report: Called with a line of text for what is being measured.
        time_limit_s: Seconds for all of it; what is left out for lack of time is among the answer's remarks.
        elsewhere: Why the plans are for another machine than this one, so that no steps are run; "" if they are not.

    Returns:
        The answer with `confirmed`, or with `is_unmeasured`.

    Raises:
        SearchError: Where no candidate fits as measured.
    """
    if answer.stopped_by:
        return replace(answer, is_unmeasured=True)
    confirming = _Confirming(answer, model, make_batch, loss_fn, make_optimizer, report, time_limit_s)
    confirming.predicted_because = elsewhere or _why_no_steps(answer, model, loss_fn)
    try:
        confirming.measure_stages()
        if confirming.confirmed and not confirming.predicted_because:
            confirming.run_steps()
        elif confirming.confirmed and confirming.predicted_because == shared_cores(answer.request.machine.num_ranks):
            confirming.run_on_shared_cores()
    except KeyboardInterrupt:
        answer = replace(answer, stopped_by="Ctrl-C")
        if not confirming.confirmed:
            return replace(answer, is_unmeasured=True)
    return confirming.answered(answer)


def _why_no_steps(answer: Answer, model: nn.Module | Stages, loss_fn: LossFn | None) -> str:
    """Why no steps can be run here; "" if they can."""
    machine = answer.request.machine
    if loss_fn is None or answer.request.inference:
        return "there is no loss to train with"
    if len({*machine.slowdowns}) > 1:
        return "its ranks differ in speed, and those of this machine do not"
    if accelerators_of(model if isinstance(model, Stages) else Stages([model])):
        return "the model is on an accelerator"
    return why_not_here(machine.num_ranks)


class _Confirming:
    """What was measured so far."""

    def __init__(
        self,
        answer: Answer,
        model: nn.Module | Stages,
        make_batch: MakeBatch,
        loss_fn: LossFn | None,
        make_optimizer: MakeOptimizer | None,
        report: Callable[[str], None],
        time_limit_s: float,
    ) -> None:
        self._answer, self._report = answer, report
        self._how = model, make_batch, loss_fn, make_optimizer
        self._deadline = Deadline(time_limit_s, None)
        self.confirmed: list[Confirmed] = []
        self.usual, self.alone = answer.usual, answer.one_process
        self.remarks: list[str] = []
        self._left_out: dict[str, list[str]] = {}  # what was not done for lack of time, of which plans
        self.predicted_because = ""
        self.on_shared_cores: OnSharedCores | None = None
        self._longest_s = 0.0  # of measuring the stages of one plan

    def measure_stages(self) -> None:
        """Measure the stages of the best candidates, and leave out those that do not fit."""
        several, others = _divided_differently(self._answer.candidates)
        for found in (*several, *others):
            if len(self.confirmed) >= _MOST:
                break
            if self.confirmed and not self._has_time_for(found, is_alike=found in others):
                self._leave_out("measuring the stages of", found)
                continue
            self._report(f"measuring the stages of {layout_text(found)}")
            again = self._stages_of(found)
            try:
                check(again.plan)
            except PlanError as error:
                self._report(f"{found.schedule}: as measured, {error}")
                continue
            self.confirmed.append(Confirmed(found.makespan_us, again))
        if not self.confirmed:
            raise NothingFitsError(
                "none of the plans fits in memory with its stages as measured; profile the layers again (--refresh), "
                "or plan with a lower limit, to leave room"
            )
        if not isinstance(self.usual, Found) or any(self.usual.is_as(one.found) for one in self.confirmed):
            return
        if self._has_time_for(self.usual, is_alike=True):
            self.usual = self._stages_of(self.usual)

    def _stages_of(self, found: Found) -> Found:
        """The plan with its stages' measured costs.

        Where steps follow, these have the stages' times, and notice other programs as well.
        """
        others, began_s = OtherPrograms(), time.monotonic()
        again = _measured(found, *self._how, _REPEATS if self.predicted_because else _REPEATS_BEFORE_STEPS)
        self._longest_s = max(self._longest_s, time.monotonic() - began_s)
        missing_cores = others.missing_cores(found.candidate.layout.num_ranks if _is_at_once(found) else 1)
        if self.predicted_because and missing_cores > _LOADED:
            self.remarks.append(
                f"the machine is busy: other programs took {missing_cores:.1f} of the cores while the stages of "
                f"{layout_text(found)} were measured; stop them, and plan again"
            )
        return again

    def _has_time_for(self, found: Found, *, is_alike: bool) -> bool:
        """Whether one more plan may be measured; `is_alike`: one that divides the processes as another one does.

        Such a plan must leave time for several rounds of steps: more rounds of fewer plans tell more.
        """
        if self.predicted_because:
            return self._deadline.left_s > self._longest_s
        plans = [one.found.plan for one in self.confirmed] + [found.plan]
        if self.alone is not None:
            plans.append(self.alone.plan)
        rounds_s = least_s(plans, _ROUNDS) if is_alike else 0.0
        return self._deadline.left_s > self._longest_s + max(rounds_s, _KEPT_FOR_STEPS * self._deadline.seconds)

    def run_steps(self) -> None:
        """Run steps of the plans that matter most, and of the other candidates if there is time for all of them."""
        plans = self._by_importance()
        while plans and self._least_s(plans) > self._deadline.left_s:
            self._leave_out("running steps of", plans.pop())
        if len(plans) == 1 and self.alone is not None:  # a pipeline alone would be compared with nothing
            plans.append(self.alone)
        if not plans:
            self.predicted_because = "no time was left for it"
            return
        steps = self._tried(self._trials(plans))
        if not steps and not self.predicted_because:
            self.predicted_because = "no step ended within the time limit"
        for found, of_found in zip(plans, steps, strict=False):
            self._take(found, _with_steps(found, of_found))
        for found in plans[len(steps) :] if steps else []:
            self._leave_out("running steps of", found)
        best_us = min((one.median_us for one in steps), default=0)
        once = sum(one.num_starts == 1 and not is_far(one, best_us) for one in steps)
        if once:
            self.remarks.append(
                f"for lack of time, {count_text(once, 'plan')} started only once, and steps differ from start to "
                f"start: give a longer --time-limit"
            )
        if why := _why_busy(steps):
            self.remarks.append(why)
            self._report(why)

    def run_on_shared_cores(self) -> None:
        """Run steps of the recommended plan, with more ranks than cores, and of one process: is that faster here?"""
        best = chosen(self._compared(), self._answer.tolerance)
        if best is None or self.alone is None or best.num_processes == 1:
            return
        needed = max(
            found.candidate.layout.num_replicas * sum(found.timeline.peak_memory_bytes) for found in (best, self.alone)
        )
        if best.num_processes > _MOST_PER_CORE * num_cores() or needed > (total_bytes() or math.inf):
            return
        self._report(f"running steps of {layout_text(best)} on {count_text(num_cores(), 'core')}, and of one process")
        steps = self._tried(self._trials([best, self.alone]))
        if len(steps) == 2:
            self.on_shared_cores = OnSharedCores(num_cores(), *(of_plan.median_us for of_plan in steps))
        else:
            self._leave_out("comparing, on these cores, with one process", best)

    def _by_importance(self) -> list[Found]:
        """The best plan, one process, the best on other numbers of ranks, 1F1B on equal layers, and the others."""
        best, *others = sorted((one.found for one in self.confirmed), key=lambda found: found.key)
        apart = [found for found in others if _division(found) != _division(best)][:1]
        alone = [] if self.alone is None else [self.alone]
        usual = [found for found in others if isinstance(self.usual, Found) and self.usual.is_as(found)]
        if isinstance(self.usual, Found) and not any(map(self.usual.is_as, (best, *others))):
            usual.append(self.usual)
        usual = [found for found in usual if found not in apart]
        first = [best, *alone, *apart, *usual]
        return first + [found for found in others if found not in first]

    def _least_s(self, plans: Sequence[Found]) -> float:
        """About how long the fewest steps of these plans take: those that matter may be started only once."""
        return least_s([found.plan for found in plans], 1 if len(plans) <= _MATTER else 2)

    def _trials(self, plans: Sequence[Found]) -> list[Trial]:
        model, make_batch, *_ = self._how
        trials = []
        for found in plans:
            inputs, target = make_batch(found.candidate.layout.rows)
            trials.append(Trial(found.plan, _stages(found, model, inputs), inputs, target))
        return trials

    def _tried(self, trials: Sequence[Trial]) -> list[StepTimes]:
        _, _, loss_fn, make_optimizer = self._how
        assert loss_fn is not None
        try:
            return run_trials(trials, loss_fn, make_optimizer, self._deadline.left_s, self._report)
        except PipelineError as error:
            self.predicted_because = f"a step failed here: {error}"
            return []

    def _take(self, before: Found, after: Found) -> None:
        if before is self.alone:
            self.alone = after
        if before is self.usual:
            self.usual = after
        self.confirmed = [one._replace(found=after) if one.found is before else one for one in self.confirmed]

    def _leave_out(self, what: str, found: Found) -> None:
        self._left_out.setdefault(what, []).append(layout_text(found))
        self._deadline.ran_out = True

    def _remarks(self) -> list[str]:
        """What to know about the figures; of all plans for which something was left out, one line."""
        left_out = (f"left out for lack of time: {what} {'; '.join(of)}" for what, of in self._left_out.items())
        return [*left_out, *self.remarks]

    def answered(self, answer: Answer) -> Answer:
        """The answer with what was measured."""
        confirmed, request = self.confirmed, answer.request
        if any(one.found.steps for one in confirmed):  # what was run is not compared with what was not
            confirmed = [one for one in confirmed if one.found.steps is not None]
        is_run = any(one.found.steps for one in confirmed)
        least = LEAST_TOLERANCE if is_run else answer.tolerance
        plans = self._compared()
        alone = self.alone if self.alone is not None and self.alone.steps is not None else None
        if alone is not None and any(found.num_processes == 1 for found in plans):
            alone_plans = [found for found in plans if found.num_processes == 1]
            alone = min([alone, *alone_plans], key=lambda found: found.key)
        elif alone is not None and request.pipeline_ranks in (None, 1) and _fits(alone, answer):
            alone = replace(alone, plan=_in_cluster(alone, answer))
            assert answer.one_process is not None
            confirmed = [*confirmed, Confirmed(answer.one_process.makespan_us, alone)]
            plans.append(alone)
        best = chosen(plans, least)
        assert best is not None
        check(best.plan)
        tolerance, num_rounds = _spread_of(plans, least)
        candidates = best, *sorted((found for found in plans if found is not best), key=lambda found: found.key)
        usual = answer.usual
        if self.usual is not usual and isinstance(usual, Found) and isinstance(self.usual, Found):
            is_alike = (self.usual.steps is None) is (best.steps is None)
            if is_alike:  # else it stays as the layers have it
                confirmed, usual = [*confirmed, Confirmed(usual.makespan_us, self.usual)], self.usual
        return replace(
            answer,
            candidates=candidates,
            usual=usual,
            confirmed=tuple(confirmed),
            tolerance=tolerance,
            num_rounds=num_rounds,
            one_process=answer.one_process if best.steps is None else alone,
            predicted_because="" if best.steps is not None else self.predicted_because,
            on_shared_cores=self.on_shared_cores,
            remarks=(*answer.remarks, *self._remarks(), *_too_noisy(tolerance), *_disagreement(confirmed)),
            ran_out=answer.ran_out or self._deadline.ran_out,
            elapsed_s=answer.elapsed_s + self._deadline.elapsed_s,
        )

    def _compared(self) -> list[Found]:
        """The plans to choose from: those with steps if there are any, else those whose stages were measured."""
        is_run = any(one.found.steps for one in self.confirmed)
        plans = [one.found for one in self.confirmed if one.found.steps is not None or not is_run]
        return plans + self._usual_if_measured(plans, is_run=is_run)

    def _usual_if_measured(self, plans: Sequence[Found], *, is_run: bool) -> list[Found]:
        """1F1B on equal layers, if it was measured as the plans were, fits by that, and is none of them."""
        usual = self.usual
        if not isinstance(usual, Found) or any(map(usual.is_as, plans)):
            return []
        if usual.steps is None if is_run else usual is self._answer.usual:
            return []
        try:
            check(usual.plan)
        except PlanError:
            return []
        return [usual]


def _spread_of(plans: Sequence[Found], least: float) -> tuple[float, int]:
    """The most by which a plan may really differ from the fastest otherwise than measured; of those that are near.

    Also in how many rounds all of these were run.
    """
    fastest = min(plans, key=lambda found: found.key)
    near = [
        found
        for found in plans
        if found is not fastest and (found.steps is None or not is_far(found.steps, fastest.step_us))
    ]
    spreads = (spread_between(found.steps, fastest.steps, least) for found in near)
    rounds = [difference(found.steps, fastest.steps).num_rounds for found in near if found.steps and fastest.steps]
    alone = 0 if fastest.steps is None else fastest.steps.num_starts
    return max([least, *spreads]), min(rounds, default=alone)


def _too_noisy(tolerance: float) -> list[str]:
    """That the rounds of steps did not tell which plan is faster, if so, and what to do."""
    if tolerance <= NOISY:
        return []
    return [
        f"step times vary too much to be sure which plan is the fastest: trial steps measure differences between plans "
        f"only to within {tolerance:.1%}, above {NOISY:.0%}; stop other programs, and give a longer --time-limit for "
        f"more steps"
    ]


def _division(found: Found) -> tuple[int, int]:
    """How a plan divides the processes: ranks of a pipeline, and replicas."""
    return found.candidate.layout.num_ranks, found.candidate.layout.num_replicas


def _divided_differently(candidates: Sequence[Found]) -> tuple[list[Found], list[Found]]:
    """The first candidate of each division of the processes, and the others, with one process alone.

    Predictions of plans that divide the processes alike are off alike. Those of others are not, so these are measured
    first.
    """
    first: dict[tuple[int, int], Found] = {}
    for found in candidates:
        first.setdefault(_division(found), found)
    several = [found for found in first.values() if found.num_processes > 1 or found is candidates[0]]
    return several, [found for found in candidates if found not in several]


def _disagreement(confirmed: Sequence[Confirmed]) -> list[str]:
    """What it means that the layers' figures and those of stages in place differ much: for the plan with the most."""
    by_times = [(_times_apart(one.before_us, one.found.makespan_us), one) for one in confirmed]
    times, most = max(by_times, key=lambda entry: entry[0])
    if times < _DISAGREE:
        return []
    layers, stages = time_text(most.before_us), time_text(most.found.makespan_us)
    return [
        f"the layers, measured one by one, predict {layers} per step for {layout_text(most.found)}, but its "
        f"stages, timed {_how_timed(most.found)}, {stages} ({times:.1f} times apart), so plans that were not run may "
        f"be ranked wrongly: plan again on an idle machine with a longer --time-limit (and --refresh if you use "
        f"--cache)"
    ]


def _how_timed(found: Found) -> str:
    """How the stages of a plan were timed."""
    return "in place" if found.steps is not None or _is_at_once(found) else "one after another, each with a whole core"


def _times_apart(a_us: int, b_us: int) -> float:
    return max(a_us, b_us) / max(min(a_us, b_us), 1)


def _why_busy(steps: Sequence[StepTimes]) -> str:
    """What shows that the machine did something else while these steps ran; "" if nothing does."""
    missing = max((one.missing_cores for one in steps), default=0.0)
    if missing > _LOADED:
        return f"the machine is busy: other programs took {missing:.1f} of the cores that steps were run on"
    spread = max((one.spread for one in steps), default=0.0)
    if spread > _LOADED:
        return f"the machine is busy: steps of one plan differ by {spread:.0%}, above {_LOADED:.0%}"
    return ""


def _fits(alone: Found, answer: Answer) -> bool:
    limit = answer.request.machine.limits[0]
    return limit is None or alone.peak_bytes <= limit


def _in_cluster(alone: Found, answer: Answer) -> Any:
    """The plan of one process, with the memory limit that was asked for."""
    return replace(alone.plan, placement=replace(alone.plan.placement, cluster=answer.request.machine.cluster(1, 1)))


def _stages(found: Found, model: nn.Module | Stages, inputs: Any) -> Stages:
    return split(model, found.candidate.layout.num_stages, found.candidate.usage.cuts, example=inputs)


def _measured(
    found: Found,
    model: nn.Module | Stages,
    make_batch: MakeBatch,
    loss_fn: LossFn | None,
    make_optimizer: MakeOptimizer | None,
    repeats: int,
) -> Found:
    """The same orders on a placement with the stages' own measured costs."""
    candidate, layout = found.candidate, found.candidate.layout
    inputs, target = make_batch(layout.rows)
    stages = _stages(found, model, inputs)
    how: dict[str, Any] = {
        "split_backward": candidate.splits_backward,
        "recompute": candidate.recomputed,
        "optimizer": make_optimizer,
        "repeats": repeats,
    }
    batch = inputs, target, loss_fn
    how |= {"ranks": layout.ranks} if _is_at_once(found) else {"here": True}
    costs = profile(stages, *batch, **how)
    candidate = replace(candidate, measured=costs)
    plan = replace(found.plan, placement=candidate.placement)
    return Found(candidate, found.schedule, plan, placement_bound_us(candidate.placement, layout.num_microbatches))


def _is_at_once(found: Found) -> bool:
    """Whether the stages of all ranks are measured at once, as they run.

    Otherwise one after another: plans for more ranks than there are cores will run on other machines.
    """
    layout = found.candidate.layout
    return layout.num_ranks <= num_cores() and not layout.has_copies


def _with_steps(found: Found, steps: StepTimes) -> Found:
    """The plan with the times of its ops as they ran, in plan order with all ranks busy."""
    as_run, count = calibrated(*steps.timelines), found.candidate.layout.num_microbatches
    placement = replace(found.plan.placement, tasks=as_run.tasks, step_ends=as_run.step_ends)
    return replace(
        found, plan=replace(found.plan, placement=placement), bound_us=placement_bound_us(placement, count), steps=steps
    )
