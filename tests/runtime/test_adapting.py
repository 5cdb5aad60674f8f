"""A rank that becomes slower: another order between two steps, and the run's own again when it has recovered."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch

import rota
from rota import Cluster, Costs, Kind, Pipeline, PipelineError, Plan, Stages, place
from rota.runtime.adapting import NUM_STEPS, Times, _Trial, _Watch, steps_of, with_times
from rota.runtime.background_search import Answer, BackgroundSearch
from rota.runtime.faults.changed_ranks import Change, changed_rank, planned_us
from rota.schedules import one_f_one_b, zb_h1
from rota.simulation import simulate
from support.core_strategies import deal, linear_extension
from support.networks import StepResult, assert_equal_steps, batch_of, chain, gradients_of, loss_fn, serial_step
from support.pool import Pool

Capsys = pytest.CaptureFixture[str]
PLANNED = [600, 600, 600]


def steps(*us: float) -> list[list[float]]:
    """For each rank ten steps of that many µs."""
    return [[each] * NUM_STEPS for each in us]


# --- which rank has changed -------------------------------------------------------------------------------------------


def test_the_rank_that_is_slower_or_faster_than_the_others() -> None:
    assert changed_rank(PLANNED, [steps(600, 600, 786)]) == Change(0, 2, 1.31, 1.0)
    assert changed_rank(PLANNED, [steps(1200, 600, 1200)]) == Change(0, 1, 1.0, 2.0)
    assert changed_rank(PLANNED, [steps(600, 600, 600), steps(900, 600, 600)]) == Change(1, 0, 1.5, 1.0)
    assert changed_rank([600, 600], [steps(600, 1200)]) == Change(0, 1, 2.0, 1.0)  # not rank 0, which is as planned
    assert changed_rank([600, 1200], [steps(600, 600)]) == Change(0, 1, 0.5, 1.0)


@pytest.mark.parametrize(
    ("planned", "busy_us"),
    [
        (PLANNED, steps(600, 700, 650)),  # not by much
        (PLANNED, steps(9000, 9100, 9000)),  # all alike
        (PLANNED, [[600, 900] * 5, [600] * 10, [600] * 10]),  # now and then
        ([600], steps(9000)),  # nobody to compare with
        ([600, 0], steps(900, 0)),  # a rank without ops
    ],
)
def test_nobody_has_changed(planned: list[int], busy_us: list[list[float]]) -> None:
    assert changed_rank(planned, [busy_us]) is None


# --- what the first rank does -----------------------------------------------------------------------------------------

PLAN = zb_h1(place(Costs.uniform(3, 100, 100, weight_us=100), Cluster.uniform(3)), 4)


def other_orders(plan: Plan, seed: int = 0) -> Plan:
    return deal(plan.placement, 4, linear_extension(plan.placement, 4, random.Random(seed), False))


def times(factors: Sequence[float], step_us: float = 2000) -> list[list[Times]]:
    """Of one pipeline whose ranks are slower by these factors; its steps vary by a tenth."""
    steps_us = [step_us * (1 + i / (10 * NUM_STEPS)) for i in range(NUM_STEPS)]
    tasks = {(stage, kind): round(100 * f) for stage, f in enumerate(factors) for kind in (Kind.F, Kind.I, Kind.W)}
    return [
        [
            Times(
                [1200 * f] * NUM_STEPS,
                {task: us for task, us in tasks.items() if task[0] == rank},
                [us + 5000 * rank for us in steps_us],  # a rank that waits until others begin a step
            )
            for rank, f in enumerate(factors)
        ]
    ]


class Answering:
    """Answers at once that another order saves `gain`."""

    def __init__(self, gain: float) -> None:
        self.gain, self.sought = gain, []
        self.answer: Answer | None = None

    @property
    def is_running(self) -> bool:
        return self.answer is not None

    def begin(self, plan: Plan, others: Sequence[Plan]) -> None:
        self.sought.append(plan)
        self.answer = Answer(other_orders(plan, len(self.sought)), 1000, round(1000 * (1 - self.gain)), 500)

    def taken(self) -> Answer | None:
        answer, self.answer = self.answer, None
        return answer

    def close(self) -> None:
        pass


def watch(gain: float) -> tuple[_Watch, Answering]:
    found, search = _Watch(PLAN, 0.03), Answering(gain)
    found.search = search  # type: ignore[assignment]
    return found, search


def test_a_slow_rank_gets_other_orders_for_the_measured_times(capsys: Capsys) -> None:
    found, search = watch(0.1)
    assert found.look(times([1, 1, 1.02]), PLAN) is None
    assert search.sought == []
    assert found.look(times([1, 1.6, 1.02]), PLAN) is None
    assert [task.duration_us for task in search.sought[0].placement.tasks if task.stage == 1] == [160] * 3
    assert search.sought[0].orders == PLAN.orders
    proposed = found.look(times([1, 1.6, 1.02]), PLAN)
    assert proposed == other_orders(search.sought[0], 1)
    found.swapped(40, "", PLAN, steps_of(times([1, 1.6, 1.02])[0]))
    assert capsys.readouterr().err == (
        "rota: rank 1 takes 1.60 times as long as planned, the others 1.01 times; another order, predicted 900 µs per "
        "step instead of 1 ms (10.0% less), from step 41 on\n"
    )
    for _ in range(20):
        assert found.look(times([1, 1.6, 1.02], 2100), proposed) is None  # as slow as it was planned for
    assert len(search.sought) == 1
    assert capsys.readouterr().err == (
        "rota: the order since step 41 takes 2.19 ms per step instead of 2.09 ms, measured in 10 steps each "
        "(predicted: 900 µs instead of 1 ms)\n"
    )


def test_an_order_that_is_slower_when_it_runs_is_left_and_not_tried_again(capsys: Capsys) -> None:
    found, search = watch(0.1)
    slow, before = times([1, 1.6, 1]), steps_of(times([1, 1.6, 1])[0])
    found.look(slow, PLAN)
    tried = found.look(slow, PLAN)
    assert tried is not None
    found.swapped(40, "", PLAN, before)
    assert found.look(times([1, 1.6, 1.3], 9000), tried) is None  # not compared: another rank has changed as well
    search.answer = None
    capsys.readouterr()
    found._trial = _Trial(tried, PLAN, before, Answer(tried, 1000, 900, 500), 41)
    assert found.look(times([1, 1.6, 1], 2500), tried) is PLAN
    found.swapped(60, "", tried, steps_of(times([1, 1.6, 1], 2500)[0]))
    assert capsys.readouterr().err == (
        "rota: the order since step 41 takes 2.61 ms per step instead of 2.09 ms, measured in 10 steps each "
        "(predicted: 900 µs instead of 1 ms), slower by more than the noise of 138 µs: back to the previous order "
        "from step 61 on\n"
    )
    for _ in range(4):
        assert found.look(slow, PLAN) is None  # nothing has changed: no search, and nothing to compare
    found._first_look = 0
    found.look(times([1, 2.4, 1]), PLAN)
    search.answer = Answer(with_times(tried, times([1, 2.4, 1])), 1000, 900, 500)
    assert found.look(times([1, 2.4, 1]), PLAN) is None
    assert (
        "the order stays: another order, predicted 900 µs per step instead of 1 ms (10.0% less) was slower than the "
        in (capsys.readouterr().err)
    )


def test_too_little_gain_changes_nothing(capsys: Capsys) -> None:
    found, search = watch(0.02)
    for _ in range(12):
        assert found.look(times([1, 1.6, 1]), PLAN) is None
    assert len(search.sought) == 1
    assert capsys.readouterr().err == (
        "rota: rank 1 takes 1.60 times as long as planned, the others 1.00 times; the order stays: no other was found "
        "that saves 3.0% of a step (1 ms predicted, best 980 µs, and none takes less than 500 µs)\n"
    )


def test_an_answer_to_what_is_no_longer_so_is_dropped() -> None:
    found, search = watch(0.1)
    found.look(times([1, 1.6, 1]), PLAN)
    assert found.look(times([1, 1, 1]), PLAN) is None  # it has recovered meanwhile
    for _ in range(4):
        found.look(times([1, 1, 1]), PLAN)
    assert len(search.sought) == 2  # for the times as they are now


def test_a_rank_that_is_slow_now_and_then_is_followed_less_and_less() -> None:
    found, search = watch(0.1)
    current, looks = PLAN, []
    for number in range(200):
        before = len(search.sought)
        proposed = found.look(times([1, 1.6 if number % 4 < 2 else 1, 1]), current)
        current = proposed or current
        looks += [number] * (len(search.sought) > before)
    gaps = [after - before for before, after in pairwise(looks)]
    assert len(looks) < 12
    assert max(gaps) >= 32


def test_a_search_that_fails_is_reported_once(capsys: Capsys) -> None:
    found, search = watch(0.1)
    found.look(times([1, 1.6, 1]), PLAN)
    search.answer = Answer(error="no numba here")
    for _ in range(9):
        assert found.look(times([1, 1.6, 1]), PLAN) is None
    assert capsys.readouterr().err.count("but no other order was searched for: no numba here") == 1


def test_the_slowest_replica_counts() -> None:
    plan = with_times(PLAN, [*times([1, 1, 1.2]), *times([1.5, 1, 1])])
    assert planned_us(plan) == [1800, 1200, 1440]
    assert plan.orders == PLAN.orders


# --- in a run ---------------------------------------------------------------------------------------------------------


class Waiting(torch.nn.Module):
    """A stage whose forward takes a given time at least."""

    def __init__(self, stage: torch.nn.Module) -> None:
        super().__init__()
        self.stage, self.wait_s = stage, 0.0005

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        time.sleep(self.wait_s)
        found: torch.Tensor = self.stage(*values)
        return found


def waiting_chain(num_stages: int) -> Stages:
    return Stages([Waiting(stage) for stage in chain(num_stages).modules])


class AlwaysTheSame:
    """A search whose answer is there at the next look: always the same order."""

    def __init__(self) -> None:
        self._answer: Answer | None = None

    @property
    def is_running(self) -> bool:
        return self._answer is not None

    def begin(self, plan: Plan, others: Sequence[Plan]) -> None:
        self._answer = Answer(other_orders(plan, 1), 1000, 900, 0)

    def taken(self) -> Answer | None:
        answer, self._answer = self._answer, None
        return answer

    def close(self) -> None:
        pass


class InProcess:
    """A search whose answer is there at the next look: other orders first, and the run's own the next time."""

    def __init__(self) -> None:
        self._num, self._answer = 0, None

    @property
    def is_running(self) -> bool:
        return self._answer is not None

    def begin(self, plan: Plan, others: Sequence[Plan]) -> None:
        self._num += 1
        found = other_orders(plan, self._num) if self._num % 2 else others[0]
        self._answer = Answer(found, 1000, 900, 0)

    def taken(self) -> Answer | None:
        answer, self._answer = self._answer, None
        return answer

    def close(self) -> None:
        pass


