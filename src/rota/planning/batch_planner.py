"""Planner: each batch gets a plan of its own, which is made while the batch before it runs.

    process 0   main     step n ───────────────────────────▶ next ─▶ step n+1
                thread     └─ lengths of n+1 ─▶ plan server ─▶ broadcast ─▶ prepare
    others      main     step n ───────────────────────────▶ next ─▶ step n+1
                thread                                          └─ receive ─▶ prepare

One process decides, in a server process of its own, and all get its plan; the pipeline checks that all have the same.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, final

from rota.core.errors import PipelineError, RotaError
from rota.core.plan import Plan
from rota.core.sizes import SizeModel
from rota.core.text import angle_repr, count_text, time_text
from rota.runtime import Pipeline
from rota.runtime.faults.watchdog import PATIENT
from rota.runtime.json_messages import all_gather_json, broadcast_json
from rota.runtime.transport import collective

#: Makes a micro-batch of samples, padded to the given lengths or packed into one row of them: (inputs, targets).
Collate = Callable[..., tuple[Any, Any]]


@final
@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """A batch as micro-batches, and the plan to run it with, for this process's replica.

    Attributes:
        inputs: The micro-batches' inputs; None where no stage reads any.
        targets: Their targets; None except on the ranks of the last stage.
        plan: The plan of the step.
        sizes: Rows and length of each micro-batch, for `step`.
        groups: The samples of each micro-batch, as indices into the batch.
        makespan_us: The step's predicted time; the largest of all replicas.
        bound_us: Lower bound on the step's time for these micro-batches, as the planner proved it.
        planning_us: Planning time, while the batch before this one ran.
        waited_us: Time that this process waited for the plan.
    """

    inputs: list[Any] | None
    targets: list[Any] | None
    plan: Plan
    sizes: tuple[tuple[int, ...], ...]
    groups: tuple[tuple[int, ...], ...]
    makespan_us: int
    bound_us: int
    planning_us: int
    waited_us: int

    def __str__(self) -> str:
        """One line."""
        sizes = f"{count_text(sum(map(len, self.groups)), 'sample')} in {len(self.groups)} micro-batches"
        return f"PlannedBatch of {sizes}: {time_text(self.makespan_us)}, lower bound {time_text(self.bound_us)}"

    __repr__ = angle_repr


@final
class Planner(Iterator[PlannedBatch]):
    """Groups the samples of each batch into micro-batches, and plans their step, while the batch before it runs.

    All processes make one and iterate over it together:

        for batch in rota.Planner(pipeline, loader, collate, model):
            loss = pipeline.step(batch.inputs, batch.targets, plan=batch.plan, sizes=batch.sizes)

    Args:
        pipeline: The pipeline whose steps are planned.
        batches: Yields each batch as a list of samples, those of all replicas; the same on all processes. None on a
            process that reads neither inputs nor targets.
        collate: `collate(samples, length)` makes a micro-batch (inputs, targets) whose rows are all padded to `length`;
            if `packed`, one row of `length` tokens, as `rota.pack_samples` does.
        plan_with: What a stage costs, by the size of a micro-batch; see `rota.fit_sizes`. Or "module:function", a
            function that plans instead of `rota.plan_batch`: `function(lengths, num_replicas, **options)` returns for
            each replica an object with `groups`, `plan`, `makespan_us` and `bound_us`.
        length_of: The length of a sample, rounded up as you like; or a tuple of lengths, of which `collate` gets the
            longest of each, and the plan counts the sum.
        packed: Whether the samples of a micro-batch follow one another in one row, each attending only to itself.
        options: Further keyword arguments of `rota.plan_batch`, such as a `cluster` if ranks and links are not those of
            the pipeline's plan; or of the function, JSON values.

    Raises:
        PipelineError: The planner's process fails.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        batches: Iterable[Sequence[Any]] | None,
        collate: Collate,
        plan_with: SizeModel | str,
        *,
        length_of: Callable[[Any], int | tuple[int, ...]] = len,
        packed: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._pipeline, self._collate = pipeline, collate
        self._length_of, self._packed = length_of, packed
        options = dict(options or {})
        self._batches = None if batches is None else iter(batches)
        self._group = pipeline.processes.of_everyone()
        self._server: _Server | None = None
        if pipeline.processes.is_first:
            function = plan_with if isinstance(plan_with, str) else None
            if isinstance(plan_with, SizeModel):
                cluster = options.get("cluster", pipeline.plan.placement.cluster)
                options |= {"model": plan_with.to_json(), "cluster": cluster.to_json(), "packed": packed}
            self._server = _Server(function, options)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="rota-planner", daemon=True)
        self._thread.start()
        self._next: _Job | None = None
        self._is_closed, self._is_first = False, True  # the first plan waits for the planner's process to start
        pipeline.before_close.callback(self.close)

    def __next__(self) -> PlannedBatch:
        if self._is_closed:
            raise StopIteration
        job = self._submitted() if self._next is None else self._next
        self._next = self._submitted() if job.has_batch else None
        begun_ns = time.monotonic_ns()
        try:
            with self._pipeline.watching("the plan of the next batch", PATIENT if self._is_first else 1):
                batch = job.planned.result()
        except PipelineError:
            self.close()
            raise
        self._is_first = False
        waited_us = (time.monotonic_ns() - begun_ns) // 1000
        if batch is None:
            self.close()
            raise StopIteration
        inputs = targets = None
        if job.samples is not None and (self._pipeline.reads_inputs or self._pipeline.reads_targets):
            collated = [
                self._collate([job.samples[i] for i in group], *size[1:])
                for group, size in zip(batch.groups, batch.sizes, strict=True)
            ]
            inputs = [inputs for inputs, _ in collated] if self._pipeline.reads_inputs else None
            targets = [targets for _, targets in collated] if self._pipeline.reads_targets else None
        return replace(batch, inputs=inputs, targets=targets, waited_us=waited_us)

    def close(self) -> None:
        """End the planner's process and thread. Closing the pipeline does so too."""
        if not self._is_closed:
            self._is_closed = True
            self._jobs.put(None)
            if self._server is not None:
                self._server.close()
            self._thread.join(timeout=1)  # stuck only if another rank is

    def _submitted(self) -> _Job:
        """The next batch, handed to the thread."""
        samples = None if self._batches is None else next(self._batches, _END)
        job = _Job(None if samples is _END else samples, samples is not _END)
        if job.samples is not None:
            lengths = [self._length_of(sample) for sample in job.samples]
            job.lengths = [[length] if isinstance(length, int) else [*length] for length in lengths]
        self._jobs.put(job)
        return job

    # --- in the thread --------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job.planned.set_result(self._planned(job))
            except Exception as error:
                job.planned.set_exception(error)

    def _planned(self, job: _Job) -> PlannedBatch | None:
        """The plan of a batch, ready to run; None after the last batch. Collective; all processes fail together."""
        answer: dict[str, Any] = {}
        if self._server is not None:
            answer = self._server.ask(job.lengths, self._pipeline.num_replicas) if job.has_batch else {"end": True}
        with collective("receiving the plan of the next batch"):
            answer = broadcast_json(answer, 0, self._group)
        batch, error = None, answer.get("error", "")
        if not error and "end" not in answer:
            try:
                self._refuse_differences(job, answer["lengths"])
                batch = self._prepared(answer)
            except RotaError as refusal:
                error = str(refusal)
        elif not error and job.has_batch and self._batches is not None:
            error = _OTHER_NUMBER
        with collective("comparing the plan of the next batch"):
            errors = all_gather_json(error, self._group)
        if first := next(filter(None, errors), ""):
            raise PipelineError(f"the next batch has no plan: {first}")
        return batch

    def _refuse_differences(self, job: _Job, lengths: list[list[int]]) -> None:
        if not job.has_batch:
            raise PipelineError(_OTHER_NUMBER)
        if job.samples is not None and job.lengths != lengths:
            raise PipelineError(
                "the processes' loaders yield samples of different lengths; give the same batches to all"
            )

    def _prepared(self, answer: dict[str, Any]) -> PlannedBatch:
        replica, lengths = answer["replicas"][self._pipeline.replica], answer["lengths"]
        batch = PlannedBatch(
            inputs=None,
            targets=None,
            plan=Plan.from_json(replica["plan"]),
            sizes=tuple(self._size_of([lengths[i] for i in group]) for group in replica["groups"]),
            groups=tuple(map(tuple, replica["groups"])),
            makespan_us=max(replica["makespan_us"] for replica in answer["replicas"]),
            bound_us=replica["bound_us"],
            planning_us=answer["took_us"],
            waited_us=0,
        )
        self._pipeline.prepare(batch.plan, batch.sizes)
        return batch

    def _size_of(self, lengths: list[list[int]]) -> tuple[int, ...]:
        """Rows and lengths of the micro-batch of these samples."""
        if self._packed:
            return (1, *map(sum, zip(*lengths, strict=True)))
        return (len(lengths), *map(max, zip(*lengths, strict=True)))


_END: Any = object()
_OTHER_NUMBER = "the processes' loaders differ in their number of batches; give the same batches to all"


@dataclass(slots=True)
class _Job:
    """A batch, and what the thread makes of it."""

    samples: Sequence[Any] | None
    has_batch: bool
    lengths: list[list[int]] = field(default_factory=list)
    planned: Future[PlannedBatch | None] = field(default_factory=Future)


@final
class _Server:
    """The planner's process. Raises PipelineError if it ends early."""

    def __init__(self, function: str | None, options: dict[str, Any]) -> None:
        path = os.pathsep.join(filter(None, sys.path))  # where this process finds Rota, and the user's function
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rota.plan_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        self._write({"function": function, "options": options})

    def ask(self, lengths: list[list[int]], num_replicas: int) -> dict[str, Any]:
        """What the process answers, with the lengths that it was asked about."""
        self._write({"lengths": [*map(sum, lengths)], "num_replicas": num_replicas})
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            return {"error": f"the planner's process ended with exit code {self._process.wait()}; see its output"}
        return {**json.loads(line), "lengths": lengths}

    def _write(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{json.dumps(request)}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # `ask` reports that it has ended

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()
