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
        progress.done(step, begun_s, 2.0 / step)
    progress.end()
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "rota run: step 15: loss 0.1333, 700 ms per step (planned: 12 ms)",
        "rota run: step 30: loss 0.06667, 700 ms per step (planned: 12 ms)",
        "rota run: 30 steps, 700 ms each in the median (planned: 12 ms)",
    ]


def test_the_median_of_few_steps_is_not_told(capsys: pytest.CaptureFixture[str]) -> None:
    progress = StepProgress(PLAN, lambda: 1.0)
    for step in range(1, 6):
        progress.done(step, 0.0, 2.0)
    progress.end()
    assert capsys.readouterr().err == ""


def test_assumed_costs_are_no_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    clock_s = [0.0]
    progress = StepProgress(PLAN, lambda: clock_s[0])
    clock_s[0] = 11.0
    progress.done(1, 0.0, math.nan)
    assert capsys.readouterr().err == "rota run: step 1: 11 s per step (the plan has no measured costs)\n"


def test_only_the_first_process_of_rota_run_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PROGRESS, raising=False)
    assert progress_of(PLAN, is_first=True) is None
    monkeypatch.setenv(PROGRESS, "1")
    assert progress_of(PLAN, is_first=False) is None
    assert progress_of(PLAN, is_first=True) is not None
