"""The states that restarts go on from, in the memory that a plan counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from planning.test_autoplan import UNEVEN, layer_costs
from rota import Cluster, Costs, PlacementError, Plan, calibration, place
from rota.cli import main
from rota.cli.snapshots import snapshots_text
from rota.core.layers import LayerCosts
from rota.core.profiles import Profile
from rota.core.simulation import simulate
from rota.core.usage import Usage
from rota.planning import Machine, autoplan
from rota.schedules import one_f_one_b

#: Parameters, gradients and an optimizer's state of 1 MB each; with activations, ranks hold 5 MB and 4 MB.
COSTS = Costs.uniform(2, 100, 200, activation_bytes=1_000_000, static_bytes=3_000_000, state_bytes=2_000_000)
Capsys = pytest.CaptureFixture[str]


def told(capsys: Capsys, *command: str) -> str:
    assert main([*command]) == 0
    return capsys.readouterr().out


def test_plan_and_check_say_whether_snapshots_fit(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("costs.json").write_text(COSTS.to_json())
    step = ("--microbatches", "4", "--costs", "costs.json", "--link", "1us")
    plan = ("plan", "1f1b", *step, "--force", "-o", "plan.json")
    assert "snapshots" not in told(capsys, *plan)  # no limit to be within
    needed = "Not included in the memory: snapshots for restarts, up to 4 MB per rank in the host's memory."
    fits = f"{needed} They fit within the limits"
    assert fits in told(capsys, *plan, "--limit", "9MB")
    assert fits in told(capsys, "check", "plan.json")
    tight = (
        f"{needed} On CPUs, the limit of rank 0 leaves 3 MB, but the snapshots need 4 MB: "
        "restarts go on from the last checkpoint, unless you plan with --snapshots."
    )
    assert tight in told(capsys, *plan, "--limit", "8MB")
    assert tight in told(capsys, "check", "plan.json")
    counted = "Included in the memory: snapshots for restarts, up to 4 MB per rank."
    assert counted in told(capsys, *plan, "--limit", "9MB", "--snapshots")
    assert counted in told(capsys, "check", "plan.json")
    assert simulate(Plan.from_json(Path("plan.json").read_text())).peak_memory_bytes == (9_000_000, 8_000_000)


def test_plans_for_other_devices_or_trainers_say_nothing_of_them() -> None:
    plan = one_f_one_b(place(COSTS, Cluster.uniform(2, limit_bytes=8_000_000)), 4)
    assert "On CPUs, the limit of rank 0 leaves 3 MB" in snapshots_text(simulate(plan))
    for usage in (Usage((), 1, note="estimated for h100"), Usage((), 1, exportable=True)):
        assert snapshots_text(simulate(replace(plan, usage=usage))) == ""


def test_what_is_refused(tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("costs.json").write_text(COSTS.to_json())
    plan = ("plan", "1f1b", "--microbatches", "4", "--link", "1us", "--snapshots")
    assert main([*plan, "--costs", "costs.json", "--limit", "8MB"]) == 1
    assert "rank 0" in capsys.readouterr().err
    assert main([*plan, "--ranks", "2"]) == 2
    assert "--snapshots needs --costs FILE" in capsys.readouterr().err
    with pytest.raises(PlacementError, match="measure them again"):
        Costs.uniform(2).with_snapshots()
    assert main(["autoplan", "model.py", "--ranks", "2", "--batch", "8", "--snapshots", "--device", "h100"]) == 2
    assert "snapshots are in the host's memory, and the limit is that of h100" in capsys.readouterr().err
    with pytest.raises(PlacementError, match="snapshots are for training"):
        autoplan({1: layer_costs(1, UNEVEN)}, Machine(2), 8, inference=True, snapshots=True)


def state(layers: LayerCosts) -> int:
    return sum(layers.parameter_bytes) + sum(layers.buffer_bytes) + sum(layers.optimizer_bytes)


def test_autoplan_counts_them(tmp_path: Path, capsys: Capsys) -> None:
    profiles = {rows: layer_costs(rows, UNEVEN, parameters=100) for rows in (1, 2)}
    (tmp_path / "profile.json").write_text(Profile(tuple(profiles.values())).to_json())
    command = ("autoplan", "--profile", str(tmp_path / "profile.json"), "--ranks", "2", "--pipeline", "2")
    options = ("--batch", "8", "--time-limit", "600", "--force", "-o", str(tmp_path / "plan.json"))
    told(capsys, *command, *options)
    without = Plan.from_json((tmp_path / "plan.json").read_text())
    assert "Included in the memory: snapshots for restarts, up to" in told(capsys, *command, *options, "--snapshots")
    plan = Plan.from_json((tmp_path / "plan.json").read_text())
    assert sum(plan.placement.snapshot_bytes) == 2 * state(profiles[1]) == 2 * sum(plan.placement.state_bytes)
    more = sum(plan.placement.static_bytes) - sum(without.placement.static_bytes)
    assert (more, without.placement.snapshot_bytes) == (2 * state(profiles[1]), ())


def test_later_plans_of_the_same_stages_count_them_too() -> None:
    plan = one_f_one_b(place(COSTS.with_snapshots(), Cluster.uniform(2)), 4)
    assert plan.placement.snapshot_bytes == (4_000_000, 4_000_000)
    assert Plan.from_json(plan.to_json()) == plan
    alone = place(COSTS.with_snapshots(), Cluster.uniform(1), ranks=(0, 0))
    assert (alone.static_bytes, alone.state_bytes, alone.snapshot_bytes) == ((14_000_000,), (4_000_000,), (8_000_000,))
    assert calibration.costs_of(plan.placement).snapshot_bytes == (4_000_000,) * 2
