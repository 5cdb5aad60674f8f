"""The tensors of a training in files: a rank's file, which rank writes what, and filling tensors from the files.

rank 0   rank-0.safetensors   │ header │ model/a, rows 0–3 │ model/b │ optimizer/a/exp_avg, rows 0–3 │
rank 1   rank-1.safetensors   │ header │ model/a, rows 4–7 │ optimizer/a/exp_avg, rows 4–7 │

A checkpoint is a folder of such files, and a snapshot is one alone. None of them is trusted. A header says what is
where, for safetensors, for PyTorch's reader and for Rota, and has all other state of the training.

A tensor is in one or more chunks, which are boxes of a grid. The planner of `torch.distributed.checkpoint` chooses the
chunks that a rank reads, so DTensors of any layout load into any other layout.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from io import FileIO
from itertools import accumulate, groupby, pairwise
from math import prod
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

import torch
from msgspec import Meta
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.tensor import DTensor

from rota.core import reading
from rota.core.errors import FormatError, PipelineError
from rota.core.reading import Field, Whole, short
from rota.runtime.checkpoints.values import DTYPES, NAMES, Size, dtype_named, tensor_of
from rota.runtime.device.protocol import Device, is_queued
from rota.runtime.fingerprints import bytes_of

Tensors: TypeAlias = dict[str, torch.Tensor]

_LENGTH = struct.Struct("<Q")  # of the header, before it
_PIECE_BYTES = 4 * 2**20
ALIGNED = 64  # bytes at which the tensors begin; large elements come first, so each is aligned


class File(NamedTuple):
    """A rank's file as it was written: its size, its header's SHA-256 in hexadecimal digits, each tensor's CRC-32."""

    num_bytes: Whole
    head_sha256: str
    crc32: tuple[Annotated[int, Meta(ge=0, lt=2**32)], ...]


class Chunk(NamedTuple):
    """A box of a tensor of this `size`: all of it, or what one rank has of a DTensor. `dtype`: as safetensors names it.

    As JSON it is a list.
    """

    key: str
    dtype: str
    size: Size
    offsets: tuple[Whole, ...]
    sizes: tuple[Whole, ...]

    @property
    def num_bytes(self) -> int:
        """Of the box."""
        return prod(self.sizes) * DTYPES[self.dtype].itemsize


class Part(NamedTuple):
    """A chunk in a file: where its bytes begin, and their CRC-32; a snapshot's is not known."""

    chunk: Chunk
    path: Path
    position: int
    crc32: int | None


Index: TypeAlias = dict[str, list[Part]]  # by the tensor's key


def read_chunks(field: Field) -> list[Chunk]:
    """Chunks from JSON. Raises FormatError that names the field."""
    chunks: list[Chunk] = field.read(list[Chunk])
    for key, dtype, size, offsets, sizes in chunks:
        is_inside = len(size) == len(offsets) == len(sizes) and all(
            offset + length <= whole for whole, offset, length in zip(size, offsets, sizes, strict=True)
        )
        if not is_inside:
            raise field.wrong(f"offsets and sizes inside of the tensor {short(key)}")
        dtype_named(field, dtype, size)
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
            chunks[Chunk(key, NAMES[tensor.dtype], size, (0,) * len(size), size)] = tensor.detach()
    if sharded:
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(sharded)
        for item in planner.create_local_plan().items:
            held, data = item.tensor_data, planner.resolve_data(item)
            assert held is not None
            assert isinstance(data, torch.Tensor)
            size, offsets, sizes = map(tuple, (held.size, held.chunk.offsets, held.chunk.sizes))
            if not prod(size):
                offsets, sizes = (0,) * len(size), size
            chunks[Chunk(item.index.fqn, NAMES[data.dtype], size, offsets, sizes)] = data.detach()
    return {chunk: chunks[chunk] for chunk in in_order(chunks)}


def in_order(chunks: Iterable[Chunk]) -> list[Chunk]:
    """In the order of a file."""
    return sorted(chunks, key=lambda chunk: -DTYPES[chunk.dtype].itemsize)


