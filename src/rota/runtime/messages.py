"""The values that stages receive, return and send to each other: tensors, and tuples, lists and dicts of them.

                          in a batch                  between stages              from the last stage
    tensor                split along dim 0           sent, if it is strided      any
    tuple                 split item by item          sent; no subclass           any; subclasses are kept
    list                  only without tensors        sent; no subclass           any
    dict                  split item by item          sent, keys int or str       any; subclasses become dicts
    None, bool, int,      every micro-batch gets it   sent in the layout          any
    float, str
    anything else         every micro-batch gets it   refused                     any, unless `forward` must send it

`items` defines the containers for all of them. Between stages `flatten` takes a value apart into flat tensors and a
layout. The layout has everything but the numbers in tensors: structure, dtypes, shapes, which tensors need a gradient,
and the plain values. Both sides know it after the first step, so later steps send only tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias, final

import torch

from rota.core.errors import PipelineError

# ("tensor", dtype, shape, wants_gradient) | ("value", v, type) | ("size", shape) | ("tuple" | "list", (layout, …))
# | ("dict", ((key, layout), …)): nested tuples, so that layouts compare and travel as JSON. Every nan is `math.nan`:
# comparing tuples treats an object as equal to itself, but two different nan objects as different.
Layout: TypeAlias = tuple[Any, ...]

_PLAIN = (type(None), bool, int, float, str)  # and none of their subclasses, such as numpy.float64 or an IntEnum
_DTYPES = {str(dtype)[6:]: dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def items(value: Any) -> Iterable[tuple[Any, Any]]:
    """Key (or position) and value of all that is directly in a dict, tuple or list; nothing for any other value."""
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, (tuple, list)) else ()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in a value, in order."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    for _, item in items(value):
        yield from tensors_in(item)


def with_tensors(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """The value with its tensors replaced, in the order of `tensors_in`."""
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, dict):
        return {key: with_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        parts = [with_tensors(item, tensors) for item in value]
        return value._make(parts) if hasattr(value, "_make") else type(value)(parts)
    return value


def over_tensors(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """The value with each of its tensors changed."""
    return with_tensors(value, map(change, tensors_in(value)))


def hand_over(value: Any) -> Any:
    """A value for a stage on the same rank: the same memory, detached from the graph that made it."""
    return over_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), value)


def describe_value(value: Any) -> str:
    """Dtypes and shapes of a value, such as "float32[2, 8]" or "(float32[2], None)"."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype)[6:]}{list(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {describe_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(describe_value, value)) + ")"
    return "None" if value is None else type(value).__name__


# --- between stages ---------------------------------------------------------------------------------------------------


def flatten(value: object, where: str) -> tuple[list[torch.Tensor], Layout]:
    """The tensors of a value in order, and its layout. `where` names the stage in errors."""
    tensors: list[torch.Tensor] = []
    return tensors, _flatten(value, tensors, where)


def _flatten(value: Any, tensors: list[torch.Tensor], where: str) -> Layout:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            raise PipelineError(
                f"{where} returned a tensor with layout {value.layout}, which does not travel; return it.to_dense()"
            )
        tensors.append(value)
        return ("tensor", str(value.dtype)[6:], tuple(value.shape), value.requires_grad)
    if isinstance(value, torch.Size):
        return ("size", tuple(value))
    if type(value) in (tuple, list):
        return (type(value).__name__, tuple(_flatten(item, tensors, where) for item in value))
    if type(value) is dict and all(type(key) in (str, int) for key in value):
        return ("dict", tuple((key, _flatten(item, tensors, where)) for key, item in value.items()))
    if type(value) in _PLAIN:
        return ("value", _comparable(value), type(value).__name__)
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    raise PipelineError(
        f"{where} returned a {kind}, but stages exchange tensors, tuples, lists and dicts of them, numbers, strings "
        f"and None; {_remedy(value)}"
    )


def _comparable(value: Any) -> Any:
    return math.nan if value != value else value


