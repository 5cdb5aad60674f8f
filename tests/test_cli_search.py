"""`rota plan search`, `rota bound` and `rota frontier`."""

from __future__ import annotations

from pathlib import Path

import pytest

from rota import Costs, Plan, check, simulate
from test_cli import run

CHAIN = ["--ranks", "4", "--forward-us", "100", "--backward-us", "100", "--weight-us", "100"]
Capsys = pytest.CaptureFixture[str]


def test_plan_search_writes_what_it_proves(tmp_path: Path, capsys: Capsys) -> None:
    path = tmp_path / "plan.json"
    code, out, _ = run(capsys, "plan", "search", *CHAIN, "--microbatches", 8, "--limit", 4, "-o", path)
    assert code == 0
    assert "makespan 2,700 µs, proven optimal" in out
    assert "zb_h1" in out
    plan = Plan.from_json(path.read_text())
    check(plan)
    assert simulate(plan).makespan_us == 2700


@pytest.mark.parametrize(("shape", "num_stages"), [("v", 4), ("m", 5), ("nn", 6), ("k", 5), ("x", 8), ("wave", 8)])
def test_shapes(shape: str, num_stages: int, tmp_path: Path, capsys: Capsys) -> None:
    path = tmp_path / "plan.json"
    arguments = ("--shape", shape, "--ranks", 4, "--microbatches", 6, "--time-limit", 1, "-o", path)
    code, out, _ = run(capsys, "plan", "search", *arguments)
    assert (code, Plan.from_json(path.read_text()).num_stages) == (0, num_stages)
    assert "no plan for this placement has less than" in out


def test_measured_costs(tmp_path: Path, capsys: Capsys) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(Costs.uniform(4, 10, 20, edges=((0, 1), (1, 2), (2, 3))).to_json())
    code, out, _ = run(capsys, "plan", "search", "--costs", costs, "--microbatches", 4, "--objective", "span")
    assert code == 0
    assert "span 210 µs, proven optimal" in out


def test_bound_tells_each_reason(tmp_path: Path, capsys: Capsys) -> None:
    path = tmp_path / "plan.json"
    assert run(capsys, "plan", "gpipe", *CHAIN, "--microbatches", 8, "-o", path)[0] == 0
    code, out, _ = run(capsys, "bound", path)
    assert code == 0
    assert "makespan 3,000 µs; no plan for this placement has less than 2,700: at most 10.00% from" in out
    assert "load: rank " in out


def test_frontier_as_table_and_picture(tmp_path: Path, capsys: Capsys) -> None:
    picture = tmp_path / "frontier.png"
    arguments = ("--ranks", 4, "--forward-us", 1, "--backward-us", 3, "--time-limit", 20, "-o", picture)
    code, out, _ = run(capsys, "frontier", *arguments)
    assert code == 0
    rows = [line.split()[:2] for line in out.splitlines()[1:4]]
    assert rows == [["1", "16.0"], ["2", "8.0"], ["4", "4.0"]]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        ("plan search --microbatches 4", 2, "how many stages? give --ranks, --stages or --costs"),
        ("plan search --ranks 3 --shape k --microbatches 4", 2, "even number of ranks"),
        ("plan search --ranks 3 --microbatches 4 --time-limit 0", 2, "must be a number of seconds above 0"),
        ("plan search --ranks 3 --microbatches 4 --limit 0", 2, "rank 0 needs at least 1 bytes"),
        ("plan 1f1b --ranks 3 --microbatches 4 --objective span", 2, "--objective is for `rota plan search`"),
        ("plan serch --ranks 3 --microbatches 4", 2, "did you mean search?"),
        ("frontier --ranks 2 -o nowhere/f.png", 2, "cannot write nowhere/f.png"),
        ("bound nothing.json", 2, "cannot read nothing.json"),
    ],
)
def test_errors(arguments: str, code: int, told: str, capsys: Capsys) -> None:
    result, _, err = run(capsys, *arguments.split())
    assert result == code
    assert told in err
    assert len(err.strip().splitlines()) == 1
