"""Pipeline: runs a checked plan on `torch.distributed`, one process a rank, with one loop over its actions."""

from __future__ import annotations

import atexit
import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from rota.checking import check
from rota.errors import PipelineError
from rota.models import Stages
from rota.plan import Plan
from rota.runtime.agreement import refuse_devices, refuse_differences
from rota.runtime.compute import Batch, Compute, LossFn
from rota.runtime.execution import Execution, evaluating, forwards_of
from rota.runtime.gradients import warm_up
from rota.runtime.handover import leave_record
from rota.runtime.intake import Intake
from rota.runtime.joining import join
from rota.runtime.memory_watch import MemoryWatch
from rota.runtime.meshes import Processes
from rota.runtime.outputs import bring
from rota.runtime.precision import LossScale
from rota.runtime.program import for_all_streams, refuse_unsupported
from rota.runtime.recompute import recomputed_by_backward
from rota.runtime.recorder import Record, clock_offset_ns, merge
from rota.runtime.shared import shared_weights
from rota.runtime.synchronizing import GradientSync
from rota.runtime.transport import Transport, together
from rota.runtime.watchdog import Watchdog
from rota.runtime.wrapping import unwrapped
from rota.timeline import Timeline


@final
class Pipeline:
    """A model's stages, run as planned; every process makes one, with the same arguments.

    `loss_fn(output, target)` returns the mean loss of a micro-batch, a tensor with one element; None for a plan of
    forwards alone. A rank that makes no progress inside a step for `timeout_s` is ended, and says what it waited
    for. `dynamic_shapes`: shapes depend on the data, not only on the inputs' shapes. `keep_outputs`: the last
    stage's outputs stay in `outputs` (always so in a plan of forwards). `mesh`: see `rota.mesh`; the plan's ranks
    are its dim "pp". Without one, all processes are the pipeline. `recompute`: "full" or a list of stages, which keep
    nothing but what they receive, and run their forward again at the beginning of their backward.

    A plan with several streams (`rota.bidirectional`) takes the stages of one, and shares their weights. Raises
    PlanError where `check` refuses the plan, PipelineError where plan, stages and processes do not fit.
    """

    def __init__(
        self,
        stages: Stages,
        plan: Plan,
        loss_fn: LossFn | None,
        *,
        timeout_s: float = 60.0,
        dynamic_shapes: bool = False,
        keep_outputs: bool = False,
        mesh: DeviceMesh | None = None,
        recompute: str | Iterable[int] = "none",
    ) -> None:
        check(plan)
        stages, ddp_groups = unwrapped(stages)
        stages = for_all_streams(stages, plan)
        refuse_unsupported(plan, [edge[:2] for edge in stages.edges], len(stages))
        shared = shared_weights(stages, plan.placement)
        sink_ranks = {sink: plan.placement.ranks_of(sink) for sink in stages.sinks}
        self.stages, self.plan, self.loss_fn = stages, plan, loss_fn
        trains = any(task.kind.makes_weight_gradients for task in plan.placement.tasks)
        if trains and loss_fn is None:
            raise PipelineError("the plan has backwards, so a loss_fn(output, target) is needed")
        recomputed = recomputed_by_backward(recompute, plan.placement)
        if trains:
            warm_up()
        self._dynamic_shapes = dynamic_shapes
        self._owns_process_group = join()
        refuse_differences(plan, shared, mesh)
        self.mesh, self._processes = mesh, Processes(mesh)
        #: This process's rank in the plan, and which replica of the pipeline it belongs to.
        self.rank, self.replica = self._processes.rank, self._processes.replica
        self.num_replicas = self._processes.num_replicas
        refuse_devices(stages, plan.placement.stages_on(self.rank))
        self._gradients = GradientSync(stages, plan, shared, self._processes, ddp_groups)
        self._transport = Transport(self._processes.pipeline, self._processes.everyone)
        self._compute = Compute(stages, plan.placement, loss_fn, keep_outputs or not trains, recomputed)
        self._running = self._training = Execution(stages, plan, self.rank, self._transport, self._compute)
        self._loss_scale = LossScale()
        self._evaluation: Execution[Compute] | None = None  # made when it is asked for
        with together("comparing clocks"):
            self._training.record.offset_ns = clock_offset_ns(self._processes.pipeline)
        self._watchdog = Watchdog(self.rank, timeout_s, lambda: self._running.doing())
        #: The stages on this rank.
        self.local_stages = {stage: stages[stage] for stage in plan.placement.stages_on(self.rank)}
        self._intake = Intake(stages, plan, self.rank, sink_ranks)
        #: What is to end before the pipeline does: a checkpoint that is being written.
        self.before_close = ExitStack()
        self._closed = False
        atexit.register(self.close)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank's stages, each once, and their names."""
        local = nn.ModuleList(self.local_stages.values())
        for name, parameter in local.named_parameters():
            yield name.partition(".")[2], parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages: what this rank's optimizer takes."""
        return (parameter for _, parameter in self.named_parameters())

    @property
    def losses(self) -> dict[int, float]:
        """Loss of each micro-batch of the last step, on the rank of the last stage."""
        return self._compute.losses

    @property
    def outputs(self) -> dict[int, Any]:
        """Output of each micro-batch of the last step, likewise, if they are kept."""
        return self._compute.outputs

    # --- one step -------------------------------------------------------------------------------------------------

    def step(
        self,
        inputs: Any = None,
        targets: Any = None,
        *,
        scale: float = 1.0,
        sync: bool = True,
        scaler: torch.amp.GradScaler | None = None,
    ) -> float:
        """Run the plan once; gradients are added to `.grad`, as `loss.backward()` does. Collective.

        `inputs`: what the stages on this rank read (None where they read nothing): a tensor, a tuple or a dict of
        them, split along dim 0 into the plan's micro-batches, or a list of micro-batches. `targets`: likewise, for
        the ranks of the last stage. Returns the mean loss on every rank (nan without a loss_fn), of all replicas.

        To accumulate over k steps, give each `scale=1/k`, which multiplies gradients and not the loss returned, and all
        but the last `sync=False`: gradients of replicas and of tied weights are then put together once, by the last.

        `scaler`: this process's own, whose factor the gradients have until it takes it out. Where one rank's overflow,
        all ranks' become infinite, so that every scaler skips the step.
        """
        training = self._training
        if not 0 < scale < math.inf:
            raise PipelineError(f"scale is {scale}; give a number above 0, such as 1/k to accumulate over k steps")
        scale *= self._loss_scale.begin(scaler)
        batch = self._take(inputs, targets, needs_targets=training.trains, scale=scale)
        self._run(training, batch, sync=sync)
        return self._loss_of(training, batch)

    def evaluate(self, inputs: Any = None, targets: Any = None) -> float:
        """The mean loss on every rank, with all stages in eval() meanwhile and no gradients. Collective.

        Takes what `step` does. The forwards run on their ranks in the plan's order; buffers and random state stay.
        """
        if self.loss_fn is None:
            raise PipelineError("the pipeline has no loss_fn to evaluate; use forward for the outputs")
        batch = self._take(inputs, targets, needs_targets=True)
        return self._loss_of(self._evaluate(batch, keep_outputs=False)[0], batch)

    def forward(self, inputs: Any = None, *, outputs: bool = True) -> list[Any] | None:
        """The last stage's output of each micro-batch in order, on ranks that ask for `outputs`. Collective.

        As `evaluate`, without targets.
        """
        batch = self._take(inputs, None, needs_targets=False)
        done, asking = self._evaluate(batch, keep_outputs=True, ask=outputs)
        made = done.compute.outputs
        found: dict[int, Any] = {}
        for sink, ranks in self._intake.sink_ranks.items():
            batches = self.plan.placement.microbatches(sink, self.plan.num_microbatches)
            here = {m: made[m] for m in batches if m in made}
            found |= bring(here, ranks, asking, self._processes.pipeline)
        done.compute.outputs = {}
        return [found[m] for m in sorted(found)] if outputs else None

    def _evaluate(self, batch: Batch, keep_outputs: bool, ask: bool = False) -> tuple[Execution[Compute], list[int]]:
        if self._evaluation is None:
            plan = forwards_of(self.plan)
            compute = Compute(self.stages, plan.placement, self.loss_fn, keep_outputs)
            self._evaluation = Execution(self.stages, plan, self.rank, self._transport, compute)
        self._evaluation.compute.keep_outputs = keep_outputs
        self._loss_scale.begin(None)
        random_state = torch.get_rng_state()
        with evaluating([*self.local_stages.values()]):
            asking = self._run(self._evaluation, batch, ask)
        torch.set_rng_state(random_state)
        return self._evaluation, asking

    def _run(self, execution: Execution[Compute], batch: Batch, ask: bool = False, sync: bool = True) -> list[int]:
        """One run of a plan; returns the ranks that ask."""
        self._running = execution
        execution.awaited = "the other ranks to reach the same step"
        self._watchdog.begin()
        seed = int(torch.randint(2**62, ()))
        random_state = torch.get_rng_state()
        try:
            fresh, seed, syncs, leaves, most, least, *asks = self._agree(execution.is_new(batch), seed, sync, ask)
            if syncs and leaves:
                raise PipelineError("some ranks gave step sync=True, others sync=False; give all the same")
            self._loss_scale.refuse_differences(most, least)
            self._gradients.begin(execution, sync, bool(fresh))
            execution.run(batch, seed + self.replica, bool(fresh), self._watchdog.tick)
            self._gradients.finish(execution, sync)
            if execution.trains and sync:
                execution.awaited = "the other ranks' scalers"
                agree = partial(self._transport.all_reduce, how=dist.ReduceOp.MAX, doing="comparing overflows")
                self._loss_scale.settle(self.parameters(), agree)
        except BaseException:
            execution.forget()
            raise
        finally:
            self._watchdog.end()
            # Each rank has drawn one number, whatever its stages drew: shuffles stay the same on all ranks.
            torch.set_rng_state(random_state)
        return [rank for rank, asking in enumerate(asks) if asking]

    def _agree(self, is_new: bool, seed: int, sync: bool, ask: bool) -> list[int]:
        """Whether layouts may be new, one seed, whether any rank syncs or does not, scales, and who asks."""
        asks = [int(ask and rank == self.rank) for rank in range(self.plan.num_ranks)]
        seed = seed if self._processes.is_first else 0
        told = torch.tensor([is_new or self._dynamic_shapes, seed, sync, not sync, *self._loss_scale.told(), *asks])
        self._transport.all_reduce(told, dist.ReduceOp.MAX, "waiting for the others to begin the step")
        return told.tolist()

    def _take(self, inputs: Any, targets: Any, **options: Any) -> Batch:
        if self._closed:
            raise PipelineError("the pipeline is closed; make a new one")
        return self._intake.take(inputs, targets, **options)

    def _loss_of(self, execution: Execution[Compute], batch: Batch) -> float:
        """The mean loss of all replicas."""
        mine = self._intake.counted_loss(batch, execution.compute.losses)
        total = torch.tensor([mine], dtype=torch.float64)
        execution.awaited = "the other ranks' losses"
        self._watchdog.begin()
        try:
            self._transport.all_reduce(total, dist.ReduceOp.SUM, f"waiting for {execution.awaited}")
        finally:
            self._watchdog.end()
        return total.item() / self._processes.num_pipelines

    @contextmanager
    def watch_memory(self) -> Iterator[MemoryWatch]:
        """A debug mode, for a look at some steps, which it makes slower: what this rank's ops hold, op by op."""
        with MemoryWatch(self.parameters()) as watch:
            self._training.watch = watch
            try:
                yield watch
            finally:
                self._training.watch = None

    # --- gradients ------------------------------------------------------------------------------------------------

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> float:
        """Scale all ranks' gradients so that their norm together is at most `max_norm`; returns it as it was.

        As `torch.nn.utils.clip_grad_norm_` on the unsplit model, for any norm type above 0, inf too: every weight
        counts once, also those that are tied, replicated, or in parts or shards on several ranks. Collective.
        """
        return self._gradients.clip(max_norm, norm_type, error_if_nonfinite)

    # --- afterwards -----------------------------------------------------------------------------------------------

    def timeline(self) -> Timeline:
        """What the last step's ops and transfers really took, on every rank. Collective."""
        if self._closed or not self._training.complete:
            raise PipelineError("there is no timeline: ask for it after a step that ran to its end, and before close")
        records: list[Any] = [None] * self.plan.num_ranks
        with together("gathering the timeline"):
            dist.all_gather_object(records, self._training.record.to_fields(), group=self._processes.pipeline)
        return merge(self.plan, [Record.from_fields(fields) for fields in records])

    def close(self) -> None:
        """End the pipeline's threads, and leave the last step's record where `rota run --timeline` wants it."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        try:
            self.before_close.close()
        finally:
            self._end()

    def _end(self) -> None:
        self._watchdog.close()
        self._transport.close()
        if self._training.complete and self._processes.is_first_pipeline:
            leave_record(self.plan, self._training.record)
        self._gradients.close()
        groups = self._processes.close()  # the last references: closes connections, which tells the peers
        if dist.is_initialized():
            for group in [dist.group.WORLD] if self._owns_process_group else groups:
                with suppress(ValueError):  # the caller has destroyed it
                    dist.destroy_process_group(group)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