def _remedy(value: object) -> str:
    """What to return instead of a value that does not travel."""
    if hasattr(value, "to_tuple"):  # the ModelOutput of transformers
        return "return its .to_tuple(), or call the model with return_dict=False"
    if type(value) is dict:
        return "give its entries keys that are int or str"
    if isinstance(value, Mapping):
        return "return dict(…) of it"
    if isinstance(value, tuple):
        return "return tuple(…) of it"
    if type(value).__module__ == "numpy":
        return "return torch.as_tensor(…) of it"
    if isinstance(value, (int, float, str)):
        return f"return {next(plain.__name__ for plain in (int, float, str) if isinstance(value, plain))}(…) of it"
    return "return the parts of it that the next stage reads"


def unflatten(tensors: Iterator[torch.Tensor], layout: Layout) -> Any:
    """The value of a layout, its tensors taken from an iterator in order."""
    what, content = layout[0], layout[1]
    if what == "tensor":
        return next(tensors)
    if what == "size":
        return torch.Size(content)
    if what == "dict":
        return {key: unflatten(tensors, item) for key, item in content}
    if what == "value":
        return content
    items = [unflatten(tensors, item) for item in content]
    return tuple(items) if what == "tuple" else items


def tensor_layouts(layout: Layout) -> list[Layout]:
    """The layouts of the tensors in it, in order."""
    if layout[0] == "tensor":
        return [layout]
    if layout[0] in ("tuple", "list"):
        return [tensor for item in layout[1] for tensor in tensor_layouts(item)]
    if layout[0] == "dict":
        return [tensor for _, item in layout[1] for tensor in tensor_layouts(item)]
    return []


def empty(tensor: Layout) -> torch.Tensor:
    """A buffer for a tensor of this layout."""
    return torch.empty(tensor[2], dtype=_DTYPES[tensor[1]], device="cpu")


@final
class Format:
    """A layout, and what each message of this layout needs, computed once."""

    __slots__ = ("gradients", "layout", "leaves", "lone", "tensors")

    def __init__(self, layout: Layout) -> None:
        tensors = tensor_layouts(layout)
        self.layout = layout
        #: Shape and dtype of each tensor; which of them need a gradient, and their shape and dtype.
        self.tensors = [(shape, _DTYPES[dtype]) for _, dtype, shape, _ in tensors]
        self.leaves = [i for i, (*_, wants) in enumerate(tensors) if wants]
        self.gradients = [self.tensors[i] for i in self.leaves]
        #: Whether the value is a tensor and nothing around it.
        self.lone = layout[0] == "tensor"

    def is_of(self, tensor: object) -> bool:
        """Whether this is the format of a lone tensor: the same as comparing layouts, but without making one."""
        return (
            self.lone
            and isinstance(tensor, torch.Tensor)
            and (tensor.shape, tensor.dtype) == self.tensors[0]
            and tensor.requires_grad == bool(self.leaves)
        )


def to_bytes(layout: Layout) -> torch.Tensor:
    """A layout as a uint8 tensor."""
    return torch.frombuffer(bytearray(json.dumps(layout).encode()), dtype=torch.uint8)


def from_bytes(data: torch.Tensor) -> Layout:
    """The layout in a uint8 tensor that `to_bytes` made."""
    layout: Layout = layout_of(json.loads(data.numpy().tobytes()))
    return layout


def layout_of(written: Any) -> Any:
    """The layout that was written as JSON."""
    return tuple(map(layout_of, written)) if isinstance(written, list) else _comparable(written)


def describe(layout: Layout) -> str:
    """Dtypes and shapes of a layout, such as "float32[2, 8] with gradient" or "(float32[2], None)"."""
    what, content = layout[0], layout[1]
    if what == "tensor":
        return f"{content}{list(layout[2])}" + (" with gradient" if layout[3] else "")
    if what == "dict":
        return "{" + ", ".join(f"{key}: {describe(item)}" for key, item in content) + "}"
    if what in ("tuple", "list"):
        return "(" + ", ".join(map(describe, content)) + ")"
    return str(content)
