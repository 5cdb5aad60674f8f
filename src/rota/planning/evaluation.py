"""Named schedules on a candidate, with as little recomputation as makes them fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rota.core.errors import RotaError
from rota.core.placing import bidirectional, interleaved, wave
from rota.core.simulation import simulate
from rota.core.timeline import Timeline
from rota.planning.choosing import Contender
from rota.planning.layout_bounds import least_bytes, placement_bound_us
from rota.planning.layouts import Candidate, Layout, Shape
from rota.schedules import FAMILIES, Family

ANY_ORDER = "any order"  # of the ops: what least_bytes rules out, no schedule can fit

# The others take a chain.
_SHAPE_OF: dict[object, Shape] = {interleaved: "interleaved", wave: "wave", bidirectional: "bidirectional"}
_SLOW = {"v_half": 0.0002, "v_min": 0.0002}  # seconds per op that their own searches take, roughly


@dataclass(frozen=True)
class Misfit:
    """A plan that does not fit: the rank that is furthest over its limit, and what it would hold."""

    candidate: Candidate
    schedule: str
    rank: int
    num_bytes: int
    over_bytes: int


def families(layout: Layout, inference: bool) -> list[Family]:
    """The named schedules to try on placements of this layout; some of them may still refuse."""
    if inference:
        return [family for family in FAMILIES if family.name == "forward_only"]
    suited = [f for f in FAMILIES if f.name not in _SLOW or _SHAPE_OF.get(f.place, "chain") == layout.shape]
    return [f for f in suited if not f.recomputes or layout.recompute == "all but the last"]


def seconds_of(family: Family, candidate: Candidate) -> float:
    """Roughly how long it takes to make a plan; 0: too little to matter."""
    return _SLOW.get(family.name, 0.0) * candidate.layout.num_stages * candidate.layout.num_microbatches * 3


def misfit(candidate: Candidate) -> Misfit | None:
    """The rank that is over its limit even with one micro-batch at a time, whatever is recomputed; None: it may fit."""
    either = [candidate.placement]
    if candidate.layout.recompute == "none" and candidate.request.may_recompute:
        either.append(candidate.recomputing(range(candidate.layout.num_stages)).placement)
    return _over(candidate, ANY_ORDER, least_bytes(*either))


def _over(candidate: Candidate, schedule: str, held_bytes: list[int] | tuple[int, ...]) -> Misfit | None:
    limits = candidate.placement.cluster.limit_bytes
    over = [0 if limit is None else held - limit for held, limit in zip(held_bytes, limits, strict=True)]
    rank = over.index(max(over))
    return Misfit(candidate, schedule, rank, held_bytes[rank], over[rank]) if over[rank] > 0 else None


def evaluate(candidate: Candidate, family: Family, worst_us: float) -> Contender | Misfit | None:
    """The schedule's plan on the candidate, within its memory.

    If the plan does not fit and the layout recomputes nothing, stages are recomputed one after another: on each rank
    over its limit the one that saves the most bytes per µs, until the plan fits, or cannot be faster than `worst_us`.
    None: the schedule does not suit the candidate, or is too slow.
    """
    while True:
        try:
            plan = family(candidate.placement, candidate.layout.num_microbatches)
            timeline = simulate(plan)
        except RotaError:
            return None  # such as for other numbers of micro-batches
        over = _over(candidate, family.name, timeline.peak_memory_bytes)
        if over is None:
            bound_us = placement_bound_us(candidate.placement, candidate.layout.num_microbatches)
            return Contender(candidate, family.name, replace(plan, usage=candidate.usage), bound_us)
        more = _saving(candidate, timeline) if candidate.layout.recompute == "none" else frozenset()
        if not more or not candidate.request.may_recompute:
            return over
        candidate = candidate.recomputing(candidate.recomputed | more)
        if placement_bound_us(candidate.placement, candidate.layout.num_microbatches) >= worst_us:
            return None


def _saving(candidate: Candidate, timeline: Timeline) -> frozenset[int]:
    """The next stage to recompute on each rank over its limit; empty if one of them has none left."""
    costs, layout = candidate.costs, candidate.layout
    again_us = candidate.layers.stages(candidate.boundaries, recompute=range(layout.num_stages)).recompute_us or ()
    saved = [held - kept for held, kept in zip(costs.activation_bytes, costs.checkpoint_bytes, strict=True)]
    limits = candidate.placement.cluster.limit_bytes
    chosen = set()
    for rank, (held, limit) in enumerate(zip(timeline.peak_memory_bytes, limits, strict=True)):
        if limit is None or held <= limit:
            continue
        left = [s % layout.num_stages for s in candidate.placement.stages_on(rank)]
        left = [s for s in left if s not in candidate.recomputed and saved[s] > 0]
        if not left:
            return frozenset()
        chosen.add(max(left, key=lambda s: (saved[s] / max(again_us[s] or 0, 1), -s)))
    return frozenset(chosen)


def whole_and_split(candidate: Candidate) -> Iterator[Candidate]:
    """The candidate with its backward whole, and with it split if it may be."""
    yield candidate
    if candidate.request.choices.split_backward and not candidate.request.choices.inference:
        yield replace(candidate, splits_backward=True)
