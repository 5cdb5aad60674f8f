"""`rota bench-search`: what is closed and what is better, and files that only ever get better."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cli.test_cli import run
from rota import Cluster, Costs, place, schedules, simulate
from rota.reference import Reference
from support.problem_library import FOLDER, check

Capsys = pytest.CaptureFixture[str]


def write_poor(folder: Path, name: str, bound_us: int = 0) -> Path:
    """A problem whose plan is GPipe's, and of whose bound nothing is known."""
    placement = place(Costs.uniform(4, 100, 100, 100, activation_bytes=2), Cluster.uniform(4))
    path = folder / f"{name}.json"
    Reference(name, "chain", schedules.gpipe(placement, 6), "gpipe", bound_us, {"argument": "words", "why": "0"}).write(
        path
    )
    return path


def add_checker(folder: Path) -> None:
    for name in ("check.py", "certificates.py"):
        shutil.copy(FOLDER / name, folder)


@pytest.mark.parametrize("jobs", [pytest.param(1, marks=pytest.mark.sweep), 2])
def test_better_plans_and_bounds_are_written(jobs: int, tmp_path: Path, capsys: Capsys) -> None:
    paths = [write_poor(tmp_path, name) for name in ("poor", "poorer", "other")]
    add_checker(tmp_path)
    before = [path.read_text() for path in paths]
    arguments = ("bench-search", tmp_path, "--only", "poor*", "--time-limit", 5, "--jobs", jobs)
    code, out, _ = run(capsys, *arguments)
    assert code == 0
    assert "2 closed, 0 within 1%, 0 open" in out
    assert "2 better plans: poor poorer" in out
    assert "2 better bounds: poor poorer" in out
    assert "These were not saved" in out
    assert [path.read_text() for path in paths] == before
    code, out, _ = run(capsys, *arguments, "--update")
    assert code == 0
    assert "These were not saved" not in out
    for path in paths[:2]:
        reference = Reference.read(path)
        assert simulate(reference.plan).makespan_us == reference.bound_us == 2100
        assert reference.certificate["argument"] == "load"
        assert check.check(path)
    assert paths[2].read_text() == before[2]
    code, out, _ = run(capsys, *arguments, "--update")
    assert code == 0
    assert "better" not in out
    assert "reached the best known plan for 2 of 2" in out


def test_nothing_is_written_that_the_checker_refuses(tmp_path: Path, capsys: Capsys) -> None:
    path = write_poor(tmp_path, "poor")
    before = path.read_text()
    arguments = ("bench-search", path, "--time-limit", 5, "--update")
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert "check.py is missing" in err
    (tmp_path / "check.py").write_text("import sys\nsys.exit('the plan takes too long')\n")
    code, _, err = run(capsys, *arguments)
    assert code == 1
    assert "poor.json was not changed" in err
    assert "refuses what the search found: the plan takes too long" in err
    assert path.read_text() == before


def test_what_is_known_is_listed_without_a_search(tmp_path: Path, capsys: Capsys) -> None:
    write_poor(tmp_path, "poor")
    write_poor(tmp_path, "nearly", bound_us=2390)
    code, out, _ = run(capsys, "bench-search", tmp_path, "--list")
    assert code == 0
    assert "0 closed, 1 within 1%, 1 open: 50.0% closed or within 1%" in out
    assert "Open: poor (100.0%)" in out
    code, out, _ = run(capsys, "bench-search", tmp_path, "--list", "--json", "--only", "near*")
    assert code == 0
    fields = json.loads(out)
    assert (fields["name"], fields["makespan_us"], fields["bound_us"]) == ("nearly", 2400, 2390)
    assert (fields["state"], fields["found_by"], fields["argument"]) == ("within 1%", "gpipe", "words")


def test_only_those_that_are_open_are_searched(tmp_path: Path, capsys: Capsys) -> None:
    write_poor(tmp_path, "done", bound_us=2400)
    write_poor(tmp_path, "poor")
    code, out, _ = run(capsys, "bench-search", tmp_path, "--open", "--list")
    assert code == 0
    assert "poor" in out
    assert "done" not in out


def test_json_has_one_object_per_problem(tmp_path: Path, capsys: Capsys) -> None:
    path = write_poor(tmp_path, "poor")
    code, out, _ = run(capsys, "bench-search", path, "--time-limit", 5, "--json")
    assert code == 0
    fields = json.loads(out)
    assert (fields["name"], fields["state"], fields["gap"]) == ("poor", "closed", 0)
    assert (fields["known_us"], fields["makespan_us"], fields["bound_us"]) == (2400, 2100, 2100)


def test_a_wrong_bound_is_noticed(tmp_path: Path, capsys: Capsys) -> None:
    path = write_poor(tmp_path, "poor", bound_us=2101)
    add_checker(tmp_path)
    code, _, err = run(capsys, "bench-search", path, "--time-limit", 5, "--update")
    assert code == 2
    assert "poor.json: the bound of 2101 µs is wrong: the search found a plan that takes 2100 µs" in err


def test_wrong_arguments_and_files(tmp_path: Path, capsys: Capsys) -> None:
    path = write_poor(tmp_path, "poor")
    for given, said in (
        ([tmp_path / "nothing"], "nothing is neither a file nor a folder"),
        ([tmp_path, "--only", "wave-*"], "there is no problem whose name matches 'wave-*'"),
        ([tmp_path, "--jobs", 0], "--jobs"),
    ):
        code, _, err = run(capsys, "bench-search", *given)
        assert code == 2
        assert said in err
    fields = json.loads(path.read_text())
    for changed, said in (
        ({"rota": "plan"}, 'it says "rota": "plan"'),
        ({"certificate": {}}, "problem.certificate has no field 'argument'"),
        ({"orders": ["0F0", "", "", ""]}, "never does"),
        ({"cluster": {**fields["cluster"], "limit_bytes": [1, None, None, None]}}, "over its limit"),
    ):
        path.write_text(json.dumps(fields | changed))
        code, _, err = run(capsys, "bench-search", path)
        assert code in (1, 2)
        assert said in err


def test_a_bound_that_counts_transfers_is_in_words(tmp_path: Path, capsys: Capsys) -> None:
    """A certificate knows nothing of what ops read and send, so it would prove less than the bound."""
    name = "transfers-chain-4x4-whole-room2-rate4"
    path = tmp_path / f"{name}.json"
    fields = json.loads((FOLDER / path.name).read_text())
    path.write_text(json.dumps(fields | {"bound_us": 1302, "certificate": {"argument": "words", "why": "0"}}))
    add_checker(tmp_path)
    code, _, _ = run(capsys, "bench-search", path, "--time-limit", 1, "--update")
    assert code == 0
    reference = Reference.read(path)
    assert reference.bound_us >= 1524
    assert reference.certificate["argument"] != "load"
    assert check.check(path)
