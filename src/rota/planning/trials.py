"""Trials: a few real steps of plans, on real processes of this machine, before one of them is recommended.

round 1   plan A: warm up, steps   plan B: warm up, steps      every step with its optimizer, from one barrier to
round 2   plan A: warm up, steps   plan B: warm up, steps      the end on the last process
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from rota.errors import PipelineError
from rota.models import Stages
from rota.plan import Plan
from rota.planning.step_times import StepTimes
from rota.profiling.forked import run_forked
from rota.profiling.optimizers import MakeOptimizer
from rota.runtime import Pipeline, mesh
from rota.runtime.losses import LossFn, needs_target
from rota.runtime.messages import over_tensors
from rota.simulation import simulate
from rota.timeline import Timeline

_ROUNDS = 2  # so that what else goes on in a second or two does not hit one plan alone
_WARM_UP, _LEAST, _MOST = 2, 3, 8  # steps of a round: not measured, and measured
_START_S = 0.5  # for processes to start, and for a plan's pipeline


class Trial(NamedTuple):
    """A plan to try, the model's stages for it, and one of its micro-batches."""

    plan: Plan
    stages: Stages
    inputs: Any
    target: Any

    @property
    def num_replicas(self) -> int:
        """Pipelines in a step."""
        return 1 if self.plan.usage is None else self.plan.usage.num_replicas

    @property
    def num_processes(self) -> int:
        """Processes of a step, one per rank of each replica."""
        return self.plan.num_ranks * self.num_replicas


def run_trials(
    trials: Sequence[Trial], loss_fn: LossFn, make_optimizer: MakeOptimizer | None, seconds: float
) -> list[StepTimes]:
    """Run steps of each plan on forked processes, all of which the trials need.

    Args:
        trials: Plans for one number of processes, whose stages are on the CPU. The modules are not touched.
        loss_fn: As for `Pipeline`.
        make_optimizer: Makes an optimizer of a list of parameters; None: the steps have none.
        seconds: How long all of them may take together; at least three steps of each plan are measured.

    Returns:
        The steps of each plan, with the timelines of the first replica.

    Raises:
        PipelineError: A step fails.
    """
    counts = {trial.num_processes for trial in trials}
    if len(counts) != 1:
        raise PipelineError(f"trials on {sorted(counts)} processes; try plans of one number of processes together")
    num_rounds = _ROUNDS if seconds >= least_s(trials, _ROUNDS) else 1
    share_s = (seconds - _START_S) / (num_rounds * len(trials))

    def work(number: int) -> list[dict[str, Any]]:
        made = [_Steps([], []) for _ in trials]
        for _ in range(num_rounds):
            for trial, steps in zip(trials, made, strict=True):
                _run(trial, loss_fn, make_optimizer, share_s, steps)
        return [{"us": s.us, "timelines": [one.to_json() for one in s.timelines] if number == 0 else []} for s in made]

    first, *_ = run_forked(counts.pop(), work)
    return [StepTimes(tuple(of["us"]), tuple(map(Timeline.from_json, of["timelines"]))) for of in first]


def least_s(trials: Sequence[Trial], num_rounds: int = 1) -> float:
    """About how long the fewest steps of these trials take together, by their plans."""
    steps_s = (simulate(trial.plan).makespan_us / 1e6 for trial in trials)
    return _START_S + num_rounds * sum(_START_S + (_WARM_UP + _LEAST) * step_s for step_s in steps_s)


class _Steps(NamedTuple):
    """What was measured of one plan so far: the same times on all processes, and this replica's timelines."""

    us: list[int]
    timelines: list[Timeline]


def _run(trial: Trial, loss_fn: LossFn, make_optimizer: MakeOptimizer | None, seconds: float, steps: _Steps) -> None:
    """Steps of one plan, for `seconds`; on each process."""
    began_s = time.monotonic()
    processes = mesh(pp=trial.plan.num_ranks, dp=trial.num_replicas)
    # All micro-batches and replicas have the same rows here.
    how: dict[str, Any] = {"mesh": processes, "check_data": "never", "allow_nonfinite_loss": True}
    with Pipeline(trial.stages, trial.plan, loss_fn, **how) as pipeline:
        parameters = [parameter for parameter in pipeline.parameters() if parameter.requires_grad]
        optimizer = make_optimizer(parameters) if make_optimizer is not None and parameters else None
        count = trial.plan.num_microbatches
        inputs = [over_tensors(torch.clone, trial.inputs) for _ in range(count)]
        targets = [trial.target] * count if needs_target(loss_fn) else None
        for i in range(_WARM_UP + _MOST):
            step_us, spent_us = _step(pipeline, optimizer, inputs, targets, began_s)
            if i >= _WARM_UP:
                steps.us.append(step_us)
                steps.timelines.append(pipeline.timeline())
            if i + 1 >= _WARM_UP + _LEAST and spent_us > 1e6 * seconds:
                break


def _step(
    pipeline: Pipeline, optimizer: torch.optim.Optimizer | None, inputs: Any, targets: Any, began_s: float
) -> tuple[int, int]:
    """The time of a step, and of the trial so far, in µs: on the slowest process."""
    dist.barrier()
    step_began_ns = time.perf_counter_ns()
    pipeline.step(inputs, targets)
    if optimizer is not None:
        optimizer.step()
    for parameter in pipeline.parameters():
        parameter.grad = None
    times = torch.tensor([(time.perf_counter_ns() - step_began_ns) // 1000, int(1e6 * (time.monotonic() - began_s))])
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return int(times[0]), int(times[1])
