"""TorchEngine: PyTorch's own pipeline engine runs a plan, by the plan's schedule CSV with communication."""

from __future__ import annotations

import atexit
import math
import os
import sys
import time
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import Dataset, DistributedSampler

from rota.checking import check
from rota.errors import LostRankError, PipelineError, error_text, failed_before, is_on_all_ranks
from rota.interop.refusals import refuse_options, refuse_ragged, refuse_what_torch_cannot_run
from rota.interop.torch_schedule import planned_schedule
from rota.interop.torch_stages import StageModule, Step, survey
from rota.models import Stages
from rota.plan import Plan
from rota.runtime.agreement import refuse_differences, refuse_loss
from rota.runtime.compute import Batch, step_seed
from rota.runtime.device.host import HostDevice
from rota.runtime.faults.stack_location import Doing, is_in_a_collective
from rota.runtime.faults.watchdog import Watchdog, limit_s
from rota.runtime.gradients.forward_backward import refuse_modes_without_gradients
from rota.runtime.loss_weights import refuse_weights
from rota.runtime.losses import LossFn, needs_target
from rota.runtime.microbatch_inputs import MicrobatchInputs
from rota.runtime.microbatches import structure
from rota.runtime.precision import LossScale, ambient_autocast, without_autocast
from rota.runtime.process_group import join, leave
from rota.runtime.step_progress import progress_of
from rota.runtime.transport import collective
from rota.tasks import Kind
from rota.timeline import Timeline
from rota.torch_internals import run_pipelining_schedule


