"""A run of a plan on one rank: what all ranks agree on before it, and put together after it."""

from __future__ import annotations

import math
from functools import partial
from typing import final

import torch
import torch.distributed as dist

from rota.errors import PipelineError
from rota.runtime.compute import Batch, Compute
from rota.runtime.execution import Execution
from rota.runtime.intake import Intake
from rota.runtime.losses import mean_of_all, refuse_loss
from rota.runtime.meshes import Processes
from rota.runtime.precision import LossScale
from rota.runtime.stopping import StopRequests
from rota.runtime.synchronizing import GradientSync
from rota.runtime.transport import Transport
from rota.runtime.watchdog import Watchdog


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
        self.loss_scale, self.stops = LossScale(), StopRequests(processes.is_first)
        #: How many steps were begun.
        self.num_steps = 0

    def run(self, execution: Execution[Compute], batch: Batch, ask: bool = False, sync: bool = True) -> list[int]:
        """One run of its plan; returns the ranks that ask. Collective."""
        execution.awaited = "the other ranks to reach the same step"
        self._watchdog.last = lambda: f"{execution.last()} in step {self.num_steps}"
        seed = int(torch.randint(2**62, ()))
        random_state = torch.get_rng_state()
        try:
            with self._watchdog.watching(execution.doing):
                fresh, seed, syncs, leaves, most, least, *asks = self._agree(execution.is_new(batch), seed, sync, ask)
                if syncs and leaves:
                    raise PipelineError("some ranks gave step sync=True, others sync=False; give all the same")
                self.loss_scale.refuse_differences(most, least)
                self._gradients.begin(execution, sync, bool(fresh))
                execution.run(batch, seed + self._processes.replica, bool(fresh), self._watchdog.tick)
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
        return [rank for rank, asking in enumerate(asks) if asking]

    def _agree(self, is_new: bool, seed: int, sync: bool, ask: bool) -> list[int]:
        """Whether layouts may be new, one seed, whether any rank syncs or does not, scales, and who asks."""
        asks = [int(ask and rank == self._processes.rank) for rank in range(self._processes.num_ranks)]
        seed = seed if self._processes.is_first else 0
        told = torch.tensor([is_new or self._dynamic_shapes, seed, sync, not sync, *self.loss_scale.told(), *asks])
        self._transport.all_reduce(told, dist.ReduceOp.MAX, "waiting for the others to begin the step")
        return told.tolist()

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
                refuse_loss(mean, self.num_steps, self._watchdog.name, by_stage, self._processes.everyone)
        return mean
