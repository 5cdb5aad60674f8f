"""The result of a run whose ops are done: its loss on all ranks, gradients divided by its count, scalers that agree.

    step(…)               sums of all ranks ──▶ read ──▶ gradients divided ──▶ scalers agree ──▶ the loss, or an error
    begin_step            sums of all ranks ──▶ gradients divided ──▶ scalers agree ──▶ a handle, which reads the loss

On the CPU, and in the first step, the loss is read at once in both cases.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final, TypeAlias, final

import torch
import torch.distributed as dist

from rota.core.errors import LostRankError, PipelineError
from rota.core.plan import Plan
from rota.core.programs.device_steps import COMPUTE
from rota.runtime.agreement import Call
from rota.runtime.bound_actions import ThisRank
from rota.runtime.compute import Batch
from rota.runtime.device.protocol import Number, is_queued
from rota.runtime.execution import Execution
from rota.runtime.faults.watchdog import Watchdog
from rota.runtime.losses import means_of
from rota.runtime.meshes import Processes
from rota.runtime.plans import ReadyPlan
from rota.runtime.precision import LossScale, Refuse, nothing_to_refuse
from rota.runtime.reducing.loss_counts import LossCounts, refuse_change
from rota.runtime.step_losses import AT_ONCE, LATER, LocalLosses, StepLoss, StepLosses, Totals, refuse_loss
from rota.runtime.stop_requests import StopRequests
from rota.runtime.transport import MAX, collective


@final
class StepResults:
    """What the runs of one rank's pipeline result in. Methods that get a ready plan are collective."""

    def __init__(
        self,
        plan: Plan,
        here: ThisRank,
        processes: Processes,
        loss_counts: LossCounts,
        stops: StopRequests,
        watchdog: Watchdog,
        allow_nonfinite_loss: bool,
    ) -> None:
        self._device, self._transport, self._processes = here.device, here.transport, processes
        self._losses = StepLosses(plan, here.rank, processes, here.device)
        self._counts, self._stops, self._watchdog = loss_counts, stops, watchdog
        self._name, self._allow_nonfinite_loss = processes.names[dist.get_rank()], allow_nonfinite_loss
        self.loss_scale: Final = LossScale(here.device)
        #: The steps with handles.
        self.begun: Final = BegunSteps()
        #: See `Pipeline.metrics`; `_metrics_of` of which of the `_num_losses` that were added up so far they are.
        self.metrics: dict[str, float] = {}
        self._num_losses, self._metrics_of = 0, 0

    # --- at once --------------------------------------------------------------------------------------------------

    def finish(self, call: Call, ready: ReadyPlan, batch: Batch) -> StepLoss:
        """The loss of a run that waits. Raises PipelineError, on all ranks, if the losses do not fit together."""
        if not call.has_loss:
            return StepLoss()
        loss = self._read(self._totals(ready, batch), AT_ONCE)
        self._stops.agreed |= self.begun.settle()  # they have ended, as they came before
        if ready.execution.trains:
            self._settle(call, ready.execution, loss.count, AT_ONCE)(AT_ONCE)
        return loss

    def refuse_nonfinite(self, ready: ReadyPlan, batch: Batch, mean: float, number: int) -> None:
        """Refuse `mean`, which is not finite, on all ranks, with all such losses, unless a scaler looks for them."""
        if self._must_be_finite(ready.execution):
            refuse_loss(mean, number, self._name, *self._nonfinite(ready, batch), self._processes.everyone)

    def _must_be_finite(self, execution: Execution) -> bool:
        return execution.trains and not (self._allow_nonfinite_loss or self.loss_scale.is_on)

    def _nonfinite(self, ready: ReadyPlan, batch: Batch) -> tuple[dict[int, dict[int, float]], list[int]]:
        losses = means_of(ready.execution.compute.losses, self._device)
        return ready.inputs.losses_by_stage(losses), ready.inputs.without_rows(batch)

    # --- with a handle --------------------------------------------------------------------------------------------

    def hand_over(self, call: Call, ready: ReadyPlan, batch: Batch, number: int) -> StepHandle:
        """The handle of a step that does not wait, which also tells what is wrong with its loss."""
        execution = ready.execution
        # Whether a loss was read, so that all ranks know its metrics, and whether it has a count.
        knows_form = self._metrics_of > 0 and (self._counts.are_means is not None or not execution.trains)
        if is_queued(self._device) and knows_form:
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
            with self._watchdog.watching(execution.doing):
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
        execution.awaits("the other ranks' losses")
        counted = ready.inputs.counted
        if batch.padding:
            counted = [m for m in counted if not batch.is_padding(m)]
        self._num_losses += 1
        local = LocalLosses(compute.losses, counted, compute.added, batch.shares)
        return self._losses.total(local, self._stops.asked(), self.all_reduce)

    def _read(self, totals: Totals, remedy: str) -> StepLoss:
        loss, stops = totals.read(remedy, together=True)
        self._stops.agreed |= stops
        self._take_metrics(loss, self._num_losses)
        return loss

    def _take_metrics(self, loss: StepLoss, nth: int) -> None:
        if nth > self._metrics_of:
            self.metrics, self._metrics_of = loss.metrics, nth

    def _settle(self, call: Call, execution: Execution, count: Number | None, remedy: str) -> Refuse:
        """Divide gradients by the loss's count, and let all scalers see an overflow; see `LossScale.settle`."""
        self._counts.finish(count, call.syncs, remedy)
        if not (call.syncs and self.loss_scale.is_on):
            return nothing_to_refuse
        execution.awaits("the other ranks' scalers")
        agree = partial(self.all_reduce, how=MAX, doing="comparing overflows")
        return self.loss_scale.settle(self._counts.parameters, agree)

    def all_reduce(self, row: torch.Tensor, how: dist.AllreduceOptions, doing: str) -> None:
        """Over all processes, where the row is. `doing`: for the error if a rank is lost. Collective."""
        if row.is_cpu:
            self._transport.all_reduce(row, how, doing)
        else:
            with collective(doing):
                dist.all_reduce(row, how.reduceOp, group=self._processes.everyone_on_device)


