"""Memory that outlives a rank: the supervisor owns it, the rank writes its state of the last steps into it.

    0                                                 64        128           4096, or 2 MiB
    │ slot 0: step, ~step, bytes, start, room, leans  │ slot 1 … │ in use … │ data of slot 0 │ data of slot 1 │ …

A slot holds the state after one step. It is whole if `step` and its complement say so: the writer takes `step` away,
writes the data, and puts the new step in place last. So a rank that is killed at any instant loses at most the slot
that it was writing: the kernel keeps what a killed process has written, in the order in which it was written.

Tensors that training itself has in use may lie here, too. They are the state of the step in their header, and before
the rank writes to them, it takes that step away. A slot may lean on them: then it is whole if both have its step.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from typing import final

from rota.runtime.mapped_file import HUGE_BYTES, MappedFile

# Environment variables, set by the launcher: numbers of open files.
_KEPT, _FORMER = "ROTA_KEPT_MEMORY", "ROTA_FORMER_MEMORIES"
_NONE = -1
_HEADER = struct.Struct("<qqQQQQ")  # step, its complement, bytes of data, where they start, bytes of room there, leans
_LEANS_AT = _HEADER.size - 8
_SLOT_BYTES, _IN_USE_AT, _HEADERS_BYTES = 64, 128, 4096
NUM_SLOTS = 2
_MORE = 17 / 16  # room for numbers that grow
MOST_FORMER = 120  #: memories of earlier processes that one process can be given


def environment_of(files: Sequence[int]) -> dict[str, str]:
    """The environment through which a rank finds its memory, and then those of earlier processes; empty if none."""
    if not files:
        return {}
    return {_KEPT: str(files[0]), **({_FORMER: ",".join(map(str, files[1:]))} if files[1:] else {})}


def is_given() -> bool:
    """Whether the launcher keeps a memory for this rank: then the rank may be started again."""
    return _KEPT in os.environ


def given() -> int | None:
    """The file of this rank's memory, which no process that it starts gets; None if the launcher keeps none."""
    if (number := os.environ.get(_KEPT)) is None:
        return None
    os.set_inheritable(int(number), False)
    return int(number)


def given_former() -> list[int]:
    """The files of the memories that the processes of another plan have left, by their rank."""
    files = [int(number) for number in os.environ.get(_FORMER, "").split(",") if number]
    for file in files:
        os.set_inheritable(file, False)
    return files


@final
class KeptMemories:
    """One memory per rank, for as long as the context manager is entered. Nothing is in any folder."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._stack = ExitStack()
        self.files: list[int] = []
        #: What the processes of another plan have left, by their rank; no process writes to it.
        self.former: list[int] = []

    def __enter__(self) -> KeptMemories:
        with self._stack as stack:
            stack.callback(self._close)
            for rank in range(self._num_ranks):
                self.files.append(os.memfd_create(f"rota-rank-{rank}"))
            self._stack = stack.pop_all()
        return self

    def _close(self) -> None:
        for file in (*self.files, *self.former):
            os.close(file)

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def forget(self, rank: int) -> None:
        """Free what a rank has in memory, which it does not come back to."""
        if self.files:
            os.close(self.files[rank])
            self.files[rank] = os.memfd_create(f"rota-rank-{rank}")

    def copy(self, source: int, target: int) -> None:
        """Give rank `target` all that rank `source` has in memory. Neither may be running."""
        self.forget(target)
        left = os.fstat(self.files[source]).st_size
        os.lseek(self.files[target], 0, os.SEEK_SET)
        at = 0
        while at < left:
            at += os.sendfile(self.files[target], self.files[source], at, left - at)

    def set_aside(self, ranks: Sequence[int]) -> None:
        """Keep what these ranks have as `former`, and give all ranks new memories."""
        if not self.files:
            return
        self.drop_former()
        self.former = [self.files[rank] for rank in ranks]
        for rank, file in enumerate(self.files):
            if rank not in ranks:
                os.close(file)
            self.files[rank] = os.memfd_create(f"rota-rank-{rank}")

    def drop_former(self) -> None:
        """Free what is in `former`."""
        for file in self.former:
            os.close(file)
        self.former = []

    def newest_step(self, ranks: Sequence[int]) -> int:
        """The newest step that all of these ranks hold; -1 if there is none."""
        return max(self.common_steps(ranks), default=_NONE)

    def common_steps(self, ranks: Sequence[int]) -> set[int]:
        """The steps that all of these ranks hold."""
        return common_steps([self.files[rank] for rank in ranks]) if self.files else set()


def steps_in(file: int) -> list[int]:
    """The steps that are whole in a rank's memory."""
    headers = os.pread(file, _HEADERS_BYTES, 0)
    return [*_whole(headers)] if len(headers) == _HEADERS_BYTES else []


