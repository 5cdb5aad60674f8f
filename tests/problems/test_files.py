"""Every reference problem: the checker accepts it, Rota agrees with the checker, and make.py makes it."""

import ast
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

import rota
from rota import Cluster, Costs, FormatError, place, schedules, simulate
from support.problem_library import FOLDER, PATHS, Reference, check, script

MOST_BYTES = 15_000_000
LARGE_BYTES = 6_000  # larger problems take half a second or more each; `make test-sweep` reads them


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.sweep] if path.stat().st_size > LARGE_BYTES else [])
        for path in PATHS
    ],
)
def test_the_checker_and_rota_agree(path: Path) -> None:
    assert check.check(path)
    text = path.read_text()
    fields, reference = json.loads(text), Reference.read(path)
    rota.check(reference.plan)
    timeline = rota.simulate(reference.plan)
    assert timeline.makespan_us == fields["makespan_us"]
    assert list(timeline.peak_memory_bytes) == fields["peak_bytes"]
    assert reference.to_json() == text


def test_there_are_200_problems_of_all_kinds_and_most_are_closed() -> None:
    made = script("make").problems()
    assert set(made) == {path.stem for path in PATHS}
    assert len(PATHS) == 200
    assert sum(path.stat().st_size for path in PATHS) <= MOST_BYTES
    assert set(Counter(family for family, *_ in made.values())) >= {"tessel", "pipeline", "dag", "transfers"}
    assert {placement.num_ranks for _, placement, _ in made.values()} >= {4, 8, 16, 32, 64, 128}
    loaded = [json.loads(path.read_text()) for path in PATHS]
    assert sum(fields["bound_us"] >= 0.99 * fields["makespan_us"] for fields in loaded) >= 180


@pytest.mark.sweep
def test_the_files_are_what_make_makes() -> None:
    for name, (family, placement, num_microbatches) in script("make").problems().items():
        reference = Reference.read(FOLDER / f"{name}.json")
        assert (reference.name, reference.family) == (name, family)
        assert reference.is_of(placement, num_microbatches), name


def test_the_checker_needs_the_standard_library_alone_and_is_short() -> None:
    for name in ("check.py", "certificates.py"):
        text = (FOLDER / name).read_text()
        assert len(text.splitlines()) < 300
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]
        modules = [node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in nodes]
        assert {str(module).split(".")[0] for module in modules} <= {*sys.stdlib_module_names, "certificates", "check"}


REFERENCE = Reference(
    "chain-2x3",
    "chain",
    schedules.gpipe(place(Costs.uniform(2, boundary_bytes=3), Cluster.uniform(2, 50, 4, 2)), 3),
    "gpipe",
    12,
    {"argument": "load", "rank": 0, "before": "first@0 0F0", "after": "first@0 0F0"},
)


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    REFERENCE.write(tmp_path / "chain-2x3.json")
    assert Reference.read(tmp_path / "chain-2x3.json") == REFERENCE
    assert REFERENCE.is_of(REFERENCE.placement, 3)
    assert not REFERENCE.is_of(REFERENCE.placement, 4)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"certificate": {}}, "problem.certificate has no field 'argument'"),
        ({"bound_us": -1}, "problem.bound_us is -1; expected 0 or more"),
        ({"name": "a\nb"}, "problem.name"),
        ({"orders": ["0F0 0X1", ""]}, "'0X1' is not an op"),
    ],
)
def test_wrong_fields_are_named(changed: dict[str, object], said: str) -> None:
    with pytest.raises(FormatError) as error:
        Reference.from_json(json.dumps(json.loads(REFERENCE.to_json()) | changed))
    assert said in str(error.value)


# --- problems/run.py: what is closed and what is better, and files that only ever get better --------------------------


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
