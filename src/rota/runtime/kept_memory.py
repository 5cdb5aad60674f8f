"""Memory that outlives a rank: the supervisor owns it, the rank writes its state of the last steps into it.

    0                                                    64              4096, or 2 MiB
    │ slot 0: step, ~step, training, bytes, start, room  │ slot 1 …      │ data of slot 0 │ data of slot 1 │ …

A slot holds the state of a training after one step. It is whole if `step` and its complement say so: the writer takes
`step` away, writes the data, and puts the new step in place last. So a rank that is killed at any instant loses at most
the slot that it was writing: the kernel keeps what a killed process has written, in the order in which it was written.
"""

from __future__ import annotations

import mmap
import os
import struct
from contextlib import ExitStack
from typing import NamedTuple, final

from rota.costs import NUM_SNAPSHOTS
from rota.runtime.mapped_file import HUGE_BYTES, MappedFile

_KEPT = "ROTA_KEPT_MEMORY"  # an environment variable, set by the launcher: the number of an open file
_NONE = -1
#: Step, its complement, number of the training, bytes of data, where they start, bytes of room there.
_HEADER = struct.Struct("<qqQQQQ")
_SLOT_BYTES, _HEADERS_BYTES = 64, 4096
NUM_SLOTS = NUM_SNAPSHOTS
_MORE = 17 / 16  # room for numbers that grow


def environment_of(file: int) -> dict[str, str]:
    """The environment through which a rank finds its memory."""
    return {_KEPT: str(file)}


def is_given() -> bool:
    """Whether the launcher keeps a memory for this rank: then the rank may be started again."""
    return _KEPT in os.environ


def given() -> int | None:
    """The file of this rank's memory; None if the launcher keeps none."""
    number = os.environ.get(_KEPT)
    return None if number is None else int(number)


class State(NamedTuple):
    """A state that is kept or saved: of which training of the script, by its number from 0, and after how many steps.

    The first training is that of the first folder of which the script makes `Checkpoints`, and so on.
    """

    training: int
    step: int


@final
class KeptMemories:
    """One memory per rank, for as long as the context manager is entered. Nothing is in any folder."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._stack = ExitStack()
        self.files: list[int] = []

    def __enter__(self) -> KeptMemories:
        with self._stack as stack:
            stack.callback(self._close)
            for rank in range(self._num_ranks):
                self.files.append(os.memfd_create(f"rota-rank-{rank}"))
            self._stack = stack.pop_all()
        return self

    def _close(self) -> None:
        for file in self.files:
            os.close(file)

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def common_states(self) -> set[State]:
        """The states that all ranks hold."""
        held = [{*states_in(file)} for file in self.files]
        return set.intersection(*held) if held else set()


def states_in(file: int) -> list[State]:
    """The states that are whole in a rank's memory."""
    headers = os.pread(file, NUM_SLOTS * _SLOT_BYTES, 0)
    if len(headers) < NUM_SLOTS * _SLOT_BYTES:
        return []
    found = (_HEADER.unpack_from(headers, slot * _SLOT_BYTES) for slot in range(NUM_SLOTS))
    return [State(training, step) for step, complement, training, *_ in found if step >= 0 and complement == ~step]


