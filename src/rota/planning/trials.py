"""Trials: a few real steps of plans, on real processes of this machine, before one of them is recommended.

round 1   plan A: start, warm up, steps   plan B: start, warm up, steps      every step with its optimizer, from one
round 2   plan B: start, warm up, steps   plan A: start, warm up, steps      barrier to the end on the last process
…

Each start has new processes, as a run has: where memory lies differs by the start, and steps with it. All plans take
turns, every second round backwards, and rounds go on until steps settle or time is up: plans are compared round by
round, so that a machine that is slow for some seconds, or becomes slower, does not hit one plan alone. Plans that are
clearly slower than the best are left out of further rounds, which the others then get.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from rota.core.plan import Plan
from rota.core.simulation import simulate
from rota.core.text import count_text
from rota.core.timeline import Timeline
from rota.models import Stages
from rota.planning.choosing import FAR, NOISY, StepTimes, difference, of_starts
from rota.profiling.devices import OtherPrograms
from rota.profiling.forked import run_forked
from rota.profiling.stage_run import MakeOptimizer
from rota.runtime import Pipeline, mesh
from rota.runtime.losses import LossFn, needs_target
from rota.runtime.messages import over_tensors

_WARM_UP, _WARM_UP_S = 2, 0.2  # steps of a start that are not measured: so many, or as many as begin in this time
_LEAST, _MOST = 2, 8  # steps of a start that are
_ENOUGH_S = 0.4  # of measured steps in a start: others, at another moment, tell more than a longer one
_SETTLED_ROUNDS, _MOST_ROUNDS, _MOST_IF_NOISY = 3, 8, 16
_COMPARED = 2  # plans that are started once whatever time is left: one alone would be compared with nothing
_SETTLED = 0.03  # spread of the differences between plans below which further rounds would tell nothing new
_START_S = 0.5  # for processes to start, and for a plan's pipeline
_OVERTIME_S = 10.0  # that a start may go on after time is up: if it is ended, its steps are lost


class Trial(NamedTuple):
    """A plan to try, the model's stages for it, and one of its micro-batches."""

    plan: Plan
    stages: Stages
    inputs: Any
    target: Any

    @property
    def num_processes(self) -> int:
        """Processes of a step, one per rank of each replica."""
        return self.plan.num_ranks * self.plan.num_replicas


def run_trials(
    trials: Sequence[Trial],
    loss_fn: LossFn,
    make_optimizer: MakeOptimizer | None,
    seconds: float,
    report: Callable[[str], None] = lambda _: None,
) -> list[StepTimes]:
    """Run steps of each plan, whose stages are on the CPU, on forked processes. The modules are not touched.

    All of them together may take `seconds`; the first two plans are started at least once, for two measured steps each.
    Processes that go on for ten seconds more are ended, and their steps are lost. `report` is called every second with
    how many starts are done, and how much time is left.

    Returns:
        The steps of each plan, with the timelines of the first replica; of fewer plans, or none, where there was no
        time for the last ones.

    Raises:
        PipelineError: A step fails.
    """
    began_s = time.monotonic()
    starts: list[list[StepTimes]] = [[] for _ in trials]
    longest_s = [0.0] * len(trials)  # of a plan's starts
    running = list(range(len(trials)))

    def tick() -> None:
        num_done, left_s = sum(map(len, starts)), max(began_s + seconds - time.monotonic(), 0)
        remaining = [max(num_rounds, _SETTLED_ROUNDS) - len(starts[i]) for i in running]
        report(
            f"running steps of {count_text(len(trials), 'plan')} in turn: {num_done} of {num_done + sum(remaining)} "
            f"starts done, at most {left_s:.0f} s left"
        )

    for num_rounds in range(1, _MOST_IF_NOISY + 1):
        for i in running if num_rounds % 2 else reversed(running):
            start_began_s = time.monotonic()
            if num_rounds == 1 and i >= _COMPARED and start_began_s > began_s + seconds:
                break
            within_s = max(began_s + seconds - start_began_s, 0) + _OVERTIME_S
            tick()
            try:
                starts[i].append(_started(trials[i], loss_fn, make_optimizer, within_s, tick))
            except TimeoutError:
                return [of_starts(plan_starts) for plan_starts in starts if plan_starts]
            longest_s[i] = max(longest_s[i], time.monotonic() - start_began_s)
        all_steps = [of_starts(plan_starts) for plan_starts in starts if plan_starts]
        best_us = min(steps.median_us for steps in all_steps)
        running = [i for i, steps in enumerate(all_steps) if not is_far(steps, best_us)]
        near = [all_steps[i] for i in running]
        is_settled = num_rounds >= _SETTLED_ROUNDS and _are_told_apart(near, _SETTLED)
        is_settled |= num_rounds >= _MOST_ROUNDS and _are_told_apart(near, NOISY)
        if is_settled or time.monotonic() + sum(longest_s[i] for i in running) > began_s + seconds:
            break
    return all_steps


