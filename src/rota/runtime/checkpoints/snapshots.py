"""A rank's states after its last steps, in files in memory that outlive the rank: what a restarted rank goes on from.

after optimizer.step   tensors, and all else in the header ──▶ partial ── rename ──▶ TRAINING-STEP.safetensors
after a restart        the newest step that every rank has whole ──copy──▶ tensors, optimizer, generators

The file of the older one of two states is written again: its memory is there, and mapped. `docs/elastic.md` has the
protocol: when a step counts as committed, and why no step is lost or done twice.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, final

import torch

from rota.core.costs import NUM_SNAPSHOTS
from rota.core.errors import FormatError, PipelineError
from rota.core.reading import Field
from rota.runtime.checkpoints.rank_file import (
    ALIGNED,
    Chunk,
    chunks_of,
    head_bytes,
    head_of,
    padded,
    read_head,
    starts_of,
)
from rota.runtime.checkpoints.state import Restoring, Trained, TrainingState
from rota.runtime.launcher_files import State, states_in

PARTIAL = "partial"  # what a state is named while it is written
_HEAD_BYTES = 1 << 16  # room for a header that grows, in which numbers become longer


class _File(NamedTuple):
    """A mapped file: its bytes, where its tensors begin, and the place of each one's values."""

    memory: torch.Tensor
    chunks: tuple[Chunk, ...]
    begin: int
    values: list[torch.Tensor]

    @classmethod
    def over(cls, memory: torch.Tensor, chunks: tuple[Chunk, ...], begin: int) -> _File:
        """The places of these chunks in the memory."""
        places = zip(chunks, starts_of(chunks, begin), strict=False)
        values = [
            _plain(memory[start : start + chunk.num_bytes].view(chunk.dtype).view(chunk.box[1]))
            for chunk, start in places
        ]
        return cls(memory, chunks, begin, values)


def _memory_of(path: Path) -> torch.Tensor:
    """The bytes of a file, mapped."""
    return torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that can be copied, as those of some dtypes of one byte cannot be."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


class Kept(NamedTuple):
    """A state that fits, which is not set yet: `restore` does that. `extra` is what `commit` was given."""

    extra: dict[str, Any]
    restoring: Restoring
    values: list[tuple[torch.Tensor, torch.Tensor]]

    def restore(self) -> None:
        """Set weights, buffers, optimizer, scheduler and random states."""
        for tensor, value in self.values:
            _plain(tensor).copy_(value)
        self.restoring.finish()


