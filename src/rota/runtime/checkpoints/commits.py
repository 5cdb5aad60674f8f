"""`Checkpoints.commit` on a rank that has room for its last states in memory: when they are kept, and if they fit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, final

import torch.distributed as dist

from rota.core.errors import PipelineError
from rota.core.simulation import simulate
from rota.core.text import size_text
from rota.runtime.checkpoints.checkpoint_folder import say
from rota.runtime.checkpoints.manifest import require_json, require_step
from rota.runtime.checkpoints.snapshots import Snapshots
from rota.runtime.checkpoints.state import Trained
from rota.runtime.host_memory import available_bytes
from rota.runtime.launcher_files import is_restart
from rota.runtime.pipeline import Pipeline
from rota.runtime.reducing.sharded_stages import is_sharded, unreduced

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
        self._num_commits += 1
        if self._num_commits & (self._num_commits - 1) == 0:  # commits 1, 2, 4, 8, …: an optimizer's state grows
            self._has_room = self._count()
        if not self._has_room:
            self.snapshots.give_up()
            return
        if has_begun_steps or pipeline.num_steps == self._num_steps:
            # No rank may be two steps ahead of another, and no step has made them wait for each other.
            self._share(f"the other ranks to commit step {step}", None)
        self._num_steps, self.last_step = pipeline.num_steps, step
        if not self._has_room_here:
            return
        require_json(extra)
        try:
            self.snapshots.keep(step, extra, newest_at_load)
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

    # --- room -----------------------------------------------------------------------------------------------------

    def _count(self) -> bool:
        """Whether the states of all ranks fit, as they are now. Says what they need, and what there is. Collective."""
        self._trained.weights.require_all()
        needed_bytes, tensor_bytes = self.snapshots.count()
        disk_bytes, host_bytes = self.snapshots.disk_bytes, available_bytes()
        taken_bytes = min(needed_bytes, self.snapshots.allocated_bytes)
        free_bytes = disk_bytes if host_bytes is None else min(disk_bytes, host_bytes)
        problem = None
        if self._is_over_limit(tensor_bytes):
            problem = f"has no room for {size_text(needed_bytes)} in the plan's limit"
        elif not self._has_room_here:
            problem = "ran out of memory for its state"
        of_processes = self._share(
            f"the other ranks' commit number {self._num_commits}",
            [needed_bytes, taken_bytes, disk_bytes, free_bytes, problem],
        )
        needed, taken, on_disk, free, problems = zip(*of_processes, strict=True)
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
