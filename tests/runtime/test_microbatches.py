"""A batch as micro-batches: nothing dropped, nothing split by guess, each with its share of the mean loss."""

from collections import UserDict
from typing import NamedTuple

import numpy as np
import pytest
import torch

from rota.core.errors import PipelineError
from rota.runtime.microbatches import refuse_writes_to_shared, shares_of, to_microbatches


def rows(n: int, *shape: int) -> torch.Tensor:
    return torch.arange(n, dtype=torch.float32).reshape(-1, *[1] * len(shape)).expand(n, *shape).clone()


def test_tuples_and_dicts_are_split_leaf_by_leaf_and_the_rest_is_handed_to_all() -> None:
    x, mask = rows(6, 2), rows(6) > 2
    batch = ({"x": x, "scale": 2.0, "none": None}, (mask, "text"))
    parts = to_microbatches("inputs", batch, 3).values
    assert len(parts) == 3
    for m, part in enumerate(parts):
        assert torch.equal(part[0]["x"], x[2 * m : 2 * m + 2])
        assert torch.equal(part[1][0], mask[2 * m : 2 * m + 2])
        assert (part[0]["scale"], part[0]["none"], part[1][1]) == (2.0, None, "text")


@pytest.mark.parametrize("batch", [None, (), {}, (1, "a"), {"a": 1}])
def test_batch_without_tensors_goes_to_all(batch: object) -> None:
    assert to_microbatches("inputs", batch, 3).values == [batch] * 3


def test_rows_that_do_not_divide_are_spread() -> None:
    batch = {"x": rows(10, 2), "y": rows(10)}
    made = to_microbatches("inputs", batch, 4)
    assert made.sizes == (3, 3, 2, 2)
    assert [len(part["y"]) for part in made.values] == [3, 3, 2, 2]
    for name, whole in batch.items():
        assert torch.equal(torch.cat([part[name] for part in made.values]), whole)


def test_fewer_rows_than_microbatches_leave_padding() -> None:
    made = to_microbatches("inputs", (rows(3, 2), 5), 5)
    assert (made.sizes, made.padding) == ((1, 1, 1, 0, 0), (3, 4))
    assert [part[0][0, 0].item() for part in made.values] == [0, 1, 2, 0, 0]
    assert all(part[0].shape == (1, 2) and part[1] == 5 for part in made.values)
    assert shares_of(made.sizes, 5) == [1 / 3, 1 / 3, 1 / 3, 0, 0]


def test_any_mapping_becomes_dicts_also_in_lists_and_inside() -> None:
    batch = UserDict(ids=rows(4), more=UserDict(mask=rows(4)))  # as a tokenizer's BatchEncoding
    for parts in (to_microbatches("inputs", batch, 2).values, to_microbatches("inputs", [batch, batch], 2).values):
        assert all(type(part) is dict and type(part["more"]) is dict for part in parts)
    assert torch.equal(to_microbatches("inputs", batch, 2).values[1]["more"]["mask"], rows(4)[2:])


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def test_named_tuples_stay_what_they_are() -> None:
    parts = to_microbatches("inputs", Pair(rows(4), rows(4)), 2).values
    assert torch.equal(parts[1].y, rows(4)[2:])


def test_what_is_the_same_for_all_rows_goes_to_all() -> None:
    positions, scale = torch.arange(7)[None], torch.tensor(2.0)
    made = to_microbatches("inputs", {"positions": positions, "x": rows(4), "scale": scale}, 2)
    assert all(part["positions"] is positions and part["scale"] is scale for part in made.values)
    assert made.num_rows == 4
    alone = to_microbatches("inputs", {"positions": positions, "x": rows(1)}, 2)  # a row is a row if all have one
    assert (alone.num_rows, alone.padding) == (1, (1,))
    refuse_writes_to_shared(made)
    positions += 1
    with pytest.raises(PipelineError, match=r"a stage writes into inputs\['positions'\] \(shape \[1, 7\]\)"):
        refuse_writes_to_shared(made)


@pytest.mark.parametrize(
    ("batch", "n", "message"),
    [
        (rows(0), 2, "inputs has 0 rows"),
        (torch.tensor(1.0), 2, r"inputs has shape \[\], so there are no rows to split"),
        ({"x": rows(4), "y": (rows(4), rows(7))}, 2, r"inputs\['y'\]\[1\] has 7 rows"),
        ([rows(1)] * 3, 4, "inputs is a list of 3 micro-batches, but the plan has 4; give 4, or plan for 3"),
        ((rows(8), rows(4)), 4, r"inputs\[1\] has 4 rows .*but inputs\[0\] has 8.*a list of 4 micro-batches"),
        ({"x": rows(8), "names": ["a"] * 8}, 4, r"inputs\['names'\] is a list of 8 items beside tensors of 8 rows"),
        ({"x": rows(8), "masks": [rows(8)]}, 4, r"inputs\['masks'\] is a list.*use a tuple"),
        ((rows(4), np.arange(4.0)), 4, r"inputs\[1\] is a numpy.ndarray, which is not split .*torch.as_tensor"),
        ((rows(4), {"t": np.float64(2)}), 4, r"inputs\[1\]\['t'\] is a numpy.float64, .* give its .item\(\)"),
    ],
)
def test_what_does_not_fit_is_told_with_value_place_and_remedy(batch: object, n: int, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        to_microbatches("inputs", batch, n)


def test_shares_are_equal_unless_sizes_say_otherwise() -> None:
    assert shares_of((), 4) == [0.25] * 4
    assert shares_of((1, 3), 2) == [0.25, 0.75]
    assert shares_of((0, 0), 2) == [0.5] * 2


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [
        (rows(8), ()),
        ([rows(1), rows(3)], (1, 3)),
        ([{"y": rows(2)}, {"y": (None, rows(2))}], (2, 2)),
        ([torch.tensor(1.0), torch.tensor(2.0)], (1, 1)),
        ([rows(3), rows(0)], (3, 0)),
        ([{"positions": rows(1), "x": rows(3)}, {"positions": rows(1), "x": rows(2)}], (3, 2)),
        ([0, 1], ()),  # what has no rows says nothing
        ([rows(3), None], ()),
    ],
)
def test_sizes(batch: object, sizes: tuple[int, ...]) -> None:
    assert to_microbatches("targets", batch, 2).sizes == sizes
