"""`rota run` says every ten seconds how the training goes."""

import math
from dataclasses import replace

import pytest

import rota
from rota.core.plan import Usage
from rota.runtime.environment import PROGRESS
from rota.runtime.step_progress import StepProgress, progress_of

PLAN = rota.schedules.gpipe(rota.place(rota.Costs.uniform(2, 1000, 2000), rota.Cluster.uniform(2)), 3)


def test_a_line_has_step_loss_and_both_times(capsys: pytest.CaptureFixture[str]) -> None:
    clock_s = [0.0]
    progress = StepProgress(replace(PLAN, usage=Usage(("1",), 1, 1)), lambda: clock_s[0])
    for step in range(1, 31):
        begun_s, clock_s[0] = clock_s[0], clock_s[0] + 0.7
        progress.done(step, begun_s, 2.0 / step)
    progress.end()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "rota run: step 15: loss 0.1333, 700 ms per step (planned: 12 ms)",
        "rota run: step 30: loss 0.06667, 700 ms per step (planned: 12 ms)",
        "rota run: 30 steps, median 700 ms each (planned: 12 ms)",
    ]


def test_steps_without_waiting_last_from_one_to_the_next(capsys: pytest.CaptureFixture[str]) -> None:
    clock_s = [0.0]
    progress = StepProgress(PLAN, lambda: clock_s[0])
    for step in range(1, 4):
        progress.begun(step)
        clock_s[0] += 6.0
    progress.done(4, 14.0, 1.0)
    progress.begun(5)
    assert capsys.readouterr().err == "rota run: step 2: 6 s per step (the plan has no measured costs)\n"


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


def test_assumed_costs_are_no_prediction_and_the_median_of_few_steps_is_not_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock_s = [0.0]
    progress = StepProgress(PLAN, lambda: clock_s[0])
    clock_s[0] = 11.0
    progress.done(1, 0.0, math.nan)
    progress.end()
    assert capsys.readouterr().err == "rota run: step 1: 11 s per step (the plan has no measured costs)\n"


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
