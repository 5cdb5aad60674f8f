"""What a rank reads of a step's batch, and what it counts of the loss: the same in every step."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, final

from rota.errors import PipelineError
from rota.models import Stages
from rota.plan import Plan
from rota.runtime import batches
from rota.runtime.compute import Batch
from rota.units import count_text


@final
class Intake:
    """Of rank `rank`. `sink_ranks`: for each last stage its ranks."""

    def __init__(self, stages: Stages, plan: Plan, rank: int, sink_ranks: dict[int, tuple[int, ...]]) -> None:
        placement = plan.placement
        self._stages, self._rank, self._num_microbatches = stages, rank, plan.num_microbatches
        reading = [stage for stage in placement.stages if stages.inputs[stage]]
        #: The stages here that read the step's inputs, and their micro-batches.
        self._reading = {
            stage: placement.microbatches(stage, plan.num_microbatches)
            for stage in placement.stages_on(rank)
            if stage in reading
        }
        self._is_first_reader = rank == min(chain(*map(placement.ranks_of, reading)), default=None)
        self._planned_rows = plan.microbatch_rows
        self.sink_ranks = sink_ranks

        def microbatches(stages: list[int]) -> list[int]:
            return sorted({m for stage in stages for m in placement.microbatches(stage, plan.num_microbatches)})

        self._read = microbatches([*self._reading])
        self._targeted = microbatches([sink for sink, ranks in self.sink_ranks.items() if rank in ranks])
        self._counted = {sink: microbatches([sink]) for sink, ranks in self.sink_ranks.items() if rank == ranks[0]}

    def take(self, inputs: Any, targets: Any, *, needs_targets: bool, scale: float = 1.0) -> Batch:
        """The micro-batches of a step. Raises PipelineError where something is missing or does not fit."""
        n = self._num_microbatches
        if inputs is None and self._reading:
            stage = next(iter(self._reading))
            raise PipelineError(
                f"rank {self._rank} holds stage {stage}, which reads the step's inputs "
                f"{list(self._stages.inputs[stage])}, but got inputs=None; pass the batch on this rank too"
            )
        given = (
            batches.to_microbatches("inputs", inputs, n, needed=bool(self._reading)),
            batches.to_microbatches("targets", targets, n, needed=bool(self._targeted)),
        )
        missing = [m for m in self._targeted if given[1][m] is None]
        if needs_targets and missing:
            got = "targets=None" if targets is None else f"targets[{missing[0]}] = None"
            raise PipelineError(f"rank {self._rank} holds the last stage, but got {got}; pass them on this rank")
        rows = (
            _rows(given[0], self._read, isinstance(inputs, list)),
            _rows(given[1], self._targeted, isinstance(targets, list)),
        )
        return Batch(*given, batches.weights(inputs, targets, n), scale, not isinstance(inputs, list), *rows)

    def given(self, batch: Batch) -> dict[str, list[str]]:
        """What is read here, for people and to compare: by input, for each micro-batch, "" where it is not read."""
        found: dict[str, list[str]] = {}
        for stage, microbatches in self._reading.items():
            for m in microbatches[:1] if batch.alike else microbatches:
                with suppress(PipelineError):  # the op itself tells what the batch lacks
                    values = self._stages.pick_inputs(stage, batch.inputs[m])
                    for wanted, value in zip(self._stages.inputs[stage], values, strict=True):
                        of_input = found.setdefault(str(wanted), [""] * self._num_microbatches)
                        of_input[m] = batches.describe(value)
                        if batch.alike:
                            of_input[:] = of_input[m : m + 1] * self._num_microbatches
        return found

    def warn_of_other_rows(self, batch: Batch) -> None:
        """Say so, once, if the plan's times and bytes are of micro-batches of another size."""
        planned, self._planned_rows = self._planned_rows, None
        if planned is None or not self._is_first_reader or not batch.rows or planned in batch.rows:
            return
        least, most = min(batch.rows), max(batch.rows)
        given = f"{least}" if least == most else f"{least} to {most}"
        print(
            f"rota: the plan is for micro-batches of {count_text(planned, 'row')}, but this step's have {given}, "
            f"so the plan's times and memory do not hold; give {planned * self._num_microbatches} rows per step, or "
            f"profile with micro-batches of {most} and plan again",
            file=sys.stderr,
            flush=True,
        )

    def without_rows(self, batch: Batch) -> list[int]:
        """The micro-batches of which nothing is there, in what this rank was given."""
        return [m for m in self._targeted if batches.is_empty(batch.targets[m]) or batches.is_empty(batch.inputs[m])]

    def counted_loss(self, batch: Batch, losses: dict[int, float]) -> float:
        """This rank's summand of the mean loss, which is counted on the first rank of each last stage."""
        return sum(batch.shares[m] * losses.get(m, math.nan) for m in sorted(chain(*self._counted.values())))

    def losses_by_stage(self, losses: dict[int, float]) -> dict[int, dict[int, float]]:
        """What of the losses is counted here, for each last stage."""
        return {sink: {m: losses[m] for m in of if m in losses} for sink, of in self._counted.items()}


def _rows(microbatches: Sequence[Any], read: Sequence[int], is_list: bool) -> tuple[int, ...]:
    """Of each micro-batch that is read here; of the first alone where a whole batch was split into equal ones."""
    return tuple(batches.num_examples(microbatches[m]) for m in (read if is_list else read[:1]))
