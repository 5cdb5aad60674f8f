"""What crosses a boundary comes out as it went in, and its layout says all but the numbers."""

from collections import OrderedDict
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from rota.core.errors import PipelineError
from rota.runtime.messages import (
    describe,
    empty,
    flatten,
    from_bytes,
    hand_over,
    tensor_layouts,
    tensors_in,
    to_bytes,
    unflatten,
    with_tensors,
)
from support.sampling import some

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.uint8]
sizes = st.lists(st.integers(0, 3), max_size=3)
tensors = st.builds(torch.zeros, sizes, dtype=st.sampled_from(DTYPES))
plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
leaves = plain | tensors | sizes.map(torch.Size)
keys = st.text() | st.integers()
values = st.recursive(
    leaves,
    lambda v: st.lists(v, max_size=3) | st.lists(v, max_size=3).map(tuple) | st.dictionaries(keys, v, max_size=3),
)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a is b
    if isinstance(a, dict):
        return [*a] == [*b] and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b or (a != a and b != b))


@given(values)
@settings(max_examples=some(100))
def test_round_trip(value: object) -> None:
    found, layout = flatten(value, "stage 0")
    assert same(unflatten(iter(found), layout), value)
    again = from_bytes(to_bytes(layout))
    assert again == layout
    assert same(unflatten(iter(found), again), value)
    buffers = [empty(tensor) for tensor in tensor_layouts(again)]
    assert [(b.shape, b.dtype) for b in buffers] == [(t.shape, t.dtype) for t in found]
    assert describe(layout)


def test_layouts_differ_where_buffers_or_values_would() -> None:
    x = torch.ones(2, 3)
    layouts = [
        flatten(value, "stage 0")[1]
        for value in (x, x.double(), x.mT, torch.ones(2, 3, requires_grad=True), (x,), [x], {"x": x}, 1, True, 1.0, "1")
    ]
    assert len({*layouts}) == len(layouts)  # also numbers that compare equal


class Output(OrderedDict[str, Any]):
    """As transformers' ModelOutput."""

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self.values())


class Color(IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("value", "name", "remedy"),
    [
        (Output(h=1), f"{__name__}.Output", "return its .to_tuple(), or call the model with return_dict=False"),
        (OrderedDict(h=1), "collections.OrderedDict", "return dict(…) of it"),
        (np.float64(0.5), "numpy.float64", "return torch.as_tensor(…) of it"),
        (np.arange(3), "numpy.ndarray", "return torch.as_tensor(…) of it"),
        (Color.RED, f"{__name__}.Color", "return int(…) of it"),
        ({Color.RED: 1}, "dict", "give its entries keys that are int or str"),
        ({1, 2}, "set", "return the parts of it that the next stage reads"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_type_that_cannot_travel_is_told_in_full_with_a_remedy(value: object, name: str, remedy: str) -> None:
    with pytest.raises(PipelineError) as error:
        flatten((torch.ones(1), value), "stage 7 (Block)")
    assert str(error.value).startswith(f"stage 7 (Block) returned a {name}, but stages exchange")
    assert str(error.value).endswith(f"numbers, strings and None; {remedy}")


def test_a_sparse_tensor_is_refused() -> None:
    with pytest.raises(PipelineError, match=r"stage 7 returned a tensor with layout torch.sparse_coo.*to_dense"):
        flatten(torch.eye(2).to_sparse(), "stage 7")


class Scores(NamedTuple):
    logits: torch.Tensor
    rest: Any = None


NESTED = {
    "containers": {"a": [torch.ones(1), 2], 5: (torch.ones(2), None, "text")},
    "a named tuple": (Scores(torch.ones(2), {"deep": torch.ones(3)}),),
    "a size": (torch.Size([2, 3]), torch.ones(1)),
    "results of an operation": torch.ones(2, 2).max(0),
    "an ordered dict": OrderedDict(b=torch.ones(2), a=torch.ones(1)),
    "nothing": [],
}


@pytest.mark.parametrize("value", NESTED.values(), ids=NESTED.keys())
def test_tensors_are_replaced_in_the_order_in_which_they_are_found(value: Any) -> None:
    found = [*tensors_in(value)]
    replaced = with_tensors(value, (torch.full((), float(i)) for i in range(len(found))))
    assert [int(tensor) for tensor in tensors_in(replaced)] == [*range(len(found))]
    assert [id(tensor) for tensor in tensors_in(with_tensors(replaced, iter(found)))] == [*map(id, found)]
    assert type(replaced) is (dict if isinstance(value, dict) else type(value))


def test_what_is_handed_over_shares_memory_and_has_no_graph() -> None:
    x = torch.randn(3, requires_grad=True)
    value = {"a": [Scores(x * 2), torch.Size([1])], 3: (x.detach(), torch.tensor([1, 2]), "text")}
    handed = hand_over(value)
    made, size = handed["a"]
    assert isinstance(made, Scores)
    assert (made.logits.is_leaf, made.logits.requires_grad) == (True, True)
    assert made.logits.data_ptr() == value["a"][0].logits.data_ptr()
    assert type(size) is torch.Size
    assert [t.requires_grad for t in handed[3][:2]] == [False, False]
    assert handed[3][2] == "text"