def starts_of(chunks: Iterable[Chunk], first: int) -> list[int]:
    """Where each chunk starts in a file whose tensors begin at `first`; and where the last one ends."""
    return [*accumulate((chunk.num_bytes for chunk in chunks), initial=first)]


# --- writing ----------------------------------------------------------------------------------------------------------


def head_of(chunks: tuple[Chunk, ...], training: dict[str, Any]) -> bytes:
    """All that is in a file before its tensors; `training` is all other state, as JSON."""
    metadata, entries = _texts(chunks)
    own = json.dumps(json.dumps(training, check_circular=False))
    text = f'{{"__metadata__": {{{metadata}, "training": {own}}}{entries}}}'.encode()
    return padded(_LENGTH.pack(0) + text, _LENGTH.size + len(text))


def padded(head: bytes, num_bytes: int) -> bytes:
    """A head in at least `num_bytes`, which are no fewer than what it has."""
    length = num_bytes + -num_bytes % ALIGNED - _LENGTH.size
    return _LENGTH.pack(length) + head[_LENGTH.size :].ljust(length)


@lru_cache(maxsize=8)
def _texts(chunks: tuple[Chunk, ...]) -> tuple[str, str]:
    """Of a header: the metadata for Rota and for PyTorch, and the entries of safetensors."""
    offsets, entries = {}, ""
    for chunk, ends in zip(chunks, pairwise(starts_of(chunks, 0)), strict=True):
        offsets[chunk.key] = {"saved_offsets": chunk.offsets}
        entry = {"dtype": chunk.dtype, "shape": chunk.sizes, "data_offsets": ends}
        entries += f", {json.dumps(chunk.key)}: {json.dumps(entry)}"
    texts = {"DCP_SHARDING_INFO": json.dumps(offsets), "tensors": json.dumps(chunks)}
    return json.dumps({"format": "pt", **texts})[1:-1], entries


def write_file(path: Path, data: Mapping[Chunk, torch.Tensor], training: dict[str, Any]) -> File:
    """Write a rank's file, and flush it to disk."""
    head, checksums = head_of(tuple(data), training), []
    with path.open("xb") as file:
        file.write(head)
        for tensor in data.values():
            values = bytes_of(tensor)
            checksums.append(zlib.crc32(values))
            file.write(values)
        file.flush()
        os.fsync(file.fileno())
        return File(file.tell(), hashlib.sha256(head).hexdigest(), tuple(checksums))


# --- reading ----------------------------------------------------------------------------------------------------------


def read_file(path: Path, written: File | None) -> tuple[list[Part], Field]:
    """Where a file's tensors are, and all other state as JSON, by its header. Raises FormatError.

    `written`: what the index says of the file; a snapshot has none.
    """
    with opened(path) as file, naming(path):
        num_bytes = os.fstat(file.fileno()).st_size
        if written is not None and num_bytes != written.num_bytes:
            raise FormatError(f"it has {num_bytes:,} bytes instead of {written.num_bytes:,}")
        begin = file.read(_LENGTH.size)
        if len(begin) < _LENGTH.size:
            raise FormatError("it is too short for a header")
        (length,) = _LENGTH.unpack(begin)
        if length > min(num_bytes - _LENGTH.size, reading.LARGEST_BYTES):
            raise FormatError(f"its header would have {length:,} bytes")
        text = reading.read_bytes(file.read, length - 1)
        if written is not None and hashlib.sha256(begin + text).hexdigest() != written.head_sha256:
            raise FormatError("it has changed since it was saved, in its header")
        chunks, training = _read_head(text)
        *positions, end = starts_of(chunks, len(begin) + length)
        checksums = [None] * len(chunks) if written is None else written.crc32
        if len(chunks) != len(checksums) or end != num_bytes:
            raise FormatError(f"its tensors do not fill its {num_bytes:,} bytes")
    places = zip(chunks, positions, checksums, strict=True)
    parts = [Part(chunk, path, position, crc32) for chunk, position, crc32 in places]
    return parts, Field(f"{path.name}: training", training.value)


