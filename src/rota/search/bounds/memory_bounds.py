"""Lower bounds from memory: bytes times µs that a rank has to hold, and the least memory that any plan needs.

Little, "A Proof for the Queuing Formula L = λW", 1961: what is held on average is what arrives per µs times how long it
stays. Bytes that a micro-batch takes with one task and frees with another stay at least as long as the longest path
from the start of the first to the end of the second.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from rota.core.errors import NothingFitsError
from rota.core.placement import Placement
from rota.core.tasks import scalar
from rota.core.text import size_text
from rota.search.problem import NO_LIMIT, Integers, Problem, without_common_tasks
from rota.search.transfer_levels import transferred_bytes

_Bytes = Counter[tuple[int, int]]  # by (task, rank)

_MOST_SETS = 20_000  # closed sets of a rank's tasks that are looked at for its least memory


@dataclass(frozen=True)
class RankLoad:
    """The least time and memory that a round (one micro-batch of each component) costs on a rank.

    Attributes:
        rank: The rank.
        work_us: Duration of its ops.
        held_byte_us: Bytes times µs that it holds; 0 where it has no limit, or nothing is known.
        headroom_bytes: What its ops may hold.
        unused_byte_us: Bytes times µs that cannot be used at the two ends of the step, or of the rank's own window.
        ends_us: How long these two ends last together.
        carried_byte_us: Bytes times µs that transfers hold on it besides, which does not leave the two ends unused.
    """

    rank: int
    work_us: int
    held_byte_us: int
    headroom_bytes: int
    unused_byte_us: int
    ends_us: int
    carried_byte_us: int


def rank_loads(problem: Problem, whole_step: bool = True) -> list[RankLoad]:
    """One entry per rank. The two ends are those of the step if `whole_step`, else of the rank's own window."""
    heads, tails = problem.heads_us * whole_step, problem.tails_us * whole_step
    result = []
    for rank, tasks in enumerate(problem.tasks_on):
        headroom = int(problem.limits_bytes[rank])
        held = carried = unused = ends = 0
        # Where more is freed than was taken, what transfers hold may lie in the room that this makes.
        if headroom != NO_LIMIT and (matched := matched_bytes(problem, tasks)) is not None:
            held = _held_byte_us(problem, tasks, matched)
            carried = _carried_byte_us(problem, rank, whole_step)
        if held:
            for sign, nearest in ((1, heads[tasks].min()), (-1, tails[tasks].min())):
                ramp, ramp_us = _ramp(problem, tasks, sign, headroom)
                unused += int(nearest) * headroom + ramp
                ends += int(nearest) + ramp_us
        result.append(RankLoad(rank, int(problem.durations_us[tasks].sum()), held, headroom, unused, ends, carried))
    return result


def _carried_byte_us(problem: Problem, rank: int, whole_step: bool) -> int:
    """Bytes times µs that a round's transfers hold on the rank: what it receives until the op that reads it ends.

    What is on its way may be outside of the rank's own window.
    """
    total = 0
    for route in problem.original.routes:
        if route.receiver == rank:
            read_us = int(problem.durations_us[route.target])
            total += scalar(route.num_bytes) * (scalar(route.duration_us) * whole_step + read_us)
        if route.sender == rank:
            total += scalar(route.num_bytes) * scalar(route.duration_us) * whole_step
    return total


def _ramp(problem: Problem, tasks: Integers, sign: int, headroom: int) -> tuple[int, int]:
    """Byte-µs that cannot be used while the rank fills its memory as fast as it can, and the µs that this lasts.

    `sign` -1 stands for the end of the step: seen backwards, the ops that free memory fill it there. Bytes that are
    never freed would be there from that end on.
    """
    held, durations = sign * problem.held_bytes[tasks], problem.durations_us[tasks]
    at_once = int((np.maximum(held, 0) + problem.peak_bytes[tasks]).max())
    speeds = [Fraction(int(d), int(m)) for d, m in zip(durations, held, strict=True) if m > 0]
    if at_once >= headroom or not speeds or (sign < 0 and (held * problem.counts[tasks]).sum()):
        return 0, 0
    us_per_byte = min(speeds)
    return int((headroom - at_once) ** 2 * us_per_byte / 2), math.ceil((headroom - at_once) * us_per_byte)


