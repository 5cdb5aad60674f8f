"""How to use a plan: what `rota autoplan` decides besides the order of ops."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import accumulate

from rota.core.errors import PlacementError
from rota.core.layers import ESTIMATED
from rota.core.reading import Name
from rota.core.units import count_text
from rota.core.whole_numbers import Positive

_FROM_RUN = "measured in a run"


@dataclass(frozen=True, slots=True)
class Usage:
    """Cuts, micro-batch size and replicas of a plan.

    Attributes:
        cuts: Where `rota.split` cuts the model.
        microbatch_rows: Examples in one micro-batch of one replica.
        num_replicas: Number of pipelines in a step, each with the plan's micro-batches.
        num_layers: Number of layers of each stage; a layer is what is between two adjacent places where the model may
            be cut. Empty: unknown.
        note: Where the times of the plan come from, such as "estimated for h100".
        pipeline_ranks: Ranks per pipeline, if they were given instead of chosen.
        exportable: Whether only plans were considered that other trainers can run.
        whole_backward: Whether only plans were considered that do not split backwards.
        places: Names of all places where the model could be cut, in the model's order. Empty: unknown.
    """

    cuts: tuple[Name, ...]
    microbatch_rows: Positive
    num_replicas: Positive = 1
    num_layers: tuple[Positive, ...] = ()
    note: str = ""
    pipeline_ranks: Positive | None = None
    exportable: bool = False
    whole_backward: bool = False
    places: tuple[Name, ...] = ()

    def __post_init__(self) -> None:
        if self.num_layers and len(self.num_layers) != len(self.cuts) + 1:
            raise PlacementError(
                f"num_layers is {self.num_layers}; give one number for each of the {len(self.cuts) + 1} stages that "
                f"the cuts make"
            )

    @property
    def is_estimate(self) -> bool:
        """Whether nothing was measured: the plan's times were computed from what a device can do."""
        return self.note.startswith(ESTIMATED)

    @property
    def estimated_for(self) -> str | None:
        """The device that the plan's times were computed for, such as "h100"; None if they were not."""
        found = re.fullmatch(rf"{ESTIMATED} for ([\w.-]+)", self.note)
        return None if found is None else found[1]

    @property
    def is_from_run(self) -> bool:
        """Whether the plan's times were measured in a run of its ranks, which `rota calibrate` put into it."""
        return self.note.startswith(_FROM_RUN)

    def measured_in(self, num_steps: int) -> Usage:
        """This usage for a plan with the times that a run of its ranks took, in so many recorded steps."""
        return replace(self, note=f"{_FROM_RUN}, in {count_text(num_steps, 'recorded step')}")

    @property
    def boundaries(self) -> tuple[int, ...] | None:
        """The stages' boundaries as in `rota.cutting`: 0, the first layer of each later stage, the number of layers."""
        return tuple(accumulate(self.num_layers, initial=0)) if self.num_layers else None

    def span_text(self, stage: int) -> str:
        """What a stage has of the model, by the names of the cuts: "all from layers.2 to before layers.5"."""
        begin = f"from {self.cuts[stage - 1]}" if stage else ""
        end = f"before {self.cuts[stage]}" if stage < len(self.cuts) else "on" if begin else ""
        return " ".join(filter(None, ("all", begin, "to" if begin and end != "on" else "", end)))
