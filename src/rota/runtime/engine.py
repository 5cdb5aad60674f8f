"""What a pipeline is made of on one rank, and one run of it.

all ranks agree ──▶ ops, with reductions between them ──▶ gradients complete ──▶ the loss, or a handle that reads it
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, TypedDict, final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rota.core.errors import LostRankError, PipelineError, error_text, failed_before, is_on_all_ranks
from rota.core.plan import Plan
from rota.core.simulation import check
from rota.models import Stages
from rota.models.elsewhere import free_elsewhere
from rota.runtime.agreement import Agreed, Agreement, Brought, Call, refuse_differences
from rota.runtime.bound_actions import ThisRank
from rota.runtime.channels import Channels
from rota.runtime.compute import Batch, Compute, step_seed
from rota.runtime.device.choosing import ctas_within, device_at, num_multiprocessors, placed_on
from rota.runtime.device.protocol import is_queued
from rota.runtime.environment import cores_of
from rota.runtime.faults.watchdog import PATIENT, Describe, Watchdog, Watched, limit_s
from rota.runtime.gradients.recompute import recomputed_by_backward
from rota.runtime.losses import LossFn, refuse_weights
from rota.runtime.memory_watch import MemoryWatch
from rota.runtime.meshes import Processes
from rota.runtime.microbatches import refuse_writes_to_shared
from rota.runtime.plans import (
    ReadyPlan,
    ReadyPlans,
    for_all_streams,
    refuse_offload,
    refuse_other_cuts,
    refuse_unsupported,
)
from rota.runtime.process_group import clock_offset_ns, join, leave, leave_world
from rota.runtime.recorder import Record
from rota.runtime.reducing.gradient_sync import GradientSync
from rota.runtime.reducing.loss_counts import NUM_FLAGS, LossCounts
from rota.runtime.reducing.sharded_stages import is_sharded, refuse_wrapped
from rota.runtime.reducing.shared_weights import shared_weights
from rota.runtime.spmd import open_groups
from rota.runtime.step_losses import StepLoss
from rota.runtime.step_results import StepHandle, StepResults
from rota.runtime.stop_requests import StopRequests
from rota.runtime.transport import Transport, collective
from rota.runtime.updates import Report, Updates

_NOTHING = nullcontext()


class Options(TypedDict, total=False):
    """Options of a `Pipeline`, which says what they mean."""

    timeout_s: float | None
    dynamic_shapes: bool
    mesh: DeviceMesh | None
    recompute: str | Iterable[int]
    allow_nonfinite_loss: bool
    check_data: Literal["first", "always", "never"]
    reduce_dtype: torch.dtype | None


@final
class Life:
    """Whether a pipeline can still be used, and all that is released when it ends, the last first."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._released = ExitStack()
        self._informed: list[Callable[[BaseException | None], None]] = []
        self._has_ended = False
        #: What must end before the pipeline does: a checkpoint that is being written.
        self.dependents = ExitStack()
        #: Whether an error has ended it, and which one if that was in the middle of a call.
        self.has_failed, self.fault = False, ""

    @property
    def has_ended(self) -> bool:
        """Whether it has been closed; a forked process has neither its threads nor its peers."""
        return self._has_ended or os.getpid() != self._process

    def at_end(self, release: Callable[[], object]) -> None:
        """Call this when it ends, even if the release of something else fails."""
        self._released.callback(release)

    def before_end(self, inform: Callable[[BaseException | None], None]) -> None:
        """Call this before anything is released, with the error that ends it, if there is one."""
        self._informed.append(inform)

    def end(self, error: BaseException | None) -> None:
        """Release all. `error`: what ends this rank; the others learn of it at once."""
        self._has_ended, self.has_failed = True, error is not None
        for inform in self._informed:
            inform(error)
        try:
            self._released.close()
        except PipelineError:
            if error is None:  # otherwise it follows from `error`, which is the one to show
                raise

    def refuse_fault(self) -> None:
        """Raises PipelineError after an error in the middle of a call."""
        if self.fault:
            raise PipelineError(failed_before(self.fault))

    def refuse_ended(self) -> None:
        """Raises PipelineError if it was closed."""
        self.refuse_fault()
        if self._has_ended:
            raise PipelineError("the pipeline is closed; make a new one")


class Ran(NamedTuple):
    """The loss of a run, the ranks that ask for its outputs, and the handle of a step that does not wait."""

    loss: StepLoss
    asking: list[int]
    handle: StepHandle | None