def _read_head(text: bytearray) -> tuple[list[Chunk], Field]:
    """The chunks, by what is written for Rota, and all other state."""
    try:
        metadata = Field("header", reading.load(text.decode()))["__metadata__"]
    except UnicodeDecodeError as error:
        raise FormatError(f"its header is not a text in UTF-8 (byte {error.start})") from None
    tensors, training = (Field(name, reading.load(metadata[name].read(str))) for name in ("tensors", "training"))
    chunks = read_chunks(tensors)
    if len({chunk.key for chunk in chunks}) < len(chunks):
        raise tensors.wrong("tensors that occur only once")
    return chunks, training


def require_unchanged(part: Part) -> None:
    """Raises FormatError if the values of a part have changed since they were saved; reads it piece by piece."""
    left, crc32 = part.chunk.num_bytes, 0
    with opened(part.path) as file:
        file.seek(part.position)
        while piece := file.read(min(left, _PIECE_BYTES)):
            left, crc32 = left - len(piece), zlib.crc32(piece, crc32)
            if part.chunk.dtype == "BOOL" and max(piece) > 1:
                raise Field(f"{part.path}: {short(part.chunk.key)}", part.chunk.dtype).wrong("bools that are 0 or 1")
    if left or part.crc32 not in (None, crc32):
        raise _changed(part)


def _changed(part: Part) -> FormatError:
    return FormatError(f"{part.path}: it has changed since it was saved, in {short(part.chunk.key)}")


def read_values(part: Part) -> torch.Tensor:
    """The values of a part. Raises FormatError if they have changed since they were saved."""
    chunk, data, num_read = part.chunk, torch.empty(part.chunk.num_bytes, dtype=torch.uint8, device="cpu"), 0
    view = data.numpy().data
    with opened(part.path) as file:
        file.seek(part.position)
        while count := file.readinto(view[num_read:]):
            num_read += count
    if num_read < len(view) or part.crc32 not in (None, zlib.crc32(view)):
        raise _changed(part)
    return tensor_of(Field(f"{part.path}: {short(chunk.key)}", chunk.dtype), data, DTYPES[chunk.dtype], chunk.sizes)


@contextmanager
def opened(path: Path) -> Iterator[FileIO]:
    """Open a regular file to read it. Raises FormatError for anything else, also for a link to one."""
    try:
        with reading.open_file(path, follow=False) as file:
            yield file
    except FileNotFoundError:
        raise FormatError(f"{path} is missing") from None
    except OSError as error:
        raise FormatError(f"cannot read {path}: {error.strerror}") from None


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Puts the file's path in front of FormatErrors that are raised inside."""
    try:
        yield
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None


# --- who writes what --------------------------------------------------------------------------------------------------


def copied(data: Mapping[Chunk, torch.Tensor], device: Device) -> tuple[dict[Chunk, torch.Tensor], Callable[[], Any]]:
    """Copies of all values on the host, and a function that waits until they are there.

    On an accelerator, they are copied on the caller's stream, before whatever the caller enqueues later, to pinned
    memory; the host goes on at once.
    """
    copies = {
        chunk: tensor.clone() if tensor.device.type == "cpu" else tensor.to("cpu", non_blocking=True)
        for chunk, tensor in data.items()
    }
    if is_queued(device):
        return copies, device.read(torch.zeros(1, device=device.torch_device))  # it comes after all of them
    return copies, lambda: None


def share_out(by_rank: Sequence[Any]) -> list[list[Chunk]]:
    """The chunks that each rank writes of those that the ranks have, as JSON; the holder with the fewest bytes does."""
    holders: dict[Chunk, list[int]] = {}
    first: dict[str, Chunk] = {}
    for rank, chunks in enumerate(by_rank):
        for chunk in read_chunks(Field("chunks", chunks)):
            other = first.setdefault(chunk.key, chunk)
            if (other.dtype, other.size) != (chunk.dtype, chunk.size):
                raise PipelineError(
                    f"process {rank} has {chunk.key} as {list(chunk.size)} of {chunk.dtype}, and another as "
                    f"{list(other.size)} of {other.dtype}; make it the same on all"
                )
            if prod(chunk.sizes) or not prod(chunk.size):
                holders.setdefault(chunk, []).append(rank)
    shares, loads = [list[Chunk]() for _ in by_rank], [0 for _ in by_rank]
    for chunk, ranks in holders.items():
        rank = min(ranks, key=lambda rank: loads[rank])
        loads[rank] += chunk.num_bytes
        shares[rank].append(chunk)
    return [*map(in_order, shares)]