def period_bound(placement: Placement) -> Fraction:
    """A lower bound for the µs per micro-batch of any steady state, however many micro-batches make a period.

    It is the largest, over all ranks, of the rank's work, and of the byte-µs that it must hold divided by its limit.
    Both are also computed without the time in which all ranks work together, which is then added.
    """
    problem = Problem(placement, placement.num_components)
    apart, together_us = without_common_tasks(problem)
    return max(_round_us(problem), together_us + _round_us(apart)) / placement.num_components


def period_reason(placement: Placement) -> str:
    """Where `period_bound` comes from, in one line."""
    problem = Problem(placement, placement.num_components)
    ranks = rank_loads(problem)
    busiest = max(ranks, key=lambda rank: rank.work_us)
    of_stream = " of each data stream" if placement.num_components > 1 else ""
    if busiest.work_us >= period_bound(placement) * placement.num_components:
        return f"{problem.rank_name(busiest.rank)} works {busiest.work_us:,} µs for a micro-batch{of_stream}"
    fullest = max(ranks, key=_us_by_memory)
    byte_us = fullest.held_byte_us + fullest.carried_byte_us
    return (
        f"rank {fullest.rank} has to hold at least {byte_us:,} byte-µs for a micro-batch{of_stream}, in "
        f"{fullest.headroom_bytes:,} bytes"
    )


def _round_us(problem: Problem) -> Fraction:
    ranks = rank_loads(problem)
    return max(*(Fraction(rank.work_us) for rank in ranks), *map(_us_by_memory, ranks))


def _us_by_memory(rank: RankLoad) -> Fraction:
    """What the rank has to hold for a round, over the bytes that it may hold."""
    return Fraction(rank.held_byte_us + rank.carried_byte_us, max(rank.headroom_bytes, 1))


def matched_bytes(problem: Problem, tasks: Integers) -> list[tuple[int, int, int]] | None:
    """(source, task, bytes) that the rank with these tasks takes with the one and frees with the other, in each round.

    None if some byte is freed that may have been taken by no task before.
    """
    held, paths_us = problem.held_bytes, problem.paths_us
    place = {task: i for i, task in enumerate(problem.topological)}
    ordered = sorted(tasks.tolist(), key=place.__getitem__)
    left = {task: int(held[task]) for task in ordered if held[task] > 0}
    matched = []
    for task in ordered:
        freed = max(-int(held[task]), 0)
        for source in reversed(left):
            if freed and left[source] and paths_us[source, task] >= 0:
                taken = min(freed, left[source])
                left[source] -= taken
                freed -= taken
                matched.append((source, task, taken))
        if freed:
            return None
    return matched


def _held_byte_us(problem: Problem, tasks: Integers, matched: Iterable[tuple[int, int, int]]) -> int:
    """Bytes times µs that a round holds on the rank with these tasks: each byte freed was taken on a path to there."""
    durations_us, paths_us = problem.durations_us.tolist(), problem.paths_us  # paths are from start to start
    at_work = sum(int(problem.peak_bytes[t]) * durations_us[t] for t in tasks)  # of any size, as all products here
    return at_work + sum(size * (int(paths_us[source, t]) + durations_us[t]) for source, t, size in matched)


@dataclass(frozen=True)
class Need:
    """No plan needs less than `num_bytes` on the rank, static bytes included; `task` is where it needs them."""

    rank: int
    num_bytes: int
    task: int


def least_memory(problem: Problem) -> list[Need]:
    """What every plan needs on each rank (`task` -1: the static bytes, or what is never freed).

    A micro-batch never holds less than its smallest closed set of tasks. So a rank needs at least the smallest peak of
    one micro-batch alone, over all orders, plus what the smallest sets of all others hold. This is exact for one
    micro-batch per rank.
    """
    received, sent = transferred_bytes(problem.original)
    return [_need(problem, rank, received, sent) for rank in range(problem.num_ranks)]


def _need(problem: Problem, rank: int, received: _Bytes, sent: _Bytes) -> Need:
    static, component_of = problem.placement.static_bytes[rank], problem.placement.component_of
    tasks = [t for t in problem.tasks_on[rank].tolist() if problem.counts[t]]
    counts = {component_of[t]: int(problem.counts[t]) for t in tasks}
    tasks_of = {c: [t for t in tasks if component_of[t] == c] for c in sorted(counts)}
    peaks = {c: _serial_peak(problem, rank, tasks_of[c], received, sent) for c in tasks_of}
    never_freed = sum(int(problem.held_bytes[t] * problem.counts[t]) for t in tasks)
    needs = [Need(rank, static + max(never_freed, 0), -1)]
    others = sum(counts[c] * lowest for c, (_, _, lowest) in peaks.items())
    needs += [Need(rank, static + peak + others - lowest, task) for peak, task, lowest in peaks.values()]
    return max(needs, key=lambda need: need.num_bytes)