@final
@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Engine:
    """One rank's part of a pipeline: all that stays the same from its making to its end. `build` makes one."""

    stages: Stages
    processes: Processes
    here: ThisRank
    compute: Compute
    plans: ReadyPlans
    gradients: GradientSync
    loss_counts: LossCounts
    updates: Updates
    stops: StopRequests
    step_results: StepResults
    agreement: Agreement
    watched: Watched
    watchdog: Watchdog
    life: Life

    def run(self, call: Call, ready: ReadyPlan, batch: Batch, scale: float, watch: MemoryWatch | None = None) -> Ran:
        """Run a plan once. Collective. `scale`: as `step` was given it; `watch` sees each op's end."""
        execution, device = ready.execution, self.here.device
        execution.awaits("the other ranks to reach the same step")
        self.watched.run = execution
        handle: StepHandle | None = None
        is_here_alone = False  # whether what is raised is raised on this rank only
        seed, random_state = step_seed(), device.random_state()
        try:
            with self.watchdog.watching(execution.doing):
                agreed = self._agree(call, ready, batch, seed, scale)
                is_here_alone = True
                self._run_ops(call, ready, batch, agreed, watch)
                is_here_alone = False
                if call.waits:
                    loss = self.step_results.finish(call, ready, batch)
                else:
                    loss, handle = StepLoss(), self.step_results.hand_over(call, ready, batch, self.watched.step)
                is_over = handle is None or handle.is_done
                if is_over and execution.trains and call.syncs and not self.step_results.loss_scale.is_on:
                    self.updates.watch_gradients()
        except BaseException as error:
            execution.forget()
            if execution.trains:
                self.loss_counts.abort()
            if is_here_alone or not is_on_all_ranks(error):
                self.break_off(error)
            raise
        finally:
            device.set_random_state(random_state)
        if execution.trains and call.waits and not math.isfinite(loss.mean):
            with self.together(execution.doing):
                self.step_results.refuse_nonfinite(ready, batch, loss.mean, self.watched.step)
        return Ran(loss, agreed.asking, handle)

    def _agree(self, call: Call, ready: ReadyPlan, batch: Batch, seed: int, scale: float) -> Agreed:
        steps = self.step_results.begun
        report = self.updates.report() if call.is_step else Report()
        trains = ready.execution.trains
        flags = self.loss_counts.flags(batch.targets, report.has_changed) if trains else [0] * NUM_FLAGS
        agreed = self.agreement.begin(ready, batch, Brought(call, seed, scale, steps.num_ended(), report, flags))
        self.stops.agreed |= steps.settle(agreed.num_ended)
        steps.bound()
        if trains:
            batch.per_count = self.loss_counts.begin(agreed.count_flags)
        return agreed

    def _run_ops(self, call: Call, ready: ReadyPlan, batch: Batch, agreed: Agreed, watch: MemoryWatch | None) -> None:
        execution = ready.execution
        if self.gradients.is_needed and execution.trains and ready.reductions is not None:
            self.gradients.begin(ready.reductions, call.syncs, agreed.learns)
        seed = agreed.seed + self.processes.replica
        with self.updates if call.is_step else _NOTHING:
            execution.run(batch, seed, agreed.learns, watch)
        refuse_writes_to_shared(batch.split_inputs, batch.split_targets)
        if self.gradients.is_needed:
            self.gradients.finish(execution, call.syncs)

    @contextmanager
    def together(self, doing: str | Describe) -> Iterator[None]:
        """Watch what all ranks do together, and end the pipeline if it fails on this rank only."""
        try:
            with self.watchdog.watching(doing):
                yield
        except BaseException as error:
            if not is_on_all_ranks(error):
                self.break_off(error)
            raise

    @contextmanager
    def watching(self, doing: str, times: int = 1) -> Iterator[None]:
        """See `Pipeline.watching`."""
        self.life.refuse_fault()
        try:
            with self.watchdog.watching(doing, times):
                yield
        except LostRankError as error:
            self.break_off(error)
            raise

    def break_off(self, error: BaseException) -> None:
        """End the pipeline at once after an error on this rank only, which the script may catch.

        The others wait for what this rank has not done, and learn of the error as it leaves.
        """
        if len(self.watched.names) > 1:
            try:
                self.close(error)
            finally:
                self.life.fault = error_text(error)

    def close(self, error: BaseException | None) -> None:
        """Release all, once. `error`: what ends this rank."""
        if not self.life.has_ended:
            try:
                self.life.end(error)
            finally:
                self.stops.close(failed=error is not None)


