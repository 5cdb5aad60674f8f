"""Reading documents: every complaint names the path, the value and what belongs there."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

import rota
from planning.test_autoplan import layer_costs
from rota import FormatError, Profile
from rota.core import reading
from rota.core.plan import Usage
from rota.core.reading import Field, Positive
from support import schemas
from support.problem_library import Reference

DOCUMENT = Field("plan", {"a": 1, "b": [1, "x", None], "c": {"d": True}, "e": [0.5, [2]]})

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
documents = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5)


@given(st.dictionaries(st.text("abc_", min_size=1), documents, max_size=4))
def test_what_is_dumped_is_parsed(fields: dict[str, object]) -> None:
    text = reading.dump("plan", fields)
    assert reading.parse(text, "plan").value == {"rota": "plan", **fields}


def test_a_dump_has_one_line_a_field_and_an_entry() -> None:
    assert reading.dump("plan", {"n": 3, "times": [1, 2], "rows": [[1], [2]], "none": []}) == (
        '{\n  "rota": "plan",\n  "n": 3,\n  "times": [1, 2],\n  "rows": [\n    [1],\n    [2]\n  ],\n  "none": []\n}\n'
    )


@pytest.mark.parametrize(
    ("read", "told"),
    [
        (lambda: DOCUMENT["z"], "plan has no field 'z'; it has a, b, c, e"),
        (lambda: DOCUMENT["a"]["z"], "plan.a is 1; expected an object"),
        (lambda: list(DOCUMENT["a"]), "plan.a is 1; expected a list"),
        (lambda: DOCUMENT["c"].read(Positive), 'plan.c is {"d": true}; expected a whole number'),
        (lambda: DOCUMENT["c"]["d"].read(int), "plan.c.d is true; expected a whole number"),
        (lambda: DOCUMENT["b"].read(list[int]), 'plan.b[1] is "x"; expected a whole number'),
        (lambda: Field("x", 10**15 + 1).read(Positive), "x is 1000000000000001; expected 1000000000000000 or less"),
        (lambda: Field("x", ["y" * 99]).read(str), 'x is ["' + "y" * 55 + "...; expected a text"),
    ],
)
def test_what_is_wrong_is_told_with_path_and_value(read: Callable[[], object], told: str) -> None:
    with pytest.raises(FormatError) as caught:
        read()
    assert str(caught.value) == told


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not JSON: Expecting value at line 1, column 1"),
        ('{\n "rota": plan}', "not JSON: Expecting value at line 2, column 10"),
        ("{}", 'not a plan file: it has no "rota": "plan"'),
        ('{"rota": "cluster"}', 'it says "rota": "cluster" (a cluster is for Cluster.from_json and rota.place); give'),
        ("[" * 100_000, "not a file of Rota: nested too deep"),
        ("9" * 5000, "not JSON that can be read: Exceeds the limit (4300 digits)"),
    ],
)
def test_what_is_no_document_of_ours_is_refused(text: str, told: str) -> None:
    with pytest.raises(FormatError, match=re.escape(told)):
        reading.parse(text, "plan")


CLUSTER = rota.Cluster.uniform(2)
PLAN = rota.schedules.one_f_one_b(rota.place(rota.Costs.uniform(2), CLUSTER), 2)
TIMELINE = rota.simulate(PLAN)


@pytest.mark.parametrize(
    ("noun", "told"),
    [
        (rota.Costs.uniform(2, forward_us=10**15 + 1), r"costs\.forward_us\[0\] is 1000000000000001"),
        (rota.Costs.uniform(2, note="\ud800"), "lone surrogate"),
        (replace(CLUSTER, shared=(rota.SharedLink("a\nb", 1, (0,), (1,)),)), "printable characters"),
        (replace(PLAN, num_microbatches=0), "plan.num_microbatches is 0"),
        (replace(PLAN, usage=Usage(("",), 1)), "plan.usage.cuts"),
        (replace(TIMELINE, starts_us=TIMELINE.ends_us, ends_us=TIMELINE.starts_us), "comes after"),
        (rota.SizeModel((rota.Curve(math.nan),), (rota.Curve(),)), 'number "NaN"'),
        (Profile((layer_costs(0),)), r"rows is 0"),
        (layer_costs(0), r"layers\.rows is 0"),
        (Reference("", "f", PLAN, "hand", 1, {"argument": "x"}), "problem.name"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else "",
)
def test_nothing_is_written_that_could_not_be_read_again(noun: Any, told: str) -> None:
    with pytest.raises(FormatError, match=f"is not written, because it could not be read again.*{told}"):
        noun.to_json()


class Rows(msgspec.Struct):
    rows: dict[reading.Name, tuple[Positive, ...]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"a\x1b": [1]}, 'doc.rows is {"a\\u001b": [1]}; expected a name of 1 to 1,000 printable characters'),
        ({"a\U000e0041": [1]}, "expected a name of 1 to 1,000 printable characters"),
        ({"a": [1, 0]}, 'doc.rows[...][1] is {"a": [1, 0]}; expected 1 or more'),
        (4, "doc.rows is 4; expected an object"),
    ],
)
def test_what_is_wrong_in_an_object_with_any_names_is_told(rows: object, message: str) -> None:
    with pytest.raises(FormatError, match=re.escape(message)):
        Field("doc", {"rows": rows}).read(Rows)


@pytest.mark.parametrize("name", schemas.FILES)
def test_published_schemas_are_those_of_the_nouns(name: str) -> None:
    path = schemas.FOLDER / f"{name}.json"
    assert path.read_text() == schemas.text(name), "run PYTHONPATH=tests python -m support.schemas"
