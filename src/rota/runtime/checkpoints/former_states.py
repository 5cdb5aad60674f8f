"""What the processes of another plan have left in memory: together all of the state, for fewer ranks or more.

before   rank 0: stage 0 │ rank 1: stage 1 │ rank 2: stage 2 │ rank 3: stage 3      memories that were set aside
now      rank 0: stage 0, stage 1          │ rank 1: stage 2 │ rank 2: stage 3      each takes its stages' state

As in a checkpoint, tensors, options and schedules are found by the names of weights, and the random state is
that of the first process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from rota.errors import PipelineError
from rota.runtime.checkpoints.in_memory import Head, Kept, folder_of, newest_at_load_of, parts_of, read_head
from rota.runtime.checkpoints.manifest import Manifest
from rota.runtime.checkpoints.names import model_key
from rota.runtime.checkpoints.optimizer_state import Record, same
from rota.runtime.checkpoints.state import Trained
from rota.runtime.checkpoints.tensors import Stored
from rota.runtime.checkpoints.training_json import TrainingState
from rota.runtime.kept_memory import Slots, states_in


@final
class FormerStates:
    """The states in the memories `files`, one per process of the other plan. Only `forget` writes there.

    `folder`: that of the training's checkpoints, see `StatesInMemory`.
    """

    def __init__(self, files: Sequence[int], trained: Trained, folder: str) -> None:
        self._files, self._trained = files, trained
        #: The newest step that all of them have, if it is of this training; -1 if there is none.
        self.step = _newest_common(files)
        if self.step >= 0 and any(folder_of(Slots(file).data(self.step)) != folder for file in files):
            self.step = -1
        #: See `newest_at_load_of`.
        self.newest_at_load = newest_at_load_of(Slots(files[0]).data(self.step)) if self.step >= 0 else 0

    def prepare(self) -> Kept:
        """Check that the state of `step` fits, before anything changes. Raises PipelineError, FormatError."""
        heads = [read_head(Slots(file).data(self.step)) for file in self._files]
        index: dict[str, Stored] = {}
        parts: dict[str, memoryview] = {}
        records: dict[str, Record] = {}
        scheduler = None
        for head in heads:
            self._refuse_other(head, heads[0])
            scheduler = scheduler or head.scheduler
            records |= head.records
            index |= head.stored
            parts |= parts_of(head)
        trained = self._trained
        if missing := [key for key in self._needed() if key not in index]:
            raise PipelineError(f"no process that ran before has {missing[0]} in memory; make the same model")
        training = TrainingState(records, scheduler, heads[0].random)
        shards = {weight.names[0]: weight.num_tp_shards for weight in trained.weights.all}
        manifest = Manifest(0, self.step, heads[0].extra, 0, 0, shards, {}, {})
        restoring = trained.prepare(manifest, training, index)
        if sharded := [key for key, tensor in restoring.tensors.items() if hasattr(tensor, "to_local")]:
            raise PipelineError(
                f"{sharded[0]} is sharded over ranks, which cannot take it from memory; use checkpoints"
            )
        values = [(tensor.detach(), parts[key]) for key, tensor in restoring.tensors.items()]
        with_zeros = {key for head in heads for key in head.with_zeros}
        return Kept(self.step, heads[0].extra, restoring, values, with_zeros)

    def forget(self) -> None:
        """Training goes on from a checkpoint: no restart may lead back to these states, if they are of this training.

        All processes do this to the same memories, so that a later start is given none of them, see `Crew`.
        """
        if self.step < 0:
            return
        self.step = -1
        for slots in map(Slots, self._files):
            for step in sorted(slots.steps):  # the newest last: it is whole until the older one is gone
                slots.drop(step)

    def _refuse_other(self, head: Head, first: Head) -> None:
        if head.step != self.step or not same(head.extra, first.extra):
            raise PipelineError(
                f"the processes that ran before have committed different values of extra with step {self.step}; commit "
                f"the same on all ranks"
            )

    def _needed(self) -> list[str]:
        """The keys of this process's weights and buffers."""
        return [model_key(weight.key(weight.names[0], shard)) for weight, shard in self._trained.weights.local()]


def _newest_common(files: Sequence[int]) -> int:
    """The newest step that is whole in all of these memories; -1 if there is none."""
    held = [{step for _, step in states_in(file)} for file in files]
    return max(set.intersection(*held), default=-1) if held else -1
