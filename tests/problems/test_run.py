"""problems/run.py: what is closed and what is better, and files that only ever get better."""

import json
from pathlib import Path

import pytest

from rota import Cluster, Costs, place, schedules, simulate
from support.problem_library import FOLDER, Reference, check, script

RUN = script("run")
Capsys = pytest.CaptureFixture[str]


def write_poor(folder: Path, name: str, bound_us: int = 0) -> Path:
    """A problem whose plan is GPipe's, and of whose bound nothing is known."""
    placement = place(Costs.uniform(4, 100, 100, 100, activation_bytes=2), Cluster.uniform(4))
    path = folder / f"{name}.json"
    certificate = {"argument": "words", "why": "0"}
    Reference(name, "chain", schedules.gpipe(placement, 6), "gpipe", bound_us, certificate).write(path)
    return path


def run(capsys: Capsys, folder: Path, *arguments: str) -> str:
    RUN.main(arguments, folder)
    return capsys.readouterr().out


def test_better_plans_and_bounds_are_written(tmp_path: Path, capsys: Capsys) -> None:
    paths = [write_poor(tmp_path, name) for name in ("poor", "other")]
    before = [path.read_text() for path in paths]
    arguments = ("poor*", "--time-limit", "5")
    out = run(capsys, tmp_path, *arguments)
    assert "better plan: -12.50%  better bound: " in out
    assert "1 closed, 0 within 1%, 0 open" in out
    assert [path.read_text() for path in paths] == before
    run(capsys, tmp_path, *arguments, "--update")
    reference = Reference.read(paths[0])
    assert simulate(reference.plan).makespan_us == reference.bound_us == 2100
    assert reference.certificate["argument"] == "load"
    assert check.check(paths[0])
    assert paths[1].read_text() == before[1]
    assert "better" not in run(capsys, tmp_path, *arguments, "--update")


def test_nothing_is_written_that_the_checker_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_poor(tmp_path, "poor")
    before = path.read_text()
    (tmp_path / "check.py").write_text("import sys\nsys.exit('the plan takes too long')\n")
    monkeypatch.setattr(RUN, "FOLDER", tmp_path)
    with pytest.raises(SystemExit, match=r"poor.json was not changed: .* refuses .*: the plan takes too long"):
        RUN.main(["poor", "--time-limit", "5", "--update"], tmp_path)
    assert path.read_text() == before


def test_a_bound_that_counts_transfers_is_in_words(tmp_path: Path, capsys: Capsys) -> None:
    """A certificate knows nothing of what ops read and send, so it would prove less than the bound."""
    name = "transfers-chain-4x4-whole-room2-rate4"
    path = tmp_path / f"{name}.json"
    fields = json.loads((FOLDER / path.name).read_text())
    path.write_text(json.dumps(fields | {"bound_us": 1302, "certificate": {"argument": "words", "why": "0"}}))
    run(capsys, tmp_path, "--time-limit", "1", "--update")
    reference = Reference.read(path)
    assert reference.bound_us >= 1524
    assert reference.certificate["argument"] != "load"
    assert check.check(path)
