"""Pipeline: runs a checked plan on `torch.distributed`, one process a rank, with one loop over its actions."""

from __future__ import annotations

import atexit
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn

from rota.checking import check
from rota.errors import PipelineError
from rota.models import Stages
from rota.plan import Plan
from rota.runtime import batches
from rota.runtime.agreement import refuse_devices, refuse_differences
from rota.runtime.compute import Batch, LossFn
from rota.runtime.execution import Execution, evaluating, forwards_of
from rota.runtime.gradients import warm_up
from rota.runtime.handover import leave_record
from rota.runtime.joining import join
from rota.runtime.memory_watch import MemoryWatch
from rota.runtime.outputs import bring
from rota.runtime.program import for_all_streams, refuse_unsupported
from rota.runtime.recorder import Record, clock_offset_ns, merge
from rota.runtime.shared import SharedWeights, shared_weights, squared_norm
from rota.runtime.transport import Transport, together
from rota.runtime.watchdog import Watchdog
from rota.timeline import Timeline


@final
class Pipeline:
    """A model's stages, run as planned; every rank makes one, with the same arguments.

    `loss_fn(output, target)` returns the mean loss of a micro-batch, a tensor with one element; None for a plan of
    forwards alone. A rank that makes no progress inside a step for `timeout_s` is ended, and says what it waited
    for. `dynamic_shapes`: shapes depend on the data, not only on the inputs' shapes. `keep_outputs`: the last
    stage's outputs stay in `outputs` (always so in a plan of forwards).

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
    ) -> None:
        check(plan)
        stages = for_all_streams(stages, plan)
        refuse_unsupported(plan, [edge[:2] for edge in stages.edges], len(stages))
        shared = shared_weights(stages, plan.placement)
        self.stages, self.plan, self.loss_fn = stages, plan, loss_fn
        self._sink_ranks = {sink: plan.placement.ranks_of(sink) for sink in stages.sinks}
        trains = any(task.kind.makes_weight_gradients for task in plan.placement.tasks)
        if trains and loss_fn is None:
            raise PipelineError("the plan has backwards, so a loss_fn(output, target) is needed")
        if trains:
            warm_up()
        self._dynamic_shapes = dynamic_shapes
        self._owns_process_group = join()
        refuse_differences(plan, shared)
        self.rank = dist.get_rank()
        refuse_devices(stages, plan.placement.stages_on(self.rank))
        self._group = dist.new_group(backend="gloo")
        self._shared = SharedWeights(stages, plan.placement, shared, self.rank)
        self._transport = Transport(self._group)
        self._running = self._training = Execution(stages, plan, loss_fn, self.rank, self._transport)
        self._evaluation: Execution | None = None  # made when it is asked for
        self._compute = self._training.compute
        self._compute.keep_outputs = keep_outputs or not trains
        with together("comparing clocks"):
            self._training.record.offset_ns = clock_offset_ns(self._group)
        self._watchdog = Watchdog(self.rank, timeout_s, lambda: self._running.doing())
        self._learn_my_part()
        self._closed = False
        atexit.register(self.close)

    def _learn_my_part(self) -> None:
        """What this rank reads of a batch and counts of the loss, which is the same in every step."""
        placement = self.plan.placement
        #: The stages on this rank.
        self.local_stages = {stage: self.stages[stage] for stage in placement.stages_on(self.rank)}
        self._reading = [stage for stage in self.local_stages if self.stages.inputs[stage]]

        def microbatches(sinks: list[int]) -> list[int]:
            return sorted(m for sink in sinks for m in placement.microbatches(sink, self.plan.num_microbatches))

        self._targeted = microbatches([sink for sink, ranks in self._sink_ranks.items() if self.rank in ranks])
        self._counted = microbatches([sink for sink, ranks in self._sink_ranks.items() if self.rank == ranks[0]])

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

    def step(self, inputs: Any = None, targets: Any = None) -> float:
        """Run the plan once; gradients are added to `.grad`, as `loss.backward()` does. Collective.

        `inputs`: what the stages on this rank read (None where they read nothing): a tensor, a tuple or a dict of
        them, split along dim 0 into the plan's micro-batches, or a list of micro-batches. `targets`: likewise, for
        the ranks of the last stage. Returns the mean loss on every rank (nan without a loss_fn).
        """
        training = self._training
        batch = self._prepare(inputs, targets, needs_targets=training.trains)
        self._run(training, batch)
        return self._loss_of(training, batch)

    def evaluate(self, inputs: Any = None, targets: Any = None) -> float:
        """The mean loss on every rank, with all stages in eval() meanwhile and no gradients. Collective.

        Takes what `step` does. The forwards run on their ranks in the plan's order; buffers and random state stay.
        """
        if self.loss_fn is None:
            raise PipelineError("the pipeline has no loss_fn to evaluate; use forward for the outputs")
        batch = self._prepare(inputs, targets, needs_targets=True)
        return self._loss_of(self._evaluate(batch, keep_outputs=False)[0], batch)

    def forward(self, inputs: Any = None, *, outputs: bool = True) -> list[Any] | None:
        """The last stage's output of each micro-batch in order, on ranks that ask for `outputs`. Collective.

        As `evaluate`, without targets.
        """
        batch = self._prepare(inputs, None, needs_targets=False)
        done, asking = self._evaluate(batch, keep_outputs=True, ask=outputs)
        made = done.compute.outputs
        found: dict[int, Any] = {}
        for sink, ranks in self._sink_ranks.items():
            microbatches = self.plan.placement.microbatches(sink, self.plan.num_microbatches)
            found |= bring({m: made[m] for m in microbatches if m in made}, ranks, asking, self._group)
        done.compute.outputs = {}
        return [found[m] for m in sorted(found)] if outputs else None

    def _evaluate(self, batch: Batch, keep_outputs: bool, ask: bool = False) -> tuple[Execution, list[int]]:
        if self._evaluation is None:
            plan = forwards_of(self.plan)
            self._evaluation = Execution(self.stages, plan, self.loss_fn, self.rank, self._transport)
        self._evaluation.compute.keep_outputs = keep_outputs
        random_state = torch.get_rng_state()
        with evaluating([*self.local_stages.values()]):
            asking = self._run(self._evaluation, batch, ask)
        torch.set_rng_state(random_state)
        return self._evaluation, asking

    def _run(self, execution: Execution, batch: Batch, ask: bool = False) -> list[int]:
        """One run of a plan; returns the ranks that ask."""
        self._running = execution
        execution.awaited = "the other ranks to reach the same step"
        self._watchdog.begin()
        seed = int(torch.randint(2**62, ()))
        random_state = torch.get_rng_state()
        try:
            fresh, seed, *asks = self._agree(execution.is_new(batch), seed, ask)
            if execution.trains:
                self._shared.begin()
            execution.run(batch, seed, bool(fresh), self._watchdog.tick)
            if execution.trains:
                execution.awaited = "the other ranks' gradients of tied weights"
                self._shared.finish()
        finally:
            self._watchdog.end()
            # Each rank has drawn one number, whatever its stages drew: shuffles stay the same on all ranks.
            torch.set_rng_state(random_state)
        return [rank for rank, asking in enumerate(asks) if asking]

    def _agree(self, is_new: bool, seed: int, ask: bool) -> list[int]:
        """Whether layouts may be new to any rank, rank 0's seed, and for each rank whether it asks."""
        asks = [int(ask and rank == self.rank) for rank in range(self.plan.num_ranks)]
        told = torch.tensor([is_new or self._dynamic_shapes, seed if self.rank == 0 else 0, *asks])
        self._transport.all_reduce(told, dist.ReduceOp.MAX, "waiting for the others to begin the step")
        return told.tolist()

    def _prepare(self, inputs: Any, targets: Any, needs_targets: bool) -> Batch:
        if self._closed:
            raise PipelineError("the pipeline is closed; make a new one")
        n = self.plan.num_microbatches
        if inputs is None and self._reading:
            stage = self._reading[0]
            raise PipelineError(
                f"rank {self.rank} holds stage {stage}, which reads the step's inputs "
                f"{list(self.stages.inputs[stage])}, but got inputs=None; pass the batch on this rank too"
            )
        given = (
            batches.to_microbatches("inputs", inputs, n, needed=bool(self._reading)),
            batches.to_microbatches("targets", targets, n, needed=bool(self._targeted)),
        )
        missing = [m for m in self._targeted if given[1][m] is None]
        if needs_targets and missing:
            got = "targets=None" if targets is None else f"targets[{missing[0]}] = None"
            raise PipelineError(f"rank {self.rank} holds the last stage, but got {got}; pass them on this rank")
        return Batch(*given, batches.weights(inputs, targets, n), alike=not isinstance(inputs, list))

    def _loss_of(self, execution: Execution, batch: Batch) -> float:
        """The mean loss, counted on the first rank of each last stage."""
        losses = execution.compute.losses
        mine = sum(batch.shares[m] * losses.get(m, math.nan) for m in self._counted)
        total = torch.tensor([mine], dtype=torch.float64)
        execution.awaited = "the other ranks' losses"
        self._watchdog.begin()
        try:
            self._transport.all_reduce(total, dist.ReduceOp.SUM, f"waiting for {execution.awaited}")
        finally:
            self._watchdog.end()
        return total.item()

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

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale all ranks' gradients so that their 2-norm together is at most `max_norm`; returns it as it was.

        Counts every weight once, tied and replicated ones too, as `torch.nn.utils.clip_grad_norm_` does on the
        unsplit model. Collective.
        """
        mine = [parameter for parameter in self.parameters() if parameter.grad is not None]
        total = squared_norm(p for p in mine if p not in self._shared.counted_elsewhere)
        with together("adding up the gradients' norm"):
            dist.all_reduce(total, group=self._group)
        norm = float(total.sqrt())
        if (scale := max_norm / (norm + 1e-6)) < 1:
            for parameter in mine:
                parameter.grad.mul_(scale)  # type: ignore[union-attr]
        return norm

    # --- afterwards -----------------------------------------------------------------------------------------------

    def timeline(self) -> Timeline:
        """What the last step's ops and transfers really took, on every rank. Collective."""
        if self._closed or not self._training.complete:
            raise PipelineError("there is no timeline: ask for it after a step that ran to its end, and before close")
        records: list[Any] = [None] * self.plan.num_ranks
        with together("gathering the timeline"):
            dist.all_gather_object(records, self._training.record.to_fields(), group=self._group)
        return merge(self.plan, [Record.from_fields(fields) for fields in records])

    def close(self) -> None:
        """End the pipeline's threads, and leave the last step's record where `rota run --timeline` wants it."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._watchdog.close()
        self._transport.close()
        if self._training.complete:
            leave_record(self.plan, self._training.record)
        groups = [dist.group.WORLD] if self._owns_process_group else [self._group, *self._shared.close()]
        del self._group  # the last reference: closes the group's connections, which tells the peers
        if dist.is_initialized():
            for group in groups:
                with suppress(ValueError):  # the caller has destroyed it
                    dist.destroy_process_group(group)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
