"""A rank's state after its last steps, in memory that outlives the rank: what a restarted rank goes on from.

after optimizer.step   tensors ──copy──▶ │ length │ head: names, sizes … │ random states │ tensors │   of one slot
after a restart        the newest step that every rank has whole ──copy──▶ tensors, optimizer, generators

`docs/elastic.md` has the protocol: when a step counts as committed, and why no step is lost or done twice.
"""

from __future__ import annotations

import errno
import json
import os
import struct
from itertools import accumulate
from math import prod
from typing import Any, ClassVar, NamedTuple, final

import torch

from rota import reading
from rota.errors import FormatError, PipelineError
from rota.reading import Field
from rota.runtime.checkpoints.generators import Generators
from rota.runtime.checkpoints.manifest import Manifest
from rota.runtime.checkpoints.optimizer_state import Record
from rota.runtime.checkpoints.random_states import random_from_json, random_state, random_to_json
from rota.runtime.checkpoints.state import Restoring, Trained, part_of
from rota.runtime.checkpoints.tensors import Stored
from rota.runtime.checkpoints.training_json import TrainingState, records_from_json, scheduler_from_json
from rota.runtime.checkpoints.values import dtype_name, read_dtype, read_size
from rota.runtime.environment import processes_here
from rota.runtime.host_memory import available_bytes
from rota.runtime.kept_memory import NUM_SLOTS, Slots, room_for
from rota.runtime.large_copies import copy, copy_into
from rota.runtime.reducing.norms import local

_ENCODER = json.JSONEncoder(check_circular=False)  # what cannot be written was refused before
_LENGTH = struct.Struct("<Q")
_ALIGNED = 64


class Kept(NamedTuple):
    """A state that fits, which is not set yet: `restore` does that. `extra` is what `commit` was given."""

    step: int
    extra: dict[str, Any]
    restoring: Restoring
    values: list[tuple[torch.Tensor, memoryview]]
    #: The keys of weights that had a gradient of zeros: an optimizer changes them, even if the next step does not.
    with_zeros: set[str]

    def restore(self) -> None:
        """Set weights, buffers, gradients of zeros, optimizer, scheduler and random states."""
        for tensor, data in self.values:
            if data:
                copy(tensor, torch.frombuffer(data, dtype=tensor.dtype).view(tensor.shape))
        for weight, key in self.restoring.keys.items():
            if key in self.with_zeros:
                weight.grad = torch.zeros_like(weight)
        self.restoring.finish()


class Part(NamedTuple):
    """What a process holds of a tensor: all of it, or a shard of this size; and its bytes."""

    size: tuple[int, ...]
    data: memoryview


class Head(NamedTuple):
    """A state in memory: what is beside its tensors, and the part of each that the process had."""

    of: str
    folder: str
    newest_at_load: int
    step: int
    extra: dict[str, Any]
    records: dict[str, Record]
    scheduler: dict[str, Any] | None
    random: dict[str, Any]
    stored: dict[str, Stored]
    parts: dict[str, Part]
    with_zeros: set[str]


def read_head(data: memoryview) -> Head:
    """Read a state in memory. Raises FormatError that names the field."""
    head, at = _read_json(data)

    def next_bytes(num_bytes: Field) -> bytearray:
        nonlocal at
        begun, at = at, at + num_bytes.integer(0, len(data) - at)
        return bytearray(data[begun:at])

    random = random_from_json(head["random"], next_bytes)
    at = _aligned(at)
    stored, parts = {}, {}
    for row in head["tensors"]:
        key, dtype, size, *shard = row
        stored[key.text()] = of = Stored(read_dtype(dtype), read_size(size), ())
        here = read_size(shard[0]) if shard else of.size
        num_bytes = prod(here) * of.dtype.itemsize
        parts[key.text()] = Part(here, data[at : at + num_bytes])
        at += _aligned(num_bytes)
    if at > len(data):
        raise FormatError(f"the state in memory has {len(data):,} bytes, but its tensors end at byte {at:,}")
    return Head(
        head["of"].text(),
        head["folder"].text(),
        head["newest_at_load"].integer(0),
        head["step"].integer(),
        head["extra"].value,
        records_from_json(head["records"]),
        scheduler_from_json(head["scheduler"]),
        random,
        stored,
        parts,
        {key.text() for key in head["with_zeros"]},
    )


