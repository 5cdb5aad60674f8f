"""Kinds, ops and their text, tasks."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from rota.core.errors import FormatError, PlacementError
from rota.core.tasks import Kind, Op, Task
from support.core_strategies import ops


def test_an_op_is_written_as_in_pytorchs_csv() -> None:
    assert str(Op(2, Kind.F, 0)) == "2F0"
    assert Op.parse(" 12W345\n") == Op(12, Kind.W, 345)


@given(ops)
def test_op_round_trip(op: Op) -> None:
    assert Op.parse(str(op)) == op


@given(st.text("0123456789FBIWRx -,\n", max_size=6))
def test_any_text_is_an_op_or_refused(text: str) -> None:
    try:
        op = Op.parse(text)
    except FormatError:
        return
    assert Op.parse(str(op)) == op


@pytest.mark.parametrize(
    "text",
    ["", "F", "2F", "F0", "2X0", "-1F0", "2F0x", "2F0,", "\u0663F0", "1" * 10 + "F0"],
)
def test_what_is_no_op_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(FormatError, match="write stage, one of F B I W R, and micro-batch, such as 2F0") as caught:
        Op.parse(text)
    assert repr(text) in str(caught.value)


def test_long_text_is_told_in_short() -> None:
    with pytest.raises(FormatError) as caught:
        Op.parse("x" * 10_000)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"stage": -1}, "stage -1 is negative; stages count from 0"),
        ({"ranks": (1, 1)}, "ranks (1, 1) must be one or more different ranks"),
        ({"ranks": (-1,)}, "ranks (-1,) must be one or more different ranks, counted from 0"),
        ({"duration_us": -1}, "duration_us of task 2F is -1: give a whole number of 0 or more"),
        ({"peak_bytes": -7}, "peak_bytes of task 2F is -7"),
        ({"held_bytes": 0.5}, "held_bytes of task 2F is 0.5"),
    ],
)
def test_a_task_refuses_what_makes_no_sense(changed: dict[str, object], told: str) -> None:
    with pytest.raises(PlacementError) as caught:
        Task(**{"stage": 2, "kind": Kind.F, "ranks": (0,), "duration_us": 1, **changed})  # type: ignore[arg-type]
    assert told in str(caught.value)