# --- steps with handles -----------------------------------------------------------------------------------------------


Read: TypeAlias = Callable[[], tuple[float, bool]]

_MOST_RUNNING = 2  # so that the device has work while the host begins the next step


@final
class StepHandle:
    """A step that `Pipeline.begin_step` has begun: the device may still be running it.

    Each rank reads its loss when somebody asks, or when all ranks have it.

    step 1 ──▶ handle 1             step 2 ──▶ handle 2                        step 3
    └─ nobody asks                  └─ handle.wait(): its loss     └─ begins with what step 1 was refused for
    """

    def __init__(self, number: int, read: Read, has_ended: Callable[[], bool]) -> None:
        # `read` waits for its loss, and whether any rank asks to stop, or raises; `has_ended` says without waiting.
        self._number, self._has_ended = number, has_ended
        self._read: Read | None = read
        self._loss, self._asks_to_stop = 0.0, False
        self._refusal: PipelineError | None = None
        self._is_told = False  # its loss, or its refusal, to somebody

    @property
    def is_done(self) -> bool:
        """Whether `wait` returns at once."""
        return self._read is None or self._has_ended()

    def wait(self) -> float:
        """Wait for the step to end; it may be called on only some ranks, and again.

        `pipeline.metrics` are then those of this step, unless those of a later step or evaluation have been read.

        Returns:
            What `step` returns.

        Raises:
            PipelineError: what `step` raises if the loss is not finite or does not fit together. The
                gradients of the step may have been applied by then.
        """
        self._end()
        self._is_told = True
        if self._refusal is not None:
            raise self._refusal
        return self._loss

    def _end(self) -> None:
        """Wait for it to end. What it is refused for is kept for `wait`."""
        if self._read is not None:
            try:
                self._loss, self._asks_to_stop = self._read()
            except PipelineError as error:
                self._refusal = error
            self._read = None  # with all that it holds


@final
class BegunSteps:
    """One rank's steps of `begin_step`. All ranks add the same ones."""

    def __init__(self) -> None:
        self._num_added = 0
        self._steps: deque[StepHandle] = deque()  # as long as somebody must look at them

    def add(self, read: Read, has_ended: Callable[[], bool]) -> StepHandle:
        """A new step, after all others."""
        self._num_added += 1
        self._steps.append(StepHandle(self._num_added, read, has_ended))
        return self._steps[-1]

    def bound(self) -> None:
        """Wait until at most `_MOST_RUNNING` steps are left that have not ended.

        Each of them holds its messages and marks, and a hang is found the later, the further the host has run ahead.
        """
        for step in [step for step in self._steps if not step.is_done][:-_MOST_RUNNING]:
            step._end()

    @property
    def num_open(self) -> int:
        """How many steps are not settled, the same on all ranks."""
        return len(self._steps)

    def num_ended(self) -> int:
        """How many steps have ended, of all that were added. Does not wait."""
        running = next((step for step in self._steps if not step.is_done), None)
        return self._num_added if running is None else running._number - 1

    def settle(self, num_ended: int | None = None) -> bool:
        """Forget the first `num_ended` steps, or all, and wait for them; returns whether any rank asked to stop.

        All ranks must settle the same steps at once. Raises PipelineError if one was refused, which nobody has been
        told yet; later ones are not forgotten then.
        """
        asks_to_stop = False
        while self._steps and (num_ended is None or self._steps[0]._number <= num_ended):
            step = self._steps.popleft()
            if not step._is_told:
                step.wait()
            asks_to_stop |= step._asks_to_stop
        return asks_to_stop
