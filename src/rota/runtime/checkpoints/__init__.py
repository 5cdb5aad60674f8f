"""Checkpoints: the state of a training run under the whole model's names, so that any other plan can resume it.

every rank   its share of the tensors ─────────────────────────▶ step-20.partial/rank-0.safetensors …
first rank   all other state, and the files with their digests ──▶ rota.json ── rename ──▶ step-20/
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch.optim import Optimizer

from rota.core.errors import FormatError, LostRankError, PipelineError
from rota.core.plan import Plan
from rota.core.reading import LARGEST, Field
from rota.runtime import control, kept_memory
from rota.runtime.agreement import Call
from rota.runtime.checkpoints import checkpoint_folder
from rota.runtime.checkpoints.all_ranks import DamagedError, Ranks
from rota.runtime.checkpoints.batches import Batches
from rota.runtime.checkpoints.contents import read_contents
from rota.runtime.checkpoints.lock import locked
from rota.runtime.checkpoints.manifest import MANIFEST, File, Manifest, file_of, read_saved, require_json
from rota.runtime.checkpoints.names import Weights
from rota.runtime.checkpoints.optimizer_state import refuse_inner_optimizers
from rota.runtime.checkpoints.rank_file import Chunk, chunks_of, write_file
from rota.runtime.checkpoints.snapshots import Snapshots, count_room
from rota.runtime.checkpoints.state import Merged, Restoring, Trained, merge
from rota.runtime.checkpoints.tensors import Reader, copied, share_out
from rota.runtime.faults.watchdog import PATIENT
from rota.runtime.json_messages import all_gather_json
from rota.runtime.launcher_files import is_restart
from rota.runtime.pipeline import Pipeline
from rota.runtime.reducing.wrapped_stages import is_sharded, unreduced
from rota.runtime.transport import collective


class Checkpoint(NamedTuple):
    """What `load` returns: the `step` and `extra` given to `save` or `commit`, and the plan that ran then.

    `path`: the checkpoint's folder; None for a state that was kept in memory.
    """

    step: int
    extra: dict[str, Any]
    plan: Plan
    path: Path | None


_LEFT_LOCK_S = 100.0  # NFS frees the locks of a machine that is gone after 90 s
_WITHOUT = "a restart goes on from the last checkpoint"


@final
class Checkpoints:
    """Saves a pipeline's training in `folder`, and resumes it with any cut, plan, number of ranks and of replicas.

    Every rank makes one, with the same arguments except its own `optimizer` and `scheduler`. Making one, `save` and
    `load` are collective. Checkpoints hold no code: all state of optimizer and scheduler besides tensors is written as
    JSON. It must be numbers, strings and tensors, in lists, tuples and dicts; `save` refuses anything else.

    Args:
        folder: all ranks must see the same folder.
        pipeline: whose weights and buffers are saved.
        optimizer: this rank's; None on a rank without weights. None on all ranks: only the model is saved and loaded.
        scheduler: this rank's learning rate scheduler, if it has one.
        keep: how many of the newest checkpoints to keep; None keeps all.
        asynchronous: `save` returns when the state is copied, and a thread writes it.

    Raises:
        PipelineError: on all ranks, if one of them fails, or if another job uses the folder: the first process holds a
            lock until `close`.
    """

    def __init__(
        self,
        folder: str | Path,
        pipeline: Pipeline,
        optimizer: Optimizer | None,
        scheduler: Any = None,
        keep: int | None = 3,
        asynchronous: bool = False,
    ) -> None:
        if not isinstance(folder, (str, Path)):
            raise PipelineError(f"folder={folder!r}: give the path of a folder, which all ranks see")
        if not isinstance(pipeline, Pipeline):
            raise PipelineError(
                f"pipeline is a {type(pipeline).__name__}, which has no checkpoints; give a rota.Pipeline"
            )
        if keep is not None and (type(keep) is not int or keep < 1):
            raise PipelineError(f"keep={keep!r}: keep 1 checkpoint or more, or all by keep=None")
        self._folder, self._pipeline, self._keep = Path(folder), pipeline, keep
        path = str(self._folder.resolve())
        self._training = hashlib.sha256(path.encode()).hexdigest()[:16]  # what tells it from others of the same script
        self._trained = Trained(Weights(pipeline), optimizer, scheduler, pipeline.device)
        self._is_sharded = any(map(is_sharded, pipeline.parameters()))
        self._thread = ThreadPoolExecutor(1, "rota-checkpoints") if asynchronous else None
        self._writing: Future[None] | None = None
        self._lock = ExitStack()
        self._snapshots = None  # where this rank keeps its states in memory, if a supervisor has given it room
        if (given := kept_memory.given()) is not None:
            self._snapshots = Snapshots(given, self._trained, path, self._training)
        self._num_commits = 0
        self._most_bytes = 0  # of memory for the states of one rank
        self._has_room = True  # for states in memory; if not, no rank keeps any
        self._has_room_here = True  # if not, this rank keeps none until all ranks count again
        self._num_steps_committed = -1  # of the pipeline's, when `commit` was called last
        self._step_committed = -1  # what `commit` was given last
        self._newest_at_load = 0  # the number of the newest checkpoint when one was loaded last
        self._newest_step_saved = 0  # its step
        with pipeline.watching("the other ranks to make their Checkpoints", PATIENT):
            self._ranks = Ranks(pipeline._processes.everyone, asynchronous)
            pipeline.before_close.callback(self.close)
            atexit.register(self._close_at_exit)  # registered after the pipeline's, so it runs before it
            self._ranks.agreed("checking the arguments", self._check)
            self._ranks.first("opening the folder", self._open)

    def _check(self) -> None:
        if sys.byteorder != "little":
            raise PipelineError(f"this machine is {sys.byteorder}-endian, and checkpoints need a little-endian one")
        optimizer, scheduler = self._trained.optimizer, self._trained.scheduler
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise PipelineError(
                f"the optimizer is a {type(optimizer).__name__}; give one torch.optim.Optimizer or None"
            )
        if optimizer is not None:
            refuse_inner_optimizers(optimizer)
        if optimizer is None and scheduler is not None:
            raise PipelineError(f"a {type(scheduler).__name__}, but no optimizer; give both, or None for both")

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if os.access(self._folder, os.W_OK):  # a read-only folder needs no lock: it can only be loaded from
            # Under torchrun, the first rank of before may be on a machine that is lost, whose lock a server of files
            # frees later.
            self._lock.enter_context(locked(self._folder, _LEFT_LOCK_S if is_restart() else 0))
            checkpoint_folder.recover_folder(self._folder)

    # --- the loop -------------------------------------------------------------------------------------------------

    def steps(
        self, loader: Any, *, num_epochs: int = 1, save_every: int | None = None, seed: int = 0
    ) -> Iterator[tuple[int, Any]]:
        """Load, then yield each step's number and batch; commit and save after steps, and stop when asked to.

        The body of the loop does one step: `pipeline.step`, `optimizer.step()`, `optimizer.zero_grad()`. No sample is
        lost or seen twice after a restart, and the batches are those of the undisturbed run. The state of a gradient
        scaler that `step` is given is kept, too. A loop that is left by `break` neither commits nor saves its last
        step.

        Args:
            loader: a DataLoader, or anything else that can be iterated once per epoch. It draws from random numbers of
                its own, and samplers with a `set_epoch` are told the epoch.
            num_epochs: how many epochs there are in all.
            save_every: after how many steps to save; None: only at the end, and when asked to stop.
            seed: of the loader's order; the same on all ranks.

        Returns:
            An iterator over (number of steps done before, batch).

        Raises:
            PipelineError: on all ranks, if the data is not that of the checkpoint.
        """
        if save_every is not None and (type(save_every) is not int or save_every < 1):
            raise PipelineError(f"save_every={save_every!r}; give a number of steps, 1 or more, or None")
        batches = Batches(loader, num_epochs, seed, self._pipeline.num_replicas, self._share_first_batch)
        return self._steps(batches, save_every)

    def _steps(self, batches: Batches, save_every: int | None) -> Iterator[tuple[int, Any]]:
        found, loss_scale = self.load(), self._pipeline._step_end.loss_scale
        step, saved = 0, max(self._newest_step_saved, 0)

        def extra() -> dict[str, Any]:
            return {"data": batches.position, "scaler": loss_scale.state()}

        if found is not None:
            if not found.extra.keys() >= {"data", "scaler"}:
                raise PipelineError(
                    f"the checkpoint of step {found.step} does not say where in the data it was, as it was not saved "
                    f"by Checkpoints.steps; go on with the loop that saved it"
                )
            batches.go_on(Field("data", found.extra["data"]))
            if found.extra["scaler"] is not None:
                loss_scale.restore(found.extra["scaler"])
            step = found.step
            if found.path is not None:
                saved = step  # a newer one may be damaged
            elif save_every is not None and saved < step - step % save_every and self._is_saved_again(step, extra()):
                saved = step
        for batch in batches:
            yield step, batch
            step += 1
            self.commit(step, **extra())
            stops = self._pipeline.should_stop
            if stops or (save_every is not None and step % save_every == 0):
                self.save(step, **extra())
                saved = step
            if stops:
                return
        if saved != step:
            self.save(step, **extra())

    def _is_saved_again(self, step: int, extra: dict[str, Any]) -> bool:
        """Save after a restart from memory, as a rank failed while the last checkpoint was saved.

        An error ends the ranks no more than once per checkpoint: a full disk must not use up the restarts.
        """
        try:
            self.save(step, **extra)
        except LostRankError:
            raise
        except PipelineError as error:
            self._report(f"step {step} is not saved again: {error}")
            return False
        return True

    def _share_first_batch(self, value: Any) -> list[Any]:
        """The values of each replica's first process. Collective."""
        awaited, processes = "the other ranks' first batch", self._pipeline._processes
        with self._pipeline.watching(awaited, PATIENT):
            self._pipeline._agreement.share(Call.BEGIN_EPOCH, f"waiting for {awaited}")
        told = self._share(awaited, value)
        return [told[of_rank[0]] for of_rank in processes.pipelines[:: processes.num_tp_shards]]

    def _share(self, awaited: str, value: Any) -> list[Any]:
        """All processes' JSON values; also while a thread saves, which has a process group of its own. Collective."""
        with self._pipeline.watching(awaited, PATIENT), collective(f"waiting for {awaited}"):
            return all_gather_json(value, self._pipeline._processes.everyone)

    # --- saving ---------------------------------------------------------------------------------------------------

    def save(self, step: int, **extra: Any) -> None:
        """Save all that training has changed. Call it between steps, on all ranks, with the same values.

        Args:
            step: the number of the step; an older checkpoint of the same step is replaced.
            extra: JSON values to save with it, such as the position in the data.

        Raises:
            PipelineError: on all ranks, if one of them fails, or if the last asynchronous `save` failed.
        """
        awaited = f"the other ranks to save step {step}"
        with self._pipeline.watching(awaited, PATIENT):
            self._pipeline._agreement.share(Call.SAVE, f"waiting for {awaited}")
            self.wait()
            data, small = self._ranks.agreed("collecting the state", lambda: self._collect(step, extra))
            gathered = self._ranks.gather(small)
            merged = self._ranks.agreed("comparing the ranks' states", lambda: merge(gathered))
            if self._thread is None:
                self._write(data, merged, lambda: None)
            else:
                data, wait = self._ranks.agreed("copying the state", lambda: copied(data, self._pipeline._device))
                self._writing = self._thread.submit(self._write, data, merged, wait)

    def wait(self) -> None:
        """Wait until the last `save` is complete on disk. Raises its error if it failed."""
        if self._writing is not None:
            with self._pipeline.watching("a checkpoint to be written", PATIENT):
                writing, self._writing = self._writing, None
                writing.result()

    def close(self) -> None:
        """Wait for the last `save`, then end the thread. The pipeline's `close` calls this, too."""
        atexit.unregister(self._close_at_exit)
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self._ranks.close()
            self._lock.close()

    def _close_at_exit(self) -> None:
        """Close at the end of a script that did not. Python ignores errors here: `_end_failed` sets the exit code."""
        if getattr(sys, "last_value", None) is not None:
            return  # the script has failed; its pipeline first reports that to the other ranks, then closes this
        try:
            self.close()
        except Exception as error:
            _failed_at_exit.append(error)
            _print(f"the last checkpoint was not saved: {error}")
            self._pipeline.close()

    def _collect(self, step: int, extra: dict[str, Any]) -> tuple[dict[Chunk, torch.Tensor], dict[str, Any]]:
        _require_step(step)
        require_json(extra)
        self._trained.weights.require_all()
        tensors, small = self._trained.collect(with_buffers=self._pipeline.replica == 0)
        return chunks_of(tensors), {**small, "given": {"step": step, "extra": extra}}

    def _write(self, data: dict[Chunk, torch.Tensor], merged: Merged, wait: Callable[[], Any]) -> None:
        """Write and publish, after `wait`; on the thread if asynchronous, so it has a process group of its own."""
        ranks, begin = self._ranks, checkpoint_folder.begin
        partial = self._folder / ranks.first("making the folder", lambda: begin(self._folder, merged.step).name)
        ranks.agreed("copying the state", wait)
        shares = share_out(ranks.gather([chunk.to_json() for chunk in data]))
        share = [(chunk, data[chunk]) for chunk in shares[ranks.mine]]
        path = partial / file_of(ranks.mine)
        written = ranks.gather(ranks.agreed(f"writing {partial}", lambda: write_file(path, share)))
        ranks.first("finishing", lambda: self._publish(partial, merged, written))

    def _publish(self, partial: Path, merged: Merged, written: list[Any]) -> None:
        weights = self._trained.weights.all
        manifest = Manifest(
            number=checkpoint_folder.next_number(self._folder),
            step=merged.step,
            extra=merged.extra,
            num_ranks=self._pipeline.plan.num_ranks,
            num_replicas=self._pipeline.num_replicas,
            weights={weight.names[0]: merged.num_tp_shards[weight.names[0]] for weight in weights},
            aliases={alias: weight.names[0] for weight in weights for alias in weight.names[1:]},
            files=tuple(File(*file) for file in written),
            plan=self._pipeline.plan.to_fields(),
            training=merged.training,
        )
        checkpoint_folder.write_synced(partial / MANIFEST, manifest.to_json().encode())
        try:
            read_contents(read_saved(partial))
        except FormatError as error:
            raise PipelineError(
                f"step {merged.step} is not saved, because it could not be read again, from a folder that all ranks "
                f"must share: {error}"
            ) from None
        checkpoint_folder.publish(partial, self._keep)
        control.report("saves", step=merged.step, training=self._training)

    # --- in memory ------------------------------------------------------------------------------------------------

    def commit(self, step: int, **extra: Any) -> None:
        """Keep all that training has changed in memory: if a rank fails, all go on from here. Call it on all ranks.

        Call it after each `optimizer.step()` and `optimizer.zero_grad()`. The memory is the supervisor's, so it
        survives the ranks: `rota run --max-restarts` has one, and without it this does nothing.

        Args:
            step: how many steps have been done.
            extra: JSON values that `load` returns, such as the position in the data.

        Raises:
            PipelineError: there is a gradient, which a restart would lose, or state that no checkpoint can hold.
        """
        if self._snapshots is None or not self._has_room:
            return
        begun_s = time.monotonic()
        gradients = self._gradients()
        self._refuse_gradients(gradients)
        _require_step(step)
        if step <= self._step_committed and self._pipeline.num_steps != self._num_steps_committed:
            raise PipelineError(
                f"commit({step}) after commit({self._step_committed}) and more steps: a restart could not tell which "
                f"state is newer; give the number of steps done"
            )
        has_begun_steps = self._pipeline.has_begun_steps
        self._pipeline._settle_begun_steps()  # the weights of a step that is refused must not be kept
        self._num_commits += 1
        if self._num_commits & (self._num_commits - 1) == 0:  # commits 1, 2, 4, 8, …: an optimizer's state grows
            self._has_room = self._count(self._snapshots)
        if not self._has_room:
            self._snapshots.give_up()
            return
        if has_begun_steps or self._pipeline.num_steps == self._num_steps_committed:
            # No rank may be two steps ahead of another, and no step has made them wait for each other.
            self._share(f"the other ranks to commit step {step}", None)
        self._num_steps_committed, self._step_committed = self._pipeline.num_steps, step
        if not self._has_room_here:
            return
        require_json(extra)
        try:
            self._snapshots.keep(step, extra, self._newest_at_load, [*gradients])
        except OSError as error:
            self._has_room_here = False
            self._snapshots.give_up()
            _print(
                f"process {self._ranks.mine} keeps no states in memory from step {step} on: its state has grown, and "
                f"this machine lacks memory for it ({error.strerror}); {_WITHOUT}"
            )
        else:
            if self._pipeline._progress is not None:
                self._pipeline._progress.committed(begun_s, self._most_bytes)

    def _gradients(self) -> dict[str, torch.Tensor]:
        """The gradients of this rank by the keys of their weights. No optimizer has buffers, so theirs do not count."""
        return {
            weight.key(weight.names[0], shard): weight.tensor.grad
            for weight, shard in self._trained.weights.local()
            if not weight.is_buffer and weight.tensor.grad is not None
        }

    def _refuse_gradients(self, gradients: dict[str, torch.Tensor]) -> None:
        """Raises PipelineError if one of them is not zeros, or if FSDP has one that is not in `.grad`."""
        # Those of zero_grad(set_to_none=False) are zeros. One answer for all: each waits for an accelerator.
        if gradients and torch.stack([gradient.any() for gradient in gradients.values()]).any():
            name = next(name for name, gradient in gradients.items() if gradient.any())
            raise PipelineError(
                f"{name} has a gradient, which a restart from memory would lose; call commit after "
                f"optimizer.step() and optimizer.zero_grad()"
            )
        if self._is_sharded and (held_back := unreduced(self._pipeline.local_stages.values())):
            name = next(weight.names[0] for weight, _ in self._trained.weights.local() if weight.tensor in held_back)
            raise PipelineError(
                f"{name} has a gradient of a step with sync=False, which FSDP keeps until a step with sync=True, and "
                f"which a restart from memory would lose; call commit after a step with sync=True, optimizer.step() "
                f"and optimizer.zero_grad()"
            )

    def _count(self, snapshots: Snapshots) -> bool:
        """Whether the states of all ranks fit in memory. Reports what they need, and what there is. Collective."""
        self._trained.weights.require_all()
        awaited = f"the other ranks' commit number {self._num_commits}"
        found = count_room(self._pipeline, snapshots, not self._has_room_here, partial(self._share, awaited))
        self._most_bytes = found.most_bytes
        if not found.fits:
            self._report(f"states are not kept in memory: {found.text}; {_WITHOUT}")
        elif self._num_commits == 2 and not is_restart():  # the first step has made the optimizer's state
            self._report(f"states are kept in memory: {found.text}")
        return found.fits

    def _load_from_memory(self, snapshots: Snapshots, newest_saved: int) -> Checkpoint | None:
        """Restore the newest step that all ranks have in memory. Collective.

        Nothing is restored if a later step was saved since: `newest_saved` is that of the newest checkpoint.
        """
        step = max(set.intersection(*map(set, self._ranks.gather(snapshots.steps))), default=-1)
        if step < 0 or (step < newest_saved and snapshots.newest_at_load(step) < self._newest_at_load):
            snapshots.forget_all_but(None)
            return None
        kept = self._ranks.agreed(f"looking at step {step} in memory", lambda: snapshots.prepare(step))
        self._ranks.agreed(f"setting the state of step {step} in memory", kept.restore)
        snapshots.forget_all_but(step)
        self._step_committed = step
        if is_restart():
            self._report(f"training resumes from step {step} in memory")
        return Checkpoint(step, kept.extra, self._pipeline.plan, None)

    # --- loading --------------------------------------------------------------------------------------------------

    def load(self, step: int | None = None) -> Checkpoint | None:
        """Restore everything from the newest whole checkpoint, or from that of `step`; returns None if none exists.

        After a restart the newest is that of the last `commit`, if all ranks have it in memory.
        Each rank compares what it reads with checksums. If the newest is damaged, the one before is loaded, and the
        first process reports that. Nothing changes if the checkpoint does not fit the model, optimizer or scheduler.

        Args:
            step: which checkpoint to load; None loads the newest.

        Raises:
            PipelineError: it does not fit; that of `step` is damaged or missing; all are damaged.
        """
        with self._pipeline.watching("the other ranks to load a checkpoint", PATIENT):
            found = self._loaded(step)
            if found is not None:
                self._pipeline._count_from(found.step)
            return found

    def _loaded(self, step: int | None) -> Checkpoint | None:
        self.wait()
        names, self._newest_at_load = self._ranks.first("looking for checkpoints", lambda: self._find(step))
        self._newest_step_saved = int(names[0].removeprefix("step-")) if names else -1
        if self._snapshots is not None and step is None:
            kept = self._load_from_memory(self._snapshots, self._newest_step_saved)
            if kept is not None:
                return kept
        for name, before in zip_longest(names, names[1:]):
            try:
                found = self._load(self._folder / name)
            except DamagedError as error:
                if before is None:
                    raise PipelineError(f"{error}; {_remedy(step)}") from None
                self._report(f"{error}; going back to {self._folder / before}")
            else:
                if is_restart():
                    self._report(f"training resumes from {found.path}")
                self._step_committed = -1
                if self._snapshots is not None:  # no restart may lead back to later steps of before
                    self._snapshots.forget_all_but(None)
                return found
        if is_restart():
            self._report(f"training starts from the beginning: no whole checkpoint in {self._folder}")
        return None

    def _report(self, text: str) -> None:
        """Print one line on the first process."""
        if self._ranks.mine == 0:
            _print(text)

    def _find(self, step: int | None) -> tuple[list[str], int]:
        """The names of the checkpoints to try, in order; and the number of the newest one, 0 if there is none."""
        if os.access(self._folder, os.W_OK):
            checkpoint_folder.recover_folder(self._folder)
        whole, damaged = checkpoint_folder.readable_ones(self._folder)
        names = [saved.path.name for saved in reversed(whole) if step in (None, saved.manifest.step)]
        errors = [error for path, error in damaged if step is None or path.name == f"step-{step}"]
        if errors and not names:
            raise FormatError(f"{errors[0]}; {_remedy(step)}")
        if step is not None and not names:
            steps = ", ".join(str(step) for step in sorted(saved.manifest.step for saved in whole))
            there = f"steps {steps}" if steps else "no checkpoints"
            raise PipelineError(f"no whole checkpoint of step {step} in {self._folder}; it has {there}")
        for error in errors:
            self._report(f"{error}; left out")
        return names, max((saved.manifest.number for saved in whole), default=0)

    def _load(self, path: Path) -> Checkpoint:
        """Load the checkpoint in `path`. Raises DamagedError, on all ranks, if one of them finds damage."""
        found, restoring, reader = self._ranks.agreed(f"comparing with {path}", lambda: self._prepare(path))
        self._ranks.agreed(f"reading {path}", reader.fill)
        self._ranks.agreed(f"setting the state of {path}", restoring.finish)
        return found

    def _prepare(self, path: Path) -> tuple[Checkpoint, Restoring, Reader]:
        manifest = (saved := read_saved(path)).manifest
        contents = read_contents(saved)
        chunks = {key: parts[0].chunk for key, parts in contents.index.items()}
        restoring = self._trained.prepare(manifest.weights, contents.training, chunks)
        reader = Reader(contents.index, restoring.tensors)
        reader.check()
        return Checkpoint(manifest.step, manifest.extra, contents.plan, path), restoring, reader


def _require_step(step: object) -> None:
    """Raises PipelineError if it is not the number of a step, or too large to be read again."""
    if type(step) is not int or not 0 <= step <= LARGEST:
        raise PipelineError(f"step={step!r}; give a whole number from 0 to {LARGEST:,}")


def _remedy(step: int | None) -> str:
    return "no other checkpoint is whole" if step is None else "give another step, or None for the newest"


def _print(text: str) -> None:
    print(f"rota: {text}", file=sys.stderr, flush=True)


# --- at the end of a process ------------------------------------------------------------------------------------------

_failed_at_exit: list[Exception] = []


def _end_failed() -> None:
    """End with exit code 1 if `_close_at_exit` failed: Python ignores errors of functions that run at exit.

    It is registered early, so that most of the others run before it.
    """
    if _failed_at_exit:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


atexit.register(_end_failed)
