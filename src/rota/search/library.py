"""The search on reference problems: what it finds, and whether that is better than what is known."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rota.checking import check
from rota.errors import FormatError, SearchError
from rota.placement import Placement
from rota.reference import Reference
from rota.search import bounds
from rota.search.bounds.certificates import Proof
from rota.search.finding import find_plan
from rota.search.problem import Problem
from rota.search.result import SearchResult
from rota.search.transfer_levels import counting_transfers


@dataclass(frozen=True)
class Attempt:
    """One search on one reference problem.

    Attributes:
        known: The problem with what was known before.
        best: The problem with the better plan and the better bound of both.
        found_us: Makespan of the plan that the search found by itself; None if it found none.
        was_stopped: Whether Ctrl-C ended it.
    """

    known: Reference
    best: Reference
    found_us: int | None
    was_stopped: bool

    @property
    def has_better_plan(self) -> bool:
        """Whether the search found a faster plan than was known."""
        return self.best.plan is not self.known.plan

    @property
    def has_better_bound(self) -> bool:
        """Whether the search proved a higher bound than was known."""
        return self.best.bound_us > self.known.bound_us


def first_reference(
    name: str, family: str, placement: Placement, num_microbatches: int, time_limit_s: float
) -> Reference:
    """A problem with the plan and the bound of a search. Raises SearchError if nothing that fits was found."""
    result = find_plan(placement, num_microbatches, time_limit_s=time_limit_s)
    bound_us, certificate = _bound(result)
    return Reference(name, family, result.plan, result.how, bound_us, certificate)


def search_file(path: str | os.PathLike[str], time_limit_s: float) -> Attempt:
    """Search the problem in a file for `time_limit_s` seconds.

    Raises:
        FormatError: The file is wrong, or the search found a plan below the bound in the file.
        PlacementError: The problem in the file is wrong.
        PlanError: The plan in the file must not run.
    """
    known = Reference.read(path)
    check(known.plan)
    try:
        result = find_plan(known.placement, known.num_microbatches, time_limit_s=time_limit_s)
    except SearchError:
        return Attempt(known, known, None, False)
    best, found_us = known, result.makespan_us
    if found_us < known.bound_us:
        raise FormatError(
            f"the bound of {known.bound_us} µs is wrong: the search found a plan that takes {found_us} µs; remove it"
        )
    if found_us < known.makespan_us:
        best = replace(best, plan=result.plan, found_by=result.how)
    bound_us, certificate = _bound(result)
    if (bound_us, _is_argument(certificate)) > (known.bound_us, _is_argument(known.certificate)):
        best = replace(best, bound_us=bound_us, certificate=certificate)
    return Attempt(known, best, found_us, result.was_stopped)


def _bound(result: SearchResult) -> tuple[int, Mapping[str, Any]]:
    """The bound of a search, and its certificate: an argument where there is one, else words or what CP-SAT took."""
    problem = Problem(result.plan.placement, result.plan.num_microbatches)
    bound = bounds.best(problem)
    found_us = int(result.bound_us)
    if bound.us >= found_us and bound.proof is not None and not _counts_transfers(problem, bound.proof):
        certificate = bounds.certificate_of(problem, bound.proof)
        if certificate is not None:
            return bound.us, certificate
    if bound.us >= found_us:
        return bound.us, {"argument": "words", "why": bound.why}
    if "CP-SAT" not in result.why:
        return found_us, {"argument": "words", "why": result.why}
    version = importlib.metadata.version("ortools")
    return found_us, {"argument": "CP-SAT", "seconds": round(result.elapsed_s, 1), "ortools": version}


def _counts_transfers(problem: Problem, proof: Proof) -> bool:
    """Whether the bound may be one that counts what ops hold of transfers, of which certificates know nothing."""
    if proof.argument == "area" or not proof.with_limits:
        return False
    return bool((counting_transfers(problem).peak_bytes != problem.peak_bytes).any())


def _is_argument(certificate: Mapping[str, Any]) -> bool:
    return certificate["argument"] not in ("CP-SAT", "words")
