"""What one rank has of a training's tensors, in one file: safetensors, whose header says what is where.

│ length │ {"__metadata__": {what Rota and PyTorch's reader need besides}, "model/a": dtype, shape, bytes …} │ tensors │

A checkpoint is a folder of such files, and a snapshot is one alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import DTensor

from rota.core import reading
from rota.core.errors import FormatError
from rota.core.reading import Field, Whole, short
from rota.runtime.checkpoints.manifest import File
from rota.runtime.checkpoints.values import Size, bytes_of, dtype_name, dtype_named, require_countable

Tensors: TypeAlias = dict[str, torch.Tensor]
Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes

LENGTH = struct.Struct("<Q")  # of the header, before it
ALIGNED = 64  # bytes at which the tensors begin; large elements come first, so each is aligned
#: Dtypes by their names in safetensors.
SAFETENSORS = {
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
_NAMES = {dtype: name for name, dtype in SAFETENSORS.items()}
#: The format has no such dtypes: these are pairs of others, and the rest is bytes, in one more dimension.
_PAIRS = {torch.complex128: "F64", torch.complex32: "F16"}


class Chunk(NamedTuple):
    """A box of a tensor: all of it, or what one rank has of a DTensor. `size` is that of the whole tensor."""

    key: str
    dtype: torch.dtype
    size: tuple[int, ...]
    box: Box

    @property
    def num_bytes(self) -> int:
        """Of the box."""
        return prod(self.box[1]) * self.dtype.itemsize

    def to_json(self) -> list[Any]:
        """The chunk as JSON, which is read as a `_Written`."""
        return [self.key, dtype_name(self.dtype), self.size, *self.box]


class _Written(NamedTuple):
    key: str
    dtype: str
    size: Size
    offsets: tuple[Whole, ...]
    sizes: tuple[Whole, ...]


def read_chunks(field: Field) -> list[Chunk]:
    """The chunks that `Chunk.to_json` wrote. Raises FormatError that names the field."""
    chunks = []
    for key, dtype, size, offsets, sizes in field.read(list[_Written]):
        is_inside = len(size) == len(offsets) == len(sizes) and all(
            offset + length <= whole for whole, offset, length in zip(size, offsets, sizes, strict=True)
        )
        if not is_inside:
            raise field.wrong(f"offsets and sizes inside of the tensor {short(key)}")
        require_countable(field, size)
        chunks.append(Chunk(key, dtype_named(field, dtype), size, (offsets, sizes)))
    return chunks


def chunks_of(tensors: Tensors) -> dict[Chunk, torch.Tensor]:
    """What this process has of each tensor, not copied, in the order of a file."""
    chunks: dict[Chunk, torch.Tensor] = {}
    sharded: Tensors = {}
    for key, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            sharded[key] = tensor
        else:
            size = tuple(tensor.shape)
            chunks[Chunk(key, tensor.dtype, size, ((0,) * len(size), size))] = tensor.detach()
    if sharded:
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(sharded)
        for item in planner.create_local_plan().items:
            assert item.tensor_data is not None
            box = tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes)
            size = tuple(item.tensor_data.size)
            data = planner.resolve_data(item)
            assert isinstance(data, torch.Tensor)
            if prod(box[1]) or not prod(size):
                box = box if prod(size) else ((0,) * len(size), size)
                chunks[Chunk(item.index.fqn, item.tensor_data.properties.dtype, size, box)] = data.detach()
    return dict(sorted(chunks.items(), key=lambda entry: -entry[0].dtype.itemsize))


def starts_of(chunks: Iterable[Chunk], first: int) -> list[int]:
    """Where each chunk starts in a file whose tensors begin at `first`; and where the last one ends."""
    return [*accumulate((chunk.num_bytes for chunk in chunks), initial=first)]


# --- the header -------------------------------------------------------------------------------------------------------


def head_of(chunks: tuple[Chunk, ...], beside: dict[str, Any]) -> bytes:
    """All that is in a file before its tensors; `beside` are JSON values to write with it."""
    metadata, entries = _texts(chunks)
    own = json.dumps(json.dumps(beside, check_circular=False))
    text = f'{{"__metadata__": {{{metadata}, "beside": {own}}}{entries}}}'.encode()
    return padded(LENGTH.pack(0) + text, LENGTH.size + len(text))


def padded(head: bytes, num_bytes: int) -> bytes:
    """A head in at least `num_bytes`, which are no fewer than what it has."""
    length = num_bytes + -num_bytes % ALIGNED - LENGTH.size
    return LENGTH.pack(length) + head[LENGTH.size :].ljust(length)


@lru_cache(maxsize=8)
def _texts(chunks: tuple[Chunk, ...]) -> tuple[str, str]:
    """Of a header: the metadata for Rota and for PyTorch, and the entries of safetensors."""
    offsets, entries, begin = {}, [], 0
    for chunk in chunks:
        dtype, more = _stored_as(chunk.dtype)
        offsets[chunk.key] = {"saved_offsets": [*chunk.box[0], *(0 for _ in more)]}
        end = begin + chunk.num_bytes
        entry = {"dtype": dtype, "shape": [*chunk.box[1], *more], "data_offsets": [begin, end]}
        entries.append(f", {json.dumps(chunk.key)}: {json.dumps(entry)}")
        begin = end
    texts = {"DCP_SHARDING_INFO": json.dumps(offsets), "tensors": json.dumps([chunk.to_json() for chunk in chunks])}
    return json.dumps({"format": "pt", **texts})[1:-1], "".join(entries)


def _stored_as(dtype: torch.dtype) -> tuple[str, tuple[int, ...]]:
    """The dtype's name in safetensors, and the dimensions that are added there."""
    if dtype in _PAIRS:
        return _PAIRS[dtype], (2,)
    return (_NAMES[dtype], ()) if dtype in _NAMES else ("U8", (dtype.itemsize,))


def read_head(head: bytes) -> tuple[tuple[Chunk, ...], Field]:
    """The chunks of a file, by what is written for Rota, and what was written beside them. Raises FormatError."""
    try:
        metadata = Field("header", reading.load(head[LENGTH.size :].decode()))["__metadata__"]
    except UnicodeDecodeError as error:
        raise FormatError(f"the header is not a text in UTF-8 (byte {error.start})") from None
    field, beside = (Field(f"header.{name}", reading.load(metadata[name].read(str))) for name in ("tensors", "beside"))
    chunks = tuple(read_chunks(field))
    if len({chunk.key for chunk in chunks}) < len(chunks):
        raise field.wrong("tensors that occur only once")
    return chunks, beside


def head_bytes(begin: bytes | memoryview, most: int) -> int:
    """The bytes of a file's head, by its first bytes. Raises FormatError if the file has fewer, or too many."""
    if len(begin) < LENGTH.size:
        raise FormatError("the file is too short for a header")
    num_bytes = LENGTH.size + int(LENGTH.unpack_from(begin)[0])
    if num_bytes > min(most, reading.LARGEST_BYTES):
        raise FormatError(f"the header would have {num_bytes:,} bytes")
    return num_bytes


# --- on disk ----------------------------------------------------------------------------------------------------------


def write_file(path: Path, chunks: Sequence[tuple[Chunk, torch.Tensor]]) -> File:
    """Write a rank's file, and flush it to disk."""
    head, checksums = head_of(tuple(chunk for chunk, _ in chunks), {}), []
    with path.open("xb") as file:
        file.write(head)
        for _, tensor in chunks:
            data = bytes_of(tensor)
            checksums.append(zlib.crc32(data))
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return File(file.tell(), hashlib.sha256(head).hexdigest(), tuple(checksums))