def build(stages: Stages, plan: Plan, loss_fn: LossFn | None, options: Options) -> Engine:
    """Join the other ranks, and make this rank's part of the pipeline. Collective. Raises as `Pipeline` does."""
    if unknown := options.keys() - Options.__annotations__:
        raise TypeError(f"Pipeline has no option {min(unknown)!r}; it has {', '.join(Options.__annotations__)}")
    check(plan)
    check_data, mesh = options.get("check_data", "first"), options.get("mesh")
    if check_data not in ("first", "always", "never"):
        raise PipelineError(f"check_data={check_data!r}; say 'first', 'always' or 'never'")
    refuse_other_cuts(stages, plan)
    limit = limit_s(options.get("timeout_s"), plan)
    refuse_wrapped(stages)
    stages = for_all_streams(stages, plan)
    refuse_unsupported(plan, [edge[:2] for edge in stages.edges], len(stages))
    _ = stages.sinks  # raises SplitError if some stage's output goes nowhere
    shared = shared_weights(stages, plan.placement)
    if any(task.kind.makes_weight_gradients for task in plan.placement.tasks):
        if loss_fn is None:
            raise PipelineError("the plan has backwards, so a loss_fn(output, target) is needed")
        refuse_weights(loss_fn, stages)
    recomputed = recomputed_by_backward(options.get("recompute", "none"), plan.placement)
    life = Life()
    try:
        life.at_end(partial(leave_world, join(limit)))
        watched = Watched([f"rank {process}" for process in range(dist.get_world_size())])
        watchdog = Watchdog(limit, watched)
        life.at_end(watchdog.close)
        life.before_end(watchdog.report)
        life.at_end(partial(_end_dependents, life, watchdog))
        with watchdog.watching("the other ranks to make their pipelines", PATIENT):
            reduce_dtype = options.get("reduce_dtype")
            otherwise = refuse_differences(plan, stages, shared, mesh, reduce_dtype)
            processes = Processes(mesh, limit)
            # The last references: this closes the connections, so that the peers notice.
            life.at_end(lambda: leave(processes.close()))
            life.before_end(processes.abort_on_device)
            watched.names = processes.names
            local = plan.placement.stages_on(processes.rank)
            device = device_at(placed_on(stages, local) or otherwise)
            if (number := num_multiprocessors(device.torch_device)) is not None:
                tied = [weight.ranks for weight in shared if weight.summed]
                processes.most_ctas = ctas_within(number, plan.placement, tied, processes.num_replicas)
            processes.open_on_device(device.backend, device.torch_device)
            gradients = GradientSync(stages, plan, shared, processes, device, reduce_dtype)
            life.at_end(gradients.close)
            transport = Transport(processes.pipeline, processes.everyone)
            life.at_end(transport.close)
            channels: Channels | None = None
            if any(is_sharded(parameter) for stage in local for parameter in stages[stage].parameters()):
                refuse_offload(plan, "sharded weights (FSDP, DTensor)")
            if is_queued(device):
                refuse_offload(plan, str(device.torch_device))
                open_groups((stages[stage] for stage in local), device.torch_device)
                channels = Channels(plan, device, transport, processes)
                life.at_end(channels.close)
            record = Record(processes.rank, num_cores=None if is_queued(device) else cores_of(plan.num_ranks))
            here = ThisRank(processes.rank, device, transport, record, channels, gradients.tied_ranks)
            compute = Compute(stages, plan.placement, loss_fn, recomputed, device)
            plans = ReadyPlans(stages, plan, loss_fn, compute, here, gradients)
            with collective("comparing clocks"):
                record.offset_ns = clock_offset_ns(processes.pipeline)
        named = dict(stages.named_parameters(local))
        counts, stops = LossCounts(named.values()), StopRequests(processes.is_first)
        updates = Updates(named.items(), reports_clipping=len(watched.names) > 1)
        life.at_end(updates.close)
        allows_nonfinite_loss = options.get("allow_nonfinite_loss", False)
        step_results = StepResults(plan, here, processes, counts, stops, watchdog, allows_nonfinite_loss)
        is_dynamic = options.get("dynamic_shapes", False)
        agreement = Agreement(processes, transport, step_results.loss_scale, watched, is_dynamic, check_data)
        free_elsewhere(stages, local)
    except BaseException as error:
        life.end(error)
        raise
    return Engine(
        stages=stages,
        processes=processes,
        here=here,
        compute=compute,
        plans=plans,
        gradients=gradients,
        loss_counts=counts,
        updates=updates,
        stops=stops,
        step_results=step_results,
        agreement=agreement,
        watched=watched,
        watchdog=watchdog,
        life=life,
    )


def _end_dependents(life: Life, watchdog: Watchdog) -> None:
    with watchdog.watching("a checkpoint to be written", PATIENT):
        life.dependents.close()
