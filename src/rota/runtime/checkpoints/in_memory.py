"""A rank's state after its last steps, in memory that outlives the rank: what a restarted rank goes on from.

after optimizer.step   tensors ──copy──▶ │ length │ head: names, sizes, options, random state │ tensors │   of one slot
beside the next step   optimizer's large tensors, which lie in this memory, too ──copy──▶ tensors of the slot
after a restart        the newest step that every rank has whole ──copy──▶ tensors, optimizer, generators

Anything may write to weights and buffers between two steps of the optimizer, but only the optimizer to its own state.
So its large tensors are moved into this memory, where they are the newest state while the next step's forwards and
backwards run. They are copied meanwhile: the optimizer's next step waits for that.

`docs/elastic.md` has the protocol: when a step counts as committed, and why no step is lost or done twice.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from math import prod
from typing import Any, NamedTuple, final

import torch
from torch.optim import Optimizer

from rota import reading
from rota.errors import PipelineError
from rota.reading import Field
from rota.runtime.checkpoints.manifest import Manifest
from rota.runtime.checkpoints.optimizer_state import Record, is_tensor_key
from rota.runtime.checkpoints.random_states import random_from_json, random_state, random_to_json
from rota.runtime.checkpoints.state import Restoring, Trained
from rota.runtime.checkpoints.tensors import Stored, Tensors
from rota.runtime.checkpoints.training_json import TrainingState, record_from_json, scheduler_from_json
from rota.runtime.checkpoints.values import dtype_name, read_dtype, read_size
from rota.runtime.kept_memory import Slots
from rota.runtime.large_copies import copy, is_plain
from rota.runtime.spare_time_copies import SpareTimeCopies
from rota.torch_internals import is_alone_in_memory, version_of

_LENGTH = struct.Struct("<Q")
_ALIGNED = 64
_LARGE_BYTES = 1 << 20  # of a tensor that is worth being copied beside the next step
_taken: set[int] = set()  # inodes of memories in which tensors of this process lie: no others are put over them


class Adopted(NamedTuple):
    """A tensor that is not filled: its values are at `place`, and stay there. `part` has room for a copy of them."""

    tensor: torch.Tensor
    place: torch.Tensor
    part: memoryview


class Kept(NamedTuple):
    """A state that fits, which is not set yet: `restore` does that. `extra` is what `commit` was given."""

    step: int
    extra: dict[str, Any]
    restoring: Restoring
    values: list[tuple[torch.Tensor, memoryview]]
    adopted: dict[str, Adopted]

    def restore(self) -> None:
        """Set weights, buffers, optimizer, scheduler and random states."""
        for tensor, data in self.values:
            if data:
                copy(tensor, _tensor_in(data, tensor))
        for tensor, place, _ in self.adopted.values():
            tensor.data = place
        self.restoring.finish()


class Head(NamedTuple):
    """What is beside the tensors of a state in memory, and their bytes in the order of `stored`.

    `data` has room for all tensors; those in `in_use` are there instead.
    """

    of: str
    step: int
    extra: dict[str, Any]
    records: dict[str, Record]
    scheduler: dict[str, Any] | None
    random: dict[str, Any]
    stored: dict[str, Stored]
    data: memoryview
    in_use: dict[str, memoryview]


def read_head(slots: Slots, step: int) -> Head:
    """Read the state after a step that is whole in memory. Raises FormatError that names the field."""
    data = slots.data(step)
    (length,) = _LENGTH.unpack_from(data, 0)
    head = Field("memory", reading.load(bytes(data[_LENGTH.size : _LENGTH.size + length]).decode()))
    rows = [tuple(row) for row in head["tensors"]]
    stored = {key.text(): Stored(read_dtype(dtype), read_size(size), ()) for key, dtype, size in rows}
    in_use: dict[str, memoryview] = {}
    if slots.step_in_use == step:
        keys = [key.text() for key in head["in_use"]]
        in_use = dict(zip(keys, _parts(slots.in_use, [_num_bytes(stored[key]) for key in keys]), strict=True))
    return Head(
        head["of"].text(),
        head["step"].integer(),
        head["extra"].value,
        {key: record_from_json(head["records"][key]) for key in head["records"].value},
        scheduler_from_json(head["scheduler"]),
        random_from_json(head["random"]),
        stored,
        data[_aligned(_LENGTH.size + length) :],
        in_use,
    )


def parts_of(head: Head) -> dict[str, memoryview]:
    """The bytes of each tensor, if the state has all of them whole. Raises PipelineError if some are sharded."""
    sizes = [_num_bytes(stored) for stored in head.stored.values()]
    if sum(map(_aligned, sizes)) != len(head.data):
        raise PipelineError(
            f"the state in memory of {head.of} is sharded over ranks, so that other ranks cannot take it; save a "
            f"checkpoint"
        )
    return dict(zip(head.stored, _parts(head.data, sizes), strict=True)) | head.in_use


@final
class StatesInMemory:
    """The states of this rank in the memory `file`; `of` says which part of the training's state it has."""

    def __init__(self, file: int, trained: Trained, of: str) -> None:
        self._slots, self._trained, self._of = Slots(file), trained, of
        self._inode = os.fstat(file).st_ino
        self._copies = SpareTimeCopies()
        #: Where the optimizer's tensors lie in this memory; empty if none can, None if that was not tried yet.
        self._in_use: Tensors | None = None
        #: The step that is being copied, and how often each of these tensors had been written before.
        self._under_way: tuple[int, list[tuple[torch.Tensor, int]]] | None = None
        self._has_stepped = False  # the optimizer, since the last `keep`
        self._hook: Any = None
        if isinstance(trained.optimizer, Optimizer):
            self._hook = trained.optimizer.register_step_pre_hook(self._before_optimizer)

    @property
    def steps(self) -> list[int]:
        """The steps whose states are whole."""
        return sorted(self._slots.steps)

    def close(self) -> None:
        """Let go of the optimizer, whose tensors stay where they are, and end the thread that copies."""
        if self._hook is not None:
            self._hook.remove()
        with suppress(PipelineError):  # then the step before is left
            self._let_write()
        self._copies.close()

    def num_bytes(self) -> int:
        """Bytes of both slots, as large as the state is now, and of the optimizer's tensors while they are moved."""
        tensors, _ = self._trained.collect(with_buffers=True)
        moved = self._movable(tensors)
        return 2 * sum(_room(_local(tensor)) for tensor in tensors.values()) + sum(map(_room, moved.values()))

    def keep(self, step: int, extra: dict[str, Any]) -> None:
        """Copy the state, which becomes that of `step`, instead of the older one of two.

        Raises PipelineError if a tensor cannot be kept, OSError if there is not enough memory.
        """
        self._finish_copies()
        trained = self._trained
        tensors, small = trained.collect(with_buffers=True)
        in_use = self._still_in_use(tensors)
        moved = self._movable(tensors) if self._in_use is None and self._has_stepped else None
        local = {key: _local(tensor) for key, tensor in tensors.items()}
        head = {
            **small,
            "of": self._of,
            "step": step,
            "extra": extra,
            "random": random_to_json(random_state(trained.device)),
            "tensors": [[key, dtype_name(tensor.dtype), [*tensor.shape]] for key, tensor in tensors.items()],
            "in_use": [*in_use],
        }
        text = json.dumps(head).encode()
        start = _aligned(_LENGTH.size + len(text))
        num_bytes = start + sum(map(_room, local.values()))
        self._slots.release()
        data = self._slots.begin(num_bytes)
        _LENGTH.pack_into(data, 0, len(text))
        data[_LENGTH.size : _LENGTH.size + len(text)] = text
        parts = dict(zip(local, _parts(data[start:], map(_num_bytes, local.values())), strict=True))
        for key, tensor in local.items():
            if key not in in_use and parts[key]:
                copy(_tensor_in(parts[key], tensor), tensor)
        self._slots.finish(step, num_bytes, leans=bool(in_use))
        if in_use:
            self._slots.use(step)
            self._watch(step, [tensors[key] for key in in_use])
            self._copies.start((_tensor_in(parts[key], place), place) for key, place in in_use.items())
        elif moved is not None:
            self._move(moved)
        self._has_stepped = False

    def prepare(self, step: int) -> Kept:
        """Check that the state after `step` fits, before anything changes. Raises PipelineError, FormatError."""
        head = read_head(self._slots, step)
        if head.of != self._of or head.step != step:
            raise PipelineError(
                f"the state of step {step} in memory is of {head.of}, but this process has {self._of}; restart the run"
            )
        trained = self._trained
        training = TrainingState(head.records, head.scheduler, head.random)
        shards = {weight.names[0]: weight.num_tp_shards for weight in trained.weights.all}
        manifest = Manifest(0, step, head.extra, 0, 0, shards, {}, {})
        index = head.stored
        restoring = trained.prepare(manifest, training, index)
        if missing := restoring.tensors.keys() ^ index.keys():
            raise PipelineError(f"the state in memory and the model differ in {min(missing)}; make the same model")
        local = {key: _local(restoring.tensors[key]) for key in index}
        parts = dict(zip(local, _parts(head.data, map(_num_bytes, local.values())), strict=True))
        adopted = {
            key: Adopted(restoring.tensors[key], _tensor_in(data, restoring.tensors[key]), parts[key])
            for key, data in self._adoptable(head, parts).items()
        }
        values = [(tensor, parts[key]) for key, tensor in local.items() if key not in adopted]
        return Kept(step, head.extra, restoring, values, adopted)

    def resume(self, kept: Kept) -> None:
        """Restore a state that `prepare` returned."""
        self._forget_copies()
        copies = [(_tensor_in(part, place), place) for _, place, part in kept.adopted.values()]
        kept.restore()
        if not kept.adopted:
            return
        _taken.add(self._inode)
        self._in_use = {key: place for key, (_, place, _) in kept.adopted.items()}
        self._watch(kept.step, [tensor for tensor, *_ in kept.adopted.values()])
        if self._slots.leans(kept.step):
            self._copies.start(copies)

    def _adoptable(self, head: Head, parts: dict[str, memoryview]) -> dict[str, memoryview]:
        """What can stay where it lies: nothing if another object of this process has its tensors there."""
        if self._in_use is not None or self._inode not in _taken:
            return head.in_use
        for key, data in head.in_use.items():
            parts[key][:] = data
        self._slots.complete(head.step)
        self._slots.release()
        return {}

    # --- tensors in use -------------------------------------------------------------------------------------------

    def _still_in_use(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Where the optimizer's tensors lie in this memory, if it has told of its step; empty if it has not.

        Once one of them lies elsewhere, all tensors are copied at once, from then on.
        """
        places = self._in_use or {}
        if not all(key in tensors and _lies_at(place, tensors[key]) for key, place in places.items()):
            self._in_use = places = {}
        return places if self._has_stepped else {}

    def _movable(self, tensors: Tensors) -> Tensors:
        """The optimizer's large tensors that can be moved into this memory: those that are in no other's memory."""
        if self._hook is None:
            return {}
        large = {key: tensor for key, tensor in tensors.items() if is_tensor_key(key) and tensor.nbytes >= _LARGE_BYTES}
        return {key: tensor for key, tensor in large.items() if is_plain(tensor) and is_alone_in_memory(tensor)}

    def _move(self, moved: Tensors) -> None:
        """Let the optimizer's tensors lie in this memory from now on; its objects stay the same."""
        self._in_use = {}
        if not moved or self._inode in _taken:
            return
        _taken.add(self._inode)
        data = self._slots.make_room_in_use(sum(map(_room, moved.values())))
        for (key, tensor), part in zip(moved.items(), _parts(data, map(_num_bytes, moved.values())), strict=True):
            self._in_use[key] = place = _tensor_in(part, tensor)
            copy(place, tensor)
            tensor.data = place

    def _watch(self, step: int, tensors: list[torch.Tensor]) -> None:
        """Nothing but the optimizer may write to its tensors until its next step."""
        self._under_way = step, [(tensor, version_of(tensor)) for tensor in tensors]

    def _before_optimizer(self, *_: object) -> None:
        self._has_stepped = True
        self._let_write()

    def _let_write(self) -> None:
        """Anything may be written to the tensors in use afterwards."""
        if self._in_use:
            self._finish_copies()
            self._slots.release()

    def _finish_copies(self) -> None:
        """The slot that leans on the tensors in use gets its own copy of them."""
        if self._under_way is None:
            return
        (step, versions), self._under_way = self._under_way, None
        self._copies.finish()
        if any(version_of(tensor) != version for tensor, version in versions):
            self._slots.release()
            raise PipelineError(
                "the optimizer's state was written to between commit and the optimizer's next step, as it was copied, "
                "so the state in memory may have either value; write to it only before commit"
            )
        self._slots.complete(step)

    def forget_all_but(self, step: int | None) -> None:
        """Steps that not all ranks have are not committed: drop them. `step` is the one that was restored, if any."""
        if step is None:
            self._forget_copies()
        self._slots.drop_all_but(step)

    def _forget_copies(self) -> None:
        self._copies.finish()
        self._under_way = None


def _parts(data: memoryview, sizes: Iterable[int]) -> Iterator[memoryview]:
    """The bytes of tensors of these sizes, one after the other."""
    at = 0
    for num_bytes in sizes:
        yield data[at : at + num_bytes]
        at += _aligned(num_bytes)


def _tensor_in(data: memoryview, like: torch.Tensor) -> torch.Tensor:
    """A tensor in this memory, of which there is some."""
    return torch.frombuffer(data, dtype=like.dtype).view(like.shape)


def _lies_at(place: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether a tensor is all of the memory at `place`."""
    return is_plain(tensor) and (tensor.data_ptr(), tensor.shape, tensor.dtype) == (
        place.data_ptr(),
        place.shape,
        place.dtype,
    )


def _num_bytes(tensor: torch.Tensor | Stored) -> int:
    size = tensor.size if isinstance(tensor, Stored) else tensor.shape
    return prod(size) * tensor.dtype.itemsize


def _room(tensor: torch.Tensor) -> int:
    return _aligned(_num_bytes(tensor))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a DTensor, or the tensor."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()
