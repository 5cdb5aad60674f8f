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
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
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

from rota.core import reading
from rota.core.errors import FormatError, PipelineError
from rota.runtime.checkpoints.manifest import File, Saved, file_of, naming, opened, pieces
from rota.runtime.checkpoints.rank_file import (
    LENGTH,
    Box,
    Chunk,
    Tensors,
    head_bytes,
    read_chunks,
    read_head,
    starts_of,
)
from rota.runtime.checkpoints.values import are_of, dtype_name, tensor_of
from rota.runtime.device.protocol import Device, is_queued


class Part(NamedTuple):
    """A chunk in a file: where its bytes begin, and their CRC-32."""

    chunk: Chunk
    path: Path
    position: int
    crc32: int


Index: TypeAlias = dict[str, list[Part]]  # by the tensor's key


# --- who writes what --------------------------------------------------------------------------------------------------


def copied(data: Mapping[Chunk, torch.Tensor], device: Device) -> tuple[dict[Chunk, torch.Tensor], Callable[[], Any]]:
    """Copies of all values on the host, and a function that waits until they are there.

    On an accelerator, they are copied on the caller's stream, before whatever the caller enqueues later, to pinned
    memory; the host goes on at once.
    """
    copies = {chunk: _copy_on_host(tensor) for chunk, tensor in data.items()}
    if is_queued(device):
        return copies, device.read(torch.zeros(1, device=device.torch_device))  # it comes after all of them
    return copies, lambda: None


def _copy_on_host(tensor: torch.Tensor) -> torch.Tensor:
    """In pinned memory if the tensor is on an accelerator, as `to` makes it where it need not wait."""
    return tensor.clone() if tensor.device.type == "cpu" else tensor.to("cpu", non_blocking=True)


def share_out(of_ranks: Iterable[Any]) -> list[list[Chunk]]:
    """The chunks that each rank writes of those that the ranks have, as JSON; the holder with the fewest bytes does."""
    holders: dict[Chunk, list[int]] = {}
    known: dict[str, Chunk] = {}
    shares: list[list[Chunk]] = []
    for rank, chunks in enumerate(of_ranks):
        shares.append([])
        for chunk in read_chunks(reading.Field("chunks", chunks)):
            other = known.setdefault(chunk.key, chunk)
            if (other.dtype, other.size) != (chunk.dtype, chunk.size):
                raise PipelineError(
                    f"process {rank} has {chunk.key} as {list(chunk.size)} of {dtype_name(chunk.dtype)}, and another "
                    f"as {list(other.size)} of {dtype_name(other.dtype)}; make it the same on all"
                )
            holders.setdefault(chunk, []).append(rank)
    loads = [0] * len(shares)
    for chunk, ranks in holders.items():
        rank = min(ranks, key=lambda rank: loads[rank])
        loads[rank] += chunk.num_bytes
        shares[rank].append(chunk)
    return [sorted(share, key=lambda chunk: -chunk.dtype.itemsize) for share in shares]


# --- what is where ----------------------------------------------------------------------------------------------------


def read_index(saved: Saved) -> Index:
    """Where a checkpoint's tensors are, by the headers of its files. Raises FormatError unless each is complete."""
    index: Index = {}
    for rank, file in enumerate(saved.manifest.files):
        for part in _parts(saved.path / file_of(rank), file):
            index.setdefault(part.chunk.key, []).append(part)
    for key, parts in index.items():
        if len({(part.chunk.dtype, part.chunk.size) for part in parts}) > 1:
            raise FormatError(f"{parts[-1].path}: {reading.short(key)} differs from another file's")
        size = parts[0].chunk.size
        if not _is_covered(size, [part.chunk.box for part in parts]):
            raise FormatError(f"{saved.path}: no parts cover {reading.short(key)}, of size {list(size)}, once")
    return index


def _parts(path: Path, file: File) -> list[Part]:
    with opened(path) as opened_file, naming(path):
        begin = opened_file.read(LENGTH.size)
        head = begin + b"".join(map(bytes, pieces(opened_file, head_bytes(begin, file.num_bytes) - len(begin))))
    if hashlib.sha256(head).hexdigest() != file.head_sha256:
        raise FormatError(f"{path} has changed since it was saved, in its header")
    with naming(path):
        chunks, _ = read_head(head)
        *positions, end = starts_of(chunks, len(head))
        if len(chunks) != len(file.crc32) or end != file.num_bytes:
            raise FormatError(f"its tensors do not fill its {file.num_bytes:,} bytes")
    return [Part(chunk, path, *where) for chunk, *where in zip(chunks, positions, file.crc32, strict=True)]


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


def check(parts: Iterable[Part]) -> None:
    """Read these parts. Raises FormatError if one has changed since it was saved."""
    for part in parts:
        for _ in _pieces(part):
            pass


def _pieces(part: Part) -> Iterator[memoryview]:
    """A part's bytes in pieces. Raises FormatError, at the end, if they have changed since they were saved."""
    (key, dtype, *_), path, crc32 = part.chunk, part.path, 0
    with opened(path) as file:
        file.seek(part.position)
        for piece in pieces(file, part.chunk.num_bytes):
            crc32 = zlib.crc32(piece, crc32)
            if not are_of(piece, dtype):
                raise FormatError(f"{path}: {reading.short(key)} holds bytes that are not {dtype_name(dtype)} values")
            yield piece
    if crc32 != part.crc32:
        raise FormatError(f"{path} has changed since it was saved, in {reading.short(key)}")


class Reader:
    """Fills `tensors`, which may be DTensors, from a checkpoint that has all of them."""

    def __init__(self, index: Index, tensors: Tensors) -> None:
        self._planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._planner.set_up_planner(tensors, _metadata({key: index[key] for key in tensors}))
        wanted: dict[Part, list[ReadItem]] = {}
        parts = {(key, part.chunk.box[0]): part for key in tensors for part in index[key]}
        for item in self._planner.create_local_plan().items:
            assert item.storage_index.offset is not None
            wanted.setdefault(parts[item.storage_index.fqn, tuple(item.storage_index.offset)], []).append(item)
        #: What to read of each part, in the order of the files.
        self._wanted = sorted(wanted.items(), key=lambda entry: (entry[0].path, entry[0].position))

    def check(self) -> None:
        """Read all that `fill` will read, and change nothing. Raises FormatError if a part has changed."""
        check(part for part, _ in self._wanted)

    def fill(self) -> None:
        """Fill the tensors. Raises FormatError as `check` does: a file may change in between."""
        for part, items in self._wanted:
            data = bytearray()
            for piece in _pieces(part):
                data += piece
            whole = tensor_of(data, part.chunk.dtype, part.chunk.box[1])
            for item in items:
                value = whole
                for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                    value = value.narrow(dimension, offset, length)
                target = self._planner.resolve_tensor(item).detach()
                target.copy_(value)
                self._planner.commit_tensor(item, target)


def _metadata(index: Index) -> Metadata:
    """The index as PyTorch's planner expects it."""
    return Metadata(
        {
            key: TensorStorageMetadata(
                TensorProperties(dtype=parts[0].chunk.dtype),
                torch.Size(parts[0].chunk.size),
                [ChunkStorageMetadata(*map(torch.Size, part.chunk.box)) for part in parts],
            )
            for key, parts in index.items()
        }
    )
