"""How a plan is meant to be used: what `rota autoplan` decides besides the order of the ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rota import reading


@dataclass(frozen=True, slots=True)
class Usage:
    """`cuts`: where `rota.split` is to cut the model; `microbatch_rows`: examples in one micro-batch of one replica.

    A step is `num_replicas` pipelines, each with the plan's micro-batches.
    """

    cuts: tuple[str, ...]
    microbatch_rows: int
    num_replicas: int = 1

    def to_fields(self) -> dict[str, Any]:
        return {
            "cuts": list(self.cuts),
            "microbatch_rows": self.microbatch_rows,
            "num_replicas": self.num_replicas,
        }

    @classmethod
    def from_fields(cls, field: reading.Field) -> Usage:
        """Raises FormatError."""
        cuts = tuple(cut.name() for cut in field["cuts"])
        return cls(cuts, field["microbatch_rows"].integer(1), field["num_replicas"].integer(1))
