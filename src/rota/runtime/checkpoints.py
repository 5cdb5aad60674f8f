"""Checkpoints: all of a training's state by the whole model's names, to go on from with any other plan.

every rank   tensors ───────────────── torch.distributed.checkpoint ──▶ step-20.partial/__0_0.distcp …
             small things, gathered on the first rank ────────────────▶ step-20.partial/training.pt, plan.json
first rank   list of all files with their hashes ──▶ rota.json ── rename ──▶ step-20/
"""

from __future__ import annotations

import sys
from concurrent.futures import Future, ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple, final

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from rota.errors import FormatError, PipelineError
from rota.plan import Plan
from rota.reading import read_text
from rota.runtime import checkpoint_files as files
from rota.runtime import handover
from rota.runtime.checkpoint_files import File, Manifest, Saved
from rota.runtime.checkpoint_metadata import read_metadata
from rota.runtime.checkpoint_names import Weights
from rota.runtime.checkpoint_ranks import Ranks, told_on_all
from rota.runtime.checkpoint_state import Merged, Restoring, Tensors, Trained, merge
from rota.runtime.launching import control
from rota.runtime.pipeline import Pipeline
from rota.runtime.watchdog import PATIENT


class Checkpoint(NamedTuple):
    """What `load` found: the step and the values that `save` was given, the plan that ran then, the folder."""

    step: int
    extra: dict[str, Any]
    plan: Plan
    path: Path


