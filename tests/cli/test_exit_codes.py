"""Exit codes: 2 for arguments and files that must be changed first, 1 for what was tried and refused or failed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rota
from cli.test_cli import run
from planning.test_autoplan import UNEVEN, layer_costs
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
