"""`confirm`: measures the best candidates before one is recommended: their own stages, and real steps of them.

answer by the layers' figures ─▶ stages of the finalists, measured: do they fit? ─▶ steps of the finalists, and of one
process, run in turn on real processes ─▶ the simplest of those that are as fast, by what was measured
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn

from rota.calibration import calibrated
from rota.core.errors import NothingFitsError, PipelineError, PlanError
from rota.core.simulation import check
from rota.core.text import count_text, time_text
from rota.models import Stages, split
from rota.planning.answer import Answer
from rota.planning.choosing import LEAST_TOLERANCE, Contender, StepTimes, difference, recommended, spread_between
from rota.planning.layout_bounds import placement_bound_us
from rota.planning.plan_text import layout_text
from rota.planning.request import Deadline
from rota.planning.trials import Trial, is_far, least_s, run_trials
from rota.profiling import StageProfileOptions, profile
from rota.profiling.devices import accelerators_of, why_not_here
from rota.profiling.stage_run import MakeOptimizer
from rota.runtime.environment import num_cores
from rota.runtime.losses import LossFn

_MOST = 3  # candidates
_MATTER = 3  # plans that are run before there are second starts: the best, the best divided differently, one process
_ROUNDS = 3  # of steps: candidates that divide the processes as others do are measured if time is left for so many
_KEPT_FOR_STEPS = 0.5  # of the time, where steps follow
_REPEATS, _REPEATS_BEFORE_STEPS = 7, 3  # of a stage's measurement: where steps follow, those have its times
_DISAGREE = 1.5  # times that one prediction of a step is another, from which on the answer says so
_LOADED = 0.10  # spread of steps, or missing cores, above which the machine is busy with something else


class Training(NamedTuple):
    """What is trained: a model on the CPU, or its stages made by hand, with its batches, loss and optimizer.

    `make_batch` makes inputs and targets of a micro-batch of so many rows; `make_optimizer` gets a list of parameters.
    """

    model: nn.Module | Stages
    make_batch: Callable[[int], tuple[Any, Any]]
    loss_fn: LossFn | None
    make_optimizer: MakeOptimizer | None = None


@dataclass(frozen=True, slots=True)
class _Findings:
    """What was measured so far: of `plans` the stages, of some of them steps, and of `alone`, one process, steps.

    `because`: why no steps are run; "" if they are.
    """

    plans: tuple[Contender, ...]
    alone: Contender | None
    because: str
    left_out: tuple[tuple[str, str], ...] = ()  # what was not done for lack of time, of which plan
    remarks: tuple[str, ...] = ()

    def without(self, activity: str, *plans: Contender) -> _Findings:
        """The same, and something was not done of these plans for lack of time."""
        return replace(self, left_out=(*self.left_out, *((activity, layout_text(plan)) for plan in plans)))


class _Work(NamedTuple):
    answer: Answer
    training: Training
    deadline: Deadline
    report: Callable[[str], None]


def confirm(
    answer: Answer,
    training: Training,
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
    cores. With more ranks than cores, no steps are run.

    Ctrl-C ends the measuring: what was measured by then counts; if nothing was, the answer stays as it was and says so.
    An answer that Ctrl-C ended is not measured. What is left out for lack of time is among the answer's remarks.
    `elsewhere`: why the plans are for another machine than this one, so that no steps are run; "" if they are not.

    Raises NothingFitsError where no candidate fits as measured.
    """
    if answer.stopped_by:
        return _unmeasured(answer)
    work = _Work(answer, training, Deadline(time_limit_s, None), report)
    findings = _Findings((), answer.one_process, elsewhere or _why_no_steps(answer, training))
    try:
        for so_far in _with_stages(findings, work):
            findings = so_far
        if not findings.because:
            findings = _with_steps(findings, work)
    except KeyboardInterrupt:
        answer = replace(answer, stopped_by="Ctrl-C")
    return _answered(answer, findings, work.deadline.elapsed_s) if findings.plans else _unmeasured(answer)


