"""René's door: instructions, rules, times, the critical path, pictures and the frontier."""

import importlib.util
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from rota import Cluster, Costs, RotaError, place, schedules, simulate
from rota.compat.rene import (
    Backward,
    EarlyRecomputation1F1B,
    Forward,
    ForwardBackward,
    Instruction,
    PipelineSchedule,
    PipelineVisualizer,
    Recomputation,
    ReneDAG,
    ReneError,
    Synchronous1F1B,
)
from support.sampling import some

PICTURE = {Forward: [1.0, 1.0, 1.4, 1.2], Backward: [1.5, 1.5, 2.0, 1.7]}


class GPipe(PipelineSchedule):
    def __iter__(self) -> Iterator[Instruction]:
        yield from (Forward(self.stage_id, m) for m in range(self.num_micro_batches))
        yield from (Backward(self.stage_id, m) for m in reversed(range(self.num_micro_batches)))


def uniform(schedule: Any, num_stages: int, num_micro_batches: int, forward: float = 1.0, backward: float = 2.0):
    durations = {Forward: [forward] * num_stages, Backward: [backward] * num_stages}
    return ReneDAG(schedule, num_stages, num_micro_batches, durations)


def axes() -> Axes:
    return Figure(figsize=(12, 4)).add_subplot()


def require_path(dag: ReneDAG) -> list[Instruction]:
    """One after the other without a gap, from the start to the end: its length is the makespan, to the last bit."""
    path = dag.get_critical_path()
    assert path[0].earliest_start == 0
    assert path[-1].earliest_finish == dag.total_execution_time
    for before, inst in pairwise(path):
        assert before.earliest_finish == inst.earliest_start
    assert {inst.slack for inst in path} == {0}
    return path


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(1, 3), (4, 8), (5, 2), (3, 3)])
def test_1f1b_is_rota_s(num_stages: int, num_micro_batches: int) -> None:
    dag = uniform(Synchronous1F1B, num_stages, num_micro_batches, 3, 5)
    placement = place(Costs.uniform(num_stages, 3, 5), Cluster.uniform(num_stages))
    timeline = simulate(schedules.one_f_one_b(placement, num_micro_batches))
    dag.schedule()
    starts = {(type(i).__name__[0], i.stage_id, i.micro_batch_id): i.actual_start for i in dag.insts}
    assert starts == {(str(op.kind), op.stage, op.microbatch): s for _, s, _, op in timeline.op_spans()}
    assert dag.total_execution_time == timeline.makespan_us


def test_early_recomputation() -> None:
    """A stage recomputes ahead once it has no forward left; the last one always recomputes with its backward."""
    results = [
        " ".join(f"{short(inst)}{inst.micro_batch_id}" for inst in EarlyRecomputation1F1B(3, 4, s)) for s in (0, 2)
    ]
    assert results == ["F0 F1 F2 FB0 F3 FB1 R2 B2 R3 B3", "F0 FB0 F1 FB1 F2 FB2 F3 FB3"]


def short(inst: Instruction) -> str:
    return "".join(letter for letter in type(inst).__name__ if letter.isupper())


def test_a_rule_for_backward_knows_forward_backward() -> None:
    times = dict.fromkeys((Forward, Recomputation), [1] * 3) | {Backward: [2] * 3, ForwardBackward: [3] * 3}
    dag = ReneDAG(EarlyRecomputation1F1B, 3, 4, times)
    finish = {(inst.stage_id, inst.micro_batch_id): inst for inst in dag.insts if isinstance(inst, Backward)}
    for stage, m in product(range(2), range(4)):
        assert finish[stage, m].earliest_start >= finish[stage + 1, m].earliest_finish
    require_path(dag)


def test_eager_and_lazy() -> None:
    dag = ReneDAG(Synchronous1F1B, 4, 8, PICTURE)
    assert dag.total_execution_time == 34.6
    for algo in ("eager", "lazy"):
        dag.schedule(algo)
        for inst in dag.insts:
            early, late = (inst.earliest_start, inst.earliest_finish), (inst.latest_start, inst.latest_finish)
            assert (inst.actual_start, inst.actual_finish) == (early if algo == "eager" else late)
            assert inst.slack == pytest.approx(late[0] - early[0])
            assert inst.actual_duration == pytest.approx(inst.duration)
        rows = [[i for i in dag.insts if i.stage_id == stage] for stage in range(4)]
        assert all(a.actual_finish <= b.actual_start for row in rows for a, b in pairwise(row))
        assert max(inst.actual_finish for inst in dag.insts) == 34.6