def _whole(headers: bytes | memoryview) -> dict[int, int]:
    """Each whole step, and its slot."""
    step_in_use, found = _step_at(headers, _IN_USE_AT), {}
    for slot in range(NUM_SLOTS):
        step = _step_at(headers, slot * _SLOT_BYTES)
        leans = _HEADER.unpack_from(headers, slot * _SLOT_BYTES)[-1]
        if step != _NONE and (not leans or step == step_in_use):
            found[step] = slot
    return found


def _step_at(headers: bytes | memoryview, at: int) -> int:
    step, complement, *_ = _HEADER.unpack_from(headers, at)
    return step if step >= 0 and complement == ~step else _NONE


def common_steps(files: Sequence[int]) -> set[int]:
    """The steps that are whole in all of these memories."""
    held = [{*steps_in(file)} for file in files]
    return set.intersection(*held) if held else set()


def newest_common(files: Sequence[int]) -> int:
    """The newest step that is whole in all of these memories; -1 if there is none."""
    return max(common_steps(files), default=_NONE)


@final
class Slots:
    """A rank's view of its memory."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._writing = 0
        self._mapped: set[int] = set()  # headers of which all pages of the data are mapped
        if os.fstat(file).st_size < _HEADERS_BYTES:
            os.posix_fallocate(file, 0, _HEADERS_BYTES)
            self._mapping = MappedFile(file, _HEADERS_BYTES)
            for at in (_IN_USE_AT, *(slot * _SLOT_BYTES for slot in range(NUM_SLOTS))):
                self._put(at, _NONE, 0, _HEADERS_BYTES, 0)
        self._mapping = MappedFile(file, os.fstat(file).st_size)

    @property
    def steps(self) -> dict[int, int]:
        """Each whole step, and its slot."""
        return _whole(self._mapping.view)

    # --- slots ----------------------------------------------------------------------------------------------------

    def begin(self, num_bytes: int) -> memoryview:
        """Room for a new state, in the slot that holds the older step or none; what that held is gone.

        Raises OSError if there is not enough memory.
        """
        held = {slot: step for step, slot in self.steps.items()}
        self._writing = min(range(NUM_SLOTS), key=lambda slot: held.get(slot, _NONE))
        return self._room(self._writing * _SLOT_BYTES, num_bytes)

    def finish(self, step: int, num_bytes: int, *, leans: bool = False) -> None:
        """The data of the slot from `begin` are the state after `step`; if it leans, together with the tensors in use.

        Then `use` makes it whole, and `complete` can follow.
        """
        at = self._writing * _SLOT_BYTES
        self._put(at, step, num_bytes, *self._place(at), leans)

    def complete(self, step: int) -> None:
        """The slot of a step does not lean any more, if it is still there: its data are all of the state."""
        if (slot := self.steps.get(step)) is not None:
            struct.pack_into("<Q", self._mapping.view, slot * _SLOT_BYTES + _LEANS_AT, 0)

    def data(self, step: int) -> memoryview:
        """The state after a step that is whole; `leans` tells if some of it is in the tensors in use."""
        return self._data_at(self.steps[step] * _SLOT_BYTES)

    def leans(self, step: int) -> bool:
        """Whether the state after a step that is whole leans on the tensors in use."""
        return bool(_HEADER.unpack_from(self._mapping.view, self.steps[step] * _SLOT_BYTES)[-1])

    def drop_all_but(self, step: int | None) -> None:
        """Forget other steps: those that not all ranks have."""
        kept = self.steps.get(-1 if step is None else step)
        for slot in range(NUM_SLOTS):
            if slot != kept:
                at = slot * _SLOT_BYTES
                self._put(at, _NONE, 0, *self._place(at))
        if step is None or step != self.step_in_use:
            self.release()

    # --- tensors in use -------------------------------------------------------------------------------------------

    @property
    def step_in_use(self) -> int:
        """The step after which the tensors in use are the state; -1 if they may be anything."""
        return _step_at(self._mapping.view, _IN_USE_AT)

    @property
    def in_use(self) -> memoryview:
        """The bytes of the tensors in use."""
        return self._data_at(_IN_USE_AT)

    def make_room_in_use(self, num_bytes: int) -> memoryview:
        """Room for the tensors in use, which belong to no step. Raises OSError if there is not enough memory."""
        room = self._room(_IN_USE_AT, num_bytes)
        self._put(_IN_USE_AT, _NONE, num_bytes, *self._place(_IN_USE_AT))
        return room

    def use(self, step: int) -> None:
        """The tensors in use are the state after `step` until `release`."""
        *_, num_bytes, start, room, _ = _HEADER.unpack_from(self._mapping.view, _IN_USE_AT)
        self._put(_IN_USE_AT, step, num_bytes, start, room)

    def release(self) -> None:
        """The tensors in use may be written now. What leans on them is not whole any more."""
        struct.pack_into("<q", self._mapping.view, _IN_USE_AT, _NONE)

    # --- both -----------------------------------------------------------------------------------------------------

    def _room(self, at: int, num_bytes: int) -> memoryview:
        """Take the step of the header at `at` away; room for new data, as large as before or behind all else."""
        start, room = self._place(at)
        self._put(at, _NONE, 0, start, room)
        if room < num_bytes:  # behind all else: what other headers hold must stay as it is
            page_bytes = HUGE_BYTES if num_bytes >= HUGE_BYTES else mmap.PAGESIZE
            start, room = (_aligned(size, page_bytes) for size in (len(self._mapping.view), int(num_bytes * _MORE)))
            os.ftruncate(self._file, start + room)
            self._mapping = MappedFile(self._file, start + room)
            self._mapping.fill(start, room)
            self._mapped.clear()
            self._put(at, _NONE, 0, start, room)
        if at not in self._mapped:
            self._mapped.add(at)
            self._mapping.map_now(start, room)
        return self._mapping.view[start : start + num_bytes]

    def _place(self, at: int) -> tuple[int, int]:
        """Where the data of a header start, and the bytes of room there."""
        *_, start, room, _ = _HEADER.unpack_from(self._mapping.view, at)
        return start, room

    def _data_at(self, at: int) -> memoryview:
        *_, num_bytes, start, room, _ = _HEADER.unpack_from(self._mapping.view, at)
        return self._mapping.view[start : start + min(num_bytes, room)]

    def _put(self, at: int, step: int, num_bytes: int, start: int, room: int, leans: bool = False) -> None:
        """Write a header so that what it tells of is not whole until the last field, the step, is written."""
        struct.pack_into("<q", self._mapping.view, at, _NONE)
        struct.pack_into("<qQQQQ", self._mapping.view, at + 8, ~step, num_bytes, start, room, leans)
        struct.pack_into("<q", self._mapping.view, at, step)


def _aligned(num_bytes: int, to_bytes: int) -> int:
    return -(-num_bytes // to_bytes) * to_bytes
