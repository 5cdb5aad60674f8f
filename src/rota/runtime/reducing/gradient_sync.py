"""Everything that combines a rank's gradients with other processes': replicas, tied weights, FSDP and TP shards."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import nn

from rota.core.errors import PipelineError
from rota.core.plan import Plan
from rota.core.programs.actions import last_gradients
from rota.core.tasks import Kind, Op
from rota.models import Stages
from rota.runtime.compute import Compute
from rota.runtime.device.protocol import Device, Mark, Number, QueuedDevice, is_queued
from rota.runtime.execution import Execution
from rota.runtime.meshes import Processes
from rota.runtime.reducing import norms
from rota.runtime.reducing.replicas import (
    AbsentGradients,
    GradientAllReduce,
    make_equal,
    parameters_by_stage,
    refuse_other_tensors,
    replicated_parameters,
)
from rota.runtime.reducing.shared_weights import SharedWeight, SharedWeights
from rota.runtime.reducing.wrapped_stages import Sharded, is_sharded
from rota.runtime.transport import collective


class Reductions(NamedTuple):
    """What comes before and after the ops of a plan, see `Execution`.

    `last_tied`: the stage with the last gradients of tied weights; the timeline shows their sum there.
    """

    before: dict[Op, Callable[[], None]]
    after: dict[Op, Callable[[Any], Mark]]
    last_tied: int | None


@final
class GradientSync:
    """Reduces one rank's gradients. `ddp_groups`: the process groups of stages that DDP wrapped. Collective."""

    def __init__(
        self,
        stages: Stages,
        plan: Plan,
        shared: list[SharedWeight],
        processes: Processes,
        ddp_groups: Mapping[nn.Module, dist.ProcessGroup],
        device: Device,
    ) -> None:
        self._processes, self._device = processes, device
        self._local = plan.placement.stages_on(processes.rank)
        replicas = processes.replica_processes
        self._sharded = Sharded(stages, plan.placement, self._local, replicas)
        self._refuse_groups(stages, ddp_groups)
        if is_queued(device):
            self._open(stages, ddp_groups)
        self._shared = SharedWeights(stages, plan.placement, shared, processes, device)
        modules = nn.ModuleList(stages[stage] for stage in self._local)
        self._parameters = [*modules.parameters()]
        self._whole = [p for p in self._parameters if not is_sharded(p)]
        replicated = replicated_parameters(stages, self._local)
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
            stage: GradientAllReduce(parameters, ddp_groups.get(stages[stage], processes.replicas_on_device))
            for stage, parameters in parameters_by_stage(stages, last).items()
            if processes.replicas_on_device is not None and parameters
        }
        reduced = {*self._all_reduces, *self._sharded}
        #: The stages of which something is reduced, in the order in which their gradients are complete.
        self._reduced = [stage for stage in last if stage in reduced]
        tied = {*self._shared.tied}
        self._with_tied = {stage for stage in last if tied & {*stages[stage].parameters()}}
        self._last_tied: int | None = None
        self._sums = {ranks: partial(self._sum_tied, ranks) for ranks in self.tied_ranks}
        self._absent = AbsentGradients(self._queue) if is_queued(device) else None
        #: When each stage's reduction began and ended in the last step.
        self._reductions: dict[int, tuple[Mark, Mark]] = {}

    def reductions(self, plan: Plan) -> Reductions:
        """What is reduced in a step of `plan`, and when.

        Raises:
            PipelineError: gradients of this rank's stages are complete in another order than in the pipeline's plan.
        """
        last = last_gradients(plan, self._processes.rank)
        order = [stage for stage in last if stage in self._reduced]
        if order != self._reduced:
            raise PipelineError(
                f"the plan of this step completes the gradients of rank {self._processes.rank}'s stages in the order "
                f"{order}, the pipeline's plan in the order {self._reduced}, in which all replicas reduce them; keep it"
            )
        return Reductions(
            {
                op: partial(self._sharded.gather, op.stage)
                for op in plan.orders[self._processes.rank]
                if op.kind is Kind.W and op.stage in self._sharded
            },
            {op: partial(self._reduce, stage) for stage, op in last.items() if stage in self._reduced},
            next((stage for stage in reversed(last) if stage in self._with_tied), None),
        )

    @property
    def tied_ranks(self) -> list[tuple[int, ...]]:
        """The ranks of each group of tied weights of this rank, in the order of their sums."""
        return self._shared.tied_ranks

    def _reduce(self, stage: int, stream: Any) -> Mark:
        """Start the stage's reduction, after its last gradient; on a queued device, all of it is put on `stream`."""
        if stage in self._sharded:
            self._sharded.reduce(stage, self._device)
        if stage not in self._all_reduces:
            return None
        if self._absent is None:
            return self._all_reduces[stage].start()
        self._reductions[stage] = begun_and_done = self._all_reduces[stage].enqueue(self._queue, stream, self._absent)
        return begun_and_done[1]

    def _sum_tied(self, ranks: tuple[int, ...], stream: Any) -> Mark:
        """On a queued device."""
        assert self._absent is not None
        begun, done = self._shared.enqueue_sum(ranks, self._queue, stream, self._absent)
        if self._last_tied is not None:
            begun, _ = self._reductions.get(self._last_tied, (begun, done))
            self._reductions[self._last_tied] = begun, done
        return done

    @property
    def _queue(self) -> QueuedDevice:
        return self._device  # type: ignore[return-value]

    def _refuse_groups(self, stages: Stages, ddp_groups: Mapping[nn.Module, dist.ProcessGroup]) -> None:
        for stage in self._local:
            group, replicas = ddp_groups.get(stages[stage]), self._processes.replica_processes
            if group is not None and (over := sorted(dist.get_process_group_ranks(group))) != replicas:
                raise PipelineError(
                    f"stage {stage} is in DDP over the processes {over}, but its replicas are {replicas}; give DDP "
                    f"process_group=mesh.get_group('dp'), and the pipeline the mesh"
                )

    def _open(self, stages: Stages, ddp_groups: Mapping[nn.Module, dist.ProcessGroup]) -> None:
        """Let DDP's groups make their communicators, for which hosts wait, before the first step."""
        for stage in self._local:
            if (group := ddp_groups.get(stages[stage])) is not None:
                with collective("opening the process groups of DDP"):
                    dist.all_reduce(torch.zeros(1, device=self._device.torch_device), group=group)

    def begin(self, execution: Execution[Compute], reductions: Reductions | None, sync: bool, may_differ: bool) -> None:
        """Prepare a step. `may_differ`: it may train other parameters than the last step."""
        if not execution.trains or reductions is None:
            return
        if may_differ and self._processes.replicas is not None:
            refuse_other_tensors(self._whole, self._processes.replicas)
        if self._shared.is_used:
            self._shared.begin()
        if self._sharded.is_used:
            self._sharded.begin()
        self._reductions = {}
        execution.before, execution.after = reductions.before, reductions.after if sync else {}
        self._last_tied = reductions.last_tied
        execution.sums = self._sums if sync else {}

    def finish(self, execution: Execution[Compute], sync: bool) -> None:
        """Complete the gradients after a step, unless a later step with `sync` reduces them."""
        if execution.trains:
            if self._absent is None:
                self._finish_here(execution, sync)
            else:
                self._absent.finish()
                self._shared.finish(sync, is_summed=True)
            execution.marks.reductions = self._reductions | self._sharded.reductions
        if self._sharded.is_used:
            self._sharded.finish()

    def _finish_here(self, execution: Execution[Compute], sync: bool) -> None:
        """On the CPU."""
        execution.awaited = "the other replicas' gradients"
        all_reduces = self._all_reduces if sync else {}
        self._reductions = {stage: all_reduce.finish() for stage, all_reduce in all_reduces.items()}
        execution.awaited = "the other ranks' gradients of tied weights"
        started_ns = time.monotonic_ns()
        if self._shared.is_used:
            self._shared.finish(sync)
        if sync and self._last_tied is not None:
            reductions = self._sharded.reductions | self._reductions
            started_ns, _ = reductions.get(self._last_tied, (started_ns, 0))
            self._reductions[self._last_tied] = started_ns, time.monotonic_ns()

    def clip(
        self, max_norm: float, norm_type: float, error_if_nonfinite: bool, share: Callable[[Number], torch.Tensor]
    ) -> torch.Tensor:
        """See `norms.clip`; every weight counts once."""
        return norms.clip(self._parameters, self._counted, max_norm, norm_type, error_if_nonfinite, share)

    def close(self) -> None:
        """Release the process groups."""
        self._shared.close()
        self._all_reduces.clear()
        self._sums.clear()
