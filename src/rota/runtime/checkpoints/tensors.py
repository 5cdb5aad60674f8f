"""The tensors of a checkpoint: which rank writes which part, where each part is, and reading them again.

rank 0   rank-0.safetensors   │ model/a, rows 0–3 │ model/b │ optimizer/a/exp_avg, rows 0–3 │
rank 1   rank-1.safetensors   │ model/a, rows 4–7 │ optimizer/a/exp_avg, rows 4–7 │

A tensor is in one or more chunks, which are boxes of a grid. The planner of `torch.distributed.checkpoint` chooses the
chunks that a rank reads, so DTensors of any layout load into any other layout.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from rota import reading
from rota.errors import FormatError, PipelineError
from rota.runtime.checkpoints.files import Saved, naming, opened, pieces
from rota.runtime.checkpoints.manifest import file_of
from rota.runtime.checkpoints.rank_file import LENGTH, Box, Chunk, Tensors, chunks_of, head_bytes, read_head, starts_of
from rota.runtime.checkpoints.values import are_of, dtype_name, tensor_of
from rota.runtime.device.protocol import Device, is_queued


class Place(NamedTuple):
    """Where a box of a tensor is, and the CRC-32 of its bytes."""

    box: Box
    file: str
    position: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in the files."""

    dtype: torch.dtype
    size: tuple[int, ...]
    places: tuple[Place, ...]


Index: TypeAlias = dict[str, Stored]  # by the tensor's key


# --- who writes what --------------------------------------------------------------------------------------------------


class Layout:
    """Which chunks of `tensors` this rank has, and their values, as they are now or as they were at `copy`."""

    def __init__(self, tensors: Tensors) -> None:
        self._data = chunks_of(tensors)

    def to_json(self) -> list[Any]:
        """The chunks, for the other ranks."""
        return [chunk.to_json() for chunk in self._data]

    def share(self, of_ranks: Sequence[Any], rank: int) -> list[tuple[Chunk, torch.Tensor]]:
        """What this rank writes, if the ranks have these chunks."""
        chunks = [[*map(Chunk.from_json, reading.Field("chunks", of_rank))] for of_rank in of_ranks]
        return [(chunk, self._data[chunk]) for chunk in share_out(chunks)[rank]]

    def copy(self, device: Device) -> Callable[[], object]:
        """Copy all values to the host; the result waits until they are there.

        On an accelerator, they are copied on the caller's stream, before whatever the caller enqueues later, to pinned
        memory; the host goes on at once.
        """
        self._data = {chunk: _copy_on_host(tensor) for chunk, tensor in self._data.items()}
        if is_queued(device):
            return device.read(torch.zeros(1, device=device.torch_device))  # it comes after all of them
        return lambda: None


def _copy_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """In pinned memory if the tensor is on an accelerator, as `to` makes it where it need not wait."""
    return tensor.clone() if tensor.device.type == "cpu" else tensor.to("cpu", non_blocking=True)


def share_out(of_ranks: Sequence[Sequence[Chunk]]) -> list[list[Chunk]]:
    """The chunks that each rank writes. A chunk goes to its holder with the fewest bytes so far."""
    holders: dict[Chunk, list[int]] = {}
    known: dict[str, Chunk] = {}
    for rank, chunks in enumerate(of_ranks):
        for chunk in chunks:
            other = known.setdefault(chunk.key, chunk)
            if (other.dtype, other.size) != (chunk.dtype, chunk.size):
                raise PipelineError(
                    f"process {rank} has {chunk.key} as {list(chunk.size)} of {dtype_name(chunk.dtype)}, and another "
                    f"as {list(other.size)} of {dtype_name(other.dtype)}; make it the same on all"
                )
            holders.setdefault(chunk, []).append(rank)
    shares: list[list[Chunk]] = [[] for _ in of_ranks]
    loads = [0] * len(of_ranks)
    for chunk, ranks in holders.items():
        rank = min(ranks, key=lambda rank: loads[rank])
        loads[rank] += chunk.num_bytes
        shares[rank].append(chunk)
    return [sorted(share, key=lambda chunk: -chunk.dtype.itemsize) for share in shares]


# --- what is where ----------------------------------------------------------------------------------------------------


def read_index(saved: Saved) -> Index:
    """Where a checkpoint's tensors are, by the headers of its files. Raises FormatError unless each is complete."""
    places: dict[str, list[Place]] = {}
    known: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for rank in range(len(saved.manifest.files)):
        for chunk, place in _places(saved, rank):
            if known.setdefault(chunk.key, (chunk.dtype, chunk.size)) != (chunk.dtype, chunk.size):
                raise FormatError(f"{saved.path / place.file}: {reading.short(chunk.key)} differs from another file's")
            places.setdefault(chunk.key, []).append(place)
    for key, (_, size) in known.items():
        if not _is_covered(size, [place.box for place in places[key]]):
            raise FormatError(f"{saved.path}: no parts cover {reading.short(key)}, of size {list(size)}, once")
    return {key: Stored(*known[key], tuple(places[key])) for key in known}


