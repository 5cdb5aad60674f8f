"""A batch as micro-batches: nothing dropped, nothing split by guess, each with its share of the mean loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rota.errors import PipelineError
from rota.runtime.messages import describe_value
from rota.runtime.microbatch_inputs import is_empty, num_examples, structure, to_microbatches, weights


def rows(n: int, *shape: int) -> torch.Tensor:
    return torch.arange(n, dtype=torch.float32).reshape(-1, *[1] * len(shape)).expand(n, *shape).clone()


def test_tensor_is_split_along_rows_in_order() -> None:
    batch = rows(12, 3)
    parts = to_microbatches("inputs", batch, 4)
    assert [part.shape[0] for part in parts] == [3] * 4
    assert torch.equal(torch.cat(parts), batch)


def test_tuples_and_dicts_are_split_leaf_by_leaf_and_the_rest_is_handed_to_all() -> None:
    x, mask = rows(6, 2), rows(6) > 2
    batch = ({"x": x, "scale": 2.0, "none": None}, (mask, "text"))
    parts = to_microbatches("inputs", batch, 3)
    assert len(parts) == 3
    for m, part in enumerate(parts):
        assert torch.equal(part[0]["x"], x[2 * m : 2 * m + 2])
        assert torch.equal(part[1][0], mask[2 * m : 2 * m + 2])
        assert (part[0]["scale"], part[0]["none"], part[1][1]) == (2.0, None, "text")


@pytest.mark.parametrize("batch", [None, (), {}, (1, "a"), {"a": 1}])
def test_batch_without_tensors_goes_to_all(batch: object) -> None:
    assert to_microbatches("inputs", batch, 3) == [batch] * 3


def test_list_is_taken_as_it_is() -> None:
    parts = [rows(2), rows(5), rows(1)]
    assert to_microbatches("inputs", parts, 3) is parts


@pytest.mark.parametrize(
    ("batch", "n", "message"),
    [
        (rows(10, 3), 4, r"inputs has 10 rows \(shape \[10, 3\]\), which do not divide into 4.*give 8 or 12 rows"),
        (rows(3), 4, r"inputs has 3 rows .*give 4 rows or more, or a list of 4 micro-batches"),
        (rows(0), 2, "inputs has 0 rows"),
        (torch.tensor(1.0), 2, r"inputs has 0 rows \(shape \[\]\)"),
        ((rows(4), rows(5)), 2, r"inputs\[1\] has 5 rows"),
        ({"x": rows(4), "y": (rows(4), rows(7))}, 2, r"inputs\['y'\]\[1\] has 7 rows"),
        ([rows(1)] * 3, 4, "inputs is a list of 3 micro-batches, but the plan has 4; give 4, or plan for 3"),
        ((rows(8), rows(4)), 4, r"inputs\[1\] has 4 rows .*but inputs\[0\] has 8.*a list of 4 micro-batches"),
        ({"x": rows(8), "masks": [rows(8)]}, 4, r"inputs\['masks'\] is a list.*use a tuple"),
        ((rows(4), np.arange(4.0)), 4, r"inputs\[1\] is a numpy.ndarray, which is not split .*torch.as_tensor"),
        ((rows(4), {"t": np.float64(2)}), 4, r"inputs\[1\]\['t'\] is a numpy.float64, .* give its .item\(\)"),
    ],
)
def test_what_does_not_fit_is_told_with_value_place_and_remedy(batch: object, n: int, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        to_microbatches("inputs", batch, n)


def test_shares_are_equal_unless_a_list_says_otherwise() -> None:
    assert weights(rows(8), rows(8), 4) == [0.25] * 4
    assert weights(None, (rows(8),), 2) == [0.5] * 2
    assert weights(None, [rows(1), rows(3)], 2) == [0.25, 0.75]
    assert weights([rows(1), rows(3)], [{"y": rows(2)}, {"y": (None, rows(2))}], 2) == [0.5, 0.5]
    assert weights([rows(1), rows(3)], None, 2) == [0.25, 0.75]
    assert weights(None, [torch.tensor(1.0), torch.tensor(2.0)], 2) == [0.5] * 2
    assert weights([rows(1), rows(3)], [0, 1], 2) == [0.25, 0.75]  # what has no rows says nothing


@pytest.mark.parametrize(
    ("value", "expected"),
    [(rows(3), 3), (torch.tensor(1.0), 1), (None, 0), ("text", 0), ((None, rows(2)), 2), ({"a": [], "b": rows(4)}, 4)],
)
def test_num_examples(value: object, expected: int) -> None:
    assert num_examples(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (rows(0), True),
        (rows(3), False),
        (torch.tensor(1.0), False),
        (None, False),
        ((3, {"y": rows(0)}, rows(2)), True),
    ],
)
def test_is_empty(value: object, expected: bool) -> None:
    assert is_empty(value) == expected


def test_describe() -> None:
    assert describe_value({"x": rows(2, 3), "pair": (rows(1), None), 1: [2.0]}) == (
        "{x: float32[2, 3], pair: (float32[1], None), 1: (float)}"
    )


def of(**changes: Any) -> object:
    value = {"x": rows(2, 3), "pair": (rows(1), None), "scale": 2, "rate": 0.5}
    plain: list[Any] = []
    return structure(value | changes, plain), plain


def test_structures_differ_where_a_boundary_could() -> None:
    assert of() == of(x=rows(2, 3) + 1)
    different = [of(x=rows(2, 4)), of(x=rows(2, 3).double()), of(pair=(None, rows(1))), of(scale=3), of(more=1)]
    assert all(other != of() for other in different)


@pytest.mark.parametrize("rate", [0.25, float("nan"), -0.0])
def test_a_float_that_changes_changes_no_structure(rate: float) -> None:
    assert of(rate=rate) == of()
    assert of(rate=float("nan")) == of(rate=float("nan"))


def test_structures_of_any_objects_compare() -> None:
    """`==` of arrays is an array, and that of others may be anything."""
    assert of(more=np.arange(4.0)) == of(more=np.arange(4.0) + 1)
    assert of(more=np.arange(4.0)) != of(more=np.arange(5.0))
    assert of(more=object()) == of(more=object())
