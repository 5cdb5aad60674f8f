"""How to use a plan: what `rota autoplan` decides besides the order of ops."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from rota import reading
from rota.layers import ESTIMATED
from rota.units import count_text

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

    cuts: tuple[str, ...]
    microbatch_rows: int
    num_replicas: int = 1
    num_layers: tuple[int, ...] = ()
    note: str = ""
    pipeline_ranks: int | None = None
    exportable: bool = False
    whole_backward: bool = False
    places: tuple[str, ...] = ()

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

    def to_fields(self) -> dict[str, Any]:
        """The fields in JSON."""
        return {
            "cuts": list(self.cuts),
            "microbatch_rows": self.microbatch_rows,
            "num_replicas": self.num_replicas,
            "num_layers": list(self.num_layers),
            **({"note": self.note} if self.note else {}),
            **({"pipeline_ranks": self.pipeline_ranks} if self.pipeline_ranks is not None else {}),
            **({"exportable": True} if self.exportable else {}),
            **({"whole_backward": True} if self.whole_backward else {}),
            **({"places": list(self.places)} if self.places else {}),
        }

    @classmethod
    def from_fields(cls, field: reading.Field) -> Usage:
        """Read what `to_fields` wrote. Raises FormatError."""
        cuts = tuple(cut.name() for cut in field["cuts"])
        num_layers = field["num_layers"].integers(1)
        if num_layers and len(num_layers) != len(cuts) + 1:
            raise field["num_layers"].wrong(f"a number for each of the {len(cuts) + 1} stages that the cuts make")
        rows, num_replicas = field["microbatch_rows"].integer(1), field["num_replicas"].integer(1)
        note = field["note"].text() if "note" in field else ""
        pipeline_ranks = field["pipeline_ranks"].integer(1) if "pipeline_ranks" in field else None
        exportable, whole_backward = (
            field[name].boolean() if name in field else False for name in ("exportable", "whole_backward")
        )
        places = tuple(place.name() for place in field["places"]) if "places" in field else ()
        return cls(cuts, rows, num_replicas, num_layers, note, pipeline_ranks, exportable, whole_backward, places)
