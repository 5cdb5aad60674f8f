"""What a rank's ops compute, and what they keep for each other.

F ──Kept──▶ B              F ──Again──▶ R or the backward itself ──Kept──▶ B or I
F ──Kept──▶ I ──WeightWork──▶ W
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from rota.core.errors import PipelineError
from rota.core.placement import Placement
from rota.core.tasks import Kind, Op
from rota.models import AddedLoss, Stages
from rota.models.added_losses import AddedLosses
from rota.models.sequence_chunks import Chunk
from rota.runtime.device.numbers import number_in
from rota.runtime.device.protocol import Device, HostDevice, Number
from rota.runtime.gradients.chunks import PassedOn
from rota.runtime.gradients.forward_backward import (
    Kept,
    StageForward,
    backward,
    backward_inputs,
    keep_loss,
    pass_on,
)
from rota.runtime.gradients.recompute import drawing_again, versions_in, without_activations
from rota.runtime.gradients.split_backward import Split
from rota.runtime.losses import LossFn, MicrobatchLoss, Weighed, ends_of, loss_of, needs_target, refuse_weights_in
from rota.runtime.messages import hand_over
from rota.runtime.microbatches import Microbatches
from rota.runtime.precision import Autocast, ambient_autocast, without_autocast


@dataclass(slots=True)
class Batch:
    """A step's micro-batches, and what gradients are multiplied by.

    `shares`: each one's of a mean loss; those in `padding` count nothing; both are set once agreed. `alike`: all inputs
    have the same shapes. `rows` and `target_rows`: the examples in each micro-batch that is read here, or only in the
    first one if all have the same number. `whole`: inputs and targets as the caller gave them. `per_count`: what the
    sum of a loss with a count is multiplied by until the count of all micro-batches is known. `loss_of_output`: the
    loss needs no target. `chunks`: for each sample that is cut, its micro-batches. `keeps_outputs`: of the last stage,
    in `Compute.outputs`.
    """

    split_inputs: Microbatches
    split_targets: Microbatches
    shares: Sequence[float] = ()
    padding: tuple[int, ...] = ()
    scale: Number = 1.0
    alike: bool = False
    rows: tuple[int, ...] = ()
    target_rows: tuple[int, ...] = ()
    whole: tuple[Any, Any] = (None, None)
    per_count: float = 1.0
    loss_of_output: bool = False
    chunks: tuple[tuple[int, ...], ...] = ()
    keeps_outputs: bool = False

    @property
    def inputs(self) -> list[Any]:
        """By micro-batch."""
        return self.split_inputs.values

    @property
    def targets(self) -> list[Any]:
        """By micro-batch."""
        return self.split_targets.values

    def is_padding(self, microbatch: int) -> bool:
        """Whether it was added because there are fewer rows than micro-batches."""
        return microbatch in self.padding

    def weight(self, microbatch: int, count: Number | None, *, is_sum: bool = False) -> Number:
        """What the backward of a loss starts from: a mean, with a count or none, or a sum that has a count."""
        if self.is_padding(microbatch):
            return 0.0
        if count is None:
            return self.shares[microbatch] * self.scale
        return self.per_count * self.scale * (1.0 if is_sum else count)


_DRAWN = torch.empty((), dtype=torch.int64, device="cpu")


def step_seed() -> int:
    """A number that seeds the ops of a step, drawn from the CPU's generator.

    A run restores the random state behind it, so that each rank has drawn one number, whatever its stages drew:
    shuffles stay the same on all ranks.
    """
    return int(_DRAWN.random_(2**62))


def seed_of(*numbers: int) -> int:
    """A seed that depends on these numbers alone: in each process, by every Python, so that a restart draws it again.

    Python's own `hash` is another one in other versions.
    """
    text = " ".join(map(str, numbers))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@final
class Compute:
    """Computes the ops of any stage.

    `losses` and `outputs` of the last stage are by micro-batch, `added` losses by stage and micro-batch.

    The stages in `recompute` run their forward again as those with R do, at the beginning of their backward.
    """

    def __init__(
        self,
        stages: Stages,
        placement: Placement,
        loss_fn: LossFn | None,
        recompute: Iterable[int] = (),
        device: Device | None = None,
    ) -> None:
        self._device = HostDevice() if device is None else device
        self._stages, self._loss_fn = stages, loss_fn
        self._takes_target = loss_fn is None or needs_target(loss_fn)  # once, as reading a signature takes long
        self._trains = any(task.kind.makes_weight_gradients for task in placement.tasks)
        self._loss_is_checked = not self._trains
        self._split = {task.stage for task in placement.tasks if task.kind is Kind.I}
        self._recomputed_late = frozenset(recompute)
        self._recomputed = {task.stage for task in placement.tasks if task.kind is Kind.R} | self._recomputed_late
        self._sharing = {stage for stage in placement.stages if stages.shares_inputs(stage)}
        self._sinks = {*stages.sinks}
        self._num_stages = len(stages) // stages.num_components  # of one copy of the model
        self._forwards: dict[int, StageForward] = {}
        self._kept: dict[tuple[int, int], Any] = {}  # by stage and micro-batch: Kept, Again or WeightWork
        self._splits: dict[int, list[Split]] = {}  # by stage, see `input_gradients`
        self._batch = Batch(Microbatches([]), Microbatches([]))
        self._chunks = PassedOn()
        self._seed = 0
        self._autocast: Autocast = ()
        self._collector = AddedLosses()
        self.losses: dict[int, MicrobatchLoss] = {}
        self.added: dict[tuple[int, int], list[Weighed]] = {}
        self.outputs: dict[int, Any] = {}

    def begin(self, batch: Batch, seed: int, learns: bool, collector: AddedLosses) -> None:
        """Before the ops of a step. `learns`: see `StageForward`. `collector`: of what modules add to the loss."""
        self._batch, self._seed, self._autocast, self._collector = batch, seed, ambient_autocast(), collector
        self._kept.clear()
        for splits in self._splits.values():
            splits.clear()
        for forward in self._forwards.values():
            forward.learns = learns
        self._chunks.begin(batch.chunks)
        self.losses, self.added, self.outputs = {}, {}, {}

    def bind(self, op: Op) -> Callable[[list[Any]], list[Any]]:
        """The function that computes one op in each step.

        F takes the values of the stage's incoming edges and returns those of its outgoing ones; B and I take gradients
        of the outgoing edges and return those of the incoming ones; R and W take and return nothing.
        """
        stage, kind, microbatch = op
        if stage not in self._forwards:
            self._forwards[stage] = StageForward(self._stages, stage, split=stage in self._split)
            self._splits[stage] = []
        if kind is Kind.F:
            forward = self._forward(stage, microbatch)
            return self._recomputable(forward, stage, microbatch) if stage in self._recomputed else forward
        if kind is Kind.R:
            return self._recompute(stage, microbatch)
        if kind is Kind.W:
            return self._without_autocast(self._weight_backward((stage, microbatch)))
        backward_of = self._input_backward if kind is Kind.I else self._whole_backward
        compute = self._without_autocast(backward_of(stage, microbatch))
        return _after(self._recompute(stage, microbatch), compute) if stage in self._recomputed_late else compute

    def inputs_of(self, op: Op) -> tuple[Any, ...]:
        """What an op's stage reads of the batch, and the loss of the last one."""
        inputs = self._stages.pick_inputs(op.stage, self._batch.inputs[op.microbatch])
        return (*inputs, self._batch.targets[op.microbatch]) if op.stage in self._sinks else inputs

    def explain(self, op: Op, error: Exception) -> PipelineError | None:
        """What an error of an op means; None if only the op itself knows."""
        is_forward = op.kind in (Kind.F, Kind.R)
        return self._forwards[op.stage].explain(error, is_forward) if isinstance(error, RuntimeError) else None

    # --- backwards ------------------------------------------------------------------------------------------------

    def _without_autocast(self, compute: Callable[[list[Any]], list[Any]]) -> Callable[[list[Any]], list[Any]]:
        def run(received: list[Any]) -> list[Any]:
            if not self._autocast:
                return compute(received)
            with without_autocast(self._autocast):
                return compute(received)

        return run

    def _whole_backward(self, stage: int, microbatch: int) -> Callable[[list[Any]], list[Any]]:
        kept, key, chunks = self._kept, (stage, microbatch), self._chunks

        def run(received: list[Any]) -> list[Any]:
            gradients = backward(kept.pop(key), received)
            chunks.release(stage, microbatch)
            return gradients

        return run

    def _input_backward(self, stage: int, microbatch: int) -> Callable[[list[Any]], list[Any]]:
        kept, key, chunks, splits = self._kept, (stage, microbatch), self._chunks, self._splits[stage]

        def run(received: list[Any]) -> list[Any]:
            gradients, kept[key] = backward_inputs(kept.pop(key), received, splits)
            chunks.release(stage, microbatch)
            return gradients

        return run

    def _weight_backward(self, key: tuple[int, int]) -> Callable[[list[Any]], list[Any]]:
        kept = self._kept

        def run(_: list[Any]) -> list[Any]:
            kept.pop(key).run()
            return []

        return run

    # --- forwards -------------------------------------------------------------------------------------------------

    def _recompute(self, stage: int, microbatch: int) -> Callable[[list[Any]], list[Any]]:
        kept, key, module = self._kept, (stage, microbatch), self._stages[stage]
        forward = self._forward(stage, microbatch)

        def run(_: list[Any]) -> list[Any]:
            again = kept.pop(key)
            with drawing_again(module, again):
                forward(again.received, again.buffers)
            return []

        return run

    def _recomputable(
        self, forward: Callable[[list[Any]], list[Any]], stage: int, microbatch: int
    ) -> Callable[[list[Any]], list[Any]]:
        """The first forward of two."""

        def run(received: list[Any]) -> list[Any]:
            inputs = self._stages.pick_inputs(stage, self._batch.inputs[microbatch])
            with without_activations(self._stages[stage], received, inputs, f"stage {stage}") as again:
                values = forward(received)
            self._kept[stage, microbatch] = again
            return values

        return run

    def _forward(self, stage: int, microbatch: int) -> Callable[..., list[Any]]:
        key, forward, kept_of, seed = (stage, microbatch), self._forwards[stage], self._kept, self._device.seed
        # By stage and micro-batch, not by the order or the rank: R draws what F drew.
        salt = seed_of(stage % self._num_stages, microbatch)
        is_sink, shares_inputs = stage in self._sinks, stage in self._sharing

        def run(received: list[Any], buffers: dict[str, torch.Tensor] | None = None) -> list[Any]:
            seed(self._seed ^ salt)
            inputs = self._batch.inputs[microbatch]
            versions = versions_in(self._stages.pick_inputs(stage, inputs)) if shares_inputs else None
            chunk = self._open_chunk(stage, microbatch, received) if microbatch in self._chunks else None
            output, values, kept = forward(received, inputs, buffers=buffers, chunk=chunk)
            if chunk is not None:
                pass_on(kept, chunk.passed_on(), self._chunks.close(stage, microbatch, chunk))
            if versions is not None and versions != versions_in(self._stages.pick_inputs(stage, inputs)):
                raise PipelineError(
                    f"stage {stage} writes into an input that other stages read too, which on another rank would have "
                    f"it unchanged; let it begin with an operation that is not in place"
                )
            if is_sink:
                self._take_output(kept, stage, microbatch, output)
            if self._collector.losses:
                self._take_added(kept, stage, microbatch, self._collector.losses)
                self._collector.losses.clear()
            if torch.is_grad_enabled():
                if not (kept.losses or any(kept.outputs)):
                    self._refuse_lost_gradients(stage, kept)
                kept_of[key] = kept
            return values

        return run

    def _take_output(self, kept: Kept, stage: int, microbatch: int, output: Any) -> None:
        batch = self._batch
        target = batch.targets[microbatch]
        if self._loss_fn is not None and (target is not None or batch.loss_of_output):
            root, loss = self._loss_of(self._loss_fn, output, target, stage)
            if loss.count is None:
                self._refuse_mean(microbatch, "the loss")
            keep_loss(kept, root, batch.weight(microbatch, loss.count, is_sum=True))
            if not batch.is_padding(microbatch):
                self.losses[microbatch] = loss
        if batch.keeps_outputs and not batch.is_padding(microbatch):
            self.outputs[microbatch] = hand_over(output)

    def _open_chunk(self, stage: int, microbatch: int, received: list[Any]) -> Chunk:
        """What the forward of a chunk reads of earlier ones."""
        module = self._stages[stage]
        values = (*received, *self._stages.pick_inputs(stage, self._batch.inputs[microbatch]))
        return self._chunks.open(stage, microbatch, module, f"stage {stage} ({type(module).__name__})", values)

    def _refuse_mean(self, microbatch: int, what: str) -> None:
        if microbatch in self._chunks:
            raise PipelineError(
                f"{what} of a chunk is a mean, but chunks count by their tokens; return (sum, count), or give "
                f"rota.add_loss a count"
            )

    def _loss_of(self, loss_fn: LossFn, output: Any, target: Any, stage: int) -> tuple[torch.Tensor, MicrobatchLoss]:
        ends = None if self._loss_is_checked else ends_of(output, target)
        root, loss = loss_of(loss_fn, output, target, self._device, self._takes_target)
        if ends is not None:
            refuse_weights_in(root, ends, self._stages, stage)
            self._loss_is_checked = True
        return root, loss

    def _take_added(self, kept: Kept, stage: int, microbatch: int, losses: list[AddedLoss]) -> None:
        batch = self._batch
        for loss in losses:
            if loss.count is None:
                self._refuse_mean(microbatch, "an added loss")
            keep_loss(kept, loss.value, batch.weight(microbatch, loss.count))
        if not batch.is_padding(microbatch):
            numbers = [number_in(loss.value, self._device) for loss in losses]
            counts = [loss.count for loss in losses]
            self.added[stage, microbatch] = [*map(Weighed, numbers, counts)]

    def _refuse_lost_gradients(self, stage: int, kept: Kept) -> None:
        """Raises PipelineError if no path leads from the loss to a stage, whose gradients would then be zeros."""
        received = kept.leaves if kept.entries is None else kept.entries
        if stage not in self._sinks:
            for edge, wanting in zip(self._stages.incoming(stage), received, strict=True):
                if wanting and len(self._stages.outgoing(edge.source)) == 1:
                    raise PipelineError(
                        f"what stage {stage} returns has no gradient, so nothing before it would be trained; leave out "
                        f"detach() and no_grad(), or freeze what comes before by requires_grad_(False)"
                    )
        elif any(received) or any(parameter.requires_grad for parameter in self._stages[stage].parameters()):
            raise PipelineError(
                f"what stage {stage}, the last one, returns has no gradient, so nothing would be trained; leave out "
                f"detach(), no_grad() and the like, or freeze all parameters by requires_grad_(False)"
            )


def _after(
    before: Callable[[list[Any]], list[Any]], compute: Callable[[list[Any]], list[Any]]
) -> Callable[[list[Any]], list[Any]]:
    def run(received: list[Any]) -> list[Any]:
        before([])
        return compute(received)

    return run
