"""The end of a run, when its ops are done: its loss on all ranks, gradients divided by its count, scalers that agree.

    step(…)               sums of all ranks ──▶ read ──▶ gradients divided ──▶ scalers agree ──▶ the loss, or an error
    begin_step            sums of all ranks ──▶ gradients divided ──▶ scalers agree ──▶ a handle, which reads the loss

On the CPU, and in the first step, the loss is read at once in both cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final, final

import torch
import torch.distributed as dist

from rota.core.errors import LostRankError, PipelineError
from rota.core.plan import Plan
from rota.core.programs.device_steps import COMPUTE
from rota.runtime.agreement import Call, refuse_loss
from rota.runtime.compute import Batch, Compute
from rota.runtime.device.protocol import Device, Number, is_queued
from rota.runtime.execution import Execution
from rota.runtime.faults.watchdog import Describe
from rota.runtime.losses import means_of
from rota.runtime.meshes import Processes
from rota.runtime.precision import LossScale, Refuse, nothing_to_refuse
from rota.runtime.ready_plans import ReadyPlan
from rota.runtime.reducing.loss_counts import LossCounts, refuse_change
from rota.runtime.step_handles import BegunSteps, StepHandle
from rota.runtime.step_losses import AT_ONCE, LATER, Given, StepLoss, StepLosses, Totals
from rota.runtime.stop_requests import StopRequests
from rota.runtime.transport import Transport, collective


def all_reduce(row: torch.Tensor, how: Any, doing: str, transport: Transport, processes: Processes) -> None:
    """Over all processes, where the row is. `doing`: for the error if a rank is lost."""
    if row.is_cpu:
        transport.all_reduce(row, how, doing)
    else:
        with collective(doing):
            dist.all_reduce(row, how, group=processes.everyone_on_device)


@final
class StepEnd:
    """Ends the runs of one rank's pipeline. Methods that get a ready plan are collective."""

    def __init__(
        self,
        plan: Plan,
        device: Device,
        processes: Processes,
        transport: Transport,
        loss_counts: LossCounts,
        stops: StopRequests,
        watching: Callable[[Describe], AbstractContextManager[None]],
        allow_nonfinite_loss: bool,
    ) -> None:
        self._device, self._processes, self._transport = device, processes, transport
        self._losses = StepLosses(plan, processes.rank, processes.num_pipelines, device)
        self._counts, self._stops, self._watching = loss_counts, stops, watching
        self._name, self._allow_nonfinite_loss = processes.names[dist.get_rank()], allow_nonfinite_loss
        self.loss_scale: Final = LossScale(device)
        #: The steps with handles.
        self.begun: Final = BegunSteps()
        #: See `Pipeline.metrics`; `_metrics_of` of which of the `_num_losses` that were added up so far they are.
        self.metrics: dict[str, float] = {}
        self._num_losses, self._metrics_of = 0, 0

    # --- at once --------------------------------------------------------------------------------------------------

    def finish(self, call: Call, ready: ReadyPlan, batch: Batch) -> StepLoss:
        """End a run that waits. Raises PipelineError, on all ranks, if the losses do not fit together."""
        loss = StepLoss.none()
        if call.has_loss:
            loss = self._read(self._totals(ready, batch), AT_ONCE)
            self._stops.agreed |= self.begun.settle()  # they have ended, as they came before
        if ready.execution.trains:
            self._settle(call, ready.execution, loss.count, AT_ONCE)(AT_ONCE)
        return loss

    def refuse_nonfinite(self, ready: ReadyPlan, batch: Batch, mean: float, number: int) -> None:
        """Raises PipelineError, on all ranks, with all losses that are not finite, unless a scaler looks for that."""
        if not math.isfinite(mean) and self._must_be_finite(ready.execution):
            refuse_loss(mean, number, self._name, *self._nonfinite(ready, batch), self._processes.everyone)

    def _must_be_finite(self, execution: Execution[Compute]) -> bool:
        return execution.trains and not (self._allow_nonfinite_loss or self.loss_scale.is_on)

    def _nonfinite(self, ready: ReadyPlan, batch: Batch) -> tuple[dict[int, dict[int, float]], list[int]]:
        losses = means_of(ready.execution.compute.losses, self._device)
        return ready.inputs.losses_by_stage(losses), ready.inputs.without_rows(batch)

    # --- with a handle --------------------------------------------------------------------------------------------

    def hand_over(self, call: Call, ready: ReadyPlan, batch: Batch, number: int) -> StepHandle:
        """End a step that does not wait. What is wrong with its loss is left to the handle."""
        execution = ready.execution
        if is_queued(self._device) and self._knows_forms(execution):
            return self._hand_over_later(call, ready, batch, number)
        mean, refusal = math.nan, None
        try:
            loss = self._read(self._totals(ready, batch), LATER)
            mean = loss.mean
            if execution.trains:
                self._settle(call, execution, loss.count, LATER)(LATER)
            if not math.isfinite(mean) and self._must_be_finite(execution):
                refuse_loss(mean, number, self._name, *self._nonfinite(ready, batch), None)
        except LostRankError:
            raise
        except PipelineError as error:
            self._counts.abort()
            refusal = error

        def read() -> tuple[float, bool]:
            if refusal is not None:
                raise refusal
            return mean, False

        return self.begun.add(read, lambda: True)

    def _knows_forms(self, execution: Execution[Compute]) -> bool:
        """Whether a loss was read, so that all ranks know its metrics, and whether it has a count."""
        return self._metrics_of > 0 and (self._counts.are_means is not None or not execution.trains)

    def _hand_over_later(self, call: Call, ready: ReadyPlan, batch: Batch, number: int) -> StepHandle:
        """Nothing waits for the device."""
        execution, inputs = ready.execution, ready.inputs
        device, are_means = self._device, self._counts.are_means
        refuse_scales: Refuse = nothing_to_refuse
        assert is_queued(device)
        totals = self._totals(ready, batch)
        if execution.trains:
            refuse_scales = self._settle(call, execution, None if are_means else totals.count, LATER)
        ended = device.record(device.stream(COMPUTE))
        must_be_finite, nth, losses = self._must_be_finite(execution), self._num_losses, execution.compute.losses
        empty = inputs.without_rows(batch) if must_be_finite else []

        def read() -> tuple[float, bool]:
            with self._watching(execution.doing):
                loss, stops = totals.read(LATER, together=False)
                if are_means is not None:
                    refuse_change(are_means, loss.count is None, LATER)
                refuse_scales(LATER)
                self._take_metrics(loss, nth)
                if not math.isfinite(loss.mean) and must_be_finite:
                    by_stage = inputs.losses_by_stage(means_of(losses, device))
                    refuse_loss(loss.mean, number, self._name, by_stage, empty, None)
            return loss.mean, stops

        return self.begun.add(read, lambda: device.is_done(ended))

    # --- both -----------------------------------------------------------------------------------------------------

    def _totals(self, ready: ReadyPlan, batch: Batch) -> Totals:
        """Of all micro-batches and replicas. The same message carries requests to stop."""
        execution, compute = ready.execution, ready.execution.compute
        execution.awaited = "the other ranks' losses"
        counted = [m for m in ready.inputs.counted if not batch.is_padding(m)]
        given = Given(compute.losses, counted, compute.added, batch.shares)
        add_up = self._all_reduce(dist.ReduceOp.SUM, f"waiting for {execution.awaited}")
        self._num_losses += 1
        return self._losses.total(given, self._stops.asked(), add_up, self._processes.everyone)

    def _read(self, totals: Totals, remedy: str) -> StepLoss:
        loss, stops = totals.read(remedy, together=True)
        self._stops.agreed |= stops
        self._take_metrics(loss, self._num_losses)
        return loss

    def _take_metrics(self, loss: StepLoss, nth: int) -> None:
        if nth > self._metrics_of:
            self.metrics, self._metrics_of = loss.metrics, nth

    def _settle(self, call: Call, execution: Execution[Compute], count: Number | None, remedy: str) -> Refuse:
        """Divide gradients by the loss's count, and let all scalers see an overflow; see `LossScale.settle`."""
        self._counts.finish(count, call.syncs, remedy)
        if not call.syncs:
            return nothing_to_refuse
        execution.awaited = "the other ranks' scalers"
        return self.loss_scale.settle(
            execution.parameters(), self._all_reduce(dist.ReduceOp.MAX, "comparing overflows")
        )

    def _all_reduce(self, how: Any, doing: str) -> Callable[[torch.Tensor], None]:
        return partial(all_reduce, how=how, doing=doing, transport=self._transport, processes=self._processes)
