"""`rota run` says every ten seconds how the training goes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

import rota
from rota.runtime.environment import PROGRESS
from rota.runtime.step_progress import StepProgress, progress_of
from rota.usage import Usage

PLAN = rota.schedules.gpipe(rota.place(rota.Costs.uniform(2, 1000, 2000), rota.Cluster.uniform(2)), 3)


def test_a_line_has_step_loss_and_both_times(capsys: pytest.CaptureFixture[str]) -> None:
    clock_s = [0.0]
    progress = StepProgress(replace(PLAN, usage=Usage(("1",), 1, 1)), lambda: clock_s[0])
    for step in range(1, 31):
        begun_s, clock_s[0] = clock_s[0], clock_s[0] + 0.7
        progress.done(step, begun_s, 2.0 / step, 0.5)
    progress.end()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "rota run: step 15: loss 0.1333, 700 ms per step (planned: 12 ms)",
        "rota run: step 30: loss 0.06667, 700 ms per step (planned: 12 ms)",
        "rota run: 30 steps, median 700 ms each (planned: 12 ms)",
    ]


def test_what_snapshots_cost_is_told_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    clock_s = [0.0]
    progress = StepProgress(PLAN, lambda: clock_s[0])
    for _ in range(10):
        clock_s[0] += 0.776  # a step
        begun_s, clock_s[0] = clock_s[0], clock_s[0] + 0.024
        progress.committed(begun_s, 425_000_000)
    progress.end()
    assert capsys.readouterr().err == (
        "rota run: snapshots: median 24 ms per step (3.0% of the time from step to step) on rank 0, and 425 MB "
        "of memory on the rank that needs most\n"
    )


def test_the_median_of_few_steps_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    progress = StepProgress(PLAN, lambda: 1.0)
    for step in range(1, 6):
        progress.done(step, 0.0, 2.0, 0.5)
    progress.end()
    assert capsys.readouterr().err == ""


def test_assumed_costs_are_no_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    clock_s = [0.0]
    progress = StepProgress(PLAN, lambda: clock_s[0])
    clock_s[0] = 11.0
    progress.done(1, 0.0, math.nan, 0.5)
    assert capsys.readouterr().err == "rota run: step 1: 11 s per step (the plan has no measured costs)\n"


def _told_of(steps: list[tuple[float, float]], capsys: pytest.CaptureFixture[str], plan: rota.Plan = PLAN) -> list[str]:
    """The lines about late steps; `steps`: seconds of each, and those of the first rank's ops."""
    clock_s = [0.0]
    progress = StepProgress(plan, lambda: clock_s[0])
    for number, (step_s, ops_s) in enumerate(steps, start=1):
        begun_s, clock_s[0] = clock_s[0], clock_s[0] + step_s
        progress.done(number, begun_s, 2.0, ops_s)
    return [line for line in capsys.readouterr().err.splitlines() if "times the median" in line]


def test_a_step_that_took_far_too_long_is_told_with_what_the_first_rank_knows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    usual = [(2.0, 1.5)] * 3
    assert _told_of([*usual, (100.0, 1.6)], capsys) == [
        "rota run: step 4 took 100 s, 50 times the median of the steps before it; of this, rank 0's own ops took 1.6 s "
        "(median 1.5 s): unless its batch was larger, another rank, or the whole machine, was stopped or stalled"
    ]
    (own,) = _told_of([*usual, (100.0, 99.0)], capsys)
    assert own.endswith("unless its batch was larger, rank 0, or the whole machine, was stopped or stalled")


def test_late_steps_are_told_once_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    steps = [(2.0, 1.5)] * 5 + [(20.0, 1.5), (20.0, 1.5)] + [(2.0, 1.5)] * 30 + [(20.0, 1.5)]
    assert [line.split()[3] for line in _told_of(steps, capsys)] == ["6", "38"]


def test_first_steps_short_ones_and_those_that_are_as_slow_as_planned_are_not_late(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert _told_of([(100.0, 99.0), (2.0, 1.5), (2.0, 1.5)], capsys) == []
    assert _told_of([(0.01, 0.01)] * 5 + [(0.9, 0.01)], capsys) == []
    tasks = tuple(replace(task, duration_us=10_000_000) for task in PLAN.placement.tasks)
    slow = replace(PLAN, placement=replace(PLAN.placement, tasks=tasks), usage=Usage(("1",), 1, 1))
    assert _told_of([(2.0, 1.5)] * 5 + [(100.0, 1.5)], capsys, slow) == []


def test_only_the_first_process_of_rota_run_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PROGRESS, raising=False)
    assert progress_of(PLAN, is_first=True, on_cpu=False) is None
    monkeypatch.setenv(PROGRESS, "1")
    assert progress_of(PLAN, is_first=False, on_cpu=False) is None
    assert progress_of(PLAN, is_first=True, on_cpu=False) is not None


def test_ranks_that_share_cores_are_told_when_the_run_begins(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(PROGRESS, "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr("rota.runtime.environment.num_cores", lambda: 2)
    progress_of(replace(PLAN, usage=Usage(("1",), 1, 1)), is_first=True, on_cpu=True)
    shared = "4 ranks share 2 cores: the plan's times assume a core per rank, so steps can take 2.0 times as long"
    assert capsys.readouterr().err == f"rota run: {shared}\n"
    progress_of(PLAN, is_first=True, on_cpu=True)  # without planned times
    for note in ("measured in a run of 5 steps", "estimated for h100"):  # times of other ranks
        progress_of(replace(PLAN, usage=Usage(("1",), 1, 1, note=note)), is_first=True, on_cpu=True)
    monkeypatch.setattr("rota.runtime.environment.num_cores", lambda: 4)
    progress_of(replace(PLAN, usage=Usage(("1",), 1, 1)), is_first=True, on_cpu=True)
    assert capsys.readouterr().err == ""
