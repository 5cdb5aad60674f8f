"""Checkpoints: the state of a training run under the whole model's names, so that any other plan can resume it.

every rank   its share of the tensors, and all other state ──▶ step-20.partial/rank-0.safetensors …
first rank   the plan, and the files with their digests ──▶ rota.json ── read again, as by load ── rename ──▶ step-20/

Read next: state, what a rank saves and restores; tensors, a rank's file; saved, a checkpoint on disk; its folder,
checkpoint_folder; snapshots, what `commit` does.
"""

from __future__ import annotations

import atexit
import hashlib
import logging
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch.optim import Optimizer

from rota.core.errors import FormatError, PipelineError
from rota.core.plan import Plan
from rota.core.reading import Field
from rota.runtime import control, launcher_files
from rota.runtime.agreement import Call
from rota.runtime.checkpoints import checkpoint_folder
from rota.runtime.checkpoints.batches import Batches
from rota.runtime.checkpoints.optimizer_state import refuse_inner_optimizers
from rota.runtime.checkpoints.ranks import DamagedError, Ranks
from rota.runtime.checkpoints.saved import Manifest, file_of, read_contents, read_saved
from rota.runtime.checkpoints.snapshots import Commits, Snapshots
from rota.runtime.checkpoints.state import Restoring, Trained
from rota.runtime.checkpoints.tensors import Chunk, File, chunks_of, copied, share_out, write_file
from rota.runtime.checkpoints.weights import Weights
from rota.runtime.environment import say
from rota.runtime.faults.watchdog import PATIENT
from rota.runtime.json_messages import all_gather_json
from rota.runtime.launcher_files import is_restart
from rota.runtime.pipeline import Pipeline
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
        self._thread = ThreadPoolExecutor(1, "rota-checkpoints") if asynchronous else None
        self._writing: Future[None] | None = None
        self._lock = ExitStack()
        self._commits: Commits | None = None  # if a supervisor has given this rank room for its states in memory
        if (room := launcher_files.snapshot_folder()) is not None:
            snapshots = Snapshots(room, path, self._training)
            self._commits = Commits(pipeline, self._trained, snapshots, self._share)
        self._newest_at_load = 0  # the number of the newest checkpoint when one was loaded last
        with pipeline.watching("the other ranks to make their Checkpoints", PATIENT):
            self._ranks = Ranks(pipeline.processes.everyone, asynchronous)
            pipeline.before_close.callback(self.close)
            atexit.register(self._close_at_exit)  # registered after the pipeline's, so it runs before it
            self._ranks.agreed("checking the arguments", self._check)
            self._ranks.first("opening the folder", self._open)

    def _check(self) -> None:
        if sys.byteorder != "little":
            raise PipelineError(f"this machine is {sys.byteorder}-endian, and checkpoints need a little-endian one")
        optimizer, scheduler = self._trained.optimizer, self._trained.scheduler
        if optimizer is not None:
            if not isinstance(optimizer, Optimizer):
                kind = type(optimizer).__name__
                raise PipelineError(f"the optimizer is a {kind}; give one torch.optim.Optimizer or None")
            refuse_inner_optimizers(optimizer)
        elif scheduler is not None:
            raise PipelineError(f"a {type(scheduler).__name__}, but no optimizer; give both, or None for both")

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        if os.access(self._folder, os.W_OK):  # a read-only folder needs no lock: it can only be loaded from
            # Under torchrun, the first rank of before may be on a machine that is lost, whose lock a server of files
            # frees later.
            self._lock.enter_context(checkpoint_folder.locked(self._folder, _LEFT_LOCK_S if is_restart() else 0))

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
        loaded, loss_scale = self.load(), self._pipeline.loss_scale
        step, is_saved = 0, True

        def extra() -> dict[str, Any]:
            return {"data": batches.position, "scaler": loss_scale.state()}

        if loaded is not None:
            if not loaded.extra.keys() >= {"data", "scaler"}:
                raise PipelineError(
                    f"the checkpoint of step {loaded.step} does not say where in the data it was, as it was not saved "
                    f"by Checkpoints.steps; go on with the loop that saved it"
                )
            batches.go_on(Field("data", loaded.extra["data"]))
            if loaded.extra["scaler"] is not None:
                loss_scale.restore(loaded.extra["scaler"])
            step, is_saved = loaded.step, loaded.path is not None
        for batch in batches:
            yield step, batch
            step += 1
            self.commit(step, **extra())
            stops = self._pipeline.should_stop
            is_saved = stops or (save_every is not None and step % save_every == 0)
            if is_saved:
                self.save(step, **extra())
            if stops:
                return
        if not is_saved:
            self.save(step, **extra())

    def _share_first_batch(self, value: Any) -> list[Any]:
        """The values of each replica's first process. Collective."""
        awaited, processes = "the other ranks' first batch", self._pipeline.processes
        self._pipeline.meet(Call.BEGIN_EPOCH, awaited)
        values = self._share(awaited, value)
        return [values[pipeline[0]] for pipeline in processes.pipelines[:: processes.num_tp_shards]]

    def _share(self, awaited: str, value: Any) -> list[Any]:
        """All processes' JSON values; also while a thread saves, which has a process group of its own. Collective."""
        with self._pipeline.watching(awaited, PATIENT), collective(f"waiting for {awaited}"):
            return all_gather_json(value, self._pipeline.processes.everyone)

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
        self._pipeline.meet(Call.SAVE, awaited)
        with self._pipeline.watching(awaited, PATIENT):
            self.wait()
            data, state = self._ranks.agreed("collecting the state", lambda: self._collect(step, extra))
            if self._thread is None:
                self._write(data, state, lambda: None)
            else:
                data, wait = self._ranks.agreed("copying the state", lambda: copied(data, self._pipeline.device_queue))
                self._writing = self._thread.submit(self._write, data, state, wait)

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
            say(f"the last checkpoint was not saved: {error}")
            self._pipeline.close()

    def _collect(self, step: int, extra: dict[str, Any]) -> tuple[dict[Chunk, torch.Tensor], dict[str, Any]]:
        self._trained.weights.require_all()
        with_buffers = self._pipeline.replica == 0
        tensors, state = self._trained.collect(step, extra, self._newest_at_load, with_buffers)
        return chunks_of(tensors), state

    def _write(self, data: dict[Chunk, torch.Tensor], state: dict[str, Any], wait: Callable[[], Any]) -> None:
        """Write and publish, after `wait`; on the thread if asynchronous, so it has a process group of its own."""
        ranks, begin = self._ranks, checkpoint_folder.begin
        folder = self._folder / ranks.first("making the folder", lambda: begin(self._folder, state["step"]).name)
        ranks.agreed("copying the state", wait)
        share = {chunk: data[chunk] for chunk in share_out(ranks.gather([*data]))[ranks.rank]}
        path = folder / file_of(ranks.rank)
        written = ranks.gather(ranks.agreed(f"writing {folder}", lambda: write_file(path, share, state)))
        ranks.first("finishing", lambda: self._publish(folder, state, written))

    def _publish(self, folder: Path, state: dict[str, Any], written: list[Any]) -> None:
        weights = self._trained.weights.all

        def manifest(number: int) -> Manifest:
            return Manifest(
                number=number,
                step=state["step"],
                extra=state["extra"],
                num_ranks=self._pipeline.plan.num_ranks,
                num_replicas=self._pipeline.num_replicas,
                names=tuple(weight.names[0] for weight in weights),
                aliases={alias: weight.names[0] for weight in weights for alias in weight.names[1:]},
                files=tuple(File(*file) for file in written),
                plan=self._pipeline.plan.to_fields(),
            )

        checkpoint_folder.publish(folder, manifest, self._keep)
        control.report("saves", step=state["step"], training=self._training)

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
        if self._commits is not None:
            self._commits.commit(step, extra, self._newest_at_load)

    def _load_from_memory(self, commits: Commits, newest_saved: int) -> Checkpoint | None:
        """Restore the newest step that all ranks have in memory. Collective.

        Nothing is restored if a later step was saved since: `newest_saved` is that of the newest checkpoint.
        """
        snapshots = commits.snapshots
        step = max(set.intersection(*map(set, self._ranks.gather(snapshots.steps))), default=-1)
        if step < 0 or (step < newest_saved and snapshots.newest_at_load(step) < self._newest_at_load):
            return None

        def prepare() -> tuple[Checkpoint, Restoring]:
            restoring = snapshots.prepare(step, self._trained)
            return Checkpoint(step, restoring.training.first.extra, self._pipeline.plan, None), restoring

        checkpoint = self._restore(f"step {step} in memory", prepare)
        snapshots.forget_all_but(step)
        commits.last_step = step
        self._report(f"training resumes from step {step} in memory")
        return checkpoint

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
            checkpoint = self._loaded(step)
            if checkpoint is not None:
                self._pipeline.count_from(checkpoint.step)
            return checkpoint

    def _loaded(self, step: int | None) -> Checkpoint | None:
        self.wait()
        names, self._newest_at_load = self._ranks.first("looking for checkpoints", lambda: self._find(step))
        if self._commits is not None and step is None:
            newest_saved = int(names[0].removeprefix("step-")) if names else -1
            try:
                if (checkpoint := self._load_from_memory(self._commits, newest_saved)) is not None:
                    return checkpoint
            except DamagedError as error:
                self._report(f"{error}; going on from the checkpoints")
            self._commits.snapshots.forget_all_but(None)
        for name, before in zip_longest(names, names[1:]):
            path = self._folder / name
            try:
                checkpoint = self._restore(str(path), partial(self._prepare, path))
            except DamagedError as error:
                if before is None:
                    raise PipelineError(f"{error}; {_remedy(step)}") from None
                self._report(f"{error}; going back to {self._folder / before}")
            else:
                if self._trained.optimizer is not None:
                    self._report(f"training resumes from {path}")
                if self._commits is not None:  # no restart may lead back to later steps of before
                    self._commits.last_step = -1
                    self._commits.snapshots.forget_all_but(None)
                return checkpoint
        if is_restart():
            self._report(f"training starts from the beginning: no whole checkpoint in {self._folder}")
        return None

    def _report(self, text: str) -> None:
        """Print one line on the first process."""
        if self._ranks.rank == 0:
            say(text)

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
            others = f"steps {steps}" if steps else "no checkpoints"
            raise PipelineError(f"no whole checkpoint of step {step} in {self._folder}; it has {others}")
        for error in errors:
            self._report(f"{error}; left out")
        return names, max((saved.manifest.number for saved in whole), default=0)

    def _restore(self, source: str, prepare: Callable[[], tuple[Checkpoint, Restoring]]) -> Checkpoint:
        """Restore what `prepare` has compared. Raises DamagedError, on all ranks, if one of them finds damage."""
        checkpoint, restoring = self._ranks.agreed(f"comparing with {source}", prepare)
        self._ranks.agreed(f"reading {source}", restoring.reader.fill)
        self._ranks.agreed(f"setting the state of {source}", restoring.finish)
        return checkpoint

    def _prepare(self, path: Path) -> tuple[Checkpoint, Restoring]:
        contents = read_contents(read_saved(path))
        num_tp_shards = {name: len(keys) for name, keys in contents.keys.items()}  # of each weight, 1 for most
        restoring = self._trained.prepare(num_tp_shards, contents.training, contents.index)
        restoring.reader.check()
        first = contents.training.first
        return Checkpoint(first.step, first.extra, contents.plan, path), restoring


def _remedy(step: int | None) -> str:
    return "no other checkpoint is whole" if step is None else "give another step, or None for the newest"


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
