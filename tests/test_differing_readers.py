"""Whatever reads a plan reads one whose micro-batches differ: against the same step written with a stage per size."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from rota import Cluster, Costs, Placement, Plan, Timeline, compare, drawing, explain, place, schedules, simulate
from rota.calibration import calibrated, costs_of
from rota.cli import main
from rota.core.errors import PlacementError
from rota.core.tasks import Task, values_of
from support.core_strategies import differing_plans
from support.sampling import some


def two_sizes(num_ranks: int = 2, class_of: tuple[int, ...] = (0, 1, 1, 0)) -> Placement:
    cluster = Cluster.uniform(num_ranks, 500, latency_us=2, bytes_per_us=3)
    costs = [Costs.uniform(num_ranks, 10 * s, 20 * s, None, 8 * s, 4 * s, reduce_us=9) for s in (1, 3)]
    return Placement.of_classes([place(own, cluster) for own in costs], class_of)


PLAN = schedules.one_f_one_b(two_sizes(), 4)


def slower(plan: Plan) -> Timeline:
    """The timeline of a run in which all ops took twice as long."""
    tasks = plan.placement.tasks
    doubled = [
        [Task(t.stage, t.kind, t.ranks, 2 * t.duration_us, t.held_bytes, t.peak_bytes) for t in own.tasks]
        for own in plan.placement.classes
    ]
    assert len(tasks) == len(doubled[0])
    classes = [replace(own, tasks=tuple(row)) for own, row in zip(plan.placement.classes, doubled, strict=True)]
    placement = Placement.of_classes(classes, plan.placement.class_of) if plan.placement.class_of else classes[0]
    return simulate(replace(plan, placement=placement))


@given(differing_plans() | differing_plans(wired=True))
@settings(max_examples=some(150))
def test_explained_compared_and_drawn(plan: Plan) -> None:
    timeline = simulate(plan)
    explanation = explain(plan)
    busy = [sum(ends) - sum(starts) for starts, ends in zip(timeline.starts_us, timeline.ends_us, strict=True)]
    for rank, totals in enumerate(explanation.by_rank):
        assert sum(totals.values()) + busy[rank] == timeline.makespan_us
    assert explanation.to_text()
    measured = replace(slower(plan), plan=plan)
    comparison = compare(plan, measured)
    assert sum(comparison.parts_us.values()) == measured.makespan_us - timeline.makespan_us
    assert set(compare(plan, plan).parts_us.values()) <= {0}
    assert comparison.to_text()
    drawing.to_text(timeline)
    drawing.to_html(timeline)
    drawing.to_chrome_trace(timeline)


@given(differing_plans())
@settings(max_examples=some(100))
def test_calibration_finds_the_time_of_each_class(plan: Plan) -> None:
    measured = slower(plan)
    placement = calibrated(replace(measured, plan=plan))
    present = {plan.placement.class_in(m) for m in range(plan.num_microbatches)}
    for task, planned in zip(placement.tasks, plan.placement.tasks, strict=True):
        batches = plan.placement.microbatches(task.stage, plan.num_microbatches)
        for c in present & {plan.placement.class_in(m) for m in batches}:
            result, before = (
                values_of(figure)[c] if len(values_of(figure)) > 1 else values_of(figure)[0]
                for figure in (task.duration_us, planned.duration_us)
            )
            assert result == 2 * before


def test_what_takes_one_size_refuses_several() -> None:
    split = [Costs.uniform(2, 10 * s, 20 * s, 10 * s) for s in (1, 2)]
    placement = Placement.of_classes([place(own, Cluster.uniform(2)) for own in split], (0, 1))
    with pytest.raises(PlacementError, match="costs_of takes micro-batches that are all alike"):
        costs_of(placement)


def test_commands_read_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(PLAN.to_json())
    for command in (["check", plan, "--bound"], ["show", plan, "-o", tmp_path / "plan.png"], ["explain", plan]):
        assert main([*map(str, command)]) == 0, (command, capsys.readouterr())
    assert main(["export", "deepspeed", str(plan), "--boundaries", "0,1,2", "-o", str(tmp_path / "parts.json")]) != 0
    assert "rota export takes micro-batches that are all alike" in capsys.readouterr().err
    assert "Traceback" not in capsys.readouterr().err
