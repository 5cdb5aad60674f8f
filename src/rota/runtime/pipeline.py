"""Pipeline: runs a checked plan on `torch.distributed`, one process per rank."""

from __future__ import annotations

import atexit
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from numbers import Real
from typing import Any, ClassVar, Unpack, final

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, DistributedSampler

from rota.core.errors import PipelineError
from rota.core.plan import Plan
from rota.core.timeline import Timeline
from rota.models import Stages
from rota.models.modes import evaluating, warn_of_eval_mode
from rota.runtime.agreement import Call
from rota.runtime.compute import Batch
from rota.runtime.device.protocol import Device, Number, is_queued
from rota.runtime.engine import Options, Ran, build
from rota.runtime.faults.watchdog import PATIENT
from rota.runtime.json_messages import all_gather_json
from rota.runtime.launcher_files import leave_record
from rota.runtime.losses import LossFn, means_of
from rota.runtime.memory_watch import MemoryWatch
from rota.runtime.meshes import Processes
from rota.runtime.plans import ReadyPlan
from rota.runtime.precision import LossScale
from rota.runtime.recorder import Record, merge
from rota.runtime.step_progress import StepProgress, progress_of
from rota.runtime.step_results import StepHandle
from rota.runtime.transport import SUM, bring_outputs, collective


