"""`rota plan-batch`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.test_cli import run
from rota import Curve, Plan, SizeModel, check

LENGTHS = [[130, 85, 2300, 410, 77, 1200, 96], [500, 400]]


@pytest.fixture
def sizes(tmp_path: Path) -> Path:
    path = tmp_path / "sizes.json"
    forward, backward = Curve(60, 0.02, 4e-6), Curve(120, 0.04, 8e-6)
    path.write_text(SizeModel((forward,) * 3, (backward,) * 3, activation_bytes=(Curve(0, 1000),) * 3).to_json())
    return path


def test_each_batch_gets_its_plan(sizes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
def test_lengths_that_cannot_be_planned(
    text: str, told: str, sizes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = tmp_path / "lengths.json"
    lengths.write_text(text)
    code, _, error = run(capsys, "plan-batch", sizes, lengths, "--limit", "40MB")
    assert code != 0
    assert told in error
