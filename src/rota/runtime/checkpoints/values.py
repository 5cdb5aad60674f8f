"""Options and states of optimizers, schedulers and generators as JSON, from which they are restored exactly.

None, bools, numbers, strings, lists, and dicts with strings as keys are written as they are. Any other value is an
object with one field, its kind:

    (0.9, nan)  ──▶  {"$tuple": [0.9, {"$float": "nan"}]}        Counter({3: 1})  ──▶  {"$counter": [[3, 1]]}
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeAlias

import torch
from msgspec import Meta

from rota.core.errors import FormatError, PipelineError
from rota.core.reading import Field, Whole, short
from rota.runtime.fingerprints import bytes_of

_LONGEST_BITS = 4096  # of an integer; Python parses about 14,000
_MOST_PAIRS = 10_000  # of keys and values; those of a file may be made to have one hash, which makes a dict slow
_DEEPEST = 64  # levels of lists and dicts
_MOST_DIMENSIONS = 64  # PyTorch's kernels take no more
_MOST_ELEMENTS = 2**58  # of a tensor, dimensions of length 0 left out: strides in bytes then fit into 64 bits
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_MAPPINGS: dict[type, str] = {dict: "$dict", Counter: "$counter"}
_KEYS = (type(None), bool, int, float, str)

Size: TypeAlias = Annotated[tuple[Whole, ...], Meta(max_length=_MOST_DIMENSIONS)]  # of a tensor in a file

#: What names a value in errors: a text, or what names the value that it is in, and its place there.
Path: TypeAlias = "str | tuple[Path, object]"

#: Dtypes by their names in safetensors. Any bytes are valid elements, except those of bools, which are checked.
DTYPES: dict[str, torch.dtype] = {
    **{f"{kind[0].upper()}{n}": getattr(torch, f"{kind}{n}") for kind in ("int", "uint") for n in (8, 16, 32, 64)},
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def require_readable(key: str, tensor: torch.Tensor) -> None:
    """Raises PipelineError that names the `key` of a tensor of this process that could not be read again."""
    if tensor.dtype not in NAMES:
        usable = ", ".join(str(dtype).removeprefix("torch.") for dtype in NAMES)
        raise PipelineError(f"checkpoints cannot hold {key}, of {tensor.dtype}; use one of {usable}")
    if tensor.layout is not torch.strided:
        raise PipelineError(f"checkpoints cannot hold {key}, whose layout is {tensor.layout}; make it dense")
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.data_ptr() and tensor.numel():
        raise PipelineError(
            f"the memory of {key} was freed, so it has no values to keep; give it memory again before that"
        )


# --- writing ----------------------------------------------------------------------------------------------------------


def to_json(value: Any, path: Path, depth: int = 0) -> Any:
    """The value as `json` can write it. Raises PipelineError that names the `path` if it could not be restored."""
    if depth > _DEEPEST:
        raise PipelineError(f"{_text_of(path)} is nested more than {_DEEPEST} levels deep; leave it out of the state")
    kind, inner = type(value), depth + 1
    if value is None or kind in (bool, str) or (kind is int and value.bit_length() <= _LONGEST_BITS):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"$float": str(value)}
    if kind in (list, tuple):
        items = [to_json(item, (path, at), inner) for at, item in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: to_json(item, (path, key), inner) for key, item in value.items()}
    if kind in _MAPPINGS and len(value) <= _MOST_PAIRS and all(type(key) in _KEYS for key in value):
        pairs = [[to_json(key, path, inner), to_json(item, (path, key), inner)] for key, item in value.items()]
        return {_MAPPINGS[kind]: pairs}
    if kind is torch.dtype and value in NAMES:
        return {"$dtype": NAMES[value]}
    if kind is torch.Tensor and value.dtype in NAMES and value.layout is torch.strided:
        return {"$tensor": [NAMES[value.dtype], list(value.shape), base64.b64encode(bytes_of(value)).decode()]}
    text = f"{kind.__name__} of {value.bit_length():,} bits" if kind is int else f"{kind.__name__}, {short(str(value))}"
    raise PipelineError(
        f"{_text_of(path)} is a {text}, but checkpoints hold only numbers (not complex ones), strings and tensors, in "
        f"lists, tuples and dicts with numbers or strings as keys; leave it out of the state"
    )


def _text_of(path: Path) -> str:
    return path if isinstance(path, str) else f"{_text_of(path[0])}[{repr(path[1])[:60]}]"


# --- reading ----------------------------------------------------------------------------------------------------------


def from_json(field: Field, depth: int = 0) -> Any:
    """The value that `to_json` wrote. Raises FormatError that names the field."""
    if depth > _DEEPEST:
        raise FormatError(f"{field.path} is nested more than {_DEEPEST} levels deep")
    value = field.value
    if isinstance(value, list):
        return [from_json(item, depth + 1) for item in field]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not (kind := next(iter(value))).startswith("$"):
        return {name: from_json(field[name], depth + 1) for name in value}
    if kind not in _KINDS:
        raise field.wrong(f"an object whose one field is one of {', '.join(_KINDS)}")
    return _KINDS[kind](field[kind], depth + 1)


def _float(field: Field, _depth: int) -> float:
    if field.read(str) not in _FLOATS:
        raise field.wrong(f"one of {', '.join(_FLOATS)}")
    return _FLOATS[field.value]


def _mapping(field: Field, depth: int) -> dict[Any, Any]:
    if len(field.read(list[tuple[Any, Any]])) > _MOST_PAIRS:
        raise field.wrong(f"at most {_MOST_PAIRS:,} pairs")
    mapping: dict[Any, Any] = {}
    for key, value in field:
        name = from_json(key, depth)
        if type(name) not in _KEYS or name in mapping:
            raise key.wrong("a number or a string that occurs only once")
        mapping[name] = from_json(value, depth)
    return mapping


def dtype_named(field: Field, name: str, size: tuple[int, ...] = ()) -> torch.dtype:
    """The dtype of this name. Raises FormatError, also if a tensor of this size cannot fit into any memory."""
    if name not in DTYPES:
        raise field.wrong("a dtype that safetensors has")
    if math.prod(filter(None, size)) > _MOST_ELEMENTS:
        raise field.wrong("fewer elements")
    return DTYPES[name]


def tensor_of(field: Field, data: torch.Tensor, dtype: torch.dtype, size: tuple[int, ...]) -> torch.Tensor:
    """The tensor whose bytes are `data`, in the same memory. Raises FormatError if a bool is neither 0 nor 1."""
    if dtype is torch.bool and bool((data > 1).any()):
        raise field.wrong("bools that are 0 or 1")
    return data.view(dtype).view(size)


def _tensor(field: Field, _depth: int) -> torch.Tensor:
    name, size, data = field.read(tuple[str, Size, bytes])  # which are written in base64
    dtype = dtype_named(field, name, size)
    if len(data) != math.prod(size) * dtype.itemsize:
        raise field.wrong(f"the elements of a {name} tensor of size {list(size)}")
    # `frombuffer` takes no empty buffer.
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return tensor_of(field, raw, dtype, size)


_KINDS: dict[str, Callable[[Field, int], Any]] = {
    "$float": _float,
    "$tuple": lambda field, depth: tuple(from_json(item, depth) for item in field),
    "$dict": _mapping,
    "$counter": lambda field, depth: Counter(_mapping(field, depth)),
    "$dtype": lambda field, _depth: dtype_named(field, field.read(str)),
    "$tensor": _tensor,
}


# --- comparing --------------------------------------------------------------------------------------------------------


def different(a: Mapping[Any, Any], b: Mapping[Any, Any]) -> Any:
    """The first key whose values differ, None if all are the same."""
    return next((key for key in {**a, **b} if key not in a or key not in b or not same(a[key], b[key])), None)


def same(a: Any, b: Any) -> bool:
    """Whether two values are exactly equal, including all tensors inside."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bytes_of(a) == bytes_of(b)
    if isinstance(a, Mapping):
        return different(a, b) is None
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))