def folder_of(data: memoryview) -> str:
    """The folder of the checkpoints of the training that a state in memory is of. Raises FormatError."""
    return _read_json(data)[0]["folder"].text()


def newest_at_load_of(data: memoryview) -> int:
    """The number of the newest checkpoint when the training of a state last loaded one. Raises FormatError.

    A training may have gone back: those are not newer than its state, even if their steps are higher.
    """
    return _read_json(data)[0]["newest_at_load"].integer(0)


def _read_json(data: memoryview) -> tuple[Field, int]:
    """What is beside the bytes, and where they start: those of the random states, then those of the tensors."""
    try:
        (length,) = _LENGTH.unpack_from(data, 0)
        text = bytes(data[_LENGTH.size : _LENGTH.size + length]).decode()
    except (struct.error, UnicodeDecodeError):
        raise FormatError(f"the state in memory, of {len(data):,} bytes, does not begin with its head") from None
    return Field("memory", reading.load(text)), _LENGTH.size + length


@final
class StatesInMemory:
    """The states of this rank in the memory `file`, which has room for those of one training.

    `of` says which part of the training's state this rank has; `folder`, that of its checkpoints, which training it is:
    a script may run several, one after the other. `number`: see `State`.
    """

    #: Which of these objects keeps its states in this process's memory, and its folder.
    _writer: ClassVar[tuple[object, str] | None] = None

    def __init__(self, file: int, trained: Trained, of: str, folder: str, number: int) -> None:
        self._slots, self._trained, self._of, self._folder = Slots(file), trained, of, folder
        self._number = number
        self._me = object(), folder
        self._generators = Generators()
        self._has_kept = False
        self._counted_bytes = 0  # of the tensors for which there was found to be room
        self._common: int | None = None  # the step from which all ranks have gone on

    @property
    def steps(self) -> list[int]:
        """The steps of this training whose states are whole."""
        return sorted(step for step, folder in self._folders().items() if folder == self._folder)

    @property
    def other_folders(self) -> list[str]:
        """The folders of other trainings whose states are whole."""
        return sorted({folder for folder in self._folders().values() if folder != self._folder})

    def newest_at_load(self, step: int) -> int:
        """See `newest_at_load_of`."""
        return newest_at_load_of(self._slots.data(step))

    def _folders(self) -> dict[int, str]:
        return {step: folder_of(self._slots.data(step)) for step in self._slots.steps}

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the host's memory that both slots take already."""
        return self._slots.allocated_bytes

    def count(self) -> tuple[int, int]:
        """Bytes of the host's memory for both slots, for the state as it is now, and of two copies of its tensors.

        `keep` then relies on that room.
        """
        tensors, _ = self._trained.collect(with_buffers=True)
        parts = [local(tensor) for tensor in tensors.values()]
        self._counted_bytes = sum(map(_room, parts))
        return NUM_SLOTS * room_for(self._counted_bytes), NUM_SLOTS * sum(part.nbytes for part in parts)

    def give_up(self) -> None:
        """Forget the states that this object has kept, and give their memory back."""
        if self._writer is self._me:
            self._slots.clear()

    def keep(self, step: int, extra: dict[str, Any], newest_at_load: int, with_zeros: list[str]) -> None:
        """Copy the state, which becomes that of `step`, instead of the older one of two.

        `newest_at_load`: see `newest_at_load_of`; `with_zeros`: see `Kept`.

        Raises PipelineError if a tensor cannot be kept, OSError if there is not enough memory.
        """
        tensors, small = self._trained.collect(with_buffers=True)
        parts = [part_of(tensor) for tensor in tensors.values()]
        beside: list[bytes] = []

        def written(data: bytes) -> int:
            beside.append(data)
            return len(data)

        head = {
            "records": small["records"],
            "scheduler": small["scheduler"],
            "of": self._of,
            "folder": self._folder,
            "newest_at_load": newest_at_load,
            "step": step,
            "extra": extra,
            "random": random_to_json(random_state(self._trained.device, self._generators), written),
            "with_zeros": with_zeros,
            "tensors": [
                [key, dtype_name(tensor.dtype), tensor.shape, *([] if part is tensor else [part.shape])]
                for (key, tensor), part in zip(tensors.items(), parts, strict=True)
            ],
        }
        text = _ENCODER.encode(head).encode()
        begin = b"".join((_LENGTH.pack(len(text)), text, *beside))
        rooms = [*map(_room, parts)]
        self._find_room(sum(rooms))
        *starts, num_bytes = accumulate(rooms, initial=_aligned(len(begin)))
        self._take_memory()
        data = self._slots.begin(num_bytes)
        data[: len(begin)] = begin
        copy_into(data, starts, parts)
        self._slots.finish(step, num_bytes, self._number)

    def _find_room(self, num_bytes: int) -> None:
        """Look for room for tensors that take more than was counted. Raises OSError if there is too little of it.

        The other processes of this machine may have grown at the same time, and by as much.
        """
        if num_bytes <= self._counted_bytes:
            return
        more_bytes = NUM_SLOTS * (num_bytes - self._counted_bytes) * processes_here()
        if (free_bytes := available_bytes()) is not None and more_bytes > free_bytes:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        self._counted_bytes = num_bytes

    def _take_memory(self) -> None:
        """Forget what no restart may mix with this training: others' states, and steps that nobody has gone on from.

        Raises PipelineError if another training has taken the memory since.
        """
        if self._writer is self._me:
            return
        if self._has_kept and self._writer is not None:
            raise PipelineError(
                f"commit for {self._folder} after one for {self._writer[1]}: the memory has room for one training, so "
                f"that a restart would take the other from its last checkpoint; leave out commit for both, or end one "
                f"before the other begins"
            )
        StatesInMemory._writer, self._has_kept = self._me, True
        for step in self._slots.steps.keys() - {self._common}:
            self._slots.drop(step)

    def prepare(self, step: int) -> Kept:
        """Check that the state after `step` fits, before anything changes. Raises PipelineError, FormatError."""
        head = read_head(self._slots.data(step))
        if head.of != self._of or head.step != step:
            raise PipelineError(
                f"the state of step {step} in memory is of {head.of}, but this process has {self._of}; restart the run"
            )
        trained = self._trained
        training = TrainingState(head.records, head.scheduler, head.random)
        shards = {weight.names[0]: weight.num_tp_shards for weight in trained.weights.all}
        manifest = Manifest(0, step, head.extra, 0, 0, shards, {}, {})
        restoring = trained.prepare(manifest, training, head.stored)
        if missing := restoring.tensors.keys() ^ head.parts.keys():
            raise PipelineError(f"the state in memory and the model differ in {min(missing)}; make the same model")
        values = [(key, local(restoring.tensors[key]), part) for key, part in head.parts.items()]
        for key, tensor, part in values:
            if tuple(tensor.shape) != part.size:
                raise PipelineError(
                    f"this process had {list(part.size)} of {key}, of size {list(head.stored[key].size)}, but has "
                    f"{list(tensor.shape)} of it now; shard the model and the optimizer's state alike"
                )
        return Kept(step, head.extra, restoring, [(tensor, part.data) for _, tensor, part in values], head.with_zeros)

    def forget_all_but(self, step: int | None) -> None:
        """Steps of this training that not all ranks have are not committed: drop them."""
        self._common = step
        for other in self.steps:
            if other != step:
                self._slots.drop(other)


def _room(tensor: torch.Tensor) -> int:
    return _aligned(tensor.nbytes)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED
