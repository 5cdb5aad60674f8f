"""The tensors of a checkpoint: raw bytes in one file per rank, and `tensors.json`, which says where each tensor is.

rank 0   tensors-0.bin   │ model/a, rows 0–3 │ model/b │ optimizer/a/exp_avg, rows 0–3 │
rank 1   tensors-1.bin   │ model/a, rows 4–7 │ optimizer/a/exp_avg, rows 4–7 │

A tensor is in one or more chunks, which are boxes of a grid. The planners of `torch.distributed.checkpoint` choose the
chunks that a rank reads, so DTensors of any layout load into any other layout.
"""

from __future__ import annotations

import hashlib
import math
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, WriteItem

from rota import reading
from rota.errors import FormatError, PipelineError
from rota.runtime.checkpoints.files import PLAN, TENSORS, TRAINING, Saved, naming, opened, pieces
from rota.runtime.checkpoints.manifest import File
from rota.runtime.checkpoints.values import DTYPES, are_of, bytes_of, dtype_name, read_dtype, read_size, tensor_of

Tensors: TypeAlias = dict[str, torch.Tensor]
Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor, whose bytes start at `position` in a file, and their CRC-32."""

    box: Box
    file: str
    position: int
    crc32: int

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the chunk if its tensor has this dtype."""
        return math.prod(self.box[1]) * dtype.itemsize


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in the files; an empty tensor has no chunks."""

    dtype: torch.dtype
    size: tuple[int, ...]
    chunks: tuple[Chunk, ...]


Index: TypeAlias = dict[str, Stored]  # by the tensor's key


# --- who writes what --------------------------------------------------------------------------------------------------


class Layout:
    """Which chunks of `tensors` this rank has, and their bytes, as they are now or as they were at `copy`."""

    def __init__(self, tensors: Tensors) -> None:
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(tensors)
        items = [(item, _box(item)) for item in planner.create_local_plan().items]
        self._items = {(item.index.fqn, box): item for item, box in items if math.prod(box[1])}
        self._data: dict[tuple[str, Box], torch.Tensor] = {}
        for at, item in self._items.items():
            data = planner.resolve_data(item)
            assert isinstance(data, torch.Tensor)
            self._data[at] = data.detach()
        self._empty = [item for item, box in items if not math.prod(box[1])]

    def to_json(self) -> list[Any]:
        """[key, dtype, size, offsets, sizes] of each chunk, for the other ranks; an empty tensor has None twice."""
        chunks = [[key, _dtype(item), [*_size(item)], *map(list, box)] for (key, box), item in self._items.items()]
        return chunks + [[item.index.fqn, _dtype(item), [*_size(item)], None, None] for item in self._empty]

    def data(self, key: str, box: Box) -> memoryview:
        """The bytes of a chunk."""
        return bytes_of(self._data[key, box])

    def tensors(self, which: Callable[[str], bool]) -> list[torch.Tensor]:
        """The chunks on an accelerator with keys for which `which`."""
        return [tensor for (key, _), tensor in self._data.items() if which(key) and tensor.device.type != "cpu"]

    def copy(self, which: Callable[[str], bool]) -> None:
        """Copy these chunks to the host, on an accelerator's current stream; its kernels may then not be over."""
        self._data |= {at: _copy_on_host(tensor) for at, tensor in self._data.items() if which(at[0])}


def _copy_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """In pinned memory if the tensor is on an accelerator, as `to` makes it where it need not wait."""
    return tensor.clone() if tensor.device.type == "cpu" else tensor.to("cpu", non_blocking=True)


def _box(item: WriteItem) -> Box:
    assert item.tensor_data is not None
    return tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes)


def _size(item: WriteItem) -> torch.Size:
    assert item.tensor_data is not None
    return item.tensor_data.size


def _dtype(item: WriteItem) -> str:
    assert item.tensor_data is not None
    return dtype_name(item.tensor_data.properties.dtype)


def share_out(of_ranks: Sequence[list[Any]]) -> list[list[tuple[str, Box]]]:
    """The chunks that each rank writes. A chunk goes to its holder with the fewest bytes so far."""
    holders: dict[tuple[str, Box], list[int]] = {}
    num_bytes: dict[tuple[str, Box], int] = {}
    properties: dict[str, tuple[str, list[int]]] = {}
    for rank, chunks in enumerate(of_ranks):
        for key, dtype, size, offsets, sizes in chunks:
            if properties.setdefault(key, (dtype, size)) != (dtype, size):
                raise PipelineError(
                    f"process {rank} has {key} as {size} of {dtype}, and another as {properties[key][1]} of "
                    f"{properties[key][0]}; make it the same on all"
                )
            if offsets is not None:
                chunk = key, (tuple(offsets), tuple(sizes))
                holders.setdefault(chunk, []).append(rank)
                num_bytes[chunk] = math.prod(sizes) * DTYPES[dtype].itemsize
    shares: list[list[tuple[str, Box]]] = [[] for _ in of_ranks]
    loads = [0] * len(of_ranks)
    for chunk, ranks in holders.items():
        rank = min(ranks, key=lambda rank: loads[rank])
        loads[rank] += num_bytes[chunk]
        shares[rank].append(chunk)
    return shares


