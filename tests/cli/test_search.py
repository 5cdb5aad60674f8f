"""`rota plan search`, `rota plan search --frontier` and `rota check --bound`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cli.test_cli import Capsys, printed, refused, run
from rota import Costs, Plan, check, simulate
from rota.cli import screen
from rota.cli.files import read_plan

pytestmark = pytest.mark.usefixtures("time_is_work")

CHAIN = ["--ranks", "4", "--forward-us", "100", "--backward-us", "100", "--weight-us", "100"]


def test_plan_search_writes_what_it_proves(tmp_path: Path, capsys: Capsys) -> None:
    path = tmp_path / "plan.json"
    out = printed(capsys, "plan", "search", *CHAIN, "--microbatches", 8, "--limit", "4kB", "-o", path)
    assert "makespan 2,700 µs, proven optimal" in out
    assert "zb_h1" in out
    plan = Plan.from_json(path.read_text())
    check(plan)
    assert simulate(plan).makespan_us == 2700


@pytest.mark.parametrize(("shape", "num_stages"), [("v", 4), ("k", 5), ("wave", 8)])
def test_shapes(shape: str, num_stages: int, tmp_path: Path, capsys: Capsys) -> None:
    path = tmp_path / "plan.json"
    arguments = ("--shape", shape, "--ranks", 4, "--microbatches", 6, "--time-limit", 1, "-o", path)
    out = printed(capsys, "plan", "search", *arguments)
    assert Plan.from_json(path.read_text()).placement.num_stages == num_stages
    assert "lower bound for this placement" in out


def test_measured_costs(tmp_path: Path, capsys: Capsys) -> None:
    costs = tmp_path / "costs.json"
    costs.write_text(Costs.uniform(4, 10, 20, edges=((0, 1), (1, 2), (2, 3))).to_json())
    out = printed(capsys, "plan", "search", "--costs", costs, "--microbatches", 4, "--objective", "span")
    assert "span 210 µs, proven optimal" in out
    assert "The backward is whole; --split-backward" in out
    out = printed(capsys, "plan", "search", "--costs", costs, "--microbatches", 4, "--split-backward")
    assert "makespan 150 µs, proven optimal" in out
    assert "backward is whole" not in out


def test_bound_tells_each_reason(tmp_path: Path, capsys: Capsys) -> None:
    path = tmp_path / "plan.json"
    assert run(capsys, "plan", "gpipe", *CHAIN, "--microbatches", 8, "-o", path)[0] == 0
    out = printed(capsys, "check", path, "--bound")
    assert "makespan 3,000 µs, lower bound 2,700 µs: within 10.00% of the optimum" in out
    assert "load: rank " in out


def test_frontier_as_table_and_picture(tmp_path: Path, capsys: Capsys) -> None:
    picture = tmp_path / "frontier.png"
    arguments = ("--ranks", 4, "--forward-us", 1, "--backward-us", 3, "--time-limit", 20, "-o", picture)
    out = printed(capsys, "plan", "search", "--frontier", *arguments)
    rows = [line.split()[:2] for line in out.splitlines()[1:5]]
    assert rows == [["1kB", "16.0"], ["2kB", "8.0"], ["3kB", "5.3"], ["4kB", "4.0"]]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_default_costs_distort_nothing(tmp_path: Path, capsys: Capsys) -> None:
    """They can be dealt to several stages per rank, and are the same for every command; a CSV has them, too."""
    given = ("--forward-us", 1000, "--backward-us", 2000, "--activation", "1kB")
    step = ("--ranks", 4, "--microbatches", 8)
    code, table, _ = run(capsys, "plan", "all", *step, "--json")
    assert (code, table) == run(capsys, "plan", "all", *step, *given, "--json")[:2]
    makespans = {row["name"]: row["makespan_us"] for row in json.loads(table)}
    assert (makespans["zb_v"], makespans["1f1b"]) == (25_500, 33_000)
    plans = []
    for suffix, more in (("json", ()), ("json", given), ("csv", ())):
        path = tmp_path / f"{len(plans)}.{suffix}"
        assert run(capsys, "plan", "zb_h1", *step, *more, "-o", path)[0] == 0
        plans.append(read_plan(str(path)))
    assert plans[0] == plans[1] == plans[2]
    printed = " ".join(run(capsys, "plan", "--help")[1].split())
    assert "(default: 1000)" in printed
    assert "(default: 2000)" in printed


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("plan search --microbatches 4", "how many stages? give --ranks, --stages or --costs"),
        ("plan search --ranks 3 --microbatches 4 --time-limit 0", "'--time-limit': 0.0 is not in the range"),
        ("plan 1f1b --ranks 3 --microbatches 4 --objective span", "--objective is for `rota plan search`"),
        ("plan 1f1b --frontier --ranks 2", "--frontier is for `rota plan search`; leave it out for 1f1b"),
        ("plan search --frontier --ranks 2 --microbatches 4", "--microbatches is of one plan, but --frontier"),
    ],
)
def test_errors(arguments: str, told: str, capsys: Capsys) -> None:
    assert told in refused(capsys, 2, *arguments.split())


@pytest.mark.parametrize("shape", ["k", "x"])
def test_shapes_are_told_as_typed(shape: str, capsys: Capsys) -> None:
    told = refused(capsys, 2, "plan", "search", "--shape", shape, "--ranks", 3, "--stages", 4, "--microbatches", 4)
    assert told.startswith(f"rota plan: error: --shape {shape}: ")


@pytest.mark.parametrize("module", ["rota.schedules", "numba.core.types", "ortools.sat.python.cp_model"])
def test_ctrl_c_while_modules_are_loaded(module: str, tmp_path: Path) -> None:
    """Each interrupts itself when it loads that module, however it would take that."""
    program = f"""
import os, signal, sys
class Interrupting:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
sys.argv = ["rota", "plan", "search", "--ranks", "2", "--microbatches", "2"]
from rota.cli import main
sys.exit(main())
"""
    ended = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert (ended.returncode, ended.stderr) == (130, "rota plan: interrupted\n")


def test_snapshots_are_for_restarts(tmp_path: Path, capsys: Capsys) -> None:
    plan, script = tmp_path / "plan.json", tmp_path / "train.py"
    assert run(capsys, "plan", "gpipe", *CHAIN, "--microbatches", 2, "-o", plan)[0] == 0
    script.write_text("")
    told = refused(capsys, 2, "run", "--snapshot-folder", "x", plan, script)
    assert "--snapshot-folder x needs --max-restarts" in told


@pytest.mark.parametrize(("every_s", "printed"), [(1e6, ""), (-1.0, "starting\nplanning\n")])
def test_progress_in_a_file(every_s: float, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    monkeypatch.setattr(screen, "_EVERY_S", every_s)
    with screen.progress_line() as show:
        show("  starting")
        show("planning")
    assert capsys.readouterr().err == printed