def _unmeasured(answer: Answer) -> Answer:
    remark = "the plan's stages were not measured; its times are the sums of its layers' times"
    return replace(answer, remarks=(*answer.remarks, remark))


def _why_no_steps(answer: Answer, training: Training) -> str:
    """Why no steps can be run here; "" if they can."""
    machine, model = answer.request.machine, training.model
    if training.loss_fn is None or answer.request.choices.inference:
        return "there is no loss to train with"
    if len({*machine.slowdowns}) > 1:
        return "its ranks differ in speed, and those of this machine do not"
    if accelerators_of(model if isinstance(model, Stages) else Stages([model])):
        return "the model is on an accelerator"
    return why_not_here(machine.num_ranks)


# --- stages -----------------------------------------------------------------------------------------------------------


def _with_stages(findings: _Findings, work: _Work) -> Iterator[_Findings]:
    """After each plan, what was measured so far: the stages of the best candidates that fit, and of 1F1B.

    The first candidate of each division of the processes comes first: predictions of plans that divide the processes
    alike are off alike, those of others are not. Others must leave time for several rounds of steps: more rounds of
    fewer plans tell more.
    """
    answer, training, deadline, report = work
    first: dict[tuple[int, int], Contender] = {}
    for plan in answer.candidates:
        first.setdefault(plan.candidate.layout.division, plan)
    apart = [plan for plan in first.values() if plan.num_processes > 1 or plan is answer.best]
    usual = [answer.usual] if isinstance(answer.usual, Contender) else []
    longest_s = 0.0
    for plan in (*apart, *(plan for plan in answer.candidates if plan not in apart), *usual):
        is_usual = any(map(plan.is_as, usual))
        if any(map(plan.is_as, findings.plans)) or (len(findings.plans) >= _MOST and not is_usual):
            continue
        needed_s = longest_s
        if not findings.because:
            to_run = (*findings.plans, plan, *filter(None, [findings.alone]))
            rounds_s = 0.0 if plan in apart else least_s([contender.plan for contender in to_run], _ROUNDS)
            needed_s += max(rounds_s, _KEPT_FOR_STEPS * deadline.seconds)
        if findings.plans and deadline.left_s <= needed_s:
            if not is_usual:
                findings = findings.without("measuring the stages of", plan)
                yield findings
            continue
        report(f"measuring the stages of {layout_text(plan)}")
        began_s = time.monotonic()
        measured = _measured(plan, training, _REPEATS if findings.because else _REPEATS_BEFORE_STEPS)
        longest_s = max(longest_s, time.monotonic() - began_s)
        try:
            check(measured.plan)
        except PlanError as error:
            report(f"{plan.schedule}: as measured, {error}")
            continue
        findings = replace(findings, plans=(*findings.plans, measured))
        yield findings
    if not findings.plans:
        raise NothingFitsError(
            "none of the plans fits in memory with its stages as measured; profile the layers again (--refresh), "
            "or plan with a lower limit, to leave room"
        )


def _measured(plan: Contender, training: Training, repeats: int) -> Contender:
    """The same orders on a placement with the stages' own measured costs."""
    candidate, layout = plan.candidate, plan.candidate.layout
    inputs, target = training.make_batch(layout.rows)
    at_once = _is_at_once(plan)
    costs = profile(
        _stages(plan, training.model, inputs),
        inputs,
        target,
        training.loss_fn,
        split_backward=candidate.splits_backward,
        recompute=candidate.recomputed,
        options=StageProfileOptions(
            training.make_optimizer, repeats, layout.ranks if at_once else None, here=not at_once
        ),
    )
    placement = (candidate := replace(candidate, measured=costs)).placement
    return Contender(
        candidate,
        plan.schedule,
        replace(plan.plan, placement=placement),
        placement_bound_us(placement, layout.num_microbatches),
        plan.makespan_us,
    )


def _stages(plan: Contender, model: nn.Module | Stages, inputs: Any) -> Stages:
    return split(model, plan.candidate.layout.num_stages, plan.candidate.usage.cuts, example=inputs)