def file_of(rank: int) -> str:
    """The name of the file with a rank's tensors."""
    return f"tensors-{rank}.bin"


def write_chunks(path: Path, layout: Layout, share: list[tuple[str, Box]]) -> tuple[list[int], File]:
    """Write one file and flush it to disk. Returns the CRC-32 of each chunk, and the file's size and hash."""
    digest, checksums = hashlib.sha256(), []
    with path.open("xb") as file:
        for key, box in share:
            data = layout.data(key, box)
            checksums.append(zlib.crc32(data))
            digest.update(data)
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
        return checksums, File(file.tell(), digest.hexdigest())


def index_of(of_ranks: Sequence[list[Any]], checksums: Sequence[list[int]]) -> Index:
    """Where the ranks have written the chunks of `share_out`. Raises PipelineError if a tensor has gaps."""
    properties = {key: (DTYPES[dtype], tuple(size)) for chunks in of_ranks for key, dtype, size, *_ in chunks}
    chunks: dict[str, list[Chunk]] = {key: [] for key in properties}
    for rank, (share, of_rank) in enumerate(zip(share_out(of_ranks), checksums, strict=True)):
        position = 0
        for (key, box), crc32 in zip(share, of_rank, strict=True):
            chunks[key].append(chunk := Chunk(box, file_of(rank), position, crc32))
            position += chunk.num_bytes(properties[key][0])
    for key, (_, size) in properties.items():
        if not _is_covered(size, [chunk.box for chunk in chunks[key]]):
            raise PipelineError(f"the ranks do not hold all of {key}, of size {list(size)}, as the cells of one grid")
    return {key: Stored(*properties[key], tuple(chunks[key])) for key in properties}


# --- the index as JSON ------------------------------------------------------------------------------------------------


def index_to_json(index: Index) -> str:
    """The text of `tensors.json`: each tensor's dtype, size and chunks."""
    entries = [
        [key, dtype_name(of.dtype), of.size, [[*c.box, c.file, c.position, c.crc32] for c in of.chunks]]
        for key, of in index.items()
    ]
    return reading.dump("tensors", {"byte_order": sys.byteorder, "tensors": entries})


def read_index(saved: Saved) -> Index:
    """Where a checkpoint's tensors are. Raises FormatError unless each is complete, and each byte is in one chunk."""
    text = saved.read_text(TENSORS)
    with naming(saved.path / TENSORS):
        document = reading.Field("tensors", reading.load(text))
        document.refuse_others(("rota", "byte_order", "tensors"))
        if document["byte_order"].text() != sys.byteorder:
            raise document["byte_order"].wrong(f"{sys.byteorder}, as on this machine")
        index: Index = {}
        for entry in document["tensors"]:
            key, stored = _entry(entry)
            if key in index:
                raise entry.wrong("a tensor that occurs only once")
            index[key] = stored
        _require_tiled_files(index, saved)
        return index


def _entry(entry: reading.Field) -> tuple[str, Stored]:
    if len(parts := [*entry]) != 4:
        raise entry.wrong("a key, a dtype, a size and chunks")
    key, size = parts[0].text(), read_size(parts[2])
    stored = Stored(read_dtype(parts[1]), size, tuple(_chunk(field, len(size)) for field in parts[3]))
    if not _is_covered(size, [chunk.box for chunk in stored.chunks]):
        raise parts[3].wrong(f"chunks that cover {reading.short(key)}, of size {list(size)}, once")
    return key, stored


def _chunk(field: reading.Field, num_dimensions: int) -> Chunk:
    if len(parts := [*field]) != 5:
        raise field.wrong("offsets, sizes, a file, a position and a CRC-32")
    offsets, sizes = parts[0].integers(0), parts[1].integers(1)
    if not len(offsets) == len(sizes) == num_dimensions:
        raise field.wrong(f"{num_dimensions} offsets and sizes")
    return Chunk((offsets, sizes), parts[2].name(), parts[3].integer(0), parts[4].integer(0, 2**32 - 1))


def _is_covered(size: tuple[int, ...], boxes: list[Box]) -> bool:
    """Whether the boxes are the cells of a grid over a tensor, each exactly once."""
    if not math.prod(size):
        return not boxes
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


