"""`--json`: every report has its figures in a form that programs read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rota
from planning.test_autoplan import UNEVEN, layer_costs
from rota.cli import main
from rota.cli.json_reports import of_rehearsal
from rota.planning.rehearsal import Rehearsal
from rota.profiles import Profile

PLAN = rota.schedules.one_f_one_b(
    rota.place(rota.Costs.uniform(3, 100, 200, activation_bytes=7), rota.Cluster.uniform(3)), 4
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan, and a run of it in which every op took 10 µs longer than planned."""
    monkeypatch.chdir(tmp_path)
    Path("plan.json").write_text(PLAN.to_json())
    slower = rota.place(rota.Costs.uniform(3, 110, 210, activation_bytes=7), rota.Cluster.uniform(3))
    measured = replace(rota.simulate(rota.schedules.one_f_one_b(slower, 4)), plan=PLAN)
    Path("measured.json").write_text(measured.to_json())
    return tmp_path


def report(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.usefixtures("folder")
def test_plans_and_runs(capsys: pytest.CaptureFixture[str]) -> None:
    simulated = report(capsys, "simulate", "plan.json", "-o", "timeline.json")
    assert simulated["makespan_us"] == rota.simulate(PLAN).makespan_us
    assert simulated["peak_memory_bytes"] == [21, 14, 7]
    assert Path("timeline.json").exists()
    checked = report(capsys, "check", "plan.json", "--device")
    assert checked["accepted"]
    assert checked["device_kernels"] > 0
    compared = report(capsys, "compare", "plan.json", "measured.json")
    assert compared["difference_us"] == sum(compared["parts_us"].values()) > 0
    assert {row["kind"] for row in compared["rows"]} == {"F", "B"}
    calibrated = report(capsys, "calibrate", "measured.json", "-o", "better.json")
    assert calibrated["predicted_us"] == calibrated["measured_us"][0]
    bounds = report(capsys, "bound", "plan.json")["makespan"]
    assert bounds["value_us"] >= bounds["bound_us"] == max(one["us"] for one in bounds["bounds"])
    assert sum(report(capsys, "explain", "measured.json")["by_cause_us"].values()) > 0


@pytest.mark.usefixtures("folder")
def test_a_refused_plan_is_no_report(capsys: pytest.CaptureFixture[str]) -> None:
    full = rota.place(rota.Costs.uniform(3, 100, 200, activation_bytes=7), rota.Cluster.uniform(3, 20))
    Path("full.json").write_text(rota.schedules.gpipe(full, 4).to_json())
    assert main(["check", "full.json", "--json"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "28 B" in printed.err


@pytest.mark.usefixtures("time_is_work")
def test_searches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("profile.json").write_text(Profile((layer_costs(1, UNEVEN),)).to_json())
    machine = ["--ranks", "2", "--batch", "8", "--time-limit", "600", "-o", "plan.json"]
    answer = report(capsys, "autoplan", "--profile", "profile.json", *machine)
    plan = rota.Plan.from_json(Path("plan.json").read_text())
    assert answer["best"]["step_us"] == rota.simulate(plan).makespan_us >= answer["bound_us"]
    assert [one["step_us"] for one in answer["candidates"]] == sorted(one["step_us"] for one in answer["candidates"])
    assert answer["assumptions"][0] == "Transfers are counted as free; give --link or --links"
    assert answer["predicted_because"] == "no model was given to run"
    assert answer["bound_holds"] == "for every layout, from its work alone"
    assert {one["is_measured"] for one in answer["candidates"]} == {False}
    assert all(one["bound_us"] <= one["step_us"] for one in answer["candidates"])
    assert "the same ops" in answer["best"]["bound_holds"]
    frontier = report(capsys, "frontier", "--shape", "v", "--ranks", "2", "--forward-us", "1", "--activation", "1")
    assert [point["us_per_microbatch"] for point in frontier["points"]][-1] >= frontier["bounds"][-1][
        "us_per_microbatch"
    ]


def test_a_rehearsal() -> None:
    timeline = rota.simulate(PLAN)
    told = of_rehearsal(Rehearsal(timeline, timeline, (timeline.makespan_us,), (), ()))
    assert told["makespans_us"] == [timeline.makespan_us]
    assert told["difference_us"] == 0
    json.dumps(told)
