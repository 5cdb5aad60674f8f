"""A reference problem: a placement and its micro-batches, with the best plan known and the best bound known.

README.md describes the files; check.py verifies them without Rota.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from rota.core import reading, writing
from rota.core.errors import FormatError
from rota.core.placement import Placement
from rota.core.plan import Plan, PlanFile
from rota.core.reading import Whole
from rota.core.simulation import simulate
from rota.search import SearchResult, bounds
from rota.search.bounds import Proof
from rota.search.problem import Problem
from rota.search.transfer_levels import counting_transfers

NEAR = 0.01  #: a gap up to which a problem counts as nearly closed

State = Literal["closed", "within 1%", "open"]


@dataclass(frozen=True)
class Reference:
    """A problem with the best that is known of it.

    Attributes:
        name: What the problem is; also the name of its file.
        family: Problems that are alike.
        plan: The best plan known; its placement and number of micro-batches are the problem.
        found_by: The method that found the plan.
        bound_us: No plan within the limits has a shorter makespan.
        certificate: How the bound is known, in the form that README.md describes.
    """

    name: str
    family: str
    plan: Plan
    found_by: str
    bound_us: int
    certificate: Mapping[str, Any]

    @property
    def placement(self) -> Placement:
        """The tasks of one micro-batch, the ranks and their limits."""
        return self.plan.placement

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of a step."""
        return self.plan.num_microbatches

    @cached_property
    def makespan_us(self) -> int:
        """Makespan of the best plan known, simulated."""
        return simulate(self.plan).makespan_us

    @property
    def gap(self) -> float:
        """How much slower than the bound the best plan may be, as a fraction of its time."""
        return max(0.0, 1 - self.bound_us / self.makespan_us) if self.makespan_us else 0.0

    @property
    def state(self) -> State:
        """Whether the best plan is proven optimal, nearly, or neither."""
        if self.makespan_us <= self.bound_us:
            return "closed"
        return "within 1%" if self.gap <= NEAR else "open"

    def is_of(self, placement: Placement, num_microbatches: int) -> bool:
        """Whether this is the same problem."""
        return (self.placement, self.num_microbatches) == (placement, num_microbatches)

    def to_json(self) -> str:
        """The text of a "problem" file, which `from_json` reads, with the simulated makespan and memory."""
        timeline = simulate(self.plan)
        fields = self.plan.to_fields()
        best = {
            "makespan_us": timeline.makespan_us,
            "peak_bytes": list(timeline.peak_memory_bytes),
            "found_by": self.found_by,
            "bound_us": self.bound_us,
            "certificate": dict(self.certificate),
            "orders": fields.pop("orders"),
        }
        return reading.dump(
            "problem", {"name": self.name, "family": self.family, **fields, **best}, Reference.from_json
        )

    @classmethod
    def from_json(cls, text: str) -> Reference:
        """Read what `to_json` wrote. Raises FormatError or PlacementError, which name the field.

        It trusts the bound and does not compare the plan with the makespan in the file: check.py does both.
        """
        file = reading.parse(text, "problem").read(ProblemFile)
        if "argument" not in file.certificate:
            raise FormatError("problem.certificate has no field 'argument'; give what problems/README.md describes")
        plan = Plan.from_file(file, "problem")
        return cls(file.name, file.family, plan, file.found_by, file.bound_us, file.certificate)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Reference:
        """Read a file. Raises FormatError or PlacementError."""
        return cls.from_json(reading.read_text(path))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a file. Raises OSError."""
        writing.write_text(path, self.to_json())


def bound_of(result: SearchResult) -> tuple[int, Mapping[str, Any]]:
    """The bound of a search, and its certificate: an argument where there is one, else words or what CP-SAT took."""
    problem = Problem(result.plan.placement, result.plan.num_microbatches)
    bound = bounds.best(problem)
    bound_us = int(result.bound_us)
    if bound.us >= bound_us:
        if bound.proof is not None and not _counts_transfers(problem, bound.proof):
            certificate = bounds.certificate_of(problem, bound.proof)
            if certificate is not None:
                return bound.us, certificate
        return bound.us, {"argument": "words", "why": bound.why}
    if "CP-SAT" not in result.why:
        return bound_us, {"argument": "words", "why": result.why}
    version = importlib.metadata.version("ortools")
    return bound_us, {"argument": "CP-SAT", "seconds": round(result.elapsed_s, 1), "ortools": version}


def _counts_transfers(problem: Problem, proof: Proof) -> bool:
    """Whether the bound may be one that counts what ops hold of transfers, of which certificates know nothing."""
    if proof.argument == "area" or not proof.with_limits:
        return False
    return bool((counting_transfers(problem).peak_bytes != problem.peak_bytes).any())


class ProblemFile(PlanFile, kw_only=True):
    """A problem in JSON, with its best plan."""

    name: reading.Name
    family: reading.Name
    found_by: reading.Name
    bound_us: Whole
    certificate: dict[str, Any]
    makespan_us: int = 0
    peak_bytes: tuple[int, ...] = ()
