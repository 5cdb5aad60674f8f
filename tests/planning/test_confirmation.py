"""confirm: what was measured decides, and is what the answer shows; with times that are given, never taken."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import pytest
import torch
from torch import nn

from planning.test_autoplan import LONG_S, UNEVEN, layer_costs
from rota import Choices, Link, Machine, PipelineError, autoplan, check, simulate
from rota.core.text import time_text
from rota.planning import Answer, confirmation, sweep, trials
from rota.planning.choosing import Contender, StepTimes, of_starts
from rota.planning.confirmation import Training
from rota.planning.trials import Trial, run_trials
from rota.runtime import environment

MODEL = nn.Linear(1, 1)
Confirm = Callable[..., Answer]


def no_batch(rows: int) -> tuple[None, None]:
    return None, None


TRAINING = Training(MODEL, no_batch, nn.functional.mse_loss)


def steps_of(trial: Trial, times: float = 1.0, apart: float = 0.0, num_starts: int = 3) -> StepTimes:
    """Steps that take `times` as long as planned, and differ by `apart`."""
    us = simulate(trial.plan).makespan_us * 1000 * times
    steps_us = tuple(round(us * (1 + apart * i)) for i in range(5))
    return StepTimes(
        steps_us, (simulate(trial.plan),), num_starts=num_starts, rounds_us=(median(steps_us),) * num_starts
    )


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Answer:
    monkeypatch.setattr(sweep, "can_search", lambda: False)  # named schedules will do
    profiles = {1: layer_costs(1, UNEVEN, parameters=8)}
    return autoplan(profiles, Machine(2, None, Link(1, 100)), 16, time_limit_s=LONG_S)


@pytest.fixture
def confirmed(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> Confirm:
    """Confirm with given steps instead of processes."""
    monkeypatch.setattr(confirmation, "_measured", lambda plan, *_: replace(plan, layers_us=plan.makespan_us))
    monkeypatch.setattr(confirmation, "_stages", lambda *_: None)
    monkeypatch.setattr(confirmation, "why_not_here", lambda _: "")

    def run(tried: Callable[[Sequence[Trial]], list[StepTimes]], of: Answer = answer, **how: object) -> Answer:
        monkeypatch.setattr(confirmation, "run_trials", lambda trials, *_: tried(trials))
        return confirmation.confirm(of, TRAINING, **how)  # type: ignore[arg-type]

    return run


def test_the_figures_are_those_of_the_steps_that_were_run(confirmed: Confirm) -> None:
    told = confirmed(lambda trials: [steps_of(trial, 1.0) for trial in trials])
    assert told.best.step_us == told.best.steps.median_us != told.best.makespan_us
    text = told.to_text()
    assert "(measured: median of 5 steps, interquartile range 0.0%)" in text
    assert "from op times measured in plan order" in text
    assert "Lower bound for every layout according to the layers' times, not to measured steps" in text
    assert "from its work alone" not in text
    check(told.plan)


def test_one_process_is_recommended_where_it_is_faster(confirmed: Confirm, answer: Answer) -> None:
    def tried(trials: Sequence[Trial]) -> list[StepTimes]:
        return [steps_of(trial, 0.1 if trial.num_processes == 1 else 1.0) for trial in trials]

    told = confirmed(tried)
    assert told.best.candidate.layout.num_ranks == told.plan.num_ranks == 1
    assert "One process is faster than several here" in told.to_text()
    request = answer.request
    given = request.profiles, request.machine, request.batch_rows
    told = confirmed(tried, autoplan(*given, Choices(pipeline_ranks=2), time_limit_s=LONG_S))
    assert told.plan.num_ranks == 2
    assert "per step), but a pipeline of 2 ranks was asked for" in told.to_text()
    assert "times as fast; one process is faster here\n" in told.to_text()
    small = replace(request.machine, limit_bytes=answer.best.peak_bytes // 2 + 20)
    told = confirmed(tried, autoplan(request.profiles, small, request.batch_rows, time_limit_s=LONG_S))
    assert told.plan.num_ranks == 2
    assert "per step), but holds" in told.to_text()


def test_a_plan_on_more_processes_must_be_faster_by_more_than_the_spread(confirmed: Confirm) -> None:
    def tried(apart: float) -> Callable[[Sequence[Trial]], list[StepTimes]]:
        def steps(trials: Sequence[Trial]) -> list[StepTimes]:
            us = {1: 1040, 2: 1000}
            found = []
            for t in trials:
                changes = (1 + apart * i * (-1) ** t.num_processes for i in range(5))
                steps_us = tuple(round(us[t.num_processes] * change) for change in changes)
                found.append(StepTimes(steps_us, (simulate(t.plan),), rounds_us=steps_us, num_starts=5))
            return found

        return steps

    quiet, noisy = confirmed(tried(0.0)), confirmed(tried(0.03))
    assert quiet.tolerance == pytest.approx(0.01)
    assert noisy.tolerance > 0.04
    assert "Trial steps (5 rounds) measure differences to within 1.0%; of equally fast plans, the " in quiet.to_text()
    assert noisy.plan.num_ranks * noisy.best.candidate.layout.num_replicas == 1
    assert quiet.plan.num_ranks * quiet.best.candidate.layout.num_replicas == 2


def test_with_fewer_cores_than_ranks_the_figures_are_for_a_core_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "can_search", lambda: False)
    machine = Machine(2, None, Link(1, 100))
    answer = autoplan(
        {1: layer_costs(1, UNEVEN, parameters=8)}, machine, 16, Choices(pipeline_ranks=2), time_limit_s=LONG_S
    )
    for module in (confirmation, environment):
        monkeypatch.setattr(module, "num_cores", lambda: 1)
    monkeypatch.setattr(confirmation, "_measured", lambda found, *_: _three_times_as_slow(found))
    monkeypatch.setattr(confirmation, "_stages", lambda *_: None)
    told = confirmation.confirm(answer, TRAINING)
    assert told.best.steps is None  # the plan is for a machine with a core per rank
    assert told.predicted_because == (
        "2 ranks share 1 core: the plan's times assume a core per rank, so steps can take 2.0 times as long"
    )
    layers, stages = time_text(answer.best.makespan_us), time_text(told.best.makespan_us)
    text = told.to_text()
    assert "per step (predicted from stage times)" in text
    assert f"  predicted   {stages} from stage times, {layers} from layer times\n" in text
    assert f"per step; compare it with {layers}, the best plan's step from layer times" in text
    (apart,) = [line for line in told.remarks if "times apart" in line]
    assert "but its stages, timed one after another, each with a whole core, " in apart


def _three_times_as_slow(found: Contender) -> Contender:
    tasks = tuple(replace(task, duration_us=3 * task.duration_us) for task in found.plan.placement.tasks)
    plan = replace(found.plan, placement=replace(found.plan.placement, tasks=tasks))
    return replace(found, plan=plan, layers_us=found.makespan_us)


def test_a_loaded_machine_is_told(confirmed: Confirm) -> None:
    told = confirmed(lambda trials: [steps_of(trial, 1.0, 0.1) for trial in trials])
    assert "the machine is busy: steps of one plan differ by 17%, above 10%" in told.to_text()
    told = confirmed(lambda trials: [replace(steps_of(trial), missing_cores=0.5) for trial in trials])
    assert "the machine is busy: other programs took 0.5 of the cores that steps were run on" in told.to_text()
    assert "busy" not in confirmed(lambda trials: [steps_of(trial, 1.0, 0.01) for trial in trials]).to_text()


def test_starts_that_other_programs_disturbed_do_not_count() -> None:
    quiet, loud = StepTimes((10, 11, 12)), StepTimes((30, 31, 32), (), 0.9)
    of_four = of_starts([loud, quiet, loud, quiet])
    assert of_four.steps_us == 2 * quiet.steps_us
    assert of_four.rounds_us == (None, 11, None, 11)
    assert of_starts([loud, loud]) == replace(loud, steps_us=2 * loud.steps_us, num_starts=2, rounds_us=(31, 31))
    less = replace(loud, missing_cores=0.6)
    assert of_starts([loud, less]) == replace(less, num_starts=2, rounds_us=(None, 31))


def test_a_plan_that_is_clearly_slower_is_started_once(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = [found.plan for found in answer.candidates[:3]]
    us = dict(zip(map(id, plans), (1000, 1200, 1400), strict=True))
    monkeypatch.setattr(trials, "_started", lambda trial, *_: StepTimes((us[id(trial.plan)], us[id(trial.plan)])))
    given = [Trial(plan, MODEL, None, None) for plan in plans]
    found = run_trials(given, nn.functional.mse_loss, None, LONG_S)
    assert [steps.median_us for steps in found] == [1000, 1200, 1400]
    assert [steps.num_starts for steps in found] == [3, 3, 1]
    jumps = {id(plans[0]): [1000] * 8, id(plans[1]): [1000, 1060] * 4, id(plans[2]): [1400] * 8}
    monkeypatch.setattr(trials, "_started", lambda trial, *_: StepTimes((jumps[id(trial.plan)].pop(),)))
    found = run_trials(given, nn.functional.mse_loss, None, LONG_S)
    assert [steps.num_starts for steps in found] == [8, 8, 1]  # three rounds would not tell the first two apart


def test_steps_that_never_end_are_left_out(confirmed: Confirm, answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    def started(trial: Trial, *_: object) -> StepTimes:
        if trial is given[num_ended]:
            raise TimeoutError("2 processes did not end within 5 s")
        return StepTimes((1000, 1000))

    monkeypatch.setattr(trials, "_started", started)
    given = [Trial(found.plan, MODEL, None, None) for found in answer.candidates[:2]]
    for num_ended in (0, 1):
        assert len(run_trials(given, nn.functional.mse_loss, None, LONG_S)) == num_ended
    assert "not run     no step ended within the time limit" in confirmed(lambda _: []).to_text()


def test_with_little_time_the_plans_that_matter_are_started_once(
    confirmed: Confirm, answer: Answer, monkeypatch: pytest.MonkeyPatch
) -> None:
    left_s = 2.0  # for three plans to be started once each, and for no more
    monkeypatch.setattr("rota.planning.request.Deadline.left_s", left_s)
    usual = answer.candidates[-1]
    assert not usual.is_as(answer.best)
    tried: list[Trial] = []

    def steps(trials: Sequence[Trial]) -> list[StepTimes]:
        tried.extend(trials)
        return [steps_of(trial, num_starts=1) for trial in trials]

    told = confirmed(steps, replace(answer, usual=usual), time_limit_s=1.0)
    assert len(tried) == 3
    assert tried[0].plan.orders == answer.best.plan.orders
    of_best = answer.best.candidate.layout
    assert tried[1].num_processes == 1
    assert (tried[2].plan.num_ranks, tried[2].plan.num_replicas) != (of_best.num_ranks, of_best.num_replicas)
    assert "for lack of time, 2 plans started only once" in told.to_text()
    assert "left out for lack of time: running steps of" in told.to_text()
    assert "started only once" not in confirmed(lambda trials: [steps_of(trial) for trial in trials]).to_text()


def test_why_nothing_was_run(confirmed: Confirm, answer: Answer) -> None:
    def fails(_: Sequence[Trial]) -> list[StepTimes]:
        raise PipelineError("rank 1 has no luck")

    assert "not run     a step failed here: rank 1 has no luck" in confirmed(fails).to_text()
    told = confirmed(fails, elsewhere="its ranks are on several nodes")
    assert "not run     its ranks are on several nodes" in told.to_text()
    assert "(predicted from stage times)" in told.to_text()
    none_left = confirmed(lambda trials: [steps_of(trial) for trial in trials], time_limit_s=1e-9)
    assert "left out for lack of time" in none_left.to_text()
    assert "not run     no time was left for it" in none_left.to_text()


@pytest.mark.parametrize("num_measured", [0, 1, 2])
def test_ctrl_c_while_plans_are_measured_loses_none(num_measured: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "can_search", lambda: False)
    answer = autoplan({1: layer_costs(1, UNEVEN)}, Machine(4, 40), 16, time_limit_s=LONG_S)
    measured: list[Contender] = []

    def measure(found: Contender, *_: object) -> Contender:
        if len(measured) == num_measured:
            raise KeyboardInterrupt
        measured.append(found)
        return found

    monkeypatch.setattr(confirmation, "_measured", measure)
    stopped = confirmation.confirm(answer, TRAINING._replace(loss_fn=None))
    check(stopped.plan)
    assert stopped.stopped_by == "Ctrl-C"
    assert "stopped by Ctrl-C" in stopped.to_text()
    is_unmeasured = "the plan's stages were not measured" in stopped.to_text()
    assert is_unmeasured == (num_measured == 0)
    if not is_unmeasured:
        assert {*map(id, stopped.candidates)} == {*map(id, measured)}
    confirmation.confirm(stopped, TRAINING._replace(loss_fn=None))  # not again
    assert len(measured) == num_measured


@pytest.mark.dist
def test_steps_are_run_on_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import rota

    monkeypatch.setattr(trials, "_OVERTIME_S", LONG_S)  # however busy the machine is
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    stages = rota.split(model, 2)
    plan = rota.schedules.gpipe(rota.place(rota.Costs.uniform(2), rota.Cluster.uniform(2)), 3)
    given = [Trial(plan, stages, torch.ones(2, 4), torch.ones(2, 4))] * 2

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    found = run_trials(given, nn.functional.mse_loss, optimizer, 0.1)
    assert len(found) == 2
    for steps in found:
        assert len(steps.steps_us) == len(steps.timelines) >= 3
        assert all(timeline.plan.orders == plan.orders for timeline in steps.timelines)
        assert all(us >= timeline.makespan_us for us, timeline in zip(steps.steps_us, steps.timelines, strict=True))
    assert all(map(torch.equal, before, model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())

    def fails(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise ValueError("no loss today")

    with pytest.raises(PipelineError, match="no loss today"):
        run_trials(given, fails, optimizer, 0.1)
