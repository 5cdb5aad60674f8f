"""Exit codes: 2 for arguments and files that must be changed first, 1 for what was tried and refused or failed."""

import json
from pathlib import Path

import pytest

import rota
from cli.test_cli import Capsys, run
from planning.test_autoplan import UNEVEN, layer_costs
from rota import Curve, Plan, SizeModel, check
from rota.core.layers import Profile

_PLAN = "--ranks 2 --microbatches 4 --activation 1GB --limit 500MB"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A profile, the sizes of stages, and lengths of samples."""
    monkeypatch.chdir(tmp_path)
    Path("profile.json").write_text(Profile((layer_costs(1, UNEVEN),)).to_json())
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
        ("autoplan --profile profile.json --ranks 2 --batch 8 --memory 1B --time-limit 600", "found nothing that fits"),
    ],
)
def test_what_does_not_fit_in_memory_is_a_failure(command: str, told: str, capsys: Capsys) -> None:
    code, _, error = run(capsys, *command.split())
    assert told in error
    assert code == 1


LENGTHS = [[130, 85, 2300, 410, 77, 1200, 96], [500, 400]]


@pytest.fixture
def sizes(tmp_path: Path) -> Path:
    path = tmp_path / "sizes.json"
    forward, backward = Curve(60, 0.02, 4e-6), Curve(120, 0.04, 8e-6)
    path.write_text(SizeModel((forward,) * 3, (backward,) * 3, activation_bytes=(Curve(0, 1000),) * 3).to_json())
    return path


def test_each_batch_gets_its_plan(sizes: Path, tmp_path: Path, capsys: Capsys) -> None:
    lengths, folder = tmp_path / "lengths.json", tmp_path / "plans"
    lengths.write_text(json.dumps(LENGTHS))
    code, out, _ = run(capsys, "plan-batch", sizes, lengths, "--limit", "40MB", "-o", folder)
    assert code == 0
    assert "batch 0: 7 samples" in out
    assert "all orders of this grouping" in out
    for i in range(2):
        plan = Plan.from_json((folder / f"batch{i}.json").read_text())
        check(plan)
        assert plan.placement.cluster.limit_bytes == (40_000_000,) * 3


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[[130], [85, 50000]]", "lengths.json, batch 1: sample 1 of length 50000"),
        ('[130, "long"]', "expected the lengths of a batch as whole numbers, such as [130, 85, 2300]"),
    ],
)
def test_lengths_that_cannot_be_planned(text: str, told: str, sizes: Path, tmp_path: Path, capsys: Capsys) -> None:
    lengths = tmp_path / "lengths.json"
    lengths.write_text(text)
    code, _, error = run(capsys, "plan-batch", sizes, lengths, "--limit", "40MB")
    assert code != 0
    assert told in error