@final
class Checkpoints:
    """Saves a pipeline's training in `folder`, and resumes it with any cut, plan, number of ranks and of replicas.

    Every rank makes one, with the same arguments but its own `optimizer` and `scheduler`: None on a rank without
    weights; None on all ranks saves and loads the model alone. All ranks need to see the same `folder`. `keep`: how
    many of the newest are kept, None for all. `asynchronous`: `save` returns when the state is copied, and a thread
    writes it. Collective, as `save` and `load` are. Raises PipelineError, on all ranks, where one of them fails.

    Loading runs nothing that a checkpoint names, and takes from it what a scheduler or an optimizer of numbers, texts
    and tensors keeps; `save` refuses one that keeps more.
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
                f"a {type(pipeline).__name__} has no checkpoints; use Rota's own engine, a rota.Pipeline"
            )
        if keep is not None and (type(keep) is not int or keep < 1):
            raise PipelineError(f"keep={keep!r}: keep 1 checkpoint or more, or all by keep=None")
        self._folder, self._pipeline, self._keep = Path(folder), pipeline, keep
        self._trained = Trained(Weights(pipeline), optimizer, scheduler)
        self._thread = ThreadPoolExecutor(1, "rota-checkpoints") if asynchronous else None
        self._writing: Future[None] | None = None
        with pipeline.watching("the other ranks to make their Checkpoints", PATIENT):
            self._ranks = Ranks()
            pipeline.before_close.callback(self.close)
            self._ranks.agreed("checking what it is given", self._check)
            self._ranks.first("opening the folder", lambda: files.mend(self._folder))

    def _check(self) -> None:
        optimizer, scheduler = self._trained.optimizer, self._trained.scheduler
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise PipelineError(
                f"the optimizer is a {type(optimizer).__name__}; give one torch.optim.Optimizer or None"
            )
        if optimizer is None and scheduler is not None:
            raise PipelineError(f"a {type(scheduler).__name__}, but no optimizer; give both, or None for both")

    # --- saving ---------------------------------------------------------------------------------------------------

    def save(self, step: int, **extra: Any) -> None:
        """Save all that training has changed, `step`, and `extra` (JSON values, such as the data's position).

        Call it between steps, on all ranks, with the same values. A checkpoint of the same step is replaced.
        """
        with self._pipeline.watching(f"the other ranks to save step {step}", PATIENT):
            self.wait()
            tensors, small = self._ranks.agreed("collecting the state", lambda: self._collect(step, extra))
            gathered = self._ranks.gather(small)
            merged = self._ranks.first("comparing the ranks' states", lambda: merge(gathered))
            if self._thread is None:
                self._write(step, tensors, merged)
            else:
                copied = {key: tensor.clone() for key, tensor in tensors.items()}
                self._writing = self._thread.submit(self._write, step, copied, merged)

    def wait(self) -> None:
        """Wait until what `save` began is whole on disk. Raises what went wrong there."""
        with self._pipeline.watching("a checkpoint to be written", PATIENT):
            if self._writing is not None:
                writing, self._writing = self._writing, None
                writing.result()

    def close(self) -> None:
        """Wait, then end the thread. The pipeline's `close` does it too."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            self._ranks.close()

    def _collect(self, step: int, extra: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
        if type(step) is not int or step < 0:
            raise PipelineError(f"step={step!r}; give a whole number of 0 or more")
        files.require_json(extra)
        tensors, small = self._trained.collect(with_buffers=self._pipeline.replica == 0)
        return tensors, {**small, "given": {"step": step, "extra": extra}}

    def _write(self, step: int, tensors: Tensors, merged: Merged | None) -> None:
        """On the thread if it is asynchronous; a group of our own keeps its messages apart from those of the steps."""
        folder = self._folder / f"step-{step}.partial"
        self._ranks.first("making the folder", lambda: files.begin(self._folder, step))
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with told_on_all(f"writing {folder}"):
            save(tensors, storage_writer=FileSystemWriter(folder), planner=planner, process_group=self._ranks.group)
        files_of = f"__{self._ranks.mine}_*"
        mine = self._ranks.agreed("hashing", lambda: {path.name: File.of(path) for path in folder.glob(files_of)})
        gathered = self._ranks.gather(mine)
        self._ranks.first("finishing", lambda: self._publish(folder, merged, gathered))

    def _publish(self, folder: Path, merged: Merged | None, of_ranks: list[dict[str, File]]) -> None:
        assert merged is not None  # on the first rank
        written = {name: file for of_rank in of_ranks for name, file in of_rank.items()}
        for name in written:
            if not (folder / name).exists():
                raise PipelineError(
                    f"{folder} lacks {name}, which another rank wrote; use a folder that all ranks share"
                )
        files.write_synced(folder / files.TRAINING, _training_file(merged.training))
        files.write_synced(folder / files.PLAN, self._pipeline.plan.to_json().encode())
        for name in (files.TRAINING, files.PLAN, files.METADATA):
            written[name] = File.of(folder / name)
        weights = self._trained.weights.all
        manifest = Manifest(
            number=files.next_number(self._folder),
            step=merged.step,
            extra=merged.extra,
            num_ranks=self._pipeline.plan.num_ranks,
            num_replicas=self._pipeline.num_replicas,
            weights={weight.names[0]: merged.num_parts[weight.names[0]] for weight in weights},
            aliases={alias: weight.names[0] for weight in weights for alias in weight.names[1:]},
            files=written,
        )
        files.publish(folder, manifest, self._keep)
        control.tell("saves", step=merged.step)

    # --- loading --------------------------------------------------------------------------------------------------

    def load(self, step: int | None = None) -> Checkpoint | None:
        """Set everything as it was in the newest whole checkpoint, or in that of `step`; None if there is none.

        Nothing is changed if the checkpoint does not fit the model, the optimizer or the scheduler.
        """
        with self._pipeline.watching("the other ranks to load a checkpoint", PATIENT):
            self.wait()
            found = self._ranks.first("looking for checkpoints", lambda: self._find(step))
            path = self._ranks.broadcast(found)
            if handover.is_restart() and self._ranks.mine == 0:
                from_where = (
                    f"goes on from {path}"
                    if path
                    else f"begins anew, as there is no whole checkpoint in {self._folder}"
                )
                print(f"rota: the training {from_where}", file=sys.stderr, flush=True)
            if path is None:
                return None
            saved, restoring = self._ranks.agreed(f"comparing with {path}", lambda: self._prepare(path))
            planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            with told_on_all(f"reading {path}"):
                reader = FileSystemReader(path)
                load(restoring.tensors, storage_reader=reader, planner=planner, process_group=self._ranks.group)
            self._ranks.agreed(f"setting the state of {path}", restoring.finish)
            plan = Plan.from_json(read_text(path / files.PLAN))
            return Checkpoint(saved.manifest.step, saved.manifest.extra, plan, path)

    def _find(self, step: int | None) -> Path | None:
        files.mend(self._folder)
        whole = files.whole_ones(self._folder)
        if step is None:
            return whole[-1].path if whole else None
        steps = [saved.manifest.step for saved in whole]
        if step not in steps:
            there = f"there are those of {', '.join(map(str, sorted(steps)))}" if steps else "there is none at all"
            raise PipelineError(f"no whole checkpoint of step {step} in {self._folder}; {there}")
        return whole[steps.index(step)].path

    def _prepare(self, path: Path) -> tuple[Saved, Restoring]:
        saved = files.read_saved(path)
        saved.require_files()
        return saved, self._trained.prepare(saved.manifest, _read_training(path), read_metadata(path))


def _training_file(training: dict[str, Any]) -> bytes:
    """Of the small things. Raises PipelineError where they would not come back."""
    torch.save(training, buffer := BytesIO())
    buffer.seek(0)
    try:
        torch.load(buffer, weights_only=True)
    except UnpicklingError as error:
        raise PipelineError(
            f"the optimizer's options or the scheduler's state hold what is neither a number, a text nor a tensor, and "
            f"would not be read again: {_first_line(error)}; take it out of state_dict()"
        ) from None
    return buffer.getvalue()


def _read_training(path: Path) -> dict[str, Any]:
    try:
        read: dict[str, Any] = torch.load(path / files.TRAINING, weights_only=True)
        if not {"records", "scheduler", "random"} <= read.keys():
            raise FormatError("it holds something else")
    except Exception as error:  # a damaged file may raise anything
        raise FormatError(
            f"{path / files.TRAINING} cannot be read ({_first_line(error)}); it is damaged, or was not written by "
            f"rota.Checkpoints"
        ) from None
    return read


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