def adapted(rank: int, plan: Plan) -> tuple[list[StepResult], list[int], bool]:
    """Rank 1 is slow until all have swapped, then as fast as before until they have swapped back."""
    stages = waiting_chain(plan.num_ranks)
    results, swaps = [], []
    with pytest.MonkeyPatch.context() as patch, rota.Pipeline(stages, plan, loss_fn, adapt=0.03) as pipeline:
        if pipeline._adapting._watch is not None:
            patch.setattr(pipeline._adapting._watch, "search", InProcess())
        current = pipeline._adapting.plan
        for number in range(200 * NUM_STEPS):  # a busy machine hides for a while that a rank is slow
            stages[1].wait_s = 0.006 if len(swaps) == 0 else 0.0005
            for parameter in pipeline.parameters():
                parameter.grad = None
            loss = pipeline.step(*batch_of(plan.num_microbatches))
            results.append(StepResult(loss, gradients_of(pipeline.stages, pipeline.local_stages)))
            if pipeline._adapting.plan is not current:
                current = pipeline._adapting.plan
                swaps.append(number)
            elif len(swaps) >= 2 and number > swaps[-1] + 2:
                break
        is_own = pipeline.timeline().plan.orders == plan.orders
    return results, swaps, is_own


def left_again(rank: int, plan: Plan) -> tuple[list[int], bool]:
    """Rank 1 is slow; and the end of a step, while the ranks run another order than their own."""
    stages, swaps = waiting_chain(plan.num_ranks), []
    stages[0].wait_s, stages[1].wait_s = 0.003, 0.008
    with pytest.MonkeyPatch.context() as patch, rota.Pipeline(stages, plan, loss_fn, adapt=0.03) as pipeline:
        adapting, finish = pipeline._adapting, pipeline._step_end.finish
        if adapting._watch is not None:
            patch.setattr(adapting._watch, "search", AlwaysTheSame())

        def finish_late(*arguments: Any) -> Any:
            time.sleep(0.0 if adapting.plan.orders == plan.orders else 0.1)
            return finish(*arguments)

        patch.setattr(pipeline._step_end, "finish", finish_late)
        current = adapting.plan
        for number in range(100 * NUM_STEPS):
            pipeline.step(*batch_of(plan.num_microbatches))
            if adapting.plan is not current:
                current = adapting.plan
                swaps.append(number)
            elif len(swaps) >= 2 and number > swaps[1] + NUM_STEPS:
                break
        return swaps, current.orders == plan.orders


