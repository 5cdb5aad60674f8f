"""One period of the steady state as modulo scheduling, solved by CP-SAT.

Software pipelining (Rau and Glaeser, 1981; with memory: Eichenberger, Davidson and Abraham, 1995): in a period T a task
starts at t = s + T·k with an offset s in [0, T) and a round k, and T later for each next micro-batch. On a rank,
offsets alone say what comes before what. What a rank holds follows from rounds and these orders.

A period may have u micro-batches of each component: a task then has u copies, in order. Node `task * u + j` is copy j.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any, Literal, NamedTuple

from ortools.sat.python import cp_model

from rota.core.stopping import look
from rota.core.tasks import scalar
from rota.search.budget import Budget
from rota.search.exact import cpsat
from rota.search.exact.transfer_memory import Level, PointOrder, TimePoint, Times
from rota.search.periodic.loop import Loop
from rota.search.periodic.retiming import Rhythm, Wait, retime

_TOO_LARGE = 1 << 60  # CP-SAT refuses sums that might exceed 64 bits


class Answer(NamedTuple):
    """A rhythm, or None; `is_proven`: no rhythm is better, or none exists.

    `as_solved` has the same orders with the model's own starts. The earliest starts may hold more than these, for what
    transfers hold depends on the times.
    """

    rhythm: Rhythm | None
    is_proven: bool
    as_solved: Rhythm | None = None


@dataclass(frozen=True)
class Interval:
    """The interval that repeats (the initiation interval of modulo scheduling), and what it has to satisfy.

    Attributes:
        loop: The tasks.
        num_copies: Micro-batches of each component per period.
        period_us: Its length.
        latency_us: All tasks of a period's micro-batches are within this time; None: in any time.
        in_flight: Most micro-batches of each component that a period mixes; None: any number. Each rank's period may be
            cut anywhere, so that it has every task `num_copies` times between two cuts.
    """

    loop: Loop
    num_copies: int
    period_us: int
    latency_us: int | None = None
    in_flight: int | None = None

    def nodes(self, tasks: Sequence[int]) -> list[int]:
        """The nodes of the tasks: task × `num_copies` + copy, for every copy."""
        return [task * self.num_copies + j for task in tasks for j in range(self.num_copies)]


def rhythm_of(interval: Interval, starts_us: Sequence[int], ties: Sequence[int]) -> Rhythm | None:
    """The least period of the orders that these starts make on each rank, and the earliest starts.

    `ties[node]` is its place among the nodes that start with it. None if the orders contradict what waits for what.
    """
    loop, u, period_us = interval.loop, interval.num_copies, interval.period_us
    waits = [Wait(source * u + j, target * u + j, least, 0) for source, target, least in loop.waits for j in range(u)]
    durations = [duration for duration in loop.durations_us for _ in range(u)]
    rounds = [start // period_us for start in starts_us]

    def place(node: int) -> tuple[int, bool, int]:
        return starts_us[node] % period_us, durations[node] > 0, ties[node]

    for tasks in loop.tasks_on:
        order = sorted(interval.nodes(tasks), key=place)
        for a, b in pairwise([*order, *order[:1]]):
            after = 1 if b == order[0] else 0
            waits.append(Wait(a, b, durations[a], rounds[a] - rounds[b] + after))
    return retime(len(durations), list(dict.fromkeys(waits)))


class Period:
    """The model of an interval; `solve` it once. Goals: any rhythm, one of least latency, or one that holds least."""

    def __init__(self, interval: Interval, goal: Literal["any", "latency", "memory"] = "any") -> None:
        self.interval, self.loop, self.goal = interval, interval.loop, goal
        self.model = cp_model.CpModel()
        self.durations_us = [d for d in self.loop.durations_us for _ in range(interval.num_copies)]
        self.num_ties = max(sum(d == 0 for d in self.durations_us), 1)
        self._add_starts()
        self._add_waits()
        self._add_ranks()
        points = dict(enumerate(map(TimePoint, self.offsets, self.rounds)))
        self.point_order = PointOrder(self.model)
        self.times = Times(
            self.model,
            points,
            self._end,
            lambda a, b: self.before[a, b],
            self.point_order.is_until,
            self.durations_us.__getitem__,
        )
        for rank in range(self.loop.placement.num_ranks):
            self._add_memory(rank)
        self._add_latency()
        if interval.in_flight is not None:
            self._add_in_flight(interval.in_flight)

    def _add_starts(self) -> None:
        """Offset and round of each node, and a tie where it has no duration.

        Parts may be moved by whole periods: a root of each is in round 0 (except for latency, which may need less).
        """
        T, count, new = self.interval.period_us, len(self.durations_us), self.model.new_int_var
        longest = sum(least + T for *_, least in self.loop.waits) + T
        self.most_rounds = most = longest // T + 1
        self.most_bytes: list[Any] = []  # of each rank, for "memory"
        self.offsets: list[Any] = [new(0, T - 1, f"s{i}") for i in range(count)]
        self.rounds: list[Any] = [new(-most, most, f"k{i}") for i in range(count)]
        self.ties: list[Any] = [0 if d else new(0, self.num_ties - 1, f"p{i}") for i, d in enumerate(self.durations_us)]
        for number, part in enumerate(self.loop.parts):
            root = part[0] * self.interval.num_copies
            if number == 0:
                self.model.add(self.offsets[root] == 0)
            least = -1 if number and self.goal != "any" else 0
            if number == 0 or (self._is_balanced(part) and self.interval.in_flight is None):
                self.model.add_linear_constraint(self.rounds[root], least, 0)
        self.starts = [s + T * k for s, k in zip(self.offsets, self.rounds, strict=True)]

    def _is_balanced(self, part: Sequence[int]) -> bool:
        """Whether a micro-batch leaves nothing behind on any rank with a limit."""
        tasks, limits = self.loop.placement.tasks, self.loop.limits_bytes
        on = self.loop.tasks_on
        return not any(
            limit is not None and sum(scalar(tasks[i].held_bytes) for i in part if i in on[rank])
            for rank, limit in enumerate(limits)
        )

    def _not_before(self, late: Any, early: Any, a: int, b: int, literal: Any = None) -> None:
        """`late` ≥ `early` in µs, where b starts at `late` and a ends at `early`; if neither lasts, a goes first."""
        if self.durations_us[a] or self.durations_us[b]:
            constraint = self.model.add(late >= early)
        else:
            n = self.num_ties
            constraint = self.model.add(n * late + self.ties[b] >= n * early + self.ties[a] + 1)
        if literal is not None:
            constraint.only_enforce_if(literal)

    def _add_waits(self) -> None:
        u, T, t, d = self.interval.num_copies, self.interval.period_us, self.starts, self.durations_us
        for source, target, least in self.loop.waits:
            for a, b in zip(range(source * u, source * u + u), range(target * u, target * u + u), strict=True):
                self._not_before(t[b], t[a] + least, a, b)
                if (source, target) in self.loop.bridges and self.interval.in_flight is None:
                    self.model.add(t[b] <= t[a] + least + T - 1)
        for task in range(self.loop.num_tasks if u > 1 else 0):
            copies = range(task * u, task * u + u)
            for a, b in pairwise(copies):
                self._not_before(t[b], t[a] + d[a], a, b)
            self._not_before(t[copies[0]] + T, t[copies[-1]] + d[copies[-1]], copies[-1], copies[0])
        for tasks in self.loop.tasks_on:  # redundant: what a rank holds it holds at least for so long
            look()
            for a, b in combinations(tasks, 2):
                least_us = self.loop.apart_us(a, b)
                if least_us is not None:
                    for j in range(u):
                        self.model.add(t[b * u + j] >= t[a * u + j] + least_us)

    def _add_ranks(self) -> None:
        """Adds a literal per pair of a rank (the first comes before the second in the period), and no overlap."""
        self.before: dict[tuple[int, int], Any] = {}
        T, s, d = self.interval.period_us, self.offsets, self.durations_us
        for tasks in self.loop.tasks_on:
            look()
            nodes = self.interval.nodes(tasks)
            for a, b in combinations(nodes, 2):
                if (a, b) not in self.before:
                    first = self.model.new_bool_var(f"{a}<{b}")
                    self.before[a, b], self.before[b, a] = first, 1 - first
                    self._not_before(s[b], s[a] + d[a], a, b, first)
                    self._not_before(s[a], s[b] + d[b], b, a, ~first)
                    self.model.add(s[b] + d[b] <= s[a] + T)
                    self.model.add(s[a] + d[a] <= s[b] + T)
            lasting = [self.model.new_fixed_size_interval_var(s[i], d[i], f"i{i}") for i in nodes if d[i]]
            self.model.add_no_overlap(lasting)

    def _add_memory(self, rank: int) -> None:
        """Limits the level when an op starts, or minimizes the highest level for the goal "memory".

        What the rank holds on average follows from that, but as a constraint of its own it is found earlier.
        """
        limit, u = self.loop.limits_bytes[rank], self.interval.num_copies
        look()
        if self.loop.left_bytes(rank) or (limit is None and self.goal != "memory"):
            return  # growing levels are refused elsewhere; shrinking ones are highest at the beginning
        tasks, nodes = self.loop.placement.tasks, self.interval.nodes(self.loop.tasks_on[rank])
        held = {i: scalar(tasks[i // u].held_bytes) for i in nodes}
        peak = {i: scalar(tasks[i // u].peak_bytes) for i in nodes}
        carries = [
            carried.between(carried.since.op * u + j, carried.until.op * u + j)
            for carried in self.loop.carried[rank]
            for j in range(u)
        ]
        most: Any = limit
        if self.goal == "memory":
            enough = sum(abs(size) for size in held.values()) * self.most_rounds + sum(peak.values())
            enough += sum(carry.num_bytes for carry in carries) * (2 * self.most_rounds + 1)
            most = self.model.new_int_var(0, enough if limit is None else limit, f"m{rank}")
            self.most_bytes.append(most)
        if carries:
            level = Level(self.times, nodes, carries)
            for held_now in level.all(held, peak):
                self.model.add(held_now <= most)
        else:  # what is held follows from orders alone
            base = -sum(held[i] * self.rounds[i] for i in nodes)
            for b in nodes:
                if held[b] > 0 or peak[b] > 0:
                    earlier = sum(held[c] * self.before[c, b] for c in nodes if c != b and held[c])
                    self.model.add(base + earlier + max(held[b], 0) + peak[b] <= most)
        sizes = [*map(abs, held.values()), *(carry.num_bytes for carry in carries)]
        byte_us = sum(sizes) * (self.most_rounds + 2) + sum(peak.values()) + (limit or 0)
        if limit is not None and byte_us * self.interval.period_us < _TOO_LARGE:
            durations_us = self.durations_us
            ends = sum(-held[i] * (self.starts[i] + (durations_us[i] if held[i] < 0 else 0)) for i in nodes)
            for carry in carries:
                (begun, begun_lag), (over, over_lag) = carry.since, carry.until
                if begun == over:
                    ends += carry.num_bytes * (over_lag - begun_lag)
                else:
                    held_us = self.starts[over] + self.durations_us[over] - self.starts[begun]
                    ends += carry.num_bytes * (held_us - self.durations_us[begun] + over_lag - begun_lag)
            self.model.add(ends + sum(peak[i] * durations_us[i] for i in nodes) <= limit * self.interval.period_us)

    def _end(self, node: int, lag_us: int) -> TimePoint:
        """The point `lag_us` after the node's end."""
        T, later = self.interval.period_us, self.durations_us[node] + lag_us
        offset = self.model.new_int_var(0, T - 1, f"s{node}+{later}")
        more = self.model.new_int_var(0, later // T + 1, f"k{node}+{later}")
        self.model.add(offset + T * more == self.offsets[node] + later)
        return TimePoint(offset, self.rounds[node] + more)

    def _add_latency(self) -> None:
        if self.goal == "any" and self.interval.latency_us is None:
            return
        longest = sum(least + self.interval.period_us for *_, least in self.loop.waits) + 2 * self.interval.period_us
        first, last = (self.model.new_int_var(-longest, longest, name) for name in ("first", "last"))
        for start, duration in zip(self.starts, self.durations_us, strict=True):
            self.model.add(first <= start)
            self.model.add(last >= start + duration)
        self.model.add(last - first >= self.loop.critical_us)
        if self.interval.latency_us is not None:
            self.model.add(last - first <= self.interval.latency_us)
        if self.goal == "latency":
            self.model.minimize(last - first)

    def _add_in_flight(self, most: int) -> None:
        """Between two cuts of a rank each node is `turns` periods late; these differ by less than `most`."""
        T, longest = self.interval.period_us, (self.most_rounds + 2) * self.interval.period_us
        first = self.model.new_int_var(-self.most_rounds - 2, self.most_rounds + 2, "first turn")
        turns = [first + self.model.new_int_var(0, most - 1, f"q{i}") for i in range(len(self.starts))]
        for rank, tasks in enumerate(self.loop.tasks_on):
            cut = self.model.new_int_var(-longest, longest, f"cut{rank}")
            for node in self.interval.nodes(tasks):
                since_cut = self.starts[node] - T * turns[node] - cut
                self.model.add_linear_constraint(since_cut, 0, T - self.durations_us[node])

    def hint(self, starts_us: Sequence[int]) -> None:
        """Hints at these starts, per node."""
        T = self.interval.period_us
        root = starts_us[self.loop.parts[0][0] * self.interval.num_copies]
        for offset, round_, start in zip(self.offsets, self.rounds, starts_us, strict=True):
            self.model.add_hint(offset, (start - root) % T)
            self.model.add_hint(round_, (start - root) // T)

    def solve(self, budget: Budget, seed: int = 0) -> Answer:
        """Runs CP-SAT within the budget."""
        if self.goal == "memory":
            self.model.minimize(sum(self.most_bytes))
        budget.spend(self.point_order.nominal_s)  # the rest of the model costs little
        status, solver = cpsat.solve(self.model, budget, seed)
        proven = status in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return Answer(None, proven)
        starts = [solver.value(start) for start in self.starts]
        ties = [0 if d else solver.value(tie) for d, tie in zip(self.durations_us, self.ties, strict=True)]
        as_solved = Rhythm(self.interval.period_us, tuple(starts), tuple(ties))
        return Answer(rhythm_of(self.interval, starts, ties), proven, as_solved)
