"""Exit codes: 2 for arguments and files that must be changed first, 1 for what was tried and refused or failed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import rota
from cli.test_cli import run
from planning.test_autoplan import UNEVEN, layer_costs
from rota.core.layers import Profile
from support.model_file import MODEL

_PLAN = "--ranks 2 --microbatches 4 --activation 1GB --limit 500MB"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Plans for 2 and 3 ranks, a script, a profile, the sizes of stages, and lengths of samples."""
    monkeypatch.chdir(tmp_path)
    for num_ranks in (2, 3):
        placement = rota.place(rota.Costs.uniform(num_ranks, 100, 200), rota.Cluster.uniform(num_ranks))
        plan = rota.schedules.one_f_one_b(placement, 4)
        Path(f"plan{num_ranks}.json").write_text(plan.to_json())
    slower = rota.place(rota.Costs.uniform(3, 110, 210), rota.Cluster.uniform(3))
    measured = replace(rota.simulate(rota.schedules.one_f_one_b(slower, 4)), plan=plan)
    Path("measured.json").write_text(measured.to_json())
    Path("train.py").write_text("")
    Path("model.py").write_text(MODEL)
    Path("profile.json").write_text(Profile((layer_costs(1, UNEVEN),)).to_json())
    Path("stale.json").write_text(Profile((layer_costs(1, UNEVEN),)).to_json())
    curve = rota.Curve(60, 0.02, 4e-6)
    Path("sizes.json").write_text(rota.SizeModel((curve,), (curve,), activation_bytes=(rota.Curve(0, 1000),)).to_json())
    Path("lengths.json").write_text(json.dumps([130, 85]))
    return tmp_path


@pytest.mark.usefixtures("folder", "time_is_work")
@pytest.mark.parametrize(
    ("command", "told"),
    [
        (f"plan 1f1b {_PLAN}", "over its limit of 500 MB"),
        (f"plan search {_PLAN}", "rank 0 needs at least 1000000000 bytes"),
        (f"plan search {_PLAN} --objective period", "rank 0 needs at least 1000000000 bytes"),
        ("plan-batch sizes.json lengths.json --limit 100kB", "sample 0 of length 130 fits in no micro-batch"),
        (
            "autoplan --profile profile.json --ranks 2 --batch 8 --memory 1B --time-limit 600",
            "found nothing that fits",
        ),
    ],
)
def test_what_does_not_fit_in_memory_is_a_failure(command: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run(capsys, *command.split())
    assert told in error
    assert code == 1


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("run --device gaudi plan2.json train.py", "device 'gaudi': "),
        ("profile model.py --device hpu", "device 'hpu': "),
        ("profile links --device hpu", "device 'hpu': "),
        ("profile model.py --cache stale.json", "stale.json is stale: "),
        ("compare measured.json ./measured.json", "./measured.json is given twice: compare a plan with"),
    ],
)
def test_arguments_that_must_be_changed_are_usage(command: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run(capsys, *command.split())
    assert told in error
    assert error.count("\n") == 1
    assert code == 2
