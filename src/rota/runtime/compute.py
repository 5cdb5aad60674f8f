"""What a rank's ops compute, and what they keep for each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch

from rota.models import Stages
from rota.placement import Placement
from rota.runtime.gradients import Kept, backward, backward_inputs, forward, hand_over, take_loss
from rota.runtime.recompute import Again, without_activations
from rota.runtime.split_backward import WeightWork
from rota.tasks import Kind, Op

LossFn = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's micro-batches, and each one's share of the mean loss."""

    inputs: list[Any]
    targets: list[Any]
    shares: list[float]


@final
class Compute:
    """Runs ops of any stage; `losses` and `outputs` of the last stage are by micro-batch."""

    def __init__(self, stages: Stages, placement: Placement, loss_fn: LossFn | None, keep_outputs: bool) -> None:
        self._stages, self._loss_fn, self._keep_outputs = stages, loss_fn, keep_outputs
        self._tasks = {(task.stage, task.kind) for task in placement.tasks}
        self._sink = stages.sink
        self._kept: dict[tuple[int, int], Kept | Again | WeightWork] = {}
        self._batch = Batch([], [], [])
        self._seed = 0
        self.losses: dict[int, float] = {}
        self.outputs: dict[int, Any] = {}

    def begin(self, batch: Batch, seed: int) -> None:
        """A new step; what is left of the one before is dropped."""
        self._batch, self._seed = batch, seed
        self._kept.clear()
        self.losses, self.outputs = {}, {}

    def run(self, op: Op, received: list[Any]) -> list[Any]:
        """One op. F takes the values of the stage's incoming edges and returns those of its outgoing ones; B and I
        take gradients of the outgoing edges and return those of the incoming ones; R and W take and return nothing.
        """
        if op.kind is Kind.F:
            return self._first_forward(op, received)
        if op.kind is Kind.R:
            self._forward_again(op)
            return []
        kept = self._kept.pop((op.stage, op.microbatch))
        if op.kind is Kind.W:
            assert isinstance(kept, WeightWork)
            kept.run()
            return []
        assert isinstance(kept, Kept)
        if op.kind is Kind.B:
            return backward(kept, received)
        gradients, work = backward_inputs(kept, received)
        self._kept[op.stage, op.microbatch] = work
        return gradients

    def _first_forward(self, op: Op, received: list[Any]) -> list[Any]:
        key, m = (op.stage, op.microbatch), op.microbatch
        if (op.stage, Kind.R) in self._tasks:
            with without_activations(self._stages[op.stage], received, f"stage {op.stage}") as again:
                output, values, _ = self._forward(op, received)
            self._kept[key] = again
        else:
            output, values, kept = self._forward(op, received)
            if torch.is_grad_enabled():
                self._kept[key] = kept
        if op.stage == self._sink and self._keep_outputs:
            self.outputs[m] = hand_over(output)
        return values

    def _forward_again(self, op: Op) -> None:
        again = self._kept.pop((op.stage, op.microbatch))
        assert isinstance(again, Again)
        _, _, kept = self._forward(op, again.received, again.buffers)
        self._kept[op.stage, op.microbatch] = kept

    def _forward(
        self, op: Op, received: list[Any], buffers: dict[str, torch.Tensor] | None = None
    ) -> tuple[Any, list[Any], Kept]:
        m = op.microbatch
        # Dropout is a matter of step, stage and micro-batch, not of the order or the rank: R draws what F drew.
        torch.default_generator.manual_seed(hash((self._seed, op.stage, m)) % 2**63)
        split = (op.stage, Kind.I) in self._tasks
        inputs, targets = self._batch.inputs[m], self._batch.targets[m]
        output, values, kept = forward(self._stages, op.stage, received, inputs, split=split, buffers=buffers)
        if op.stage == self._sink and self._loss_fn is not None and targets is not None:
            self.losses[m] = take_loss(kept, self._loss_fn, output, targets, self._batch.shares[m])
        return output, values, kept