def _places(saved: Saved, rank: int) -> list[tuple[Chunk, Place]]:
    name, told = file_of(rank), saved.manifest.files[rank]
    path = saved.path / name
    with opened(path) as file, naming(path):
        begin = file.read(LENGTH.size)
        head = begin + b"".join(map(bytes, pieces(file, head_bytes(begin, told.num_bytes) - len(begin))))
    if hashlib.sha256(head).hexdigest() != told.head_sha256:
        raise FormatError(f"{path} has changed since it was saved, in its header")
    with naming(path):
        chunks, _ = read_head(head)
        *positions, end = starts_of(chunks, len(head))
        if len(chunks) != len(told.crc32) or end != told.num_bytes:
            raise FormatError(f"its tensors do not fill its {told.num_bytes:,} bytes")
    return [
        (chunk, Place(chunk.box, name, position, crc32))
        for chunk, position, crc32 in zip(chunks, positions, told.crc32, strict=True)
    ]


def _is_covered(size: tuple[int, ...], boxes: list[Box]) -> bool:
    """Whether the boxes are the cells of a grid over a tensor, each exactly once."""
    if not math.prod(size):
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


def check_all(saved: Saved, index: Index) -> None:
    """Read every tensor. Raises FormatError if one has changed since it was saved."""
    for key, stored in index.items():
        for place in stored.places:
            _check(saved, key, stored.dtype, place)


def _check(saved: Saved, key: str, dtype: torch.dtype, place: Place) -> None:
    for _ in _pieces(saved, key, dtype, place):
        pass


def _pieces(saved: Saved, key: str, dtype: torch.dtype, place: Place) -> Iterator[memoryview]:
    """A box's bytes in pieces. Raises FormatError, at the end, if they have changed since they were saved."""
    path, crc32 = saved.path / place.file, 0
    with opened(path) as file:
        file.seek(place.position)
        for piece in pieces(file, math.prod(place.box[1]) * dtype.itemsize):
            crc32 = zlib.crc32(piece, crc32)
            if not are_of(piece, dtype):
                raise FormatError(f"{path}: {reading.short(key)} holds bytes that are not {dtype_name(dtype)} values")
            yield piece
    if crc32 != place.crc32:
        raise FormatError(f"{path} has changed since it was saved, in {reading.short(key)}")


class Reader:
    """Fills `tensors`, which may be DTensors, from a checkpoint that has all of them."""

    def __init__(self, saved: Saved, index: Index, tensors: Tensors) -> None:
        self._saved, self._index = saved, index
        self._planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(tensors, _metadata({key: index[key] for key in tensors}))
        self._wanted: dict[tuple[str, Place], list[ReadItem]] = {}
        places = {(key, place.box[0]): place for key in tensors for place in index[key].places}
        for item in self._planner.create_local_plan().items:
            assert item.storage_index.offset is not None
            key = item.storage_index.fqn
            self._wanted.setdefault((key, places[key, tuple(item.storage_index.offset)]), []).append(item)

    def check(self) -> None:
        """Read all that `fill` will read, and change nothing. Raises FormatError if a box has changed."""
        for (key, place), _ in self._in_order():
            _check(self._saved, key, self._index[key].dtype, place)

    def fill(self) -> None:
        """Fill the tensors. Raises FormatError as `check` does: a file may change in between."""
        for (key, place), items in self._in_order():
            data = bytearray()
            for piece in _pieces(self._saved, key, self._index[key].dtype, place):
                data += piece
            read = tensor_of(data, self._index[key].dtype, place.box[1])
            for item in items:
                part = read
                for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    part = part.narrow(dimension, offset, length)
                target = self._planner.resolve_tensor(item).detach()
                target.copy_(part)
                self._planner.commit_tensor(item, target)

    def _in_order(self) -> list[tuple[tuple[str, Place], list[ReadItem]]]:
        """The wanted boxes, in the order of the files."""
        return sorted(self._wanted.items(), key=lambda entry: (entry[0][1].file, entry[0][1].position))


def _metadata(index: Mapping[str, Stored]) -> Metadata:
    """The index as PyTorch's planner expects it."""
    return Metadata(
        {
            key: TensorStorageMetadata(
                TensorProperties(dtype=stored.dtype),
                torch.Size(stored.size),
                [ChunkStorageMetadata(*map(torch.Size, place.box)) for place in stored.places],
            )
            for key, stored in index.items()
        }
    )