def is_far(steps: StepTimes, best_us: int) -> bool:
    """Whether even the fastest step of a plan is clearly slower than the best plan's: further starts tell no more."""
    return min(steps.steps_us) > FAR * best_us


def _are_told_apart(steps: Sequence[StepTimes], within: float) -> bool:
    """Whether the rounds tell to `within` how much slower each of these plans is than the fastest."""
    fastest = min(steps, key=lambda plan: plan.median_us)
    return all(difference(plan, fastest).spread < within for plan in steps if plan is not fastest)


def least_s(plans: Sequence[Plan], num_starts: int) -> float:
    """About how long the fewest steps of these plans take together, as simulated, if each is started so often."""
    steps_s = (simulate(plan).makespan_us / 1e6 for plan in plans)
    return num_starts * sum(_START_S + (1 + _LEAST) * step_s for step_s in steps_s)


def _started(
    trial: Trial, loss_fn: LossFn, make_optimizer: MakeOptimizer | None, within_s: float, tick: Callable[[], None]
) -> StepTimes:
    """Steps of one plan on new processes. Raises TimeoutError if these have not ended in time."""
    programs = OtherPrograms()
    first, *_ = run_forked(
        trial.num_processes,
        lambda number: _run(trial, loss_fn, make_optimizer, number == 0),
        within_s=within_s,
        tick=tick,
    )
    missing_cores = programs.missing_cores(trial.num_processes)
    timelines = tuple(map(Timeline.from_json, first["timelines"]))
    return StepTimes(tuple(first["us"]), timelines, missing_cores)


def _run(trial: Trial, loss_fn: LossFn, make_optimizer: MakeOptimizer | None, is_first: bool) -> dict[str, Any]:
    """On each process: steps' times, the same on all; on the first one also the timelines."""
    # All micro-batches and replicas have the same rows here.
    how: dict[str, Any] = {"check_data": "never", "allow_nonfinite_loss": True}
    all_us: list[int] = []
    timelines = []
    processes = mesh(pp=trial.plan.num_ranks, dp=trial.plan.num_replicas)
    with Pipeline(trial.stages, trial.plan, loss_fn, mesh=processes, **how) as pipeline:
        parameters = [parameter for parameter in pipeline.parameters() if parameter.requires_grad]
        optimizer = make_optimizer(parameters) if make_optimizer is not None and parameters else None
        count = trial.plan.num_microbatches
        inputs, targets = (
            [over_tensors(torch.clone, value) for _ in range(count)] for value in (trial.inputs, trial.target)
        )
        batch = inputs, targets if needs_target(loss_fn) else None
        warm_up_us = 0
        for _ in range(_WARM_UP):
            if warm_up_us < 1e6 * _WARM_UP_S:
                warm_up_us += _step(pipeline, optimizer, batch)
        while len(all_us) < _LEAST or (len(all_us) < _MOST and sum(all_us) < 1e6 * _ENOUGH_S):
            all_us.append(_step(pipeline, optimizer, batch))
            timelines.append(pipeline.timeline())
    return {"us": all_us, "timelines": [timeline.to_json() for timeline in timelines] if is_first else []}


def _step(pipeline: Pipeline, optimizer: torch.optim.Optimizer | None, batch: tuple[Any, Any]) -> int:
    """The time of a step in µs, on the slowest process."""
    dist.barrier()
    began_ns = time.perf_counter_ns()
    pipeline.step(*batch)
    if optimizer is not None:
        optimizer.step()
    for parameter in pipeline.parameters():
        parameter.grad = None
    step_us = torch.tensor((time.perf_counter_ns() - began_ns) // 1000)
    dist.all_reduce(step_us, dist.ReduceOp.MAX)
    return int(step_us)
