"""Pipeline: runs a checked plan on `torch.distributed`, one process per rank, with one loop over its actions."""

from __future__ import annotations

import atexit
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any, ClassVar, Literal, NamedTuple, final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset, DistributedSampler

from rota.core.checking import check
from rota.core.errors import LostRankError, PipelineError, error_text, failed_before, is_on_all_ranks
from rota.core.plan import Plan
from rota.core.timeline import Timeline
from rota.models import Stages
from rota.models.elsewhere import free_elsewhere
from rota.models.modes import evaluating, warn_of_eval_mode
from rota.runtime.agreement import Agreement, Call, refuse_differences
from rota.runtime.channels import Channels
from rota.runtime.clocks import clock_offset_ns
from rota.runtime.compute import Batch, Compute, step_seed
from rota.runtime.device.choosing import device_of
from rota.runtime.device.protocol import Device, Number, is_queued
from rota.runtime.environment import cores_of
from rota.runtime.execution import Execution, forwards_of
from rota.runtime.faults.watchdog import PATIENT, Describe, Watchdog, limit_s
from rota.runtime.gradients.recompute import recomputed_by_backward
from rota.runtime.json_messages import all_gather_json
from rota.runtime.known_layouts import KnownLayouts, Size
from rota.runtime.launcher_files import leave_record
from rota.runtime.loss_weights import refuse_weights
from rota.runtime.losses import LossFn, means_of, needs_target
from rota.runtime.memory_watch import MemoryWatch
from rota.runtime.meshes import Processes
from rota.runtime.microbatch_inputs import MicrobatchInputs
from rota.runtime.plan_fit import for_all_streams, refuse_other_cuts, refuse_unsupported
from rota.runtime.precision import LossScale
from rota.runtime.process_group import join, leave
from rota.runtime.ready_plans import ReadyPlan, ReadyPlans
from rota.runtime.recorder import Record, merge
from rota.runtime.reducing.gradient_sync import GradientSync
from rota.runtime.reducing.loss_counts import NUM_FLAGS, LossCounts
from rota.runtime.reducing.shared_weights import shared_weights
from rota.runtime.reducing.wrapped_stages import unwrapped
from rota.runtime.step_end import StepEnd, all_reduce
from rota.runtime.step_handles import StepHandle
from rota.runtime.step_losses import StepLoss
from rota.runtime.step_progress import StepProgress, progress_of
from rota.runtime.stop_requests import StopRequests
from rota.runtime.transport import Transport, bring_outputs, collective
from rota.runtime.updates import Report, Updates


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
        timeout_s: end all ranks if one makes no progress for this many seconds; None: 20 simulated steps, at least 60
            s.
        dynamic_shapes: shapes between stages depend on the data, not only on the inputs' shapes.
        keep_outputs: keep the last stage's outputs in `outputs`; a plan with forward passes only always does.
        mesh: as `rota.mesh` makes it; the plan's ranks are its dim "pp". None: all processes are the pipeline.
        recompute: "none", "full", or stages that keep only what they receive, and repeat their forward for B or I.
        allow_nonfinite_loss: `step` returns a loss that is nan or infinite instead of raising PipelineError.
        check_data: when ranks compare what they were given: "first" (in the first step, evaluation and forward),
            "always" or "never". Ranks of one replica must have the same batch, replicas different ones.

    Raises:
        PlanError: `check` refuses the plan.
        PipelineError: plan, stages and processes do not fit together.
    """

    #: Called with a pipeline and what its first `step` was given, before that; None: nothing is.
    before_first_step: ClassVar[Callable[[Pipeline, Any, Any], None] | None] = None

    def __init__(
        self,
        stages: Stages,
        plan: Plan,
        loss_fn: LossFn | None,
        *,
        timeout_s: float | None = None,
        dynamic_shapes: bool = False,
        keep_outputs: bool = False,
        mesh: DeviceMesh | None = None,
        recompute: str | Iterable[int] = "none",
        allow_nonfinite_loss: bool = False,
        check_data: Literal["first", "always", "never"] = "first",
    ) -> None:
        check(plan)
        if check_data not in ("first", "always", "never"):
            raise PipelineError(f"check_data={check_data!r}; say 'first', 'always' or 'never'")
        refuse_other_cuts(stages, plan)
        limit = limit_s(timeout_s, plan)
        stages, ddp_groups = unwrapped(stages)
        stages = for_all_streams(stages, plan)
        refuse_unsupported(plan, [edge[:2] for edge in stages.edges], len(stages))
        shared = shared_weights(stages, plan.placement)
        self._sink_ranks = {sink: plan.placement.ranks_of(sink) for sink in stages.sinks}
        self.stages, self.plan, self.loss_fn = stages, plan, loss_fn
        self._takes_target = loss_fn is None or needs_target(loss_fn)
        trains = any(task.kind.makes_weight_gradients for task in plan.placement.tasks)
        if trains and loss_fn is None:
            raise PipelineError("the plan has backwards, so a loss_fn(output, target) is needed")
        if trains and loss_fn is not None:
            refuse_weights(loss_fn, stages)
        recomputed = recomputed_by_backward(recompute, plan.placement)
        self._closed, self._failed = False, False
        self._fault = ""  # what ended the pipeline in the middle of a call
        self._before_first = type(self).before_first_step
        self._process = os.getpid()
        #: What must end before the pipeline does: a checkpoint that is being written.
        self.before_close = ExitStack()
        #: Releases all that has been acquired so far, the last first, even if the release of another one fails.
        self._teardown = ExitStack()
        self._report_failure: Callable[[BaseException], None] = _report_to_nobody
        self._abort: Callable[[], None] = lambda: None
        try:
            if join(limit):
                self._teardown.callback(leave, [dist.group.WORLD])
            self._watchdog = Watchdog(limit)
            self._teardown.callback(self._watchdog.close)
            self._report_failure = self._watchdog.fail
            self._teardown.callback(self._end_checkpoints)
            with self._watchdog.watching("the other ranks to make their pipelines", PATIENT):
                otherwise = refuse_differences(plan, stages, shared, mesh)
                self.mesh, self._processes = mesh, Processes(mesh, limit)
                # The last references: this closes the connections, so that the peers notice.
                self._teardown.callback(lambda: leave(self._processes.close()))
                self._abort = self._processes.abort_on_device
                self._watchdog.names = self._processes.names
                #: This process's rank in the plan, and which replica of the pipeline it belongs to.
                self.rank, self.replica = self._processes.rank, self._processes.replica
                self.num_replicas = self._processes.num_replicas
                self._is_alone = len(self._processes.names) == 1
                #: The stages on this rank.
                self.local_stages = {stage: stages[stage] for stage in plan.placement.stages_on(self.rank)}
                self._device = device_of(stages, plan.placement.stages_on(self.rank), otherwise)
                self._processes.open_on_device(self._device.backend, self.device)
                self._gradients = GradientSync(stages, plan, shared, self._processes, ddp_groups, self._device)
                self._teardown.callback(self._gradients.close)
                self._transport = Transport(self._processes.pipeline, self._processes.everyone)
                self._teardown.callback(self._transport.close)
                self._channels: Channels | None = None
                if is_queued(self._device):
                    self._channels = Channels(plan, self._device, self._transport, self._processes)
                    self._teardown.callback(self._channels.close)
                self._compute = Compute(
                    stages,
                    plan.placement,
                    loss_fn,
                    keep_outputs or not trains,
                    recomputed,
                    self._device,
                )
                num_cores = None if is_queued(self._device) else cores_of(plan.num_ranks)
                self._record = Record(self.rank, num_cores=num_cores)
                self._watch: MemoryWatch | None = None
                self._known = KnownLayouts()
                self._plans = ReadyPlans(plan, self._made_ready)
                #: Plans of forwards only, by the plans that they are of; made when they are needed.
                self._for_evaluation: WeakKeyDictionary[ReadyPlan, ReadyPlan] = WeakKeyDictionary()
                self._known_in_evaluation = KnownLayouts()
                self._last = self._plans.base
                with collective("comparing clocks"):
                    self._record.offset_ns = clock_offset_ns(self._processes.pipeline)
            self._num_steps = 0  # that were begun
            self._num_steps_before = 0  # of the training, until a checkpoint was loaded
            self._warns_of_mode = self._processes.is_first
            self._ran_own = True  # the last step was given no plan
            self._progress = progress_of(plan, self._processes.is_first, on_cpu=not is_queued(self._device))
            self._loss_counts, self._stops = LossCounts(self.parameters()), StopRequests(self._processes.is_first)
            self._updates = Updates(self.named_parameters(), self._device, compares=not self._is_alone)
            self._teardown.callback(self._updates.close)
            self._step_end = StepEnd(
                plan,
                self._device,
                self._processes,
                self._transport,
                self._loss_counts,
                self._stops,
                self._watchdog.watching,
                allow_nonfinite_loss,
            )
            self._agreement = Agreement(
                self._processes, self._transport, self._step_end.loss_scale, dynamic_shapes, check_data
            )
            self._watchdog.num_calls = partial(getattr, self._agreement, "num_calls")
            self._teardown.callback(self._leave_record)
            self._teardown.callback(self.settle_begun_steps)
            free_elsewhere(stages, self.local_stages)
            atexit.register(self._close_at_exit)
        except BaseException as error:
            self._end(error)
            raise

    def _made_ready(self, plan: Plan, number: int, sizes: tuple[Size, ...]) -> ReadyPlan:
        """For `ReadyPlans`. Plans of forwards only have no reductions."""
        tied = self._gradients.tied_ranks
        execution = self._execution(plan, self._compute, sizes, self._known, tied)
        execution.record = self._record
        inputs = MicrobatchInputs(self.stages, plan, self.rank, self._sink_ranks, self.device, warns=not number)
        return ReadyPlan(plan, number, sizes, execution, inputs, self._gradients.reductions(plan))

    def _execution(
        self,
        plan: Plan,
        compute: Compute,
        sizes: tuple[Size, ...],
        known: KnownLayouts,
        tied: Sequence[tuple[int, ...]] = (),
    ) -> Execution[Compute]:
        transport, channels = self._transport, self._channels
        known = known if sizes else KnownLayouts()
        return Execution(self.stages, plan, self.rank, transport, compute, self._device, channels, tied, sizes, known)

    def prepare(self, plan: Plan, sizes: Sequence[Sequence[int]] = ()) -> None:
        """Make `plan` ready to run, so that the `step` that gets it begins at once. Any thread may call it.

        Args:
            plan: a plan for a batch of its own: the same tasks on the same ranks as in the pipeline's plan. The number
                of micro-batches, their times and bytes, and all orders may differ.
            sizes: for each micro-batch its rows and whatever else determines shapes, such as (rows, length). Ranks
                learn how layouts follow from sizes, and then exchange no layouts for new sizes.

        Raises:
            PlanError: `check` refuses the plan.
            PipelineError: the plan is for other stages or ranks, or the sizes are not those of its micro-batches.
        """
        self._refuse_closed()
        self._plans.get(plan, sizes)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank's stages, each once, by their names in `Stages.named_parameters`."""
        return self.stages.named_parameters(self.local_stages)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages, for this rank's optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    @property
    def device(self) -> torch.device:
        """Where this rank's stages are. Batches may be here or on the CPU."""
        return self._device.torch_device

    @property
    def device_queue(self) -> Device:
        """What runs this rank's stages there, at once or in the order in which it gets its work."""
        return self._device

    @property
    def losses(self) -> dict[int, float]:
        """The mean loss of each micro-batch of the last step, on the ranks of the last stage. Waits for that step."""
        return means_of(self._compute.losses, self._device)

    @property
    def metrics(self) -> dict[str, float]:
        """The means of the metrics that `loss_fn` returned in the last `step` or `evaluate`, the same on all ranks.

        After `begin_step` they are those of the last step whose handle was waited for.
        """
        return self._step_end.metrics

    @property
    def outputs(self) -> dict[int, Any]:
        """The output of each micro-batch of the last step, on the ranks of the last stage, if outputs are kept."""
        return self._compute.outputs

    # --- data ---------------------------------------------------------------------------------------------------------

    @property
    def reads_inputs(self) -> bool:
        """Whether a stage of this rank reads the step's inputs; other ranks may give None."""
        return self._plans.base.inputs.reads_inputs

    @property
    def reads_targets(self) -> bool:
        """Whether this rank has the last stage, whose loss takes targets; other ranks may give None."""
        return self._takes_target and self._plans.base.inputs.reads_targets

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
        self._stops.listen()
        return self._stops.agreed

    @property
    def has_begun_steps(self) -> bool:
        """Whether there are steps of `begin_step` that may not have ended on all ranks."""
        return self._step_end.begun.num_open > 0

    @property
    def processes(self) -> Processes:
        """All processes of the run, this one's place among them, and their groups."""
        return self._processes

    @property
    def progress(self) -> StepProgress | None:
        """What says how the training goes; None on all processes but the first, and without `rota run`."""
        return self._progress

    @property
    def loss_scale(self) -> LossScale:
        """The scale of the gradient scaler that `step` is given."""
        return self._step_end.loss_scale

    @property
    def num_steps(self) -> int:
        """How many steps this pipeline has begun."""
        return self._num_steps

    @property
    def _number(self) -> int:
        """The last step's number in the training, for messages."""
        return self._num_steps_before + self._num_steps

    def count_from(self, step: int) -> None:
        """Messages number the next step as the one after `step`: the training goes on from there."""
        self._num_steps_before = step - self._num_steps

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
            self._progress.done(self._number, begun_s, loss)
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
    ) -> _Ran:
        self._refuse_closed()
        ready = self._plans.get(plan, sizes)
        before_first, self._before_first = self._before_first, None
        if before_first is not None:
            before_first(self, inputs, targets)
        if not isinstance(scale, Real) or not 0 < scale < math.inf:
            raise PipelineError(f"scale is {scale!r}; give a number above 0, such as 1/k to accumulate over k steps")
        factor = self._step_end.loss_scale.begin(scaler)
        batch = self._take(ready, inputs, targets, has_loss=ready.execution.trains, scale=scale * factor)
        ready.inputs.warn_of_other_rows(batch)
        if self._warns_of_mode and ready.execution.trains:
            self._warns_of_mode = False
            warn_of_eval_mode(self.stages.modules)
        self._ran_own = plan is None or plan is self.plan
        self._num_steps += 1
        return self._run(call, ready, batch, float(scale))

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
        self._refuse_closed()
        if self.loss_fn is None:
            raise PipelineError("the pipeline has no loss_fn to evaluate; use forward for the outputs")
        ready = self._evaluating(plan, sizes)
        batch = self._take(ready, inputs, targets, has_loss=True)
        return self._evaluate(Call.EVALUATE, ready, batch).loss.mean

    def forward(
        self,
        inputs: Any = None,
        *,
        outputs: bool = True,
        plan: Plan | None = None,
        sizes: Sequence[Sequence[int]] = (),
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
        self._refuse_closed()
        ready = self._evaluating(plan, sizes)
        batch = self._take(ready, inputs, None, has_loss=False)
        ran = self._evaluate(Call.FORWARD if outputs else Call.FORWARD_WITHOUT_OUTPUTS, ready, batch)
        compute = ready.execution.compute
        found: dict[int, Any] = {}
        for sink, ranks in self._sink_ranks.items():
            batches = ready.plan.placement.microbatches(sink, ready.plan.num_microbatches)
            here = {m: compute.outputs[m] for m in batches if m in compute.outputs}
            with self.watching("outputs"):
                where = f"stage {sink} ({type(self.stages[sink]).__name__})"
                found |= bring_outputs(here, ranks, ran.asking, where, self._processes.pipeline, self.device)
        compute.outputs = {}
        return [found[m] for m in sorted(found)] if outputs else None

    def _evaluating(self, plan: Plan | None, sizes: Sequence[Sequence[int]]) -> ReadyPlan:
        """The forwards of a plan, ready."""
        training = self._plans.get(plan, sizes)
        if training not in self._for_evaluation:
            forwards = forwards_of(training.plan)
            compute = Compute(self.stages, forwards.placement, self.loss_fn, keep_outputs=False, device=self._device)
            execution = self._execution(forwards, compute, training.sizes, self._known_in_evaluation)
            self._for_evaluation[training] = replace(training, plan=forwards, execution=execution, reductions=None)
        return self._for_evaluation[training]

    def _evaluate(self, call: Call, ready: ReadyPlan, batch: Batch) -> _Ran:
        if not self._plans.base.execution.trains:
            ready.inputs.warn_of_other_rows(batch)
        ready.execution.compute.keep_outputs = call is not Call.EVALUATE
        self._step_end.loss_scale.begin(None)
        random_state = self._device.random_state()
        try:
            with evaluating([*self.local_stages.values()]):
                return self._run(call, ready, batch)
        finally:
            self._device.set_random_state(random_state)

    def _run(self, call: Call, ready: ReadyPlan, batch: Batch, scale: float = 0.0) -> _Ran:
        """Run a plan once. `scale`: as `step` was given it."""
        execution = ready.execution
        execution.watch = self._watch if call.is_step else None
        if call.is_step:
            self._last = ready
        execution.awaited = "the other ranks to reach the same step"
        self._watchdog.last = lambda: f"{execution.last()} in step {self._number}"
        self._watchdog.num_reached, self._watchdog.device = execution.num_reached, execution.doing_on_device
        sync, trains = call.syncs, execution.trains
        loss, handle = StepLoss.none(), None
        is_running = False  # what is raised now, is raised on this rank only
        try:
            with step_seed(self._device) as seed, self._watchdog.watching(execution.doing):
                report = self._updates.report() if call.is_step else Report()
                flags = self._loss_counts.flags(batch.targets, report.has_changed) if trains else [0] * NUM_FLAGS
                num_ended = self._step_end.begun.num_ended()
                begun = self._agreement.begin(call, ready, batch, seed, scale, num_ended, report, flags)
                self._stops.agreed |= self._step_end.begun.settle(begun.num_ended)
                self._step_end.begun.bound()
                batch = begun.batch
                if trains:
                    batch = replace(batch, per_count=self._loss_counts.begin(begun.count_flags))
                is_running = True
                self._gradients.begin(execution, ready.reductions, sync, begun.with_layouts)
                try:
                    with self._updates.refused() if call.is_step else nullcontext():
                        execution.run(batch, begun.seed + self.replica, begun.with_layouts, self._watchdog.tick)
                    ready.inputs.refuse_writes(batch)
                    self._gradients.finish(execution, sync)
                except Exception as error:
                    self._agreement.explain(error, execution)
                    raise
                is_running = False
                if call.waits:
                    loss = self._step_end.finish(call, ready, batch)
                else:
                    handle = self._step_end.hand_over(call, ready, batch, self._number)
                if handle is None or handle.is_done:
                    execution.settle()
                    if trains and sync:
                        self._updates.end(self._step_end.loss_scale.is_on)
        except BaseException as error:
            execution.forget()
            if trains:
                self._loss_counts.abort()
            if is_running or not is_on_all_ranks(error):
                self._break(error)
            raise
        if trains and call.waits and not math.isfinite(loss.mean):
            with self._together(execution.doing):
                self._step_end.refuse_nonfinite(ready, batch, loss.mean, self._number)
        return _Ran(batch, loss, begun.asking, handle)

    def _take(self, ready: ReadyPlan, inputs: Any, targets: Any, *, has_loss: bool, scale: float = 1.0) -> Batch:
        if targets is not None and not self._takes_target:
            raise PipelineError(
                "targets are given, but loss_fn takes the output alone; leave them out, or make it "
                "loss_fn(output, target)"
            )
        takes_target = self._takes_target
        return ready.inputs.take(
            inputs,
            targets,
            needs_targets=has_loss and takes_target,
            loss_of_output=has_loss and not takes_target,
            scale=scale,
        )

    def _refuse_closed(self) -> None:
        self._refuse_fault()
        if self._closed:
            raise PipelineError("the pipeline is closed; make a new one")

    def _refuse_fault(self) -> None:
        if self._fault:
            raise PipelineError(failed_before(self._fault))

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
        kept, count, metrics = self._compute.keep_outputs, self._num_steps, self._step_end.metrics
        warns, self._warns_of_mode = self._warns_of_mode, False
        self._compute.keep_outputs = True
        self._plans.base.execution.forget()
        self._updates.begin_again()
        try:
            yield
        finally:
            self._compute.keep_outputs, self._num_steps, self._step_end.metrics = kept, count, metrics
            self._warns_of_mode = warns
            self._updates.begin_again()
            self._compute.outputs = {}
            self._plans.base.execution.forget()

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
        self._refuse_closed()
        if self._loss_counts.is_open:
            raise PipelineError(
                "clip_grad_norm_ is called after a step with sync=False, whose gradients are not divided by the loss's "
                "count yet; call it after a step with sync=True"
            )
        self._updates.forget_gradients()
        with self._together("the other ranks' norms"):
            return self._gradients.clip(max_norm, norm_type, error_if_nonfinite, self._share_norm)

    def _share_norm(self, mine: Number) -> torch.Tensor:
        """All processes' numbers, where the stages are. Collective; does not wait for a queued device."""
        doing = "adding up the gradients' norm"
        if not self._device.is_queued:
            return self._device.numbers(self._agreement.share(Call.CLIP_GRAD_NORM, doing, float(mine)))
        numbers = self._device.numbers([0.0 for _ in self._agreement.share(Call.CLIP_GRAD_NORM, doing)])
        numbers[dist.get_rank()].add_(mine)
        all_reduce(numbers, dist.ReduceOp.SUM, doing, self._transport, self._processes)
        return numbers

    # --- afterwards -----------------------------------------------------------------------------------------------

    def timeline(self) -> Timeline:
        """The measured ops and transfers of the last step, of all ranks and on every rank. Collective.

        Raises:
            PipelineError: no step has run to its end, or the pipeline is closed.
        """
        self._refuse_fault()
        if self._closed or not self._last.execution.complete:
            raise PipelineError("there is no timeline: ask for it after a step that ran to its end, and before close")
        with self.watching("the other ranks' timelines"), collective("gathering the timeline"):
            self._agreement.share(Call.TIMELINE, "gathering the timeline")
            self._last.execution.settle()
            records = all_gather_json(self._record.to_fields(), self._processes.pipeline)
        return merge(self._last.plan, [Record.from_fields(fields) for fields in records])

    @contextmanager
    def watching(self, doing: str, times: int = 1) -> Iterator[None]:
        """Watch anything else that all ranks do together: a rank that gets stuck is reported as in a step.

        Args:
            doing: text after "waits for" in the report.
            times: how many times `timeout_s` it may take, if some ranks work long while others wait.
        """
        self._refuse_fault()
        try:
            with self._watchdog.watching(doing, times):
                yield
        except LostRankError as error:
            self._break(error)
            raise

    def meet(self, call: Call, awaited: str) -> None:
        """Wait until all ranks make this call; PipelineError on all of them if one makes another. Collective."""
        with self.watching(awaited, PATIENT):
            self._agreement.share(call, f"waiting for {awaited}")

    def close(self) -> None:
        """End the pipeline's threads, and write the last step's record where `rota run --timeline` expects it."""
        self._close(sys.exception())

    def _close_at_exit(self) -> None:
        self._close(getattr(sys, "last_value", None))

    def _close(self, error: BaseException | None) -> None:
        if self._closed or os.getpid() != self._process:  # a forked process has neither its threads nor its peers
            return
        try:
            self._end(error)
        finally:
            self._stops.close(failed=error is not None)

    @contextmanager
    def _together(self, doing: str | Describe) -> Iterator[None]:
        """Watch what all ranks do together, and end the pipeline if it fails on this rank only."""
        try:
            with self._watchdog.watching(doing):
                yield
        except BaseException as error:
            if not is_on_all_ranks(error):
                self._break(error)
            raise

    def _break(self, error: BaseException) -> None:
        """End the pipeline at once after an error on this rank only, which the script may catch.

        The others wait for what this rank has not done, and learn of the error as it leaves.
        """
        if not self._is_alone:
            try:
                self._close(error)
            finally:
                self._fault = error_text(error)

    def _end(self, error: BaseException | None) -> None:
        """Release all that was acquired. `error`: what ends this rank; the others learn of it at once."""
        self._closed, self._failed = True, error is not None
        atexit.unregister(self._close_at_exit)
        if error is not None:
            self._report_failure(error)
            if not isinstance(error, SystemExit) or error.code:
                self._abort()
        else:
            self._watchdog.report_end(self._number)
            if self._progress is not None:
                self._progress.end()
        try:
            self._teardown.close()
        except PipelineError:
            if error is None:  # otherwise it follows from `error`, which is the one to show
                raise

    def _end_checkpoints(self) -> None:
        with self.watching("a checkpoint to be written", PATIENT):
            self.before_close.close()

    def settle_begun_steps(self) -> None:
        """Raise the errors of steps of `begin_step` that nobody has been told yet."""
        if not self._failed:
            self._stops.agreed |= self._step_end.begun.settle()

    def _leave_record(self) -> None:
        if self._failed and self._channels is not None:  # the device may never end the step
            return
        if self._ran_own and self._last.execution.complete and self._processes.is_first_pipeline:
            self._last.execution.settle()
            try:
                leave_record(self.plan, self._record)
            except OSError as error:
                raise PipelineError(
                    f"the last step's record for `rota run --timeline` was not written ({error}); make room there, or "
                    f"run without --timeline"
                ) from error

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        self._close(error)


class _Ran(NamedTuple):
    """What a run was of, its loss, the ranks that ask for outputs, and the handle of a step that does not wait."""

    batch: Batch
    loss: StepLoss
    asking: list[int]
    handle: StepHandle | None


def _report_to_nobody(_: BaseException) -> None:
    """Before there is a watchdog."""
