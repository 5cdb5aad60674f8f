"""Every reference problem: the checker accepts it, Rota agrees with the checker, and make.py makes it."""

import ast
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

import rota
from rota import Cluster, Costs, FormatError, place, schedules
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
