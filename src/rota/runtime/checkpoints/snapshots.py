"""A rank's states after its last steps, in files in memory that outlive the rank: what a restarted rank goes on from.

after optimizer.step   tensors, and all else in the header ──▶ partial ── rename ──▶ TRAINING-STEP.safetensors
after a restart        the newest step that every rank has whole ──▶ tensors, optimizer, generators

The file of the older one of two states is written again: its memory is there, and mapped. `docs/elastic.md` has the
protocol: when a step counts as committed, and why no step is lost or done twice.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, final

import torch
import torch.distributed as dist

from rota.core.costs import NUM_SNAPSHOTS
from rota.core.errors import PipelineError
from rota.core.simulation import simulate
from rota.core.text import size_text
from rota.runtime.checkpoints.state import Restoring, Trained, TrainingState, read_training, require_step
from rota.runtime.checkpoints.tensors import Chunk, Part, chunks_of, head_of, index_of, padded, read_file, starts_of
from rota.runtime.checkpoints.values import DTYPES
from rota.runtime.environment import say
from rota.runtime.host_memory import available_bytes
from rota.runtime.launcher_files import State, is_restart, states_in
from rota.runtime.pipeline import Pipeline
from rota.runtime.reducing.sharded_stages import is_sharded, unreduced

PARTIAL = "partial"  # what a state is named while it is written
_HEAD_BYTES = 1 << 16  # room for a header that grows, in which numbers become longer


class _Mapped(NamedTuple):
    """A mapped file: its bytes, what it has, the bytes of its head, and the place of each chunk's values."""

    memory: torch.Tensor
    chunks: tuple[Chunk, ...]
    head_bytes: int
    places: list[torch.Tensor]


@final
class Snapshots:
    """The states of this rank in `folder`, which has room for those of one training.

    `checkpoints`, the folder of its checkpoints, says which training it is: a script may run several, one after the
    other. `training` is a short name for that.
    """

    #: Which of these objects keeps its states in this process's memory.
    _writer: ClassVar[Snapshots | None] = None

    def __init__(self, folder: Path, checkpoints: str, training: str) -> None:
        self.folder, self._checkpoints, self._training = folder, checkpoints, training
        self._has_kept = False
        self._mapped: dict[State, _Mapped] = {}  # of the states that this object has written
        self._common: int | None = None  # the step from which all ranks have gone on

    @property
    def steps(self) -> list[int]:
        """The steps of this training whose states are whole."""
        return sorted(step for training, step in states_in(self.folder) if training == self._training)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the host's memory that the files take already."""
        return sum(512 * entry.stat().st_blocks for entry in os.scandir(self.folder))

    @property
    def disk_bytes(self) -> int:
        """Bytes that the file system of the folder has for more states."""
        system = os.statvfs(self.folder)
        return system.f_bavail * system.f_frsize

    # --- writing ------------------------------------------------------------------------------------------------------

    def keep(self, step: int, data: Mapping[Chunk, torch.Tensor], training: dict[str, Any]) -> None:
        """Copy a state, which becomes that of `step`, into the file of the older one of two; `training`: as JSON.

        Raises PipelineError if another training has taken the memory, OSError if there is not enough of it.
        """
        self._take_memory()
        self._write(State(self._training, step), data, training)

    def _write(self, state: State, data: Mapping[Chunk, torch.Tensor], training: dict[str, Any]) -> None:
        chunks, path, mapped = tuple(data), self.folder / PARTIAL, None
        if len(states := states_in(self.folder)) >= NUM_SNAPSHOTS:
            oldest = min(states, key=lambda state: state.step)
            os.rename(self.folder / oldest.file, path)
            mapped = self._mapped.pop(oldest, None)
        head = head_of(chunks, training)
        if mapped is None or mapped.chunks != chunks or mapped.head_bytes < len(head):
            mapped = None  # its memory is free before there is more
            mapped = self._allocate(path, chunks, len(padded(head, len(head) + _HEAD_BYTES)))
        head = padded(head, mapped.head_bytes)
        mapped.memory[: len(head)].copy_(torch.frombuffer(bytearray(head), dtype=torch.uint8))
        for place, tensor in zip(mapped.places, data.values(), strict=True):
            place.copy_(tensor)
        os.rename(path, self.folder / state.file)
        self._mapped[state] = mapped

    def _allocate(self, path: Path, chunks: tuple[Chunk, ...], head_bytes: int) -> _Mapped:
        """A new file with all of its memory: a page that is missing later would end the process."""
        *starts, num_bytes = starts_of(chunks, head_bytes)
        path.unlink(missing_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, num_bytes)
        finally:
            os.close(file)
        memory = torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
        places = [
            memory[start : start + chunk.num_bytes].view(DTYPES[chunk.dtype]).view(chunk.sizes)
            for chunk, start in zip(chunks, starts, strict=True)
        ]
        return _Mapped(memory, chunks, head_bytes, places)

    def _take_memory(self) -> None:
        """Forget what no restart may mix with this training: others' states, and steps that nobody has gone on from."""
        writer = Snapshots._writer
        if writer is self:
            return
        if self._has_kept and writer is not None:
            raise PipelineError(
                f"commit for {self._checkpoints} after one for {writer._checkpoints}: the memory has room for one "
                f"training, so that a restart would take the other from its last checkpoint; leave out commit for "
                f"both, or end one before the other begins"
            )
        if writer is not None:
            writer._mapped.clear()
        Snapshots._writer, self._has_kept = self, True
        self._drop(states_in(self.folder) - {State(self._training, -1 if self._common is None else self._common)})

    def _drop(self, states: Iterable[State]) -> None:
        for state in states:
            self._mapped.pop(state, None)
            os.unlink(self.folder / state.file)

    def give_up(self) -> None:
        """Forget the states that this object has kept, and give their memory back."""
        if Snapshots._writer is self:
            self._mapped.clear()
            for entry in os.scandir(self.folder):
                os.unlink(entry)

    # --- reading ------------------------------------------------------------------------------------------------------

    def newest_at_load(self, step: int) -> int:
        """The number of the newest checkpoint when the training of a state last loaded one.

        A training may have gone back: those are not newer than its state, even if their steps are higher.
        """
        return self._read(step)[1].first.newest_at_load

    def _read(self, step: int) -> tuple[list[Part], TrainingState]:
        parts, field = read_file(self.folder / State(self._training, step).file, None)
        return parts, read_training([field])

    def prepare(self, step: int, trained: Trained) -> Restoring:
        """Check that the state after `step` fits, before anything changes. Raises PipelineError, FormatError."""
        parts, training = self._read(step)
        shards = {weight.names[0]: weight.num_tp_shards for weight in trained.weights.all}
        restoring = trained.prepare(shards, training, index_of(parts))
        kept = {part.chunk for part in parts}
        for chunk in chunks_of(restoring.tensors).keys() ^ kept:
            was = [(other.offsets, other.sizes) for other in kept if other.key == chunk.key]
            raise PipelineError(
                f"this process had {was} (offsets and sizes) of {chunk.key}, but has another part of it now; make the "
                f"same model, and shard the model and the optimizer's state alike"
            )
        return restoring

    def forget_all_but(self, step: int | None) -> None:
        """Steps of this training that not all ranks have are not committed: drop them."""
        self._common = step
        self._drop(State(self._training, other) for other in self.steps if other != step)


