"""What a rank reads of a step's batch, and what it counts of the loss: the same in every step."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any, final

from rota.errors import PipelineError
from rota.models import Stages
from rota.plan import Plan
from rota.runtime import batches
from rota.runtime.compute import Batch


@final
class Intake:
    """Of rank `rank`. `sink_ranks`: for each last stage its ranks."""

    def __init__(self, stages: Stages, plan: Plan, rank: int, sink_ranks: dict[int, tuple[int, ...]]) -> None:
        placement = plan.placement
        self._stages, self._rank, self._num_microbatches = stages, rank, plan.num_microbatches
        self._reading = [stage for stage in placement.stages_on(rank) if stages.inputs[stage]]
        self.sink_ranks = sink_ranks

        def microbatches(sinks: list[int]) -> list[int]:
            return sorted(m for sink in sinks for m in placement.microbatches(sink, plan.num_microbatches))

        self._targeted = microbatches([sink for sink, ranks in self.sink_ranks.items() if rank in ranks])
        self._counted = {sink: microbatches([sink]) for sink, ranks in self.sink_ranks.items() if rank == ranks[0]}

    def take(self, inputs: Any, targets: Any, *, needs_targets: bool, scale: float = 1.0) -> Batch:
        """The micro-batches of a step. Raises PipelineError where something is missing or does not fit."""
        n = self._num_microbatches
        if inputs is None and self._reading:
            stage = self._reading[0]
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
        return Batch(*given, batches.weights(inputs, targets, n), scale, alike=not isinstance(inputs, list))

    def counted_loss(self, batch: Batch, losses: dict[int, float]) -> float:
        """This rank's summand of the mean loss, which is counted on the first rank of each last stage."""
        return sum(batch.shares[m] * losses.get(m, math.nan) for m in sorted(chain(*self._counted.values())))

    def losses_by_stage(self, losses: dict[int, float]) -> dict[int, dict[int, float]]:
        """What of the losses is counted here, for each last stage."""
        return {sink: {m: losses[m] for m in of if m in losses} for sink, of in self._counted.items()}