@final
class Snapshots:
    """The states of this rank in `folder`, which has room for those of one training.

    `checkpoints`, the folder of its checkpoints, says which training it is: a script may run several, one after the
    other. `training` is a short name for that.
    """

    #: Which of these objects keeps its states in this process's memory, and its checkpoints.
    _writer: ClassVar[tuple[object, str] | None] = None

    def __init__(self, folder: Path, trained: Trained, checkpoints: str, training: str) -> None:
        self.folder, self._trained = folder, trained
        self._checkpoints, self._training = checkpoints, training
        self._me = object(), checkpoints
        self._has_kept = False
        self._files: dict[int, _File] = {}  # by their numbers in the file system
        self._common: int | None = None  # the step from which all ranks have gone on

    @property
    def steps(self) -> list[int]:
        """The steps of this training whose states are whole."""
        return sorted(step for training, step in states_in(self.folder) if training == self._training)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the host's memory that the files take already."""
        return sum(512 * entry.stat().st_blocks for entry in os.scandir(self.folder))

    def newest_at_load(self, step: int) -> int:
        """The number of the newest checkpoint when the training of a state last loaded one.

        A training may have gone back: those are not newer than its state, even if their steps are higher.
        """
        return self._read(step)[1]["newest_at_load"].read(int)

    @property
    def disk_bytes(self) -> int:
        """Bytes that the file system of the folder has for more states."""
        system = os.statvfs(self.folder)
        return system.f_bavail * system.f_frsize

    def count(self) -> tuple[int, int]:
        """Bytes of the host's memory for two states as they are now, and of two copies of their tensors."""
        tensors, _ = self._trained.collect(with_buffers=True)
        tensor_bytes = sum(chunk.num_bytes for chunk in chunks_of(tensors))
        return NUM_SNAPSHOTS * (tensor_bytes + 2 * _HEAD_BYTES), NUM_SNAPSHOTS * tensor_bytes

    # --- writing ------------------------------------------------------------------------------------------------------

    def keep(self, step: int, extra: dict[str, Any], newest_at_load: int) -> None:
        """Copy the state, which becomes that of `step`, instead of the older one of two.

        Raises PipelineError if a tensor cannot be kept, OSError if there is not enough memory.
        """
        tensors, small = self._trained.collect(with_buffers=True)
        data = chunks_of(tensors)
        beside = {"newest_at_load": newest_at_load, "extra": extra, "training": small["training"]}
        self._take_memory()
        self._write(State(self._training, step), data, beside)

    def _write(self, state: State, data: dict[Chunk, torch.Tensor], beside: dict[str, Any]) -> None:
        chunks, path = tuple(data), self.folder / PARTIAL
        held = sorted(states_in(self.folder), key=lambda held: held.step)
        if len(held) >= NUM_SNAPSHOTS:
            os.rename(self.folder / held[0].file, path)
        head = head_of(chunks, beside)
        file = self._mapped(path, chunks, head)
        head = padded(head, file.begin)
        file.memory[: len(head)].copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        for place, tensor in zip(file.values, data.values(), strict=True):
            place.copy_(_plain(tensor))
        os.rename(path, self.folder / state.file)

    def _mapped(self, path: Path, chunks: tuple[Chunk, ...], head: bytes) -> _File:
        """The file for these chunks and this head: the one that is there, if it fits."""
        end = starts_of(chunks, 0)[-1]
        begin = path.stat().st_size - end if path.exists() else 0
        if not len(head) <= begin <= len(head) + 2 * _HEAD_BYTES or begin % ALIGNED:
            begin = len(padded(head, max(len(head), _HEAD_BYTES) + _HEAD_BYTES))
            self._allocate(path, begin + end)
        number = path.stat().st_ino
        file = self._files.get(number)
        if file is None or file.chunks != chunks:
            memory = _memory_of(path) if file is None else file.memory
            file = self._files[number] = _File.over(memory, chunks, begin)
        return file

    def _allocate(self, path: Path, num_bytes: int) -> None:
        """Make the file with all of its memory. A page that is missing later would end the process."""
        path.unlink(missing_ok=True)
        numbers = {entry.inode() for entry in os.scandir(self.folder)}
        self._files = {number: file for number, file in self._files.items() if number in numbers}
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, num_bytes)
        finally:
            os.close(file)

    def _take_memory(self) -> None:
        """Forget what no restart may mix with this training: others' states, and steps that nobody has gone on from.

        Raises PipelineError if another training has taken the memory since.
        """
        if self._writer is self._me:
            return
        if self._has_kept and self._writer is not None:
            raise PipelineError(
                f"commit for {self._checkpoints} after one for {self._writer[1]}: the memory has room for one "
                f"training, so that a restart would take the other from its last checkpoint; leave out commit for "
                f"both, or end one before the other begins"
            )
        Snapshots._writer, self._has_kept = self._me, True
        self._drop(states_in(self.folder) - {State(self._training, -1 if self._common is None else self._common)})

    def _drop(self, states: Iterable[State]) -> None:
        for state in states:
            os.rename(self.folder / state.file, self.folder / PARTIAL)

    def give_up(self) -> None:
        """Forget the states that this object has kept, and give their memory back."""
        if self._writer is self._me:
            self._files.clear()
            for entry in os.scandir(self.folder):
                os.unlink(entry)

    # --- reading ------------------------------------------------------------------------------------------------------

    def _read(self, step: int) -> tuple[_File, Field]:
        """The state after a step, and what is beside its tensors. Raises FormatError."""
        memory = _memory_of(self.folder / State(self._training, step).file)
        data = memory.numpy().data
        head = bytes(data[: head_bytes(data, len(data))])
        chunks, beside = read_head(head)
        if (end := starts_of(chunks, len(head))[-1]) != len(data):
            raise FormatError(f"the state in memory has {len(data):,} bytes, but its tensors end at byte {end:,}")
        return _File.over(memory, chunks, len(head)), beside

    def prepare(self, step: int) -> Kept:
        """Check that the state after `step` fits, before anything changes. Raises PipelineError, FormatError."""
        file, beside = self._read(step)
        trained = self._trained
        shards = {weight.names[0]: weight.num_tp_shards for weight in trained.weights.all}
        training = TrainingState.from_json(beside["training"])
        try:
            restoring = trained.prepare(shards, training, {chunk.key: chunk for chunk in file.chunks})
        except KeyError as error:
            raise PipelineError(f"the state in memory has no {error.args[0]}; make the same model") from None
        own, kept = chunks_of(restoring.tensors), dict(zip(file.chunks, file.values, strict=True))
        for chunk in own.keys() ^ kept.keys():
            was, now = ([part.box for part in chunks if part.key == chunk.key] for chunks in (kept, own))
            raise PipelineError(
                f"this process had {was} (offsets and sizes) of {chunk.key}, but has {now} of it now; make the same "
                f"model, and shard the model and the optimizer's state alike"
            )
        values = [(tensor, kept[chunk]) for chunk, tensor in own.items()]
        return Kept(beside["extra"].value, restoring, values)

    def forget_all_but(self, step: int | None) -> None:
        """Steps of this training that not all ranks have are not committed: drop them."""
        self._common = step
        self._drop(State(self._training, other) for other in self.steps if other != step)