# --- when they are kept, and if they fit ------------------------------------------------------------------------------

_INSTEAD = "a restart goes on from the last checkpoint"


@final
class Commits:
    """Keeps this rank's states in `snapshots`.

    `share`: all processes' JSON values, given what they wait for and this process's own. Collective.
    """

    def __init__(
        self, pipeline: Pipeline, trained: Trained, snapshots: Snapshots, share: Callable[[str, Any], list[Any]]
    ) -> None:
        self.snapshots = snapshots
        #: What `commit` was given last, or the step that a restart has gone on from; -1 if there is none.
        self.last_step = -1
        self._pipeline, self._trained, self._share = pipeline, trained, share
        self._is_sharded = any(map(is_sharded, pipeline.parameters()))
        self._num_commits = 0
        self._num_steps = -1  # of the pipeline's, at the last commit
        self._most_bytes = 0  # of memory for the states of one rank
        self._has_room = True  # if not, no rank keeps any
        self._has_room_here = True  # if not, this rank keeps none until all ranks count again

    def commit(self, step: int, extra: dict[str, Any], newest_at_load: int) -> None:
        """See `Checkpoints.commit`, and `Snapshots.keep`."""
        if not self._has_room:
            return
        begun_s, pipeline = time.monotonic(), self._pipeline
        self._refuse_gradients()
        require_step(step)
        if step <= self.last_step and pipeline.num_steps != self._num_steps:
            raise PipelineError(
                f"commit({step}) after commit({self.last_step}) and more steps: a restart could not tell which state "
                f"is newer; give the number of steps done"
            )
        has_begun_steps = pipeline.has_begun_steps
        pipeline.settle_begun_steps()  # the weights of a step that is refused must not be kept
        tensors, training = self._trained.collect(step, extra, newest_at_load)
        data = chunks_of(tensors)
        self._num_commits += 1
        if self._num_commits & (self._num_commits - 1) == 0:  # commits 1, 2, 4, 8, …: an optimizer's state grows
            self._has_room = self._count(data)
        if not self._has_room:
            self.snapshots.give_up()
            return
        if has_begun_steps or pipeline.num_steps == self._num_steps:
            # No rank may be two steps ahead of another, and no step has made them wait for each other.
            self._share(f"the other ranks to commit step {step}", None)
        self._num_steps, self.last_step = pipeline.num_steps, step
        if not self._has_room_here:
            return
        try:
            self.snapshots.keep(step, data, training)
        except OSError as error:
            self._has_room_here = False
            self.snapshots.give_up()
            say(
                f"process {dist.get_rank()} keeps no states in memory from step {step} on: its state has grown, and "
                f"this machine lacks memory for it ({error.strerror}); {_INSTEAD}"
            )
        else:
            if pipeline.progress is not None:
                pipeline.progress.committed(begun_s, self._most_bytes)

    def _refuse_gradients(self) -> None:
        """Raises PipelineError if a weight has a gradient. No optimizer has buffers, so theirs do not count."""
        weights = [weight for weight, _ in self._trained.weights.local() if not weight.is_buffer]
        for weight in weights:
            if weight.tensor.grad is not None:
                raise PipelineError(
                    f"{weight.names[0]} has a gradient, which a restart from memory would lose; call commit after "
                    f"optimizer.step() and optimizer.zero_grad(), without set_to_none=False"
                )
        if self._is_sharded and (held_back := unreduced(self._pipeline.local_stages.values())):
            name = next(weight.names[0] for weight in weights if weight.tensor in held_back)
            raise PipelineError(
                f"{name} has a gradient of a step with sync=False, which FSDP keeps until a step with sync=True, and "
                f"which a restart from memory would lose; call commit after a step with sync=True, optimizer.step() "
                f"and optimizer.zero_grad()"
            )

    def _count(self, chunks: Iterable[Chunk]) -> bool:
        """Whether the states of all ranks fit, as they are now. Says what they need, and what there is. Collective."""
        self._trained.weights.require_all()
        tensor_bytes = NUM_SNAPSHOTS * sum(chunk.num_bytes for chunk in chunks)
        needed_bytes = tensor_bytes + 2 * NUM_SNAPSHOTS * _HEAD_BYTES
        disk_bytes, host_bytes = self.snapshots.disk_bytes, available_bytes()
        taken_bytes = min(needed_bytes, self.snapshots.allocated_bytes)
        free_bytes = disk_bytes if host_bytes is None else min(disk_bytes, host_bytes)
        problem = None
        if self._is_over_limit(tensor_bytes):
            problem = f"has no room for {size_text(needed_bytes)} in the plan's limit"
        elif not self._has_room_here:
            problem = "ran out of memory for its state"
        counts = [needed_bytes, taken_bytes, disk_bytes, free_bytes, problem]
        by_process = self._share(f"the other ranks' commit number {self._num_commits}", counts)
        needed, taken, on_disk, free, problems = zip(*by_process, strict=True)
        self._most_bytes = max(needed)
        room_bytes = sum(taken) + min(free)
        reason = next((f"process {process} {text}" for process, text in enumerate(problems) if text), None)
        fits = reason is None and sum(needed) <= room_bytes
        if reason is None and not fits and min(on_disk) == min(free):
            where = self.snapshots.folder.parent.parent
            reason = f"{where} has {size_text(room_bytes)}: enlarge it, or name another tmpfs by --snapshot-folder"
        elif reason is None:
            reason = f"this machine has {size_text(room_bytes)} for them"
        if self._pipeline.processes.is_first:
            if not fits:
                say(f"states are not kept in memory: they need {size_text(sum(needed))}, and {reason}; {_INSTEAD}")
            elif self._num_commits == 2 and not is_restart():  # the first step has made the optimizer's state
                say(f"states are kept in memory: they need {size_text(sum(needed))}, and {reason}")
        return fits

    def _is_over_limit(self, tensor_bytes: int) -> bool:
        """Whether this process would need more than its memory limit, which counts the host's memory on a CPU alone."""
        placement, rank = self._pipeline.plan.placement, self._pipeline.rank
        limit_bytes = placement.cluster.limit_bytes[rank]
        if limit_bytes is None or self._pipeline.device.type != "cpu":
            return False
        counted_bytes = placement.snapshot_bytes[rank] if placement.snapshot_bytes else 0
        return simulate(self._pipeline.plan).peak_memory_bytes[rank] - counted_bytes + tensor_bytes > limit_bytes
