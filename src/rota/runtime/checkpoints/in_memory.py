"""A rank's state after its last steps, in memory that outlives the rank: what a restarted rank goes on from.

after optimizer.step   tensors ──copy──▶ │ length │ head: names, sizes, options, random state │ tensors │   of one slot
after a restart        the newest step that every rank has whole ──copy──▶ tensors, optimizer, generators

`docs/elastic.md` has the protocol: when a step counts as committed, and why no step is lost or done twice.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple, final

import torch

from rota import reading
from rota.errors import PipelineError
from rota.reading import Field
from rota.runtime.checkpoints.manifest import Manifest
from rota.runtime.checkpoints.optimizer_state import Record
from rota.runtime.checkpoints.random_states import random_from_json, random_state, random_to_json
from rota.runtime.checkpoints.state import Restoring, Trained
from rota.runtime.checkpoints.tensors import Stored
from rota.runtime.checkpoints.training_json import TrainingState, record_from_json, scheduler_from_json
from rota.runtime.checkpoints.values import dtype_name, read_dtype, read_size
from rota.runtime.kept_memory import Slots
from rota.runtime.large_copies import copy, copy_into

_LENGTH = struct.Struct("<Q")
_ALIGNED = 64


class Kept(NamedTuple):
    """A state that fits, which is not set yet: `restore` does that. `extra` is what `commit` was given."""

    step: int
    extra: dict[str, Any]
    restoring: Restoring
    values: list[tuple[torch.Tensor, memoryview]]

    def restore(self) -> None:
        """Set weights, buffers, optimizer, scheduler and random states."""
        for tensor, data in self.values:
            if data:
                copy(tensor, torch.frombuffer(data, dtype=tensor.dtype).view(tensor.shape))
        self.restoring.finish()


class Head(NamedTuple):
    """What is beside the tensors of a state in memory, and their bytes, `data`, in the order of `stored`."""

    of: str
    step: int
    extra: dict[str, Any]
    records: dict[str, Record]
    scheduler: dict[str, Any] | None
    random: dict[str, Any]
    stored: dict[str, Stored]
    data: memoryview


def read_head(data: memoryview) -> Head:
    """Read a state in memory. Raises FormatError that names the field."""
    (length,) = _LENGTH.unpack_from(data, 0)
    head = Field("memory", reading.load(bytes(data[_LENGTH.size : _LENGTH.size + length]).decode()))
    rows = [tuple(row) for row in head["tensors"]]
    return Head(
        head["of"].text(),
        head["step"].integer(),
        head["extra"].value,
        {key: record_from_json(head["records"][key]) for key in head["records"].value},
        scheduler_from_json(head["scheduler"]),
        random_from_json(head["random"]),
        {key.text(): Stored(read_dtype(dtype), read_size(size), ()) for key, dtype, size in rows},
        data[_aligned(_LENGTH.size + length) :],
    )


def parts_of(head: Head) -> dict[str, memoryview]:
    """The bytes of each tensor, if the state has all of them whole. Raises PipelineError if some are sharded."""
    found, at = {}, 0
    for key, stored in head.stored.items():
        num_bytes = prod(stored.size) * stored.dtype.itemsize
        found[key] = head.data[at : at + num_bytes]
        at += _aligned(num_bytes)
    if at != len(head.data):
        raise PipelineError(
            f"the state in memory of {head.of} is sharded over ranks, so that other ranks cannot take it; save a "
            f"checkpoint"
        )
    return found


@final
class StatesInMemory:
    """The states of this rank in the memory `file`; `of` says which part of the training's state it has."""

    def __init__(self, file: int, trained: Trained, of: str) -> None:
        self._slots, self._trained, self._of = Slots(file), trained, of

    @property
    def steps(self) -> list[int]:
        """The steps whose states are whole."""
        return sorted(self._slots.steps)

    def num_bytes(self) -> int:
        """Bytes of both slots, as large as the state is now."""
        tensors, _ = self._trained.collect(with_buffers=True)
        return 2 * sum(_room(_local(tensor)) for tensor in tensors.values())

    def keep(self, step: int, extra: dict[str, Any]) -> None:
        """Copy the state, which becomes that of `step`, instead of the older one of two.

        Raises PipelineError if a tensor cannot be kept, OSError if there is not enough memory.
        """
        trained = self._trained
        tensors, small = trained.collect(with_buffers=True)
        local = [_local(tensor) for tensor in tensors.values()]
        head = {
            **small,
            "of": self._of,
            "step": step,
            "extra": extra,
            "random": random_to_json(random_state(trained.device)),
            "tensors": [[key, dtype_name(tensor.dtype), [*tensor.shape]] for key, tensor in tensors.items()],
        }
        text = json.dumps(head).encode()
        start = _aligned(_LENGTH.size + len(text))
        starts = [*accumulate(map(_room, local), initial=start)]
        num_bytes = starts.pop()
        data = self._slots.begin(num_bytes)
        _LENGTH.pack_into(data, 0, len(text))
        data[_LENGTH.size : _LENGTH.size + len(text)] = text
        copy_into(data, starts, local)
        self._slots.finish(step, num_bytes)

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
        index = head.stored
        restoring = trained.prepare(manifest, training, index)
        if missing := restoring.tensors.keys() ^ index.keys():
            raise PipelineError(f"the state in memory and the model differ in {min(missing)}; make the same model")
        local = [_local(restoring.tensors[key]) for key in index]
        return Kept(step, head.extra, restoring, [*zip(local, _parts(head.data, local), strict=True)])

    def forget_all_but(self, step: int | None) -> None:
        """Steps that not all ranks have are not committed: drop them."""
        self._slots.drop_all_but(step)


def _parts(data: memoryview, tensors: list[torch.Tensor]) -> Iterator[memoryview]:
    """The bytes of each tensor, one after the other."""
    at = 0
    for tensor in tensors:
        yield data[at : at + tensor.numel() * tensor.element_size()]
        at += _room(tensor)


def _room(tensor: torch.Tensor) -> int:
    return _aligned(tensor.numel() * tensor.element_size())


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a DTensor, or the tensor."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()