def test_an_unknown_algorithm_schedules_nothing() -> None:
    dag = uniform(GPipe, 2, 2)
    with pytest.raises(ReneError, match="'foo' is unknown; use 'eager' or 'lazy'"):
        dag.schedule("foo")
    assert not dag.scheduled
    with pytest.raises(ValueError, match=r"not scheduled; call dag.schedule\(\) first"):
        PipelineVisualizer(dag)


@settings(max_examples=some(60))
@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.lists(st.floats(0, 1e9, allow_subnormal=False) | st.just(1.0), min_size=8, max_size=8),
    st.sampled_from([GPipe, Synchronous1F1B]),
)
@example(4, 4, [1.0] * 4 + [2.0] * 4, GPipe)  # has critical instructions that wait for one another, but not at once
def test_it_is_as_long_as_the_whole(num_stages: int, num_micro_batches: int, times: list[float], schedule: Any) -> None:
    durations = {Forward: times[:num_stages], Backward: times[4 : 4 + num_stages]}
    require_path(ReneDAG(schedule, num_stages, num_micro_batches, durations))


def test_a_cycle_is_told() -> None:
    def back(inst1: Backward, inst2: Forward) -> bool:
        return inst1.stage_id == inst2.stage_id == 0 and inst1.micro_batch_id == inst2.micro_batch_id == 0

    with pytest.raises(ReneError) as error:
        ReneDAG(GPipe, 1, 1, {Forward: [1], Backward: [1]}, [back])
    message = str(error.value).partition("; ")[0]
    assert message in (
        "instructions wait for each other: Forward(S0B0) -> Backward(S0B0) -> Forward(S0B0)",
        "instructions wait for each other: Backward(S0B0) -> Forward(S0B0) -> Backward(S0B0)",
    )


def unannotated(inst1, inst2):
    return False


def of_numbers(inst1: int, inst2: Forward) -> bool:
    return False


def one(inst1: Forward, inst2: Forward) -> int:
    return 1


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (unannotated, "argument inst1 of dependency rule unannotated has no annotation; annotate its type"),
        (of_numbers, "argument inst1 of dependency rule of_numbers is annotated <class 'int'>; use Instruction"),
        (one, r"dependency rule one returned 1 for Forward\(S0B0\) and Forward\(S0B0\); return True or False"),
    ],
)
def test_rules_that_are_refused(rule: Any, message: str) -> None:
    with pytest.raises(ReneError, match=message):
        ReneDAG(GPipe, 2, 2, {Forward: [1, 1], Backward: [1, 1]}, [rule])


@pytest.mark.parametrize(
    ("durations", "message"),
    [
        ({Forward: [1, 1], Backward: [1]}, r"durations\[Backward\] is for 1 stages, not for num_stages=2"),
        ({Forward: [1, 1]}, r"durations has nothing for Backward, which Backward\(S0B1\) is; add it"),
        ({Forward: [1, -1], Backward: [1, 1]}, r"the duration of Forward\(S1B0\) is -1; give a number of 0 or more"),
    ],
)
def test_durations_that_are_refused(durations: Any, message: str) -> None:
    with pytest.raises(ReneError, match=message):
        ReneDAG(GPipe, 2, 2, durations)


def test_the_picture_of_1f1b_with_its_critical_path(tmp_path: Path) -> None:
    dag = ReneDAG(schedule_type=Synchronous1F1B, num_stages=4, num_micro_batches=8, durations=PICTURE)
    dag.schedule("eager")
    vis = PipelineVisualizer(dag)
    ax = axes()
    vis.draw(ax)
    vis.draw_critical_path(ax)
    ax.figure.savefig(tmp_path / "pipeline.png")
    expected = [(i.actual_start, i.stage_id, pytest.approx(i.duration), 1) for i in dag.insts]
    assert [(*patch.get_xy(), patch.get_width(), patch.get_height()) for patch in ax.patches] == expected
    assert [text.get_text() for text in ax.texts] == [str(inst.micro_batch_id) for inst in dag.insts]
    (line,) = ax.lines
    assert (line.get_xdata()[0], line.get_xdata()[-1]) == (0, 34.6)
    assert {y for _, y in zip(*line.get_data(), strict=True)} == {0.75, 1.75, 2.75, 3.75}
    assert ax.get_ylim() == (4, 0), "stage 0 is on top"
    assert not ax.axison


