"""What a rank reads of a step's batch, on the device of its stages, and what it counts of the loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, final

import torch

from rota.core.errors import PipelineError
from rota.core.plan import Plan
from rota.core.text import count_text
from rota.models import Stages
from rota.runtime.compute import Batch
from rota.runtime.device.protocol import Number
from rota.runtime.environment import say
from rota.runtime.fingerprints import Fingerprints, fingerprints
from rota.runtime.messages import over_tensors, tensors_in
from rota.runtime.microbatches import (
    Microbatches,
    is_empty,
    num_examples,
    shares_of,
    to_chunks,
    to_microbatches,
    with_dicts,
)
from rota.torch_internals import version_of


@final
class MicrobatchInputs:
    """What rank `rank` takes of each batch, to `device`.

    `takes_target`: whether `loss_fn` does, or there is none; else the output contains the loss. `warns`: of batches of
    another size than the plan is for.
    """

    def __init__(
        self, stages: Stages, plan: Plan, rank: int, device: torch.device, takes_target: bool, warns: bool = True
    ) -> None:
        placement, self._device, self._takes_target = plan.placement, device, takes_target
        self._stages, self._rank, self._num_microbatches = stages, rank, plan.num_microbatches
        reading = [stage for stage in placement.stages if stages.inputs[stage]]
        #: The stages here that read the step's inputs, and their micro-batches.
        self._reading = {
            stage: placement.microbatches(stage, plan.num_microbatches)
            for stage in placement.stages_on(rank)
            if stage in reading
        }
        self._is_first_reader = rank == min(chain(*map(placement.ranks_of, reading)), default=None)
        self._planned_rows = plan.microbatch_rows if warns else None
        self._sample_of, self._chunks = placement.sample_of, placement.chunks
        sinks = {sink: placement.ranks_of(sink) for sink in stages.sinks}

        def microbatches(stages: list[int]) -> list[int]:
            return sorted({m for stage in stages for m in placement.microbatches(stage, plan.num_microbatches)})

        self._read = microbatches([*self._reading])
        self._targeted = microbatches([sink for sink, ranks in sinks.items() if rank in ranks])
        self._counted = {sink: microbatches([sink]) for sink, ranks in sinks.items() if rank == ranks[0]}
        #: The micro-batches whose loss is counted here: on the first rank of each last stage.
        self.counted = sorted(chain(*self._counted.values()))
        #: Whether a stage of this rank reads the step's inputs, and whether one is last and its loss takes targets.
        self.reads_inputs, self.reads_targets = bool(self._reading), takes_target and bool(self._targeted)

    def take(
        self, inputs: Any, targets: Any, *, has_loss: bool = True, scale: Number = 1.0, keeps_outputs: bool = False
    ) -> Batch:
        """The micro-batches of a step. Raises PipelineError if something is missing or does not fit.

        On an accelerator, what this rank reads of them is copied there, for which the host does not wait if the batch
        is in pinned memory.
        """
        if targets is not None and not self._takes_target:
            raise PipelineError(
                "targets are given, but loss_fn takes the output alone; leave them out, or make it "
                "loss_fn(output, target)"
            )
        if inputs is None and self._reading:
            stage = next(iter(self._reading))
            raise PipelineError(
                f"rank {self._rank} holds stage {stage}, which reads the step's inputs "
                f"{list(self._stages.inputs[stage])}, but got inputs=None; pass the batch on this rank too"
            )
        split_inputs = self._split("inputs", inputs, needed=self.reads_inputs)
        split_targets = self._split("targets", targets, needed=bool(self._targeted))
        missing = [m for m in self._targeted if split_targets.values[m] is None]
        if has_loss and self._takes_target and missing:
            got = "targets=None" if targets is None else f"targets[{missing[0]}] = None"
            raise PipelineError(f"rank {self._rank} holds the last stage, but got {got}; pass them on this rank")
        if self._device.type != "cpu":
            read = [value for m in self._read for value in self._inputs_read(split_inputs, m)]
            split_inputs = self._moved(split_inputs, read)
            split_targets = self._moved(split_targets, [split_targets.values[m] for m in self._targeted])
        return Batch(
            split_inputs,
            split_targets,
            scale=scale,
            alike=not (isinstance(inputs, list) or self._chunks) and len({*split_inputs.sizes} - {0}) < 2,
            rows=_rows(split_inputs, self._read),
            target_rows=_rows(split_targets, self._targeted),
            whole=(inputs, targets),
            loss_of_output=has_loss and not self._takes_target,
            chunks=self._chunks,
            keeps_outputs=keeps_outputs,
        )

    def _split(self, name: str, batch: Any, *, needed: bool = True) -> Microbatches:
        """The micro-batches of inputs or targets."""
        if self._sample_of:
            return to_chunks(name, batch, self._sample_of, needed=needed)
        return to_microbatches(name, batch, self._num_microbatches, needed=needed)

    def shares(self, sizes: Sequence[int]) -> list[float]:
        """What each micro-batch counts in the mean loss, by their numbers of rows; () if these are equal."""
        return shares_of(sizes, self._num_microbatches)

    def have_rows(self, batch: Batch, rows: Sequence[int]) -> bool:
        """Whether all micro-batches that are read here have these numbers of rows."""
        for of_batch, read in ((batch.rows, self._read), (batch.target_rows, self._targeted)):
            spread = of_batch * len(read) if len(of_batch) == 1 else of_batch  # one number stands for all
            if of_batch and [*spread] != [rows[m] for m in read]:
                return False
        return True

    def _moved(self, microbatches: Microbatches, read: Sequence[Any]) -> Microbatches:
        """With the tensors in `read` on the device, each copied once, however many micro-batches and stages read it."""
        to_move = {id(tensor) for value in read for tensor in tensors_in(value)}
        moved: dict[int, torch.Tensor] = {}

        def on_device(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) in to_move and id(tensor) not in moved:
                moved[id(tensor)] = tensor.to(self._device, non_blocking=True)
            return moved.get(id(tensor), tensor)

        shared = ((place, on_device(tensor)) for place, tensor, _ in microbatches.shared)
        return microbatches._replace(
            values=[over_tensors(on_device, value) for value in microbatches.values],
            shared=tuple((place, tensor, version_of(tensor)) for place, tensor in shared),
        )

    def _inputs_read(self, inputs: Microbatches, microbatch: int) -> Iterator[Any]:
        """What stages here read of the inputs of a micro-batch."""
        for stage, microbatches in self._reading.items():
            if microbatch in microbatches:
                with suppress(PipelineError):  # the op itself says what the batch lacks
                    yield self._stages.pick_inputs(stage, inputs.values[microbatch])

    def fingerprints(self, batch: Batch) -> Fingerprints:
        """Of all that this rank was given, {} if it reads nothing of it."""
        if not (self.reads_inputs or self.reads_targets):
            return {}
        # A batch on an accelerator comes to the host at once, rather than by micro-batches.
        inputs, targets = map(_on_host, batch.whole)
        of_inputs = fingerprints("inputs", self._split("inputs", inputs).values, self._stages.input_names)
        return of_inputs | fingerprints("targets", self._split("targets", targets).values)

    def warn_of_other_rows(self, batch: Batch) -> None:
        """Warn once if the plan's times and bytes are of another size of micro-batches than most of this step have."""
        planned, self._planned_rows = self._planned_rows, None
        other_rows = [rows for rows in batch.rows if rows != planned]
        if planned is not None and self._is_first_reader and 2 * len(other_rows) > len(batch.rows):
            most = max(other_rows)
            say(
                f"the plan is for micro-batches of {count_text(planned, 'row')}, but this step's have up to {most}, so "
                f"the plan's times and memory do not hold; give {planned * self._num_microbatches} rows per step, or "
                f"profile with micro-batches of {most} and plan again"
            )

    def without_rows(self, batch: Batch) -> list[int]:
        """The micro-batches without rows, as this rank was given them."""
        return [m for m in self._targeted if is_empty(batch.targets[m]) or is_empty(batch.inputs[m])]

    def losses_by_stage(self, losses: dict[int, float]) -> dict[int, dict[int, float]]:
        """The losses that are counted here, for each last stage."""
        return {sink: {m: losses[m] for m in counted if m in losses} for sink, counted in self._counted.items()}


def _on_host(value: Any) -> Any:
    parts = [*map(with_dicts, value)] if isinstance(value, list) else with_dicts(value)
    return over_tensors(lambda tensor: tensor if tensor.is_meta else tensor.cpu(), parts)


def _rows(microbatches: Microbatches, read: Sequence[int]) -> tuple[int, ...]:
    """Of each micro-batch that is read here; of the first alone where a whole batch was split into equal ones."""
    if microbatches.sizes:
        return tuple(microbatches.sizes[m] for m in read)
    if microbatches.num_rows:
        return (microbatches.num_rows // len(microbatches.values),) if read else ()
    return tuple(num_examples(microbatches.values[m]) for m in read)
