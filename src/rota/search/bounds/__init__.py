"""Lower bounds for the time of a step, whatever the order: `docs/bounds.md` has the proof of each.

One-machine bounds with heads and tails are Carlier's ("The one-machine sequencing problem", 1982). Here the heads of a
rank's ops take its memory limit into account too, and what they wait for is idle time, which adds up over the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import itemgetter

import numpy as np

from rota.core.placement import Placement
from rota.search.bounds.certificates import Proof, certificate_of
from rota.search.bounds.heads_tails import Heads, MemoryHeadroom, Side, both_sides, find_heads, ranks_after
from rota.search.bounds.memory_bounds import Need, RankLoad, least_memory, period_bound, rank_loads
from rota.search.bounds.memory_headroom import find_headroom
from rota.search.problem import NO_LIMIT, Problem, without_common_tasks
from rota.search.transfer_levels import counting_transfers
from rota.search.unfolding import Unfolding
from rota.search.validation import refuse_wrong

__all__ = ["Bound", "Need", "Proof", "best", "bounds_of", "certificate_of", "every", "least_memory", "period_bound"]

_MOST_BEGINNINGS = 12  # ranks whose own window is tried for the span


@dataclass(frozen=True)
class Bound:
    """A lower bound.

    Attributes:
        us: No plan takes less time, in µs.
        name: Which argument it comes from.
        why: The reason, as one line of text.
        proof: What the argument is about, for `certificate_of`; None where it cannot be written as a certificate.
    """

    us: int
    name: str
    why: str
    proof: Proof | None = None


def bounds_of(placement: Placement, num_microbatches: int, objective: str = "makespan") -> list[Bound]:
    """Lower bounds for all plans of a placement, the highest first.

    Args:
        placement: The tasks of one micro-batch, and the cluster.
        num_microbatches: Micro-batches per step.
        objective: What is bounded, "makespan" or "span", in µs.

    Returns:
        At least one bound. If no plan is within the memory limits (see `least_memory`), they say nothing.

    Raises:
        SearchError: An argument is invalid.
    """
    refuse_wrong(placement, num_microbatches, objective, ("makespan", "span"))
    problem = Problem(placement, num_microbatches) if placement.is_alike else Unfolding(placement).problem
    return every(problem, objective)


def best(problem: Problem, objective: str = "makespan") -> Bound:
    """The highest of `every`."""
    return every(problem, objective)[0]


def every(problem: Problem, objective: str = "makespan") -> list[Bound]:
    """As `bounds_of`, for a `Problem`."""
    all_bounds = [Bound(0, "nothing", "a step without work takes no time")]
    if objective == "makespan":
        all_bounds += _step_ends(problem)
    all_bounds += _of_part(problem, objective)
    apart, together_us = without_common_tasks(problem)
    if together_us:
        prefix = f"all ranks work together for {together_us:,} µs; in addition, "
        for bound in _of_part(apart, objective):
            proof = bound.proof and bound.proof._replace(without_common=True)
            all_bounds.append(replace(bound, us=bound.us + together_us, why=prefix + bound.why, proof=proof))
    return sorted(all_bounds, key=lambda bound: -bound.us)


def _of_part(problem: Problem, objective: str) -> list[Bound]:
    """Bounds without memory limits, whose reasons are easier to follow, and with them."""
    bounds = _makespans if objective == "makespan" else _spans
    all_bounds = [*bounds(problem, False)]
    if np.any(problem.limits_bytes != NO_LIMIT):
        all_bounds += bounds(counting_transfers(problem), True)
        all_bounds += _memory_held(problem, objective, max((bound.us for bound in all_bounds), default=0))
    return all_bounds


@dataclass(frozen=True)
class _BothSides:
    """A problem seen from both ends, and what each place waits for because of memory."""

    problem: Problem
    first: Side
    last: Side
    first_headroom: MemoryHeadroom
    last_headroom: MemoryHeadroom
    name: str

    @classmethod
    def of(cls, problem: Problem, limits: bool, step_ends: bool) -> _BothSides:
        first, last = both_sides(problem, step_ends, limits)
        name = " under the memory limit" if limits else ""
        return cls(problem, first, last, find_headroom(first), find_headroom(last), name)

    def heads(self, beginning: int | None = None, alone: bool = False) -> tuple[Heads, Heads]:
        """Heads from the first side and from the last one, which are tails."""
        first = find_heads(self.first, self.first_headroom, beginning, alone)
        return first, find_heads(self.last, self.last_headroom, beginning, alone)

    def path(self, heads: tuple[Heads, Heads]) -> Bound | None:
        """The longest path: head, op and tail."""
        first, last = heads[0].heads_us, heads[1].heads_us
        paths = []
        for task, (count, duration) in enumerate(zip(self.first.counts, self.first.durations_us, strict=True)):
            if count:
                before, after = first[:count, task], last[:count, task][::-1]
                k = int((before + after).argmax())
                paths.append((int(before[k] + duration + after[k]), task, k, int(before[k]), int(after[k])))
        us, task, k, head, tail = max(paths, key=itemgetter(0), default=(-1, 0, 0, 0, 0))
        if us < 0:
            return None
        node, duration = self.problem.node_name(task, k), int(self.first.durations_us[task])
        why = f"{node} cannot start before {head:,} µs, takes {duration:,} and is followed by {tail:,}"
        return Bound(us, "longest path" + self.name, why, Proof("path", -1, task, k, bool(self.name)))

    def load(self, heads: tuple[Heads, Heads], rank: int) -> Bound | None:
        """A rank's work, and its idle time before an op and after it."""
        places = self.first.places_on(rank)
        backward = {int(self.last.places[place]): place for place in places}
        idles = []
        for place in places:
            task = int(self.first.places[place])
            if count := int(self.first.counts[task]):
                before, after = heads[0].idle_us[:count, place], heads[1].idle_us[:count, backward[task]][::-1]
                k = int((before + after).argmax())
                idles.append((int(before[k] + after[k]), task, k, int(before[k]), int(after[k])))
        idle_us, task, k, before_us, after_us = max(idles, key=itemgetter(0), default=(-1, 0, 0, 0, 0))
        if idle_us < 0:
            return None
        work, node = self.first.work_us(rank), self.problem.node_name(task, k)
        idle = f"is idle for {before_us:,} before {node} and for {after_us:,} after it"
        why = f"{self.problem.rank_name(rank)} works {work:,} µs, {idle}"
        return Bound(work + idle_us, "load" + self.name, why, Proof("load", rank, task, k, bool(self.name)))


