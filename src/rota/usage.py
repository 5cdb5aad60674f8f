"""How a plan is meant to be used: what `rota autoplan` decides besides the order of the ops."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from rota import reading


@dataclass(frozen=True, slots=True)
class Usage:
    """`cuts`: where `rota.split` is to cut the model; `microbatch_rows`: examples in one micro-batch of one replica.

    A step is `num_replicas` pipelines, each with the plan's micro-batches. `num_layers`: of each stage, what lies
    between two neighbouring places where the model may be cut; empty where nobody has counted.
    """

    cuts: tuple[str, ...]
    microbatch_rows: int
    num_replicas: int = 1
    num_layers: tuple[int, ...] = ()

    @property
    def boundaries(self) -> tuple[int, ...] | None:
        """Of the stages, as `rota.cutting` gives them: 0, where each further stage begins, the number of layers."""
        return tuple(accumulate(self.num_layers, initial=0)) if self.num_layers else None

    def to_fields(self) -> dict[str, Any]:
        return {
            "cuts": list(self.cuts),
            "microbatch_rows": self.microbatch_rows,
            "num_replicas": self.num_replicas,
            "num_layers": list(self.num_layers),
        }

    @classmethod
    def from_fields(cls, field: reading.Field) -> Usage:
        """Raises FormatError."""
        cuts = tuple(cut.name() for cut in field["cuts"])
        num_layers = field["num_layers"].integers(1)
        if num_layers and len(num_layers) != len(cuts) + 1:
            raise field["num_layers"].wrong(f"a number for each of the {len(cuts) + 1} stages that the cuts make")
        rows, num_replicas = field["microbatch_rows"].integer(1), field["num_replicas"].integer(1)
        return cls(cuts, rows, num_replicas, num_layers)