@final
class TorchEngine:
    """Runs a chain of stages as planned on `torch.distributed.pipelining`, with the methods of `Pipeline`.

    Args:
        stages: The stages, a chain.
        plan: Their plan, one rank per stage.
        loss_fn: Returns the mean loss of an output and a target; None if the plan has only forwards.
        timeout_s: Limit on no progress; None: as for `Pipeline`.
        dynamic_shapes: Refused if true: PyTorch's engine receives into buffers that it allocates beforehand.
        keep_outputs: Whether to keep the outputs of the last step.
        mesh: Refused, because PyTorch's engine runs one pipeline.
        recompute: Refused unless "none".
        allow_nonfinite_loss: Whether a loss may be infinite or NaN.
        check_data: Taken as `Pipeline` takes it, but nothing is compared.

    Raises:
        PlanError: `check` refuses the plan.
        PipelineError: PyTorch's engine cannot run the plan, or plan, stages and processes do not fit together.
    """

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
        check_data: str = "first",  # noqa: ARG002
    ) -> None:
        check(plan)
        limit = limit_s(timeout_s, plan)
        refuse_what_torch_cannot_run(stages, plan, dynamic_shapes)
        refuse_options(mesh=mesh, recompute=None if recompute == "none" else recompute)
        self.stages, self.plan, self.loss_fn = stages, plan, loss_fn
        self._trains = any(task.kind.makes_weight_gradients for task in plan.placement.tasks)
        if self._trains and loss_fn is None:
            raise PipelineError("the plan has backwards, so a loss_fn(output, target) is needed")
        if self._trains and loss_fn is not None:
            refuse_weights(loss_fn, stages)
        if loss_fn is not None and not needs_target(loss_fn):
            raise PipelineError("PyTorch's engine calls loss_fn(output, target), but this one takes the output alone")
        self._ranks = [plan.placement.ranks_of(stage)[0] for stage in plan.placement.stages]
        self._allow_nonfinite_loss, self._num_steps = allow_nonfinite_loss, 0
        self._process = os.getpid()
        self._owns_process_group = join(limit)
        self._watchdog = Watchdog(limit)
        try:
            with self._watchdog.guarding("the other ranks to make their engines"):
                self._join_processes()
        except BaseException:
            leave([dist.group.WORLD] if self._owns_process_group else [])
            raise
        self._watchdog.last = lambda: f"in step {self._num_steps}"
        self._inputs = MicrobatchInputs(stages, plan, self.rank, {stages.sink: (self._ranks[-1],)})
        self._modules = [
            StageModule(stages, stage, loss_fn, keep_outputs or not self._trains, self._begin) for stage in self._local
        ]
        #: It runs one pipeline.
        self.replica, self.num_replicas = 0, 1
        self._schedule: Any = None
        self._signature: object = None
        self._loss_scale = LossScale(HostDevice())
        self._begun = ""  # the last op that began, as the CSV writes it
        #: Loss of each micro-batch of the last step, on the rank of the last stage.
        self.losses: dict[int, float] = {}
        #: Output of each micro-batch of the last step, if outputs are kept.
        self.outputs: dict[int, Any] = {}
        self._progress = progress_of(plan, self.rank == 0, on_cpu=True)
        self._closed, self._fault = False, ""
        self._watchdog.num_calls = lambda: self._num_steps
        self._is_running = False  # what is raised now, is raised on this rank only
        atexit.register(self._close_at_exit)

    # --- the processes --------------------------------------------------------------------------------------------

    def _join_processes(self) -> None:
        refuse_differences(self.plan, self.stages, [])  # weights tied over ranks were refused
        self.rank = dist.get_rank()
        self._group = dist.new_group(backend="gloo")
        self._busy = [rank for rank, order in enumerate(self.plan.orders) if order]  # PyTorch knows no idle ranks
        self._pipeline_group = dist.new_group(self._busy, backend="gloo")

    @property
    def _local(self) -> tuple[int, ...]:
        return self.plan.placement.stages_on(self.rank)

    @property
    def local_stages(self) -> dict[int, nn.Module]:
        """The stages on this rank."""
        return {stage: self.stages[stage] for stage in self._local}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters of this rank's stages, each once, by their names in `Stages.named_parameters`."""
        return self.stages.named_parameters(self._local)

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this rank's stages, for this rank's optimizer."""
        return (parameter for _, parameter in self.named_parameters())

    @property
    def reads_inputs(self) -> bool:
        """As in `Pipeline`."""
        return self._inputs.reads_inputs

    @property
    def reads_targets(self) -> bool:
        """As in `Pipeline`."""
        return self._inputs.reads_targets

    def sampler(
        self, dataset: Dataset[Any], *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> DistributedSampler[Any]:
        """As in `Pipeline`, for one replica."""
        return DistributedSampler(
            dataset, self.num_replicas, self.replica, shuffle=shuffle, seed=seed, drop_last=drop_last
        )

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

        Arguments and results are those of `Pipeline.step`; all micro-batches must have the same shapes.
        """
        if self._fault:
            raise PipelineError(failed_before(self._fault))
        if self._closed:
            raise PipelineError("the engine is closed; make a new one")
        if self._trains:
            refuse_modes_without_gradients()
        batch = self._inputs.take(inputs, targets, needs_targets=self._trains)
        refuse_ragged(batch.inputs)
        step = Step(batch.inputs, batch.targets, batch.shares)
        step.scale, step.autocast = scale * float(self._loss_scale.begin(scaler)), ambient_autocast()
        self._begun, self._is_running = "", False
        self._num_steps += 1
        begun_s = time.monotonic()
        for module in self._modules:
            module.step = step
        try:
            with step_seed(HostDevice()) as step.seed, self._watchdog.watching(self._doing):
                self._run_step(step, sync)
                loss = self._mean_loss(batch, step.losses)
        except BaseException as error:
            is_only_here = self._is_running or not is_on_all_ranks(error)
            if is_only_here and self.plan.num_ranks > 1:  # the others wait for the rest of the step
                self._close(error)
                self._fault = error_text(error)
            raise
        self.losses, self.outputs = step.losses, step.outputs
        if self._progress is not None:
            self._progress.done(self._num_steps, begun_s, loss)
        return loss

    def _run_step(self, step: Step, sync: bool) -> None:
        with torch.set_grad_enabled(self._trains), without_autocast(step.autocast):
            torch.clear_autocast_cache()  # of weights as they were before an optimizer's step
            is_new = self._is_new(step, sync)
            self._is_running = True
            if is_new:
                signature, self._signature = self._signature, None  # no stage is surveyed if this fails
                self._schedule = self._survey()
                self._signature = signature
            if self._schedule is not None:
                self._run(self._schedule)
        self._is_running = False
        if self._trains and sync:
            self._loss_scale.settle(self.parameters(), self._agree)

    def _is_new(self, step: Step, sync: bool) -> bool:
        """Whether any rank expects other boundaries than in the last step."""
        plain: list[Any] = []
        signature = (
            structure(step.inputs[0], plain),
            plain,
            [(m.training, [p.requires_grad for p in m.parameters()]) for m in self.local_stages.values()],
            step.autocast,
        )
        flags = torch.tensor([signature != self._signature, sync, not sync, *self._loss_scale.flags()])
        with collective("waiting for the others to begin the step"):
            self._agree(flags)
        changed, syncs, leaves, *scales = flags.tolist()
        if syncs and leaves:
            raise PipelineError("some ranks gave step sync=True, others sync=False; pass the same on all ranks")
        self._loss_scale.refuse_differences(*scales)
        self._signature = signature
        return bool(changed)

    def _agree(self, flags: torch.Tensor) -> None:
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._group)

    def _survey(self) -> Any:
        survey(self._modules, self._ranks, self._group)
        if not self._modules:
            return None
        homes = {stage: self._busy.index(rank) for stage, rank in enumerate(self._ranks)}
        return planned_schedule(
            self._modules, self._row(), homes, self._pipeline_group, self.plan.num_microbatches, self._trains
        )

    def _row(self) -> list[str]:
        """This rank's cells of the plan's CSV."""
        return self.plan.to_csv(communication=True).splitlines()[self.rank].split(",")

    def _run(self, schedule: Any) -> None:
        try:
            run_pipelining_schedule(schedule)
        except RuntimeError as error:
            first = _first(error)  # PyTorch wraps what a stage raised
            if "gloo" in str(first):
                raise LostRankError("lost a rank", self._place()) from error
            raise first from None

    def _mean_loss(self, batch: Batch, losses: dict[int, float]) -> float:
        mine = sum(batch.shares[m] * losses.get(m, math.nan) for m in self._inputs.counted)
        total = torch.tensor(mine, dtype=torch.float64)
        with collective(f"waiting for the loss from rank {self._ranks[-1]}"):
            dist.all_reduce(total, group=self._group)
        mean = total.item()
        if self._trains and not (math.isfinite(mean) or self._allow_nonfinite_loss or self._loss_scale.is_on):
            by_stage, empty = self._inputs.losses_by_stage(losses), self._inputs.without_rows(batch)
            refuse_loss(mean, self._num_steps, self._watchdog.name, by_stage, empty, self._group)
        return mean

    def _begin(self, op: str) -> None:
        self._begun = op
        self._watchdog.tick()

    def _doing(self, frames: list[FrameType]) -> Doing:
        return Doing(is_in_a_collective(frames), f"is {self._place()}")

    def _place(self) -> str:
        return f"in PyTorch's engine, after the start of {self._begun}" if self._begun else "before the first op"

    # --- afterwards -----------------------------------------------------------------------------------------------

    @property
    def backward_at(self) -> dict[int, str]:
        """After a step: for this rank's stages with I and W, where their backward runs: "I and W", "I" or "W"."""
        split = {task.stage for task in self.plan.placement.tasks if task.kind is Kind.W}
        return {m.stage: m.layouts.backward_at for m in self._modules if m.stage in split}

    def timeline(self) -> Timeline:
        """Always raises PipelineError: PyTorch's engine records no times."""
        raise PipelineError("PyTorch's engine records no timeline; run the plan by Rota's engine for one")

    def close(self) -> None:
        """End the engine's thread and close its connections."""
        self._close(sys.exception())

    def _close_at_exit(self) -> None:
        self._close(getattr(sys, "last_value", None))

    def _close(self, error: BaseException | None) -> None:
        if self._closed or os.getpid() != self._process:  # a forked process has neither its threads nor its peers
            return
        self._closed = True
        atexit.unregister(self._close_at_exit)
        if error is not None:
            self._watchdog.fail(error)
        else:
            self._watchdog.report_end(self._num_steps)
            if self._progress is not None:
                self._progress.end()
        self._watchdog.close()
        self._schedule = None
        groups = [dist.group.WORLD] if self._owns_process_group else [self._pipeline_group, self._group]
        del (
            self._group,
            self._pipeline_group,
        )  # the last references: this closes their connections, so that peers notice
        leave(groups)

    def __enter__(self) -> TorchEngine:
        return self

    def __exit__(self, kind: object, error: BaseException | None, where: object) -> None:
        self._close(error)


def _first(error: BaseException) -> BaseException:
    return error if error.__cause__ is None else _first(error.__cause__)
