"""What a rank holds for how long, at least: Little's law on bytes, and the least memory that any plan needs.

Little, "A Proof for the Queuing Formula L = λW", 1961: what is held on average is what comes in a µs times how long
each of it stays. Bytes that a micro-batch takes with one task and frees with another stay at least as long as the
longest way from the one's start to the other's end.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from rota.placement import Placement
from rota.search.bounds.view import without_common_tasks
from rota.search.problem import NO_LIMIT, Integers, Problem

_NO_WAY = -(1 << 60)
_MOST_SETS = 20_000  # closed sets of a rank's tasks that are looked at for its least memory


@dataclass(frozen=True)
class Steady:
    """A rank in the steady state: µs and byte-µs that each round of one micro-batch a stream takes, and its memory.

    `unused_byte_us` of memory are out of reach at the two ends of a step, or of the rank's own window in it, which
    together take `ends_us`.
    """

    rank: int
    work_us: int
    held_byte_us: int
    room_bytes: int
    unused_byte_us: int
    ends_us: int


def steady(problem: Problem, whole_step: bool = True) -> list[Steady]:
    """For each rank; byte-µs are 0 where there is no limit or nothing is known. Else the ends are of its own window."""
    ways, durations, on = _longest_ways(problem), problem.durations_us, problem.tasks_on
    heads = ways.max(axis=1) * whole_step
    tails = ((ways + durations[:, None]).max(axis=0) - durations) * whole_step
    result = []
    for rank in range(problem.placement.num_ranks):
        tasks = on.values[on.first[rank] : on.first[rank + 1]]
        room = int(problem.limits_bytes[rank])
        held = _held_byte_us(problem, ways, tasks) if room != NO_LIMIT else 0
        unused = ends = 0
        if held:
            for sign, nearest in ((1, heads[tasks].min()), (-1, tails[tasks].min())):
                ramp, ramp_us = _ramp(problem, tasks, sign, room)
                unused += int(nearest) * room + ramp
                ends += int(nearest) + ramp_us
        result.append(Steady(rank, int(durations[tasks].sum()), held, room, unused, ends))
    return result


def _ramp(problem: Problem, tasks: Integers, sign: int, room: int) -> tuple[int, int]:
    """Byte-µs that cannot be used while the rank fills its memory as fast as it can, and the µs that this takes.

    `sign` -1: at the end of the step, where the memory, seen backwards, is filled by what frees. Bytes that are never
    freed would be there from that end on.
    """
    held, durations = sign * problem.held_bytes[tasks], problem.durations_us[tasks]
    at_once = int((np.maximum(held, 0) + problem.peak_bytes[tasks]).max())
    speeds = [Fraction(int(d), int(m)) for d, m in zip(durations, held, strict=True) if m > 0]
    if at_once >= room or not speeds or (sign < 0 and (held * problem.counts[tasks]).sum()):
        return 0, 0
    us_a_byte = min(speeds)
    return int((room - at_once) ** 2 * us_a_byte / 2), math.ceil((room - at_once) * us_a_byte)


def period_bound(placement: Placement) -> Fraction:
    """No steady state takes less µs a micro-batch, however many of them make a period.

    A rank's work; what it has to hold, over its limit; and both once more beside what all ranks do together.
    """
    problem = Problem(placement, placement.num_components)
    apart, together_us = without_common_tasks(problem)
    return max(_round_us(problem), together_us + _round_us(apart)) / placement.num_components


def period_reason(placement: Placement) -> str:
    """What `period_bound` comes from, in a line."""
    ranks = steady(Problem(placement, placement.num_components))
    busiest = max(ranks, key=lambda rank: rank.work_us)
    each = " of each stream" if placement.num_components > 1 else ""
    if busiest.work_us >= period_bound(placement) * placement.num_components:
        return f"rank {busiest.rank} works {busiest.work_us:,} µs for a micro-batch{each}"
    fullest = max(ranks, key=lambda rank: Fraction(rank.held_byte_us, max(rank.room_bytes, 1)))
    return (
        f"rank {fullest.rank} has to hold at least {fullest.held_byte_us:,} byte-µs for a micro-batch{each}, in "
        f"{fullest.room_bytes:,} bytes"
    )


def _round_us(problem: Problem) -> Fraction:
    ranks = steady(problem)
    by_memory = (Fraction(rank.held_byte_us, max(rank.room_bytes, 1)) for rank in ranks)
    return max(*(Fraction(rank.work_us) for rank in ranks), *by_memory)


def _longest_ways(problem: Problem) -> Integers:
    """[t, s]: from the start of task s to the start of task t of the same micro-batch, at least."""
    ways = np.full((len(problem.counts),) * 2, _NO_WAY, np.int64)
    inputs, durations = problem.inputs, problem.durations_us
    for task in problem.topological:
        ways[task, task] = 0
        row = inputs.values[inputs.first[task] : inputs.first[task + 1]]
        for source, lag in row.reshape(-1, 2):
            np.maximum(ways[task], ways[source] + durations[source] + lag, out=ways[task])
    return ways


def _held_byte_us(problem: Problem, ways: Integers, tasks: Integers) -> int:
    """Bytes times µs that a round holds on the rank with these tasks: each byte freed is one taken on a way to there.

    0 if some byte is freed that no task before has surely taken.
    """
    held, durations = problem.held_bytes, problem.durations_us
    place = {task: i for i, task in enumerate(problem.topological)}
    ordered = sorted(tasks.tolist(), key=place.__getitem__)
    left = {task: int(held[task]) for task in ordered if held[task] > 0}
    total = sum(int(problem.peak_bytes[t]) * int(durations[t]) for t in ordered)  # of any size, as all products here
    for task in ordered:
        freed = max(-int(held[task]), 0)
        for source in reversed(left):
            if freed and ways[task, source] >= 0:
                taken = min(freed, left[source])
                left[source] -= taken
                freed -= taken
                total += taken * int(ways[task, source] + durations[task])
        if freed:
            return 0
    return total


@dataclass(frozen=True)
class Need:
    """No plan does with less than `num_bytes` on the rank, static bytes included; `task` is where it takes them."""

    rank: int
    num_bytes: int
    task: int


def least_memory(problem: Problem) -> list[Need]:
    """For each rank what every plan needs (`task` -1: the static bytes, or what is never freed).

    Another micro-batch never holds less than its smallest closed set of tasks, so a rank needs at least the smallest
    peak, over all orders, of one micro-batch alone, and that of all others. Exact for one micro-batch a rank.
    """
    return [_need(problem, rank) for rank in range(problem.placement.num_ranks)]


def _need(problem: Problem, rank: int) -> Need:
    static, on = problem.placement.static_bytes[rank], problem.tasks_on
    stream = problem.placement.component_of
    tasks = [t for t in on.values[on.first[rank] : on.first[rank + 1]].tolist() if problem.counts[t]]
    peaks = {}
    for s in sorted({stream[t] for t in tasks}):
        peaks[s] = _serial_peak(problem, rank, [t for t in tasks if stream[t] == s])
    never_freed = sum(int(problem.held_bytes[t] * problem.counts[t]) for t in tasks)
    needs = [Need(rank, static + max(never_freed, 0), -1)]
    counts = {stream[t]: int(problem.counts[t]) for t in tasks}
    others = sum(counts[s] * lowest for s, (_, _, lowest) in peaks.items())
    needs += [Need(rank, static + peak + others - lowest, task) for peak, task, lowest in peaks.values()]
    return max(needs, key=lambda need: need.num_bytes)


def _serial_peak(problem: Problem, rank: int, tasks: list[int]) -> tuple[int, int, int]:
    """(the least peak over all orders of one micro-batch's tasks, the task where it is, the least that any closed set
    holds). Sets are reached in order of the peak on the way there, as in Dijkstra's shortest paths.
    """
    before = _before_on(problem, tasks)
    start, end = _changes(problem, rank, tasks)
    net = [int(problem.held_bytes[t]) for t in tasks]
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
    return peak, where, _least_held(before, net)


def _before_on(problem: Problem, tasks: list[int]) -> list[int]:
    """For each of the tasks the set of those before it, as bits."""
    reached = dict.fromkeys(range(len(problem.counts)), 0)
    inputs = problem.inputs
    own = {task: 1 << i for i, task in enumerate(tasks)}
    for task in problem.topological:
        for source in inputs.values[inputs.first[task] : inputs.first[task + 1] : 2].tolist():
            reached[task] |= reached[source] | own.get(source, 0)
    return [reached[task] for task in tasks]


def _changes(problem: Problem, rank: int, tasks: list[int]) -> tuple[list[int], list[int]]:
    """What each task needs over the level before it: while it runs, with what it received; when it has just sent."""
    received, sent = dict.fromkeys(tasks, 0), dict.fromkeys(tasks, 0)
    for route in problem.placement.routes:
        if route.receiver == rank and route.target in received:
            received[route.target] += route.num_bytes
        if route.sender == rank and route.source in sent and route.duration_us:
            sent[route.source] += route.num_bytes
    held, peak = problem.held_bytes.tolist(), problem.peak_bytes.tolist()
    return [max(held[t], 0) + peak[t] + received[t] for t in tasks], [held[t] + sent[t] for t in tasks]


def _least_held(before: list[int], net: list[int]) -> int:
    """A lower bound for what any closed set of tasks holds, one with all that is before each of its tasks."""
    if sum(net) >= 0 and _frees_what_is_held(before, net):
        return 0
    return sum(min(change, 0) for change in net)


def _frees_what_is_held(before: list[int], net: list[int]) -> bool:
    """Whether each freed byte can be given one that a task before it has taken: then no closed set is below 0."""
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