@final
class Pipeline:
    """A model's stages, run as planned. Every process makes one, with the same arguments.

    A plan with several data streams (`rota.bidirectional`) takes the stages of one, and shares their weights.

    It frees other ranks' weights in the model that was split, which then refuses to be used by itself. See
    `gather_weights`.

    Args:
        stages: the model; this process runs the stages that the plan has on its rank.
        plan: for each rank its ops in order; `check` must accept it.
        loss_fn: `loss_fn(output, target)`, or `loss_fn(output)` if the output contains the loss; None if nothing is
            trained. It returns the mean loss of a micro-batch (one element), or `(sum, count)`, or a dict with one of
            the two as "loss" and metrics beside it. It has no weights of its own to train: those belong to a stage.
        options: any of these, by name:

            - `timeout_s`: end all ranks if one makes no progress for this many seconds; by default 20 simulated steps,
              at least 60 s.
            - `dynamic_shapes`: True: shapes between stages depend on the data, not only on the inputs' shapes.
            - `mesh`: as `rota.mesh` makes it; the plan's ranks are its dim "pp". Without one, all processes are the
              pipeline.
            - `recompute`: "full", or stages that keep only what they receive, and repeat their forward for B or I; by
              default "none".
            - `allow_nonfinite_loss`: True: `step` returns a loss that is nan or infinite instead of raising
              PipelineError.
            - `check_data`: when ranks compare what they were given: "first" (in the first step, evaluation and
              forward), "always" or "never". Ranks of one replica must have the same batch, replicas different ones.
            - `reduce_dtype`: gradients of lower precision are added up over replicas and tied weights in this dtype,
              such as torch.float32; by default each in its own.

    Raises:
        PlanError: `check` refuses the plan.
        PipelineError: plan, stages and processes do not fit together.
    """

    #: Called with a pipeline and what its first `step` was given, before that; None: nothing is.
    before_first_step: ClassVar[Callable[[Pipeline, Any, Any], None] | None] = None

    def __init__(self, stages: Stages, plan: Plan, loss_fn: LossFn | None, **options: Unpack[Options]) -> None:
        self._engine = engine = build(stages, plan, loss_fn, options)
        self.stages, self.plan, self.loss_fn, self.mesh = engine.stages, plan, loss_fn, options.get("mesh")
        #: This process's rank in the plan, and which replica of the pipeline it belongs to.
        self.rank, self.replica = engine.processes.rank, engine.processes.replica
        self.num_replicas = engine.processes.num_replicas
        #: The stages on this rank.
        self.local_stages = {stage: self.stages[stage] for stage in plan.placement.stages_on(self.rank)}
        #: What must end before the pipeline does: a checkpoint that is being written.
        self.before_close = engine.life.dependents
        self._num_steps = 0  # that were begun
        self._last, self._ran_own = engine.plans.base, True  # the last step was given no plan
        self._before_first = type(self).before_first_step
        self._keeps_outputs = False
        self._watch: MemoryWatch | None = None
        is_first = engine.processes.is_first
        self._warns_of_mode = is_first
        self._progress = progress_of(plan, is_first, on_cpu=not is_queued(engine.here.device))
        engine.life.at_end(self._leave_record)
        engine.life.at_end(self.settle_begun_steps)
        engine.life.at_end(lambda: atexit.unregister(self._close_at_exit))
        atexit.register(self._close_at_exit)

    def prepare(self, plan: Plan, sizes: Sequence[Sequence[int]] = ()) -> None:
        """Make `plan` ready to run, so that the `step` that gets it begins at once. Any thread may call it.

        Args:
            plan: a plan for a batch of its own: the same tasks on the same ranks as in the pipeline's plan. The number
                of micro-batches, their times and bytes, and all orders may differ.
            sizes: for each micro-batch its rows and whatever else determines shapes, such as (rows, length). Ranks
                exchange layouts at the first step with a new size, and none at sizes that were there.

        Raises:
            PlanError: `check` refuses the plan.
            PipelineError: the plan is for other stages or ranks, or the sizes are not those of its micro-batches.
        """
        self._engine.life.refuse_ended()
        self._engine.plans.get(plan, sizes)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank's stages, each once, by their names in `Stages.named_parameters`."""
        return self.stages.named_parameters(self.local_stages)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages, for this rank's optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    @property
    def device(self) -> torch.device:
        """Where this rank's stages are. Batches may be here or on the CPU."""
        return self._engine.here.device.torch_device

    @property
    def device_queue(self) -> Device:
        """What runs this rank's stages there, at once or in the order in which it gets its work."""
        return self._engine.here.device

    @property
    def losses(self) -> dict[int, float]:
        """The mean loss of each micro-batch of the last step, on the ranks of the last stage. Waits for that step."""
        return means_of(self._engine.compute.losses, self._engine.here.device)

    @property
    def metrics(self) -> dict[str, float]:
        """The means of the metrics that `loss_fn` returned in the last `step` or `evaluate`, the same on all ranks.

        After `begin_step` they are those of the last step whose handle was waited for.
        """
        return self._engine.step_results.metrics

    @property
    def outputs(self) -> dict[int, Any]:
        """By micro-batch, what the last stage returned in a step of a plan with forwards only, on its ranks."""
        return self._engine.compute.outputs

    # --- data ---------------------------------------------------------------------------------------------------------

    @property
    def reads_inputs(self) -> bool:
        """Whether a stage of this rank reads the step's inputs; other ranks may give None."""
        return self._engine.plans.base.inputs.reads_inputs

    @property
    def reads_targets(self) -> bool:
        """Whether this rank has the last stage, whose loss takes targets; other ranks may give None."""
        return self._engine.plans.base.inputs.reads_targets

    def sampler(
        self, dataset: Dataset[Any], *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> DistributedSampler[Any]:
        """A sampler that gives all ranks of a replica the same rows, and each replica different ones.

        Call its `set_epoch` before each epoch, as usual, to shuffle again.

        Args:
            dataset: what the DataLoader gets.
            shuffle: as for `torch.utils.data.DistributedSampler`.
            seed: the same on all ranks.
            drop_last: leave out what does not divide among the replicas, instead of repeating rows.

        Returns:
            A `DistributedSampler` over the replicas.
        """
        options: dict[str, Any] = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
        return DistributedSampler(dataset, self.num_replicas, self.replica, **options)

    @property
    def should_stop(self) -> bool:
        """Whether any rank or `rota run` has received SIGTERM or SIGUSR1. If so, save and leave the loop.

        The same on all ranks, which agree on it at the end of each step. Once a script has looked at it, these signals
        do not end a rank until the pipeline is closed, unless one comes again after 3 s or more.
        """
        self._engine.stops.listen()
        return self._engine.stops.agreed

    @property
    def has_begun_steps(self) -> bool:
        """Whether there are steps of `begin_step` that may not have ended on all ranks."""
        return self._engine.step_results.begun.num_open > 0

    @property
    def processes(self) -> Processes:
        """All processes of the run, this one's place among them, and their groups."""
        return self._engine.processes

    @property
    def progress(self) -> StepProgress | None:
        """What says how the training goes; None on all processes but the first, and without `rota run`."""
        return self._progress

    @property
    def loss_scale(self) -> LossScale:
        """The scale of the gradient scaler that `step` is given."""
        return self._engine.step_results.loss_scale

    @property
    def num_steps(self) -> int:
        """How many steps this pipeline has begun."""
        return self._num_steps

    def count_from(self, step: int) -> None:
        """Messages number the next step as the one after `step`: the training goes on from there."""
        self._engine.watched.step = step

    # --- one step -------------------------------------------------------------------------------------------------

    def step(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        plan: Plan | None = None,
        sizes: Sequence[Sequence[int]] = (),
        scale: float = 1.0,
        sync: bool = True,
        scaler: torch.amp.GradScaler | None = None,
    ) -> float:
        """Run the plan once; gradients are added to `.grad`, as `loss.backward()` does. Collective.

        To accumulate over k steps, give `scale=1/k` to each, and `sync=False` to all but the last.

        Args:
            inputs: what the stages on this rank read, None if they read nothing: a tensor, or a tuple or mapping of
                tensors, whose rows are spread over the plan's micro-batches; or a list of micro-batches. A tensor
                without dims, or with one row beside others with more, goes to every micro-batch whole.
            targets: what `loss_fn` gets, on the ranks of the last stage; in the same forms as `inputs`. None if
                `loss_fn` takes only the output.
            plan: the plan of this step, the same on all ranks of a replica; see `prepare`. None: that of the pipeline.
            sizes: as for `prepare`.
            scale: multiplies the gradients, but not the loss returned.
            sync: reduce the gradients of replicas and of tied weights, with those of earlier steps without `sync`.
            scaler: this process's own GradScaler; the gradients have its factor until it takes it out. If gradients
                overflow on one rank, they become infinite on all, so that every scaler skips the step.

        Returns:
            The mean loss over all micro-batches and replicas, on every rank, with all losses that modules added; nan
            without a `loss_fn`. Where `loss_fn` returns `(sum, count)`, all sums divided by all counts.

        Raises:
            PlanError: `check` refuses the plan.
            PipelineError: batch or plan do not fit, the ranks differ in what they call, or the loss is not finite.
            LostRankError: another rank is gone.
        """
        begun_s = time.monotonic()
        call = Call.STEP if sync else Call.STEP_WITHOUT_SYNC
        loss = self._step(call, inputs, targets, plan, sizes, scale, scaler).loss.mean
        if self._progress is not None:
            self._progress.done(self._engine.watched.step, begun_s, loss)
        return loss

    def begin_step(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        plan: Plan | None = None,
        sizes: Sequence[Sequence[int]] = (),
        scale: float = 1.0,
        sync: bool = True,
        scaler: torch.amp.GradScaler | None = None,
    ) -> StepHandle:
        """As `step`, with the same arguments, but an accelerator gets the next step while it runs this one. Collective.

        The first step waits in any case. If a step fails and nobody waits for its handle, a later call raises the error
        on all ranks, `close` at the latest.

        Returns:
            A handle, at once, which returns the loss.

        Raises:
            PlanError: As `step`.
            PipelineError: As `step`.
            LostRankError: As `step`.
        """
        call = Call.BEGIN_STEP if sync else Call.BEGIN_STEP_WITHOUT_SYNC
        handle = self._step(call, inputs, targets, plan, sizes, scale, scaler).handle
        if self._progress is not None:
            self._progress.begun(self._engine.watched.step)
        assert handle is not None
        return handle

    def _step(
        self,
        call: Call,
        inputs: Any,
        targets: Any,
        plan: Plan | None,
        sizes: Sequence[Sequence[int]],
        scale: float,
        scaler: torch.amp.GradScaler | None,
    ) -> Ran:
        engine = self._engine
        engine.life.refuse_ended()
        ready = engine.plans.get(plan, sizes)
        before_first, self._before_first = self._before_first, None
        if before_first is not None:
            before_first(self, inputs, targets)
        if not isinstance(scale, Real) or not 0 < scale < math.inf:
            raise PipelineError(f"scale is {scale!r}; give a number above 0, such as 1/k to accumulate over k steps")
        trains = ready.execution.trains
        factor = scale * engine.step_results.loss_scale.begin(scaler)
        keeps_outputs = self._keeps_outputs or not trains
        batch = ready.inputs.take(inputs, targets, has_loss=trains, scale=factor, keeps_outputs=keeps_outputs)
        ready.inputs.warn_of_other_rows(batch)
        if self._warns_of_mode and trains:
            self._warns_of_mode = False
            warn_of_eval_mode(self.stages.modules)
        self._last, self._ran_own = ready, plan is None or plan is self.plan
        self._num_steps += 1
        engine.watched.step += 1
        return engine.run(call, ready, batch, float(scale), self._watch)

    def evaluate(
        self, inputs: Any = None, targets: Any = None, *, plan: Plan | None = None, sizes: Sequence[Sequence[int]] = ()
    ) -> float:
        """The mean loss on every rank, with all stages in eval() and without gradients. Collective.

        Args:
            inputs: as for `step`.
            targets: as for `step`.
            plan: as for `step`; its forwards are run.
            sizes: as for `prepare`.

        Returns:
            The mean loss over all micro-batches and replicas. Buffers and random states are as they were before.

        Raises:
            PlanError: `check` refuses the plan.
            PipelineError: there is no `loss_fn`, batch or plan do not fit, or the ranks differ in what they call.
        """
        self._engine.life.refuse_ended()
        if self.loss_fn is None:
            raise PipelineError("the pipeline has no loss_fn to evaluate; use forward for the outputs")
        ready = self._engine.plans.forwards(plan, sizes)
        return self._evaluate(Call.EVALUATE, ready, ready.inputs.take(inputs, targets)).loss.mean

    def forward(
        self, inputs: Any = None, *, outputs: bool = True, plan: Plan | None = None, sizes: Sequence[Sequence[int]] = ()
    ) -> list[Any] | None:
        """Run the plan's forwards with all stages in eval() and without gradients. Collective.

        Args:
            inputs: as for `step`.
            outputs: whether this rank asks for the outputs.
            plan: as for `step`; its forwards are run.
            sizes: as for `prepare`.

        Returns:
            The last stage's output of each micro-batch in order; None on ranks that do not ask.

        Raises:
            PlanError: `check` refuses the plan.
            PipelineError: an output cannot be sent, batch or plan do not fit, or the ranks differ in what they call.
        """
        engine = self._engine
        engine.life.refuse_ended()
        ready = engine.plans.forwards(plan, sizes)
        batch = ready.inputs.take(inputs, None, has_loss=False, keeps_outputs=True)
        ran = self._evaluate(Call.FORWARD if outputs else Call.FORWARD_WITHOUT_OUTPUTS, ready, batch)
        local, ready.execution.compute.outputs = ready.execution.compute.outputs, {}
        gathered: dict[int, Any] = {}
        for sink in self.stages.sinks:
            ranks = ready.plan.placement.ranks_of(sink)
            microbatches = ready.plan.placement.microbatches(sink, ready.plan.num_microbatches)
            here = {m: local[m] for m in microbatches if m in local}
            with self.watching("outputs"):
                where = f"stage {sink} ({type(self.stages[sink]).__name__})"
                gathered |= bring_outputs(here, ranks, ran.asking, where, engine.processes.pipeline, self.device)
        return [gathered[m] for m in sorted(gathered)] if outputs else None

    def _evaluate(self, call: Call, ready: ReadyPlan, batch: Batch) -> Ran:
        engine = self._engine
        if not engine.plans.base.execution.trains:
            ready.inputs.warn_of_other_rows(batch)
        engine.step_results.loss_scale.begin(None)
        random_state = engine.here.device.random_state()
        try:
            with evaluating([*self.local_stages.values()]):
                return engine.run(call, ready, batch, scale=0.0)
        finally:
            engine.here.device.set_random_state(random_state)

    @contextmanager
    def watch_memory(self) -> Iterator[MemoryWatch]:
        """A debug mode that records what this rank's ops hold, op by op; it makes steps slower."""
        with MemoryWatch(self.parameters()) as watch:
            self._watch = watch
            try:
                yield watch
            finally:
                self._watch = None

    @contextmanager
    def trial(self) -> Iterator[None]:
        """For trial steps: outputs are kept, and weights may have another dtype in this context. On all ranks."""
        engine = self._engine
        before = self._num_steps, engine.watched.step, self._warns_of_mode, engine.step_results.metrics
        self._keeps_outputs, self._warns_of_mode = True, False
        engine.plans.base.execution.forget()
        engine.updates.begin_again()
        try:
            yield
        finally:
            self._keeps_outputs = False
            self._num_steps, engine.watched.step, self._warns_of_mode, engine.step_results.metrics = before
            engine.updates.begin_again()
            engine.compute.outputs = {}
            engine.plans.base.execution.forget()

    # --- gradients ------------------------------------------------------------------------------------------------

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all ranks' gradients, as `torch.nn.utils.clip_grad_norm_` does on the unsplit model. Collective.

        Every weight counts once, also if it is tied, replicated or sharded.

        Args:
            max_norm: the largest norm that all gradients together may have afterwards.
            norm_type: any number above 0, or inf.
            error_if_nonfinite: raise PipelineError if the norm is nan or infinite. This waits for an accelerator.

        Returns:
            The norm of all gradients before clipping: a float64 tensor without dims, on the stages' device.
        """
        engine = self._engine
        engine.life.refuse_ended()
        if engine.loss_counts.is_open:
            raise PipelineError(
                "clip_grad_norm_ is called after a step with sync=False, whose gradients are not divided by the loss's "
                "count yet; call it after a step with sync=True"
            )
        engine.updates.forget_gradients()
        with engine.together("the other ranks' norms"):
            return engine.gradients.clip(max_norm, norm_type, error_if_nonfinite, self._share_norm)

    def _share_norm(self, norm: Number) -> torch.Tensor:
        """All processes' numbers, where the stages are. Collective; does not wait for a queued device."""
        doing, device, agreement = "adding up the gradients' norm", self._engine.here.device, self._engine.agreement
        if not device.is_queued:
            return device.numbers(agreement.share(Call.CLIP_GRAD_NORM, doing, float(norm)))
        numbers = device.numbers([0.0 for _ in agreement.share(Call.CLIP_GRAD_NORM, doing)])
        numbers[dist.get_rank()].add_(norm)
        self._engine.step_results.all_reduce(numbers, SUM, doing)
        return numbers

    # --- afterwards -----------------------------------------------------------------------------------------------

    def timeline(self) -> Timeline:
        """The measured ops and transfers of the last step, of all ranks and on every rank. Collective.

        Raises:
            PipelineError: no step has run to its end, or the pipeline is closed.
        """
        engine, last = self._engine, self._last
        engine.life.refuse_fault()
        if engine.life.has_ended or not last.execution.complete:
            raise PipelineError("there is no timeline: ask for it after a step that ran to its end, and before close")
        with self.watching("the other ranks' timelines"), collective("gathering the timeline"):
            engine.agreement.share(Call.TIMELINE, "gathering the timeline")
            last.execution.settle()
            records = all_gather_json(engine.here.record.to_fields(), engine.processes.pipeline)
        return merge(last.plan, [Record.from_fields(fields) for fields in records])

    def watching(self, doing: str, times: int = 1) -> AbstractContextManager[None]:
        """Watch anything else that all ranks do together: a rank that gets stuck is reported as in a step.

        Args:
            doing: text after "waits for" in the report.
            times: how many times `timeout_s` it may take, if some ranks work long while others wait.

        Returns:
            A context in which that is done.
        """
        return self._engine.watching(doing, times)

    def meet(self, call: Call, awaited: str) -> None:
        """Wait until all ranks make this call; PipelineError on all of them if one makes another. Collective."""
        with self.watching(awaited, PATIENT):
            self._engine.agreement.share(call, f"waiting for {awaited}")

    def close(self) -> None:
        """End the pipeline's threads, and write the last step's record where `rota run --timeline` expects it."""
        self._close(sys.exception())

    def _close_at_exit(self) -> None:
        self._close(getattr(sys, "last_value", None))

    def _close(self, error: BaseException | None) -> None:
        if self._progress is not None and error is None and not self._engine.life.has_ended:
            self._progress.end()
        self._engine.close(error)

    def settle_begun_steps(self) -> None:
        """Raise the errors of steps of `begin_step` that nobody has been told yet."""
        if not self._engine.life.has_failed:
            self._engine.stops.agreed |= self._engine.step_results.begun.settle()

    def _leave_record(self) -> None:
        engine, last = self._engine, self._last.execution
        if engine.life.has_failed and engine.here.channels is not None:  # the device may never end the step
            return
        if self._ran_own and last.complete and engine.processes.is_first_pipeline:
            last.settle()
            try:
                leave_record(self.plan, engine.here.record)
            except OSError as error:
                raise PipelineError(
                    f"the last step's record for `rota run --timeline` was not written ({error}); make room there, or "
                    f"run without --timeline"
                ) from error

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        self._close(error)