@pytest.mark.dist
def test_all_ranks_leave_an_order_that_is_slower(pool: Pool) -> None:
    plan = zb_h1(place(Costs.uniform(2, 600, 100, weight_us=100), Cluster.uniform(2)), 4)
    (swaps, is_own), *others = pool.run(2, left_again, plan)
    assert all(other == (swaps, is_own) for other in others)
    assert len(swaps) == 2
    assert is_own


@pytest.mark.dist
def test_gradients_are_exact_before_between_and_after_two_swaps(pool: Pool) -> None:
    costs = Costs.uniform(3, 600, 100, weight_us=100)
    plan = zb_h1(place(costs, Cluster.uniform(3)), 4)
    found = pool.run(3, adapted, plan)
    assert len({tuple(swaps) for _, swaps, _ in found}) == 1
    assert len(found[0][1]) == 2
    assert found[0][2]
    whole = serial_step(waiting_chain(3), *batch_of(4))
    for i in range(len(found[0][0])):
        assert_equal_steps([results[i] for results, _, _ in found], whole)


def refuse(rank: int, plan: Plan) -> list[str]:
    told = []
    for adapt in (0, 1.5, True, "3%", 0.03 if rank else None):
        with pytest.raises(PipelineError) as error:
            Pipeline(chain(2), plan, loss_fn, adapt=adapt)  # type: ignore[arg-type]
        told.append(str(error.value))
    return told