def _is_at_once(plan: Contender) -> bool:
    """Whether the stages of all ranks are measured at once, as they run.

    Otherwise one after another: plans for more ranks than there are cores will run on other machines.
    """
    layout = plan.candidate.layout
    return layout.num_ranks <= num_cores() and not layout.has_copies


# --- steps ------------------------------------------------------------------------------------------------------------


def _with_steps(findings: _Findings, work: _Work) -> _Findings:
    """With steps of the plans that matter most, and of the other candidates if there is time for all of them."""
    plans = _by_importance(findings, work.answer)
    # Plans that matter may be started only once.
    while plans and least_s([plan.plan for plan in plans], 1 if len(plans) <= _MATTER else 2) > work.deadline.left_s:
        findings = findings.without("running steps of", plans.pop())
    if len(plans) == 1 and findings.alone is not None and plans != [findings.alone]:
        plans.append(findings.alone)  # a pipeline alone would be compared with nothing
    if not plans:
        return replace(findings, because="no time was left for it")
    try:
        all_steps = _tried(plans, work)
    except PipelineError as error:
        return replace(findings, because=f"a step failed here: {error}")
    if not all_steps:
        return replace(findings, because="no step ended within the time limit")
    as_run = {id(plan): _as_run(plan, steps) for plan, steps in zip(plans, all_steps, strict=False)}
    remarks = []
    best_us = min(steps.median_us for steps in all_steps)
    if once := sum(steps.num_starts == 1 and not is_far(steps, best_us) for steps in all_steps):
        remarks.append(
            f"for lack of time, {count_text(once, 'plan')} started only once, and steps differ from start to start: "
            f"give a longer --time-limit"
        )
    if why := _why_busy(all_steps):
        remarks.append(why)
    alone = findings.alone
    contenders = (*findings.plans, *(plan for plan in plans if plan not in findings.plans and plan is not alone))
    return replace(
        findings.without("running steps of", *plans[len(all_steps) :]),
        plans=tuple(as_run.get(id(plan), plan) for plan in contenders),
        alone=alone and as_run.get(id(alone), alone),
        remarks=(*findings.remarks, *remarks),
    )


def _by_importance(findings: _Findings, answer: Answer) -> list[Contender]:
    """The best plan, one process, the best on other numbers of ranks, 1F1B on equal layers, and the others."""
    (best, *others), usual = sorted(findings.plans, key=lambda plan: plan.key), answer.usual
    division = best.candidate.layout.division
    apart = [plan for plan in others if plan.candidate.layout.division != division][:1]
    ordered = [best, *filter(None, [findings.alone]), *apart]
    if isinstance(usual, Contender) and not usual.is_as(best):  # even if its stages were not measured
        ordered.append(next((plan for plan in others if usual.is_as(plan)), usual))
    ordered += others
    return list({id(plan): plan for plan in ordered}.values())


def _tried(plans: Sequence[Contender], work: _Work) -> list[StepTimes]:
    training, trials = work.training, []
    for plan in plans:
        inputs, target = training.make_batch(plan.candidate.layout.rows)
        trials.append(Trial(plan.plan, _stages(plan, training.model, inputs), inputs, target))
    assert training.loss_fn is not None
    return run_trials(trials, training.loss_fn, training.make_optimizer, work.deadline.left_s, work.report)


def _as_run(plan: Contender, steps: StepTimes) -> Contender:
    """The plan with the times of its ops as they ran, in plan order with all ranks busy."""
    as_run, count = calibrated(*steps.timelines), plan.candidate.layout.num_microbatches
    placement = replace(plan.plan.placement, tasks=as_run.tasks, step_ends=as_run.step_ends)
    as_measured = replace(plan.plan, placement=placement)
    bound_us = placement_bound_us(placement, count)
    return replace(plan, plan=as_measured, bound_us=bound_us, layers_us=plan.by_layers_us, steps=steps)


def _why_busy(all_steps: Sequence[StepTimes]) -> str:
    """What shows that the machine did something else while these steps ran; "" if nothing does."""
    missing = max(steps.missing_cores for steps in all_steps)
    if missing > _LOADED:
        return f"the machine is busy: other programs took {missing:.1f} of the cores that steps were run on"
    spread = max(steps.spread for steps in all_steps)
    if spread > _LOADED:
        return f"the machine is busy: steps of one plan differ by {spread:.0%}, above {_LOADED:.0%}"
    return ""