@final
class Slots:
    """A rank's view of its memory."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._writing = 0
        self._mapped: set[int] = set()  # slots of which all pages are mapped
        if os.fstat(file).st_size < _HEADERS_BYTES:
            os.posix_fallocate(file, 0, _HEADERS_BYTES)
            self._mapping = MappedFile(file, _HEADERS_BYTES)
            for slot in range(NUM_SLOTS):
                self._put(slot, _NONE, 0, _HEADERS_BYTES, 0)
        self._mapping = MappedFile(file, os.fstat(file).st_size)

    @property
    def steps(self) -> dict[int, int]:
        """Each whole step, and its slot."""
        headers = {slot: _HEADER.unpack_from(self._mapping.view, slot * _SLOT_BYTES) for slot in range(NUM_SLOTS)}
        return {step: slot for slot, (step, complement, *_) in headers.items() if step >= 0 and complement == ~step}

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the host's memory that the slots take already; also those that an earlier process wrote."""
        return os.fstat(self._file).st_blocks * 512

    def clear(self) -> None:
        """Forget all states, and give their memory back."""
        for slot in range(NUM_SLOTS):
            self._put(slot, _NONE, 0, _HEADERS_BYTES, 0)
        os.ftruncate(self._file, _HEADERS_BYTES)
        self._mapping = MappedFile(self._file, _HEADERS_BYTES)
        self._mapped.clear()

    def begin(self, num_bytes: int) -> memoryview:
        """Room for a new state, in the slot that holds the older step or none; what that held is gone.

        Raises OSError if there is not enough memory.
        """
        self._map_all()
        held = {slot: step for step, slot in self.steps.items()}
        self._writing = slot = min(range(NUM_SLOTS), key=lambda slot: held.get(slot, _NONE))
        *_, start, room = _HEADER.unpack_from(self._mapping.view, slot * _SLOT_BYTES)
        self._put(slot, _NONE, 0, start, room)
        if room < num_bytes:  # behind all else: the other slot must stay as it is
            outgrown = start, room
            start, room = _aligned(len(self._mapping.view), _page_bytes(num_bytes)), room_for(num_bytes)
            os.ftruncate(self._file, start + room)
            self._mapping = MappedFile(self._file, start + room)
            self._mapping.fill(start, room)
            self._mapped.clear()
            self._put(slot, _NONE, 0, start, room)
            if outgrown[1]:
                self._mapping.free(*outgrown)
        if slot not in self._mapped:
            self._mapped.add(slot)
            self._mapping.map_now(start, room)
        return self._mapping.view[start : start + num_bytes]

    def finish(self, step: int, num_bytes: int, training: int = 0) -> None:
        """The data of the slot from `begin` are the state after `step` of a training, see `State`."""
        *_, start, room = _HEADER.unpack_from(self._mapping.view, self._writing * _SLOT_BYTES)
        self._put(self._writing, step, num_bytes, start, room, training)

    def data(self, step: int) -> memoryview:
        """The state after a step that is whole."""
        self._map_all()
        *_, num_bytes, start, room = _HEADER.unpack_from(self._mapping.view, self.steps[step] * _SLOT_BYTES)
        return self._mapping.view[start : start + min(num_bytes, room)]

    def _map_all(self) -> None:
        """Another view of the memory in this process may have made it larger."""
        if (num_bytes := os.fstat(self._file).st_size) > len(self._mapping.view):
            self._mapping = MappedFile(self._file, num_bytes)
            self._mapped.clear()

    def drop(self, step: int) -> None:
        """Forget the state after a step."""
        for slot in [slot for whole, slot in self.steps.items() if whole == step]:
            self._put(slot, _NONE, 0, *_HEADER.unpack_from(self._mapping.view, slot * _SLOT_BYTES)[4:])

    def _put(self, slot: int, step: int, num_bytes: int, start: int, room: int, training: int = 0) -> None:
        """Write a header so that its slot is not whole until the last field, the step, is written."""
        at = slot * _SLOT_BYTES
        struct.pack_into("<q", self._mapping.view, at, _NONE)
        struct.pack_into("<qQQQQ", self._mapping.view, at + 8, ~step, training, num_bytes, start, room)
        struct.pack_into("<q", self._mapping.view, at, step)


def room_for(num_bytes: int) -> int:
    """Bytes of memory that one slot takes for a state of so many."""
    return _aligned(int(num_bytes * _MORE), _page_bytes(num_bytes))


def _page_bytes(num_bytes: int) -> int:
    return HUGE_BYTES if num_bytes >= HUGE_BYTES else mmap.PAGESIZE


def _aligned(num_bytes: int, to_bytes: int) -> int:
    return -(-num_bytes // to_bytes) * to_bytes