@pytest.mark.dist
def test_what_is_refused(pool: Pool) -> None:
    plan = one_f_one_b(place(Costs.uniform(2), Cluster.uniform(2)), 4)
    for told in pool.run(2, refuse, plan):
        assert all("give the least gain as a fraction of a step" in each for each in told[:4])
        assert told[4] == "rank 1 has a different value of adapt from rank 0; give all ranks the same value of adapt"


# --- the search -------------------------------------------------------------------------------------------------------


def answer_of(search: BackgroundSearch) -> Answer:
    while (answer := search.taken()) is None:
        time.sleep(0.02)
    return answer


@pytest.mark.sweep
def test_the_search_runs_in_a_process_of_its_own() -> None:
    """The middle rank is slow: its order of one micro-batch at a time is far from the best."""
    costs = Costs(forward_us=(100, 300, 100), backward_us=(100, 300, 100), weight_us=(100, 300, 100))
    placement = place(costs, Cluster.uniform(3))
    order = [[rota.Op(rank, kind, m) for m in range(4) for kind in (Kind.F, Kind.I, Kind.W)] for rank in range(3)]
    slow = Plan(placement, 4, tuple(map(tuple, order)))
    search = BackgroundSearch()
    search.begin(slow, [one_f_one_b(placement, 4)])
    assert search.is_running
    answer = answer_of(search)
    assert answer.error == ""
    assert answer.plan is not None
    assert not search.is_running
    assert answer.before_us == simulate(slow).makespan_us
    assert answer.bound_us <= answer.makespan_us == simulate(answer.plan).makespan_us < answer.before_us
    assert answer.makespan_us == 3700  # 4 · 900 on the slow rank, behind the first forward
    search.begin(slow, [])
    search.close()  # at once
    assert not search.is_running


def test_a_process_that_ends_early_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rota.runtime.background_search.sys.executable", "/bin/false")
    search = BackgroundSearch()
    search.begin(PLAN, [])
    assert answer_of(search).error == "its process has ended without an answer"
