"""`--json`: every report has its figures in a form that programs read."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rota
from cli.test_cli import Capsys
from planning.test_autoplan import UNEVEN, layer_costs
from rota.cli import main
from rota.core.layers import Profile
from support.model_file import MODEL
from support.parsing import ALL

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


def report(capsys: Capsys, *words: str, code: int = 0) -> dict[str, Any]:
    assert main([*words, "--json"]) == code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("name", ALL)
def test_every_report_has_json(name: str) -> None:
    """The others train, or run other commands."""
    assert any(param.name == "json" for param in ALL[name].params) is (name not in ("demo", "run"))


@pytest.mark.usefixtures("folder", "time_is_work")
def test_plans(capsys: Capsys) -> None:
    step = ["--ranks", "2", "--microbatches", "4"]
    named = report(capsys, "plan", "zb_h1", *step, "-o", "named.json")
    assert named["schedule"] == "zb_h1"
    assert named["makespan_us"] == rota.simulate(rota.Plan.from_json(Path("named.json").read_text())).makespan_us
    assert named["assumed"] == ["I and W each take half of the backward, as the costs have no weight_us"]
    searched = report(capsys, "plan", "search", *step, "-o", "searched.json")
    assert searched["makespan_us"] == searched["search"]["value_us"] >= searched["search"]["bound_us"]
    curve = rota.Curve(60, 0.02, 4e-6)
    Path("sizes.json").write_text(rota.SizeModel((curve,), (curve,), activation_bytes=(rota.Curve(0, 9),)).to_json())
    Path("lengths.json").write_text("[[130, 85], [30]]")
    batches = report(capsys, "plan-batch", "sizes.json", "lengths.json", "-o", "plans")["batches"]
    assert [sum(map(len, batch["groups"])) for batch in batches] == [2, 1]
    assert all(batch["makespan_us"] >= batch["bounds"][0]["us"] for batch in batches)


@pytest.mark.usefixtures("folder")
def test_profiles(capsys: Capsys) -> None:
    Path("model.py").write_text(MODEL)
    profile = report(capsys, "profile", "model.py", "--device", "h100", "--rows", "1,2", "-o", "profile.json")
    assert [layers["rows"] for layers in profile["layers"]] == [1, 2]
    assert profile["layers"][0]["forward_us"] == list(Profile.from_json(Path("profile.json").read_text())[1].forward_us)


@pytest.mark.usefixtures("folder")
def test_plans_and_runs(capsys: Capsys) -> None:
    simulated = report(capsys, "show", "plan.json", "--timeline", "timeline.json")
    assert simulated["makespan_us"] == rota.simulate(PLAN).makespan_us
    assert simulated["peak_memory_bytes"] == [21, 14, 7]
    assert Path("timeline.json").exists()
    checked = report(capsys, "check", "plan.json", "--device")
    assert checked["accepted"]
    assert checked["device_kernels"] > 0
    assert (checked["device_slots"], checked["device_most_ctas"]) == (6, None)
    assert report(capsys, "check", "plan.json", "--sms", "132")["device_most_ctas"] == 22
    compared = report(capsys, "compare", "plan.json", "measured.json")
    assert compared["difference_us"] == sum(compared["parts_us"].values()) > 0
    assert {row["kind"] for row in compared["rows"]} == {"F", "B"}
    calibrated = report(capsys, "calibrate", "measured.json", "-o", "better.json")
    assert calibrated["predicted_us"] == calibrated["measured_us"][0]
    bounds = report(capsys, "check", "plan.json", "--bound")["bounds"]["makespan"]
    assert bounds["value_us"] >= bounds["bound_us"] == max(one["us"] for one in bounds["bounds"])
    assert sum(report(capsys, "explain", "measured.json")["by_cause_us"].values()) > 0


@pytest.mark.usefixtures("folder")
def test_a_refused_plan_is_no_report(capsys: Capsys) -> None:
    full = rota.place(rota.Costs.uniform(3, 100, 200, activation_bytes=7), rota.Cluster.uniform(3, 20))
    Path("full.json").write_text(rota.schedules.gpipe(full, 4).to_json())
    assert main(["check", "full.json", "--json"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "28 B" in printed.err


@pytest.mark.usefixtures("time_is_work")
def test_searches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
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
    costs = ["--ranks", "2", "--forward-us", "1", "--activation", "1"]
    frontier = report(capsys, "plan", "search", "--frontier", *costs)
    fastest_us, bound_us = (frontier[name][-1]["us_per_microbatch"] for name in ("points", "bounds"))
    assert fastest_us >= bound_us
