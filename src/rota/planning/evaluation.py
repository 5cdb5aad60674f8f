"""Named schedules on a candidate, with as little recomputation as makes them fit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from rota.core.errors import RotaError
from rota.core.placing import bidirectional, interleaved, wave
from rota.core.plan import Plan
from rota.core.simulation import simulate
from rota.core.timeline import Timeline
from rota.planning.candidate import Candidate
from rota.planning.layout_bounds import least_bytes, placement_bound_us
from rota.planning.layouts import Layout, Shape
from rota.planning.step_times import StepTimes
from rota.schedules import FAMILIES, Family

SEARCHED = "searched"  # instead of a schedule's name
ANY_ORDER = "any order"  # of the ops: what least_bytes rules out, no schedule can fit

#: What makes the first of two plans simpler, in the order of `Contender.simplicity`.
SIMPLER = (
    "uses fewer processes",
    "recomputes fewer stages",
    "has a named schedule",
    "runs each backward as a whole",
    "has fewer stages per rank",
    "has fewer copies of the model",
)

# The others take a chain.
_SHAPE_OF: dict[object, Shape] = {interleaved: "interleaved", wave: "wave", bidirectional: "bidirectional"}
_SLOW = {"v_half": 0.0002, "v_min": 0.0002}  # seconds per op that their own searches take, roughly


@dataclass(frozen=True)
class Contender:
    """A plan that fits, its schedule's name or `SEARCHED`, and a lower bound on every order of its ops.

    Attributes:
        layers_us: Its step by the layers' times, where its stages or ops were measured as well; else None.
        steps: Its steps, if some were run.
    """

    candidate: Candidate
    schedule: str
    plan: Plan
    bound_us: int
    layers_us: int | None = None
    steps: StepTimes | None = None

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated timeline of the plan."""
        return simulate(self.plan)

    @property
    def makespan_us(self) -> int:
        """The simulated makespan of the plan, in µs."""
        return self.timeline.makespan_us

    @property
    def step_us(self) -> int:
        """The time of a step: as measured, else as simulated."""
        return self.makespan_us if self.steps is None else self.steps.median_us

    @property
    def by_layers_us(self) -> int:
        """The simulated step by the layers' times, which all plans have: stages are measured of some only."""
        return self.makespan_us if self.layers_us is None else self.layers_us

    @property
    def peak_bytes(self) -> int:
        """The most bytes that any rank holds at once."""
        return max(self.timeline.peak_memory_bytes)

    def is_as(self, other: Contender) -> bool:
        """Whether both are one plan, whatever their ops' times are."""
        return self._identity == other._identity

    @property
    def _identity(self) -> tuple[object, ...]:
        candidate = self.candidate
        return candidate.layout, candidate.boundaries, candidate.recomputed, self.plan.orders

    @property
    def simplicity(self) -> tuple[int, ...]:
        """The smaller, the simpler; first what costs a user most, as in `SIMPLER`.

        Only between plans that are alike in all else, fewer copies of the model are simpler: replicas of a plain plan
        are easier to understand and to run than one pipeline that interleaves stages.
        """
        layout = self.candidate.layout
        directions = 2 if layout.has_copies else 1  # each rank has a stage of each direction's copy
        return (
            self.num_processes,
            len(self.candidate.recomputed),
            int(self.schedule == SEARCHED),
            int(self.candidate.splits_backward),
            directions * layout.stages_per_rank,
            directions * layout.num_replicas,
        )

    @property
    def num_processes(self) -> int:
        """Processes of a step, one per rank of each replica."""
        return self.candidate.layout.num_ranks * self.candidate.layout.num_replicas

    @property
    def key(self) -> tuple[int, int, int]:
        """The smaller, the better: time, then memory, then processes."""
        return self.step_us, self.peak_bytes, self.num_processes


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
