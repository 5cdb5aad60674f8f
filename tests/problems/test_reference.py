"""Reference problems in files: what was written is read again, and wrong fields are named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rota import Cluster, Costs, FormatError, place, schedules
from support.problem_library import Reference

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
