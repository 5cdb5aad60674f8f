"""Options and states of optimizers, schedulers and generators as JSON, from which they are restored exactly.

None, bools, numbers, strings, lists, and dicts with strings as keys are written as they are. Any other value is an
object with one field, its kind:

    (0.9, nan)  ──▶  {"$tuple": [0.9, {"$float": "nan"}]}        Counter({3: 1})  ──▶  {"$counter": [[3, 1]]}
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Annotated, Any, TypeAlias

import torch
from msgspec import Meta

from rota.core.errors import FormatError, PipelineError
from rota.core.reading import Field, Whole, short

_LONGEST_BITS = 4096  # of an integer; Python parses about 14,000
_MOST_PAIRS = 10_000  # of keys and values; those of a file may be made to have one hash, which makes a dict slow
_DEEPEST = 64  # levels of lists and dicts
_MOST_DIMENSIONS = 32
_MOST_ELEMENTS = 2**58  # of a tensor, dimensions of length 0 left out: strides in bytes then fit into 64 bits
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_MAPPINGS: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}
_SEQUENCES: dict[type, str] = {tuple: "$tuple", torch.Size: "$size"}
_KEYS = (type(None), bool, int, float, str)

Size: TypeAlias = Annotated[tuple[Whole, ...], Meta(max_length=_MOST_DIMENSIONS)]  # of a tensor in a file

#: What names a value in errors: a text, or what names the value that it is in, and its place there.
Path: TypeAlias = "str | tuple[Path, object]"

#: Dtypes with whole bytes per element. Any bytes are valid elements, except those of bools, which are checked.
DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
        *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool"),
    )
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name without its module, such as "float32"."""
    return _NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def require_readable(key: str, tensor: torch.Tensor) -> None:
    """Raises PipelineError that names the `key` of a tensor of this process that could not be read again."""
    if tensor.dtype not in _NAMES:
        dtype = dtype_name(tensor.dtype)
        raise PipelineError(f"checkpoints cannot hold {key}, of {dtype}; use one of {', '.join(DTYPES)}")
    if tensor.layout is not torch.strided:
        raise PipelineError(f"checkpoints cannot hold {key}, whose layout is {tensor.layout}; make it dense")
    if tensor.dim() > _MOST_DIMENSIONS:
        raise PipelineError(
            f"checkpoints cannot hold {key}, which has {tensor.dim()} dims; make it one of at most {_MOST_DIMENSIONS}"
        )
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
    if kind is list:
        return [to_json(item, (path, at), inner) for at, item in enumerate(value)]
    if kind in _SEQUENCES:
        return {_SEQUENCES[kind]: [to_json(item, (path, at), inner) for at, item in enumerate(value)]}
    if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: to_json(item, (path, key), inner) for key, item in value.items()}
    if kind in _MAPPINGS and len(value) <= _MOST_PAIRS and all(type(key) in _KEYS for key in value):
        items = value.items()
        return {
            _MAPPINGS[kind]: [[to_json(key, path, inner), to_json(item, (path, key), inner)] for key, item in items]
        }
    if kind is torch.dtype and value in _NAMES:
        return {"$dtype": dtype_name(value)}
    if kind is torch.Tensor and value.dtype in _NAMES and value.layout is torch.strided:
        elements = base64.b64encode(bytes_of(value)).decode()
        return {"$tensor": [dtype_name(value.dtype), list(value.shape), elements]}
    text = f"{kind.__name__} of {value.bit_length():,} bits" if kind is int else f"{kind.__name__}, {short(str(value))}"
    raise PipelineError(
        f"{_text_of(path)} is a {text}, but checkpoints hold only numbers, strings and tensors, in lists, tuples and "
        f"dicts with numbers or strings as keys; leave it out of the state"
    )


def _text_of(path: Path) -> str:
    return path if isinstance(path, str) else f"{_text_of(path[0])}[{repr(path[1])[:60]}]"


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor's elements, in row-major order."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data


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


def _mapping(made: Callable[[dict[Any, Any]], Any]) -> Callable[[Field, int], Any]:
    def read(field: Field, depth: int) -> Any:
        if len(field.read(list[tuple[Any, Any]])) > _MOST_PAIRS:
            raise field.wrong(f"at most {_MOST_PAIRS:,} pairs")
        mapping: dict[Any, Any] = {}
        for key, value in field:
            name = from_json(key, depth)
            if type(name) not in _KEYS or name in mapping:
                raise key.wrong("a number or a string that occurs only once")
            mapping[name] = from_json(value, depth)
        return made(mapping)

    return read


def dtype_named(field: Field, name: str) -> torch.dtype:
    """The dtype of this name. Raises FormatError."""
    if name not in DTYPES:
        raise field.wrong("a dtype that PyTorch has")
    return DTYPES[name]


def require_countable(field: Field, size: tuple[int, ...]) -> None:
    """Raises FormatError if a tensor of this size would have more elements than any memory has bytes."""
    if math.prod(filter(None, size)) > _MOST_ELEMENTS:
        raise field.wrong("fewer elements")


def are_of(data: bytes | bytearray | memoryview, dtype: torch.dtype) -> bool:
    """Whether the bytes are valid elements of a dtype: a bool must be 0 or 1, other dtypes allow all bytes."""
    return dtype is not torch.bool or not bytes(data).translate(None, b"\0\1")


def tensor_of(data: bytearray, dtype: torch.dtype, size: tuple[int, ...]) -> torch.Tensor:
    """The tensor with the elements `data`; it shares the memory."""
    raw = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return raw.view(dtype).reshape(size)


def _tensor(field: Field, _depth: int) -> torch.Tensor:
    name, size, data = field.read(tuple[str, Size, bytes])  # which are written in base64
    dtype = dtype_named(field, name)
    require_countable(field, size)
    if len(data) != math.prod(size) * dtype.itemsize or not are_of(data, dtype):
        raise field.wrong(f"the elements of a {name} tensor of size {list(size)}")
    return tensor_of(bytearray(data), dtype, size)


_KINDS: dict[str, Callable[[Field, int], Any]] = {
    "$float": _float,
    "$tuple": lambda field, depth: tuple(from_json(item, depth) for item in field),
    "$size": lambda field, _depth: torch.Size(field.read(tuple[Whole, ...])),
    "$dict": _mapping(dict),
    "$ordered": _mapping(OrderedDict),
    "$counter": _mapping(Counter),
    "$dtype": lambda field, _depth: dtype_named(field, field.read(str)),
    "$tensor": _tensor,
}