# --- the answer -------------------------------------------------------------------------------------------------------


def _answered(answer: Answer, findings: _Findings, took_s: float) -> Answer:
    """The answer with what was measured. What was run is not compared with what was not."""
    run = [plan for plan in findings.plans if plan.steps is not None]
    plans, least = run or [*findings.plans], LEAST_TOLERANCE if run else answer.tolerance
    alone = findings.alone if findings.alone is not None and findings.alone.steps is not None else None
    if alone is not None:
        same = [plan for plan in plans if plan.num_processes == 1]
        if not same and _is_allowed(alone, answer):
            cluster = answer.request.machine.cluster(1, 1)
            alone = replace(alone, plan=replace(alone.plan, placement=replace(alone.plan.placement, cluster=cluster)))
            plans.append(alone)
        alone = min([alone, *same], key=lambda plan: plan.key)
    best = recommended(plans, least)
    check(best.plan)
    tolerance, num_rounds = _spread_of(plans, least)
    others = sorted((plan for plan in plans if plan is not best), key=lambda plan: plan.key)
    usual = answer.usual
    if isinstance(usual, Contender):
        usual = next((plan for plan in plans if plan.is_as(usual)), usual)
    left_out: dict[str, list[str]] = {}
    for activity, layout in findings.left_out:
        left_out.setdefault(activity, []).append(layout)
    lacking = [f"left out for lack of time: {activity} {'; '.join(layouts)}" for activity, layouts in left_out.items()]
    return replace(
        answer,
        candidates=(best, *others),
        usual=usual,
        tolerance=tolerance,
        num_rounds=num_rounds,
        one_process=answer.one_process if best.steps is None else alone,
        predicted_because="" if best.steps is not None else findings.because,
        remarks=(*answer.remarks, *lacking, *findings.remarks, *_disagreement(plans)),
        ran_out=answer.ran_out or bool(left_out),
        elapsed_s=answer.elapsed_s + took_s,
    )


def _is_allowed(alone: Contender, answer: Answer) -> bool:
    """Whether one process may be recommended: a pipeline of several ranks was not asked for, and it fits."""
    limit = answer.request.machine.limits[0]
    return answer.request.choices.pipeline_ranks in (None, 1) and (limit is None or alone.peak_bytes <= limit)


def _spread_of(plans: Sequence[Contender], least: float) -> tuple[float, int]:
    """The most by which a plan may really differ from the fastest otherwise than measured; of those that are near.

    Also in how many rounds all of these were run.
    """
    fastest = min(plans, key=lambda plan: plan.key)
    near = [plan for plan in plans if plan.steps is None or not is_far(plan.steps, fastest.step_us)]
    slower = [plan.steps for plan in near if plan is not fastest]
    rounds = [difference(steps, fastest.steps).num_rounds for steps in slower if steps and fastest.steps]
    return max([least, *(spread_between(steps, fastest.steps, least) for steps in slower)]), min(rounds, default=0)


def _disagreement(plans: Sequence[Contender]) -> list[str]:
    """What it means that the layers' figures and those of stages in place differ much: for the plan with the most."""

    def times_apart(plan: Contender) -> float:
        a_us, b_us = plan.by_layers_us, plan.makespan_us
        return max(a_us, b_us) / max(min(a_us, b_us), 1)

    most = max(plans, key=times_apart)
    if times_apart(most) < _DISAGREE:
        return []
    at_once = most.steps is not None or _is_at_once(most)
    return [
        f"the layers, measured one by one, predict {time_text(most.by_layers_us)} per step for {layout_text(most)}, "
        f"but its stages, timed {'in place' if at_once else 'one after another, each with a whole core'}, "
        f"{time_text(most.makespan_us)} ({times_apart(most):.1f} times apart), so plans that were not run may be "
        f"ranked wrongly: plan again on an idle machine with a longer --time-limit (and --refresh if you use --cache)"
    ]