def _makespans(problem: Problem, limits: bool) -> Iterator[Bound]:
    """The load of the rank that has to work and to wait longest, and the longest path."""
    sides = _BothSides.of(problem, limits, step_ends=True)
    heads = sides.heads()
    by_work = sorted(range(sides.first.num_ranks), key=sides.first.work_us, reverse=True)
    yield from _highest([sides.load(heads, rank) for rank in by_work])
    yield from _highest([sides.path(heads)])


def _spans(problem: Problem, limits: bool) -> Iterator[Bound]:
    """As `_makespans`, counted from a rank's first op to its last.

    A rank's bound over the whole step is never below the bound of its own window, so some ranks can be left out. For
    one rank, the one that most others depend on, paths through the others count too.
    """
    sides = _BothSides.of(problem, limits, step_ends=False)
    whole = sides.heads()
    ranks = range(problem.num_ranks)  # a shared link's own window does not count
    most = {rank: load.us for rank in ranks if (load := sides.load(whole, rank))}
    if not most:
        return
    around = {rank: (ranks_after(sides.first, rank), ranks_after(sides.last, rank)) for rank in most}
    center = max(most, key=lambda rank: (sum(map(np.count_nonzero, around[rank])), most[rank]))
    through, surrounded = sides.heads(center), np.flatnonzero(np.logical_and(*around[center])).tolist()
    tried = [sides.path(through), *(sides.load(through, rank) for rank in surrounded)]
    for rank in sorted(most, key=sides.first.work_us, reverse=True)[:_MOST_BEGINNINGS]:
        if rank != center and most[rank] > max(bound.us for bound in tried if bound):
            alone = sides.heads(rank, alone=True)
            tried += [sides.path(alone), sides.load(alone, rank)]
    yield from _highest(tried)


def _highest(bounds: list[Bound | None]) -> list[Bound]:
    some = [bound for bound in bounds if bound is not None]
    return [max(some, key=lambda bound: bound.us)] if some else []  # the first if tied


def _step_ends(problem: Problem) -> Iterator[Bound]:
    """Bounds from each rank's step ends alone, which also cover ranks without ops."""
    for rank in range(problem.num_ranks):
        ends = problem.step_ends
        if reductions := ends.of_rank(rank):
            us = int(ends.reduce_us[reductions].sum()) + ends.optimizers_us(rank)
            yield Bound(us, "step end", f"rank {rank} reduces gradients and does its optimizer steps for {us:,} µs")


def _memory_held(problem: Problem, objective: str, known_us: int) -> Iterator[Bound]:
    """Bytes times µs that the fullest rank has to hold, over the bytes it may hold. `known_us` is another bound."""
    rounds = problem.num_microbatches // problem.placement.num_components
    if not rounds:
        return
    unit = "micro-batches" if problem.placement.num_components == 1 else "rounds of micro-batches"
    tried: list[Bound | None] = []
    for load in rank_loads(problem, whole_step=objective == "makespan"):
        if load.headroom_bytes <= 0:
            continue
        held = rounds * load.held_byte_us
        if load.carried_byte_us:
            tried.append(_with_carried(load, rounds, unit))
        if not held:
            continue
        least, more = (-(-byte_us // load.headroom_bytes) for byte_us in (held, held + load.unused_byte_us))
        # In a step at least as long as its two ends, both are unused; in a shorter one they may overlap.
        us = more if max(least, known_us) >= load.ends_us else least
        why = (
            f"rank {load.rank} holds {load.held_byte_us:,} byte-µs for each of {rounds:,} {unit}, and has room for "
            f"{load.headroom_bytes:,} bytes, less while it fills and empties"
        )
        tried.append(Bound(us, "memory held", why, Proof("area", load.rank, -1, -1, True)))
    yield from _highest(tried)


def _with_carried(load: RankLoad, rounds: int, unit: str) -> Bound:
    """Byte-µs of transfers too; they may use the room that ops cannot use at the two ends."""
    byte_us = load.held_byte_us + load.carried_byte_us
    why = (
        f"rank {load.rank} holds {byte_us:,} byte-µs for each of {rounds:,} {unit}, {load.carried_byte_us:,} of them "
        f"for transfers, and has room for {load.headroom_bytes:,} bytes"
    )
    return Bound(-(-rounds * byte_us // load.headroom_bytes), "memory held with transfers", why)
