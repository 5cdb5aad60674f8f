"""A run of a plan on one rank: what all ranks agree on before it, and put together after it."""

from __future__ import annotations

import math
from functools import partial
from typing import final

import torch
import torch.distributed as dist

from rota.errors import PipelineError
from rota.runtime.agreement import GivenBatch, batch_differences
from rota.runtime.calls import Agreed, Call, Calls
from rota.runtime.compute import Batch, Compute
from rota.runtime.execution import Execution
from rota.runtime.faults.watchdog import Watchdog
from rota.runtime.json_messages import all_gather_json
from rota.runtime.losses import mean_of_all, refuse_loss
from rota.runtime.meshes import Processes
from rota.runtime.microbatch_inputs import Intake
from rota.runtime.precision import LossScale
from rota.runtime.reducing.gradient_sync import GradientSync
from rota.runtime.stopping import StopRequests
from rota.runtime.transport import Transport, together

_BEGINNING = "waiting for the others to begin the step"


@final
class Runs:
    """Of one pipeline on one process, its steps and evaluations."""

    def __init__(
        self,
        processes: Processes,
        gradients: GradientSync,
        transport: Transport,
        watchdog: Watchdog,
        intake: Intake,
        dynamic_shapes: bool,
    ) -> None:
        self._processes, self._gradients, self._transport = processes, gradients, transport
        self._watchdog, self._intake, self._dynamic_shapes = watchdog, intake, dynamic_shapes
        self._calls = Calls(processes, transport)
        self.loss_scale, self.stops = LossScale(), StopRequests(processes.is_first)
        self._sizes: dict[Execution[Compute], object] = {}  # of the last batch that all ranks have told each other
        self._differences = ""  # between what the ranks were given
        #: How many steps were begun.
        self.num_steps = 0

    def run(self, call: Call, execution: Execution[Compute], batch: Batch, scale: float = 0.0) -> list[int]:
        """One run of its plan; returns the ranks that ask for outputs. Collective. `scale`: as `step` was given it."""
        execution.awaited = "the other ranks to reach the same step"
        self._watchdog.last = lambda: f"{execution.last()} in step {self.num_steps}"
        sync = call is not Call.STEP_WITHOUT_SYNC
        seed = int(torch.randint(2**62, ()))
        random_state = torch.get_rng_state()
        try:
            with self._watchdog.watching(execution.doing):
                fresh, seed, agreed = self._agree(call, execution, batch, seed, scale)
                self._gradients.begin(execution, sync, fresh)
                try:
                    execution.run(batch, seed + self._processes.replica, fresh, self._watchdog.tick)
                except Exception as error:
                    self._explain(error, execution)
                    raise
                self._gradients.finish(execution, sync)
                if execution.trains and sync:
                    execution.awaited = "the other ranks' scalers"
                    agree = partial(self._transport.all_reduce, how=dist.ReduceOp.MAX, doing="comparing overflows")
                    self.loss_scale.settle(execution.parameters(), agree)
        except BaseException:
            execution.forget()
            raise
        finally:
            # Each rank has drawn one number, whatever its stages drew: shuffles stay the same on all ranks.
            torch.set_rng_state(random_state)
        asking = (agreed.calls[process] is Call.FORWARD for process in self._processes.pipeline_processes)
        return [rank for rank, asks in enumerate(asking) if asks]

    def agree(self, call: Call, doing: str, number: float = 0.0) -> list[float]:
        """All processes' `number`s, if all make this `call`. Collective."""
        return self._calls.agree(call, doing, number=number).numbers

    def _agree(
        self, call: Call, execution: Execution[Compute], batch: Batch, seed: int, scale: float
    ) -> tuple[bool, int, Agreed]:
        """Whether layouts may be new, and one seed for all."""
        is_new = execution.is_new(batch) or self._dynamic_shapes
        sizes = batch.rows, batch.target_rows
        has_other_size = sizes != self._sizes.get(execution)
        seed = seed if self._processes.is_first else 0
        flags = is_new, has_other_size, seed, *self.loss_scale.told()
        agreed = self._calls.agree(call, _BEGINNING, flags, scale)
        fresh, compares, seed, most, least = agreed.flags
        self.loss_scale.refuse_differences(most, least)
        self._refuse_scales(agreed.numbers)
        if compares:
            self._compare(batch)
            self._sizes[execution] = sizes
        return bool(fresh), seed, agreed

    def _refuse_scales(self, scales: list[float]) -> None:
        for pipeline in self._processes.pipelines:
            first = pipeline[0]
            for process in pipeline:
                if scales[process] != scales[first]:
                    names = self._processes.names
                    raise PipelineError(
                        f"{names[first]} gave step scale={scales[first]:g}, {names[process]} {scales[process]:g}; give "
                        f"all ranks the same"
                    )

    def _compare(self, batch: Batch) -> None:
        """Learn what the others were given."""
        mine = GivenBatch(self._intake.given(batch), [*batch.rows], [*batch.target_rows])
        with together("comparing batches"):
            given = [GivenBatch(*told) for told in all_gather_json(mine, self._processes.everyone)]
        self._differences = batch_differences(given, self._processes.pipelines, self._processes.names)

    def _explain(self, error: Exception, execution: Execution[Compute]) -> None:
        """Where an op fails and the ranks were given different batches, that is what to tell all ranks."""
        if self._differences and execution.failed is not None and not isinstance(error, PipelineError):
            raise PipelineError(
                f"{execution.failed} failed on {self._watchdog.name} ({type(error).__name__}: {error}); the ranks' "
                f"batches do not fit together, which may be why: {self._differences}. Give all ranks the same batch"
            ) from error

    def mean_loss(self, execution: Execution[Compute], batch: Batch, refuse: bool = False) -> float:
        """Of all replicas; `refuse` it, on all ranks, where it is not finite and no scaler is there. Collective."""
        losses = execution.compute.losses
        execution.awaited = "the other ranks' losses"
        add_up = partial(self._transport.all_reduce, how=dist.ReduceOp.SUM, doing=f"waiting for {execution.awaited}")
        with self._watchdog.watching(execution.doing):
            mine = self._intake.counted_loss(batch, losses)
            mean = mean_of_all(mine, self._processes.num_pipelines, add_up, self.stops)
            if refuse and not math.isfinite(mean) and not self.loss_scale.is_on:
                by_stage = self._intake.losses_by_stage(losses)
                empty = self._intake.without_rows(batch)
                refuse_loss(mean, self.num_steps, self._watchdog.name, by_stage, empty, self._processes.everyone)
        return mean