def _require_tiled_files(index: Index, saved: Saved) -> None:
    """Raises FormatError unless each byte of each file is in one chunk: a small file must not become many tensors."""
    places: dict[str, list[tuple[int, int]]] = {}
    for stored in index.values():
        for chunk in stored.chunks:
            places.setdefault(chunk.file, []).append((chunk.position, chunk.num_bytes(stored.dtype)))
    files = {name: file for name, file in saved.manifest.files.items() if name not in (PLAN, TENSORS, TRAINING)}
    if elsewhere := sorted(places.keys() - files.keys()):
        raise FormatError(f"it places a tensor in {reading.short(elsewhere[0])}, which is not a tensor file")
    for name, file in files.items():
        of_file = sorted(places.get(name, []))
        ends = [0, *(position + num_bytes for position, num_bytes in of_file)]
        if [position for position, _ in of_file] != ends[:-1] or ends[-1] != file.num_bytes:
            raise FormatError(f"its chunks do not fill {reading.short(name)}, of {file.num_bytes:,} bytes")


# --- reading ----------------------------------------------------------------------------------------------------------


def check_all(saved: Saved, index: Index) -> None:
    """Read every tensor. Raises FormatError if one has changed since it was saved."""
    for key, stored in index.items():
        for chunk in stored.chunks:
            _check(saved, key, stored.dtype, chunk)


def _check(saved: Saved, key: str, dtype: torch.dtype, chunk: Chunk) -> None:
    for _ in _pieces(saved, key, dtype, chunk):
        pass


def _pieces(saved: Saved, key: str, dtype: torch.dtype, chunk: Chunk) -> Iterator[memoryview]:
    """A chunk's bytes in pieces. Raises FormatError, at the end, if they have changed since they were saved."""
    path, crc32 = saved.path / chunk.file, 0
    with opened(path) as file:
        file.seek(chunk.position)
        for piece in pieces(file, chunk.num_bytes(dtype)):
            crc32 = zlib.crc32(piece, crc32)
            if not are_of(piece, dtype):
                raise FormatError(f"{path}: {reading.short(key)} holds bytes that are not {dtype_name(dtype)} values")
            yield piece
    if crc32 != chunk.crc32:
        raise FormatError(f"{path} has changed since it was saved, in {reading.short(key)}")


class Reader:
    """Fills `tensors`, which may be DTensors, from a checkpoint that has all of them."""

    def __init__(self, saved: Saved, index: Index, tensors: Tensors) -> None:
        self._saved, self._index = saved, index
        self._planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(tensors, _metadata({key: index[key] for key in tensors}))
        self._wanted: dict[tuple[str, Chunk], list[ReadItem]] = {}
        chunks = {(key, chunk.box[0]): chunk for key in tensors for chunk in index[key].chunks}
        for item in self._planner.create_local_plan().items:
            assert item.storage_index.offset is not None
            key = item.storage_index.fqn
            chunk = chunks[key, tuple(item.storage_index.offset)]
            self._wanted.setdefault((key, chunk), []).append(item)

    def check(self) -> None:
        """Read all that `fill` will read, and change nothing. Raises FormatError if a chunk has changed."""
        for (key, chunk), _ in self._in_order():
            _check(self._saved, key, self._index[key].dtype, chunk)

    def fill(self) -> None:
        """Fill the tensors. Raises FormatError as `check` does: a file may change in between."""
        for (key, chunk), items in self._in_order():
            read = self._read(key, chunk)
            for item in items:
                part = read
                for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    part = part.narrow(dimension, offset, length)
                target = self._planner.resolve_tensor(item).detach()
                target.copy_(part)
                self._planner.commit_tensor(item, target)

    def _in_order(self) -> list[tuple[tuple[str, Chunk], list[ReadItem]]]:
        """The wanted chunks, in the order of the files."""
        return sorted(self._wanted.items(), key=lambda entry: (entry[0][1].file, entry[0][1].position))

    def _read(self, key: str, chunk: Chunk) -> torch.Tensor:
        dtype, at = self._index[key].dtype, 0
        data = bytearray(chunk.num_bytes(dtype))
        for piece in _pieces(self._saved, key, self._index[key].dtype, chunk):
            data[at : at + len(piece)] = piece
            at += len(piece)
        return tensor_of(data, dtype, chunk.box[1])


def _metadata(index: Mapping[str, Stored]) -> Metadata:
    """The index as PyTorch's planner expects it."""
    return Metadata(
        {
            key: TensorStorageMetadata(
                TensorProperties(dtype=stored.dtype),
                torch.Size(stored.size),
                [ChunkStorageMetadata(*map(torch.Size, chunk.box)) for chunk in stored.chunks],
            )
            for key, stored in index.items()
        }
    )
