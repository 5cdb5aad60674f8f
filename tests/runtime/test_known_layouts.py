"""Layouts that are told from those of other sizes, or not."""

from __future__ import annotations

from typing import Any

import pytest

from rota.runtime.known_layouts import KnownLayouts, as_layout


def tensor(*shape: int) -> Any:
    return "tensor", "float32", shape, True


def known(seen: dict[tuple[int, ...], Any]) -> KnownLayouts:
    layouts = KnownLayouts()
    for size, layout in seen.items():
        layouts.learn("edge", size, layout)
    return layouts


def test_nothing_is_known_at_first() -> None:
    assert KnownLayouts().layout_at("edge", (1, 2)) is None
    assert known({(3, 4): tensor(3, 4, 8)}).layout_at("another", (3, 4)) is None


def test_one_size_tells_nothing_about_others() -> None:
    layouts = known({(3, 4): tensor(3, 4, 8)})
    assert layouts.layout_at("edge", (3, 4)) == tensor(3, 4, 8)
    assert layouts.layout_at("edge", (3, 5)) is None  # 4 may be constant, and 8 twice the length


@pytest.mark.parametrize(
    ("shape", "at_next"),
    [
        (lambda rows, length: (rows, length, 8), (5, 11, 8)),
        (lambda rows, length: (rows * length, 8), (55, 8)),
        (lambda rows, length: (rows, 2, length, length), (5, 2, 11, 11)),
        (lambda rows, length: (length - 1, rows), (10, 5)),
        (lambda rows, length: (rows, length * length, 3 * length), (5, 121, 33)),
    ],
)
def test_forms(shape: Any, at_next: tuple[int, ...]) -> None:
    sizes = [(3, 4), (2, 7), (6, 9)]
    layouts = known({size: ("tuple", (tensor(*shape(*size)), ("value", size[1], "int"))) for size in sizes})
    assert layouts.layout_at("edge", (5, 11)) == ("tuple", (tensor(*at_next), ("value", 11, "int")))
    form = layouts.format_at("edge", (5, 11))
    assert form is not None
    assert form.tensors[0][0] == at_next
    assert layouts.format_at("edge", (5, 11)) is form


def test_a_constant_number_of_tokens_is_not_taken_for_a_constant() -> None:
    layouts = known({size: tensor(*size, 8) for size in [(32, 2), (16, 4), (8, 8)]})
    assert layouts.layout_at("edge", (4, 16)) == tensor(4, 16, 8)
    assert layouts.layout_at("edge", (4, 4)) is None  # 8 may be an eighth of rows x length
    layouts.learn("edge", (4, 4), tensor(4, 4, 8))
    assert layouts.layout_at("edge", (3, 5)) == tensor(3, 5, 8)


def test_what_has_no_form_is_known_where_it_was_seen() -> None:
    rounded = known({(2, length): tensor(2, -(-length // 8) * 8) for length in (3, 8, 11, 30)})
    assert rounded.layout_at("edge", (2, 11)) == tensor(2, 16)
    assert rounded.layout_at("edge", (2, 12)) is None
    other = known({(2, 3): tensor(2, 3), (3, 4): ("value", None, "NoneType"), (4, 7): tensor(4, 7)})
    assert other.layout_at("edge", (3, 4)) == ("value", None, "NoneType")
    assert other.layout_at("edge", (5, 6)) is None


def test_a_layout_that_changes_replaces_the_old_one() -> None:
    layouts = known({(2, 3): tensor(2, 3), (3, 5): tensor(3, 5), (5, 7): tensor(5, 7)})
    assert layouts.format_at("edge", (8, 9)) is not None
    layouts.learn("edge", (2, 3), tensor(2, 4))
    assert layouts.layout_at("edge", (2, 3)) == tensor(2, 4)
    assert layouts.format_at("edge", (8, 9)) is None
    layouts.forget()
    assert layouts.layout_at("edge", (2, 3)) is None


def test_inputs_are_nested_tuples() -> None:
    assert as_layout([{"x": ((2, 3), "int64"), "n": 5}, True]) == (
        (("x", ((2, 3), "int64")), ("n", ("value", 5, "int"))),
        True,
    )
