"""Everything that combines a rank's gradients with other processes': replicas, tied weights, FSDP and TP shards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import nn

from rota.core.errors import PipelineError
from rota.core.plan import Plan
from rota.core.programs.actions import last_gradients
from rota.core.tasks import Kind
from rota.models import Stages
from rota.runtime.bound_actions import Hooks
from rota.runtime.device.protocol import Device, Mark, Number
from rota.runtime.execution import Execution
from rota.runtime.meshes import Processes
from rota.runtime.reducing import norms
from rota.runtime.reducing.replicas import (
    GradientAllReduce,
    make_equal,
    parameters_by_stage,
    refuse_other_tensors,
    replicated_parameters,
)
from rota.runtime.reducing.sharded_stages import Sharded, is_sharded
from rota.runtime.reducing.shared_weights import SharedWeight, SharedWeights


class Reductions(NamedTuple):
    """What is reduced in a step of a plan, and when.

    `last_tied`: the stage with the last gradients of tied weights; the timeline shows their sum there.
    """

    hooks: Hooks
    last_tied: int | None


@final
class GradientSync:
    """Reduces one rank's gradients, in `sum_dtype` where theirs is lower. Collective. Raises PipelineError."""

    def __init__(
        self,
        stages: Stages,
        plan: Plan,
        shared: list[SharedWeight],
        processes: Processes,
        device: Device,
        sum_dtype: torch.dtype | None,
    ) -> None:
        if sum_dtype is not None and not (isinstance(sum_dtype, torch.dtype) and sum_dtype.is_floating_point):
            raise PipelineError(f"reduce_dtype is {sum_dtype!r}; give a dtype of floats, such as torch.float32")
        self._processes, self._device = processes, device
        local = plan.placement.stages_on(processes.rank)
        self._sharded = Sharded(stages, plan.placement, local, processes.replica_processes)
        self._shared = SharedWeights(stages, plan.placement, shared, processes, device, sum_dtype)
        modules = nn.ModuleList(stages[stage] for stage in local)
        self._parameters = [*modules.parameters()]
        self._whole = [p for p in self._parameters if not is_sharded(p)]
        replicated = replicated_parameters(stages, local)
        if processes.tp_group is not None:
            make_equal([norms.local(p) for p in replicated], processes.tp_group)
        if processes.replicas is not None:
            tensors = [*self._whole, *modules.buffers()]
            refuse_other_tensors(tensors, processes.replicas)
            make_equal(tensors, processes.replicas)
        elsewhere = {*self._shared.counted_elsewhere}
        elsewhere |= {*self._whole} if processes.replica else {*()}
        elsewhere |= {*replicated} if processes.tp_shard else {*()}
        self._counted = [p for p in self._parameters if p not in elsewhere]
        last = last_gradients(plan, processes.rank)
        self._all_reduces = {
            stage: GradientAllReduce(
                parameters, processes.replicas_on_device, device, processes.num_replicas, sum_dtype
            )
            for stage, parameters in parameters_by_stage(stages, last, self._shared.tied).items()
            if processes.replicas_on_device is not None and parameters
        }
        reduced = {*self._all_reduces, *self._sharded}
        #: The stages of which something is reduced, in the order in which their gradients are complete.
        self._reduced = [stage for stage in last if stage in reduced]
        tied = {*self._shared.tied}
        self._with_tied = {stage for stage in last if tied & {*stages[stage].parameters()}}
        self._last_tied: int | None = None
        self._syncs = True  # in this step
        #: Whether steps have anything to do here.
        self.is_needed = bool(shared or self._shared.buffers or [*self._sharded] or processes.replicas is not None)
        #: The ranks of each group of tied weights of this rank, in the order of their sums.
        self.tied_ranks = [*self._shared.sums]
        self._sums = {ranks: partial(self._start, tied_sum) for ranks, tied_sum in self._shared.sums.items()}

    def reductions(self, plan: Plan) -> Reductions:
        """What is reduced in a step of `plan`, and when.

        Raises PipelineError if gradients of this rank's stages are complete in another order than in the pipeline's.
        """
        last = last_gradients(plan, self._processes.rank)
        order = [stage for stage in last if stage in self._reduced]
        if order != self._reduced:
            raise PipelineError(
                f"the plan of this step completes the gradients of rank {self._processes.rank}'s stages in the order "
                f"{order}, the pipeline's plan in the order {self._reduced}, in which all replicas reduce them; keep it"
            )
        before = {
            op: partial(self._sharded.gather, op.stage)
            for op in plan.orders[self._processes.rank]
            if op.kind is Kind.W and op.stage in self._sharded
        }
        after = {op: partial(self._reduce, stage) for stage, op in last.items() if stage in self._reduced}
        last_tied = next((stage for stage in reversed(last) if stage in self._with_tied), None)
        return Reductions(Hooks(before, after, self._sums), last_tied)

    def _reduce(self, stage: int, stream: Any) -> Mark:
        """Start the stage's reduction, after its last gradient; on a queued device, all of it is put on `stream`."""
        if stage in self._sharded and self._syncs:
            self._sharded.reduce(stage, self._device)
        return self._start(self._all_reduces[stage], stream) if stage in self._all_reduces else None

    def _start(self, all_reduce: GradientAllReduce, stream: Any) -> Mark:
        return all_reduce.start(stream) if self._syncs else None

    def begin(self, reductions: Reductions, sync: bool, may_differ: bool) -> None:
        """Prepare a step that trains. `may_differ`: it may train other parameters than the last step."""
        self._syncs = sync
        if may_differ and self._processes.replicas is not None:
            refuse_other_tensors(self._whole, self._processes.replicas)
        self._shared.begin()
        self._sharded.begin()
        self._last_tied = reductions.last_tied

    def finish(self, execution: Execution, sync: bool) -> None:
        """Complete the gradients after a step, unless a later step with `sync` reduces them."""
        if execution.trains:
            execution.awaits("the other replicas' gradients")
            all_reduces = self._all_reduces if sync else {}
            reductions = self._sharded.reductions | {stage: total.finish() for stage, total in all_reduces.items()}
            execution.awaits("the other ranks' gradients of tied weights")
            sums = self._shared.finish(sync)
            if sums and self._last_tied is not None:
                begun, _ = reductions.get(self._last_tied, sums[0])
                reductions[self._last_tied] = begun, sums[-1][1]
            execution.marks.reductions.update(reductions)
        self._sharded.finish()

    def clip(
        self, max_norm: float, norm_type: float, error_if_nonfinite: bool, share: Callable[[Number], torch.Tensor]
    ) -> torch.Tensor:
        """See `norms.clip`; every weight counts once."""
        return norms.clip(self._parameters, self._counted, max_norm, norm_type, error_if_nonfinite, share)

    def close(self) -> None:
        """Release the process groups."""
        self._shared.sums.clear()
        self._all_reduces.clear()
        self._sums.clear()