CHOICES = [(1.0, 100.0, 1700), (1.5, 60.0, 1200), (2.0, 50.0, 900), (1.8, 90.0, 1000)]
TIME_COSTS = {Forward: dict.fromkeys(range(2), CHOICES), Backward: dict.fromkeys(range(2), CHOICES)}


def test_the_slowest_option_is_the_default() -> None:
    dag = ReneDAG(Synchronous1F1B, 2, 2, time_costs=TIME_COSTS)
    assert {(i.duration, i.cost, i.frequency, i.power) for i in dag.insts} == {(2.0, 50.0, 900, 25.0)}
    assert dag.total_execution_time == 12


def test_power_colors() -> None:
    dag = ReneDAG(Synchronous1F1B, 2, 1, time_costs=TIME_COSTS)
    first = next(dag.insts)
    first.duration, first.cost, first.frequency = CHOICES[0]
    dag.annotate_nodes()
    dag.schedule()
    ax = axes()
    PipelineVisualizer(dag, power_color="gray", normalizer=Normalize(0, 200)).draw(ax)
    results = [patch.get_facecolor()[0] for patch in ax.patches]
    assert results == pytest.approx([0.5, 0.125, 0.125, 0.125], abs=0.01)
    assert ax.texts[1].get_color() == "#ffffff", "white on a dark colour"
    without = uniform(GPipe, 1, 1)
    without.schedule()
    with pytest.raises(ReneError, match=r"Forward\(S0B0\) has no cost, so no power"):
        PipelineVisualizer(without, power_color="gray")


def test_time_costs_that_are_refused() -> None:
    with pytest.raises(ReneError, match="both given"):
        ReneDAG(GPipe, 1, 1, {Forward: [1]}, time_costs={Forward: {0: CHOICES}})
    with pytest.raises(ReneError, match=r"time_costs\[Forward\] is for 1 stages, not for num_stages=2"):
        ReneDAG(GPipe, 2, 1, time_costs={Forward: {0: CHOICES}})


def brute_force(dag: ReneDAG) -> dict[float, float]:
    """For each time the least cost, of all choices there are."""
    insts, best = list(dag.insts), {}
    for options in product(CHOICES, repeat=len(insts)):
        for inst, option in zip(insts, options, strict=True):
            inst.duration, inst.cost, inst.frequency = option
        dag.annotate_nodes()
        time, cost = dag.total_execution_time, sum(option[1] for option in options)
        best[time] = min(cost, best.get(time, cost))
    return best


def test_the_frontier() -> None:
    """From all slowest to as fast as can be; where choices lie on a convex curve, exactly what brute force finds."""
    pytest.importorskip("lowtime", reason="the extra `energy` is not installed")
    dag = ReneDAG(Synchronous1F1B, 2, 1, time_costs=TIME_COSTS)
    points = dag.frontier(0.5)
    best = brute_force(dag)
    assert [point.total_execution_time for point in points] == [4.0, 4.5, 5.0, 5.5, 6.0, 6.5, 7.0, 7.5, 8.0]
    for point in points:
        assert point.cost == best[point.total_execution_time]
        dag.assign(point)
        assert dag.total_execution_time == point.total_execution_time
        assert sum(inst.cost for inst in dag.insts) == point.cost
        assert all((i.duration, i.cost, i.frequency) in CHOICES for i in dag.insts)
        require_path(dag)


def test_frontiers_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    dag = ReneDAG(Synchronous1F1B, 2, 1, time_costs=TIME_COSTS)
    find_spec = importlib.util.find_spec
    there = lambda name: name == "lowtime" or find_spec(name)  # noqa: E731
    monkeypatch.setattr("rota.compat.rene.energy.find_spec", there)
    with pytest.raises(ReneError, match=r"Forward\(S0B0\) has nothing to choose from; give ReneDAG time_costs"):
        uniform(GPipe, 1, 1).frontier(1)
    monkeypatch.setattr("rota.compat.rene.energy.find_spec", lambda name: None)
    with pytest.raises(RotaError, match=r"needs lowtime, which is not installed: pip install 'rota\[energy\]'"):
        dag.frontier(0.5)