def _serial_peak(problem: Problem, rank: int, tasks: list[int], received: _Bytes, sent: _Bytes) -> tuple[int, int, int]:
    """(least peak of one micro-batch's tasks over all orders, the task where it is, the least that a closed set holds).

    A set is closed if it has, for each task, all tasks before it. Sets are reached in order of the peak on the way
    there, as in Dijkstra's shortest paths.
    """
    before = [sum(1 << j for j, a in enumerate(tasks) if problem.after[a, b]) for b in tasks]  # sets as bits
    net, peaks = problem.held_bytes[tasks].tolist(), problem.peak_bytes[tasks].tolist()
    # Per task, bytes above the level before it: while it runs, with what it received, and after it sent.
    start = [max(held, 0) + peak + received[t, rank] for t, held, peak in zip(tasks, net, peaks, strict=True)]
    end = [held + sent[t, rank] for t, held in zip(tasks, net, strict=True)]
    full = (1 << len(tasks)) - 1
    queue: list[tuple[int, int, int, int]] = [(0, 0, 0, -1)]  # peak so far, set, level, where the peak was
    seen: set[int] = set()
    lowest = sum(min(change, 0) for change in net)  # a bound for what sets hold, exact if all are seen
    while queue and len(seen) < _MOST_SETS:
        peak, done, level, where = heapq.heappop(queue)
        if done in seen:
            continue
        seen.add(done)
        if done == full:
            break
        for i in range(len(tasks)):
            if not done >> i & 1 and before[i] & ~done == 0:
                most = level + max(start[i], end[i])
                place = (most, tasks[i]) if most > peak else (peak, where)
                heapq.heappush(queue, (place[0], done | 1 << i, level + net[i], place[1]))
    else:
        peak, where = max(((max(start[i], end[i]) + lowest, tasks[i]) for i in range(len(tasks))), default=(0, -1))
    return peak, where, 0 if sum(net) >= 0 and _frees_what_is_held(before, net) else lowest


def _frees_what_is_held(before: list[int], net: list[int]) -> bool:
    """Whether each freed byte can be matched with one that a task before took: then no closed set is below 0."""
    left = [max(change, 0) for change in net]
    for i in sorted(range(len(net)), key=lambda i: before[i].bit_count()):
        freed = max(-net[i], 0)
        for j in sorted(range(len(net)), key=lambda j: -before[j].bit_count()):
            if before[i] >> j & 1:
                taken = min(freed, left[j])
                left[j] -= taken
                freed -= taken
        if freed:
            return False
    return True


def refuse_too_little_memory(problem: Problem) -> None:
    """Raises NothingFitsError where a rank's limit is below what every plan needs."""
    placement = problem.original
    limits = placement.cluster.limit_bytes
    needs = zip(least_memory(problem), limits, strict=True)
    short = [need for need, limit in needs if limit is not None and need.num_bytes > limit]
    if not short:
        return
    first, *others = short
    infeasible = f"{_describe_need(placement, first)}, over its limit of {limits[first.rank]}"
    raised = "the limit to that"
    if others:
        ranks = ", ".join(f"rank {need.rank} ({need.num_bytes} bytes)" for need in others)
        infeasible += f"; also {ranks}"
        raised = f"the limits to these, or all to {max(need.num_bytes for need in short)}"
    remedies = ["give such ranks fewer layers" if others else "give the rank fewer layers"]
    remedies.append("free what is left behind" if _is_left_behind(placement, first) else "make micro-batches smaller")
    raise NothingFitsError(f"{infeasible}; raise {raised}, {remedies[0]}, or {remedies[1]}")


def _describe_need(placement: Placement, need: Need) -> str:
    static = placement.static_bytes[need.rank]
    use = "parameters, gradients and optimizer alone"
    if need.task >= 0:
        use = f"{placement.tasks[need.task]} of a single micro-batch"
    elif _is_left_behind(placement, need):
        use = f"what its micro-batches leave behind: {need.num_bytes - static} bytes that no op frees"
    return (
        f"rank {need.rank} needs at least {need.num_bytes} bytes ({size_text(need.num_bytes)}; {size_text(static)} of "
        f"them static) for {use}"
    )


def _is_left_behind(placement: Placement, need: Need) -> bool:
    """Whether the largest need is for bytes that nothing frees."""
    return need.task < 0 and need.num_bytes > placement.static_bytes[need.rank]