# --- what is where ----------------------------------------------------------------------------------------------------


def index_of(parts: Iterable[Part]) -> Index:
    """The parts by tensor. Raises FormatError if they are of different ones."""
    index: Index = {}
    for part in parts:
        parts_of_tensor = index.setdefault(part.chunk.key, [])
        parts_of_tensor.append(part)
        if parts_of_tensor[0].chunk[1:3] != part.chunk[1:3]:
            raise FormatError(f"{part.path}: {short(part.chunk.key)} differs from another file's")
    return index


def require_covered(index: Index) -> None:
    """Raises FormatError unless the parts of each tensor cover it once."""
    for key, parts in index.items():
        size = parts[0].chunk.size
        if not _is_covered(size, [part.chunk[3:] for part in parts]):
            where = parts[0].path.parent
            raise FormatError(f"{where}: no parts cover {short(key)}, of size {list(size)}, once")


def _is_covered(size: tuple[int, ...], boxes: list[tuple[Any, ...]]) -> bool:
    """Whether the boxes are the cells of a grid over a tensor, each exactly once."""
    if not prod(size):
        return boxes == [((0,) * len(size), size)]
    num_cells = 1
    for dimension, length in enumerate(size):
        intervals = _without_equals((offsets[dimension], sizes[dimension]) for offsets, sizes in boxes)
        ends = [0, *(offset + width for offset, width in intervals)]
        if [offset for offset, _ in intervals] != ends[:-1] or ends[-1] != length:
            return False
        num_cells *= len(intervals)
    return len(boxes) == len(_without_equals(boxes)) == num_cells


def _without_equals(values: Iterable[Any]) -> list[Any]:
    """The different ones, in order. They are sorted, because the hashes of a file's numbers may be made to collide."""
    return [value for value, _ in groupby(sorted(values))]


# --- reading ----------------------------------------------------------------------------------------------------------


class Reader:
    """Fills `tensors`, which may be DTensors, from parts of all of them."""

    def __init__(self, index: Index, tensors: Tensors) -> None:
        self._planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(tensors, Metadata({key: _metadata(index[key]) for key in tensors}))
        items: dict[Part, list[ReadItem]] = {}
        parts = {(key, part.chunk.offsets): part for key in tensors for part in index[key]}
        for item in self._planner.create_local_plan().items:
            assert item.storage_index.offset is not None
            items.setdefault(parts[item.storage_index.fqn, tuple(item.storage_index.offset)], []).append(item)
        #: What to read of each part, in the order of the files.
        self._items = sorted(items.items(), key=lambda entry: (entry[0].path, entry[0].position))

    def check(self) -> None:
        """Read all that `fill` will read, and change nothing. Raises FormatError if a part has changed."""
        for part, _ in self._items:
            require_unchanged(part)

    def fill(self) -> None:
        """Fill the tensors. Raises FormatError as `check` does: a file may change in between."""
        for part, items in self._items:
            whole = read_values(part)
            for item in items:
                extents = zip(item.storage_offsets, item.lengths, strict=True)
                target = self._planner.resolve_tensor(item).detach()
                target.copy_(whole[tuple(slice(offset, offset + length) for offset, length in extents)])
                self._planner.commit_tensor(item, target)


def _metadata(parts: list[Part]) -> TensorStorageMetadata:
    """A tensor as PyTorch's planner expects it."""
    first, chunks = parts[0].chunk, [part.chunk for part in parts]
    boxes = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes)) for chunk in chunks]
    return TensorStorageMetadata(TensorProperties(dtype=DTYPES[first.dtype]), torch.Size(first.size), boxes)
