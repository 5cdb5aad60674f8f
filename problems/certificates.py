"""Recomputes the bounds that certificates claim, from the problem alone; README.md beside this file defines them."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from graphlib import TopologicalSorter
from math import ceil, floor, gcd, inf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from check import Problem

Op = tuple[int, int]  #: (task, k): the k-th micro-batch of the task, seen from one end of the step


class WrongError(Exception):
    """Something in a file does not hold."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise WrongError(what)


class View:
    """The problem from its beginning, or from its end: then time runs backwards, and what was freed is taken."""

    def __init__(self, p: Problem, backward: bool) -> None:
        self.p, self.backward = p, backward
        self.held = [-held if backward else held for held in p.held]
        self.left = [sum(p.held[t] * p.count[t] for t in on) * backward for on in p.on]  # that the plan never frees
        self.room = [inf if limit is None else limit - p.static[r] - self.left[r] for r, limit in enumerate(p.limits)]
        self.lag = {(b, a) if backward else (a, b): lag for (a, b), lag in p.lag.items()}
        self.release = [max(self.step_ends(t, r) for r in p.ranks[t]) * backward for t in range(len(p.tasks))]
        self.path = {(t, t): 0 for t in range(len(p.tasks))}  # (a, b) -> longest path from the start of a to that of b
        for t in TopologicalSorter({b: {a for a, c in self.lag if c == b} for b in range(len(p.tasks))}).static_order():
            for a in (a for a, b in self.lag if b == t):
                for source, us in [(s, us) for (s, b), us in self.path.items() if b == a]:
                    far = us + p.duration[a] + self.lag[a, t]
                    self.path[source, t] = max(self.path.get((source, t), 0), far)
        self.before = [{a for a, b in self.path if b == t != a} for t in range(len(p.tasks))]
        self.head = [
            max(us + self.release[a] for (a, b), us in self.path.items() if b == t) for t in range(len(p.tasks))
        ]

    def step_ends(self, t: int, r: int) -> int:
        """What comes after each op of the task: its stage's reduction, and all optimizer steps of its rank."""
        own = [stage for stage in self.p.ends if r in self.p.ranks_of_end(stage)]
        reduces = self.p.stage[t] in own and t in self.p.gradients(self.p.stage[t])
        return sum(self.p.ends[stage][1] for stage in own) + (self.p.ends[self.p.stage[t]][0] if reduces else 0)

    @cache  # noqa: B019
    def sets(self, r: int, stream: int) -> list[tuple[set, int, int]]:
        """(tasks, µs, bytes): what rank r can have done of one micro-batch; with a task, all tasks before it."""
        found, on = {frozenset()}, set(self.p.on[r])
        for t in sorted((t for t in on if self.p.stream[t] == stream), key=lambda t: len(self.before[t])):
            found |= {done | {t} for done in found if self.before[t] & on <= done}
        return [(s, sum(self.p.duration[t] for t in s), sum(self.held[t] for t in s)) for s in found]

    @cache  # noqa: B019
    def most(self, op: Op, r: int, work: int, price: Fraction, over: Op | None = None) -> Any:
        """The most that `work` × µs - `price` × bytes can be for all that rank r has done just before the op.

        With `over` = (task, y), of this task exactly y micro-batches are done.
        """
        (t, k), p, here = op, self.p, set(self.p.on[r])
        need, later = self.before[t] & here, {u for u in here if t in self.before[u]} | {t}
        u, y = over or (t, k)
        without = {v for v in here if u in self.before[v]} | {u} if over else set()

        def best(times: int, stream: int, has: set, lacks: set) -> Any:
            sets = self.sets(r, stream) if times else ()
            values = (work * us - price * held for s, us, held in sets if has <= s and not lacks & s)
            return times and times * max(values, default=-inf)

        total = best(y, p.stream[t], need | {t}, set()) + best(k - y, p.stream[t], need | {t}, without)
        total += best(1, p.stream[t], need, later | without)
        total += best(p.count[t] - k - 1, p.stream[t], set(), later | without)
        for s, count in {(p.stream[u], p.count[u]) for u in here if p.stream[u] != p.stream[t]}:
            total += best(count, s, set(), set())
        return total

    def needed(self, t: int) -> int:
        return max(self.held[t], 0) + self.p.peak[t]

    def free(self, r: int, t: int, price: Fraction) -> Any:
        """The price of what rank r's ops may hold when the task starts; what they hold is a multiple of its grain."""
        require(self.room[r] < inf, f"rank {r} has no limit, so its memory has no price")
        grain = gcd(*(self.held[u] for u in self.p.on[r])) or 1
        return price * ((self.room[r] - self.needed(t)) // grain * grain)

    def beginning(self, r: int, price: Fraction, frees: bool) -> tuple[int, set[int]]:
        """Idle time before any op of rank r, or of its ops that free memory or come after some that do; their tasks."""
        on = self.p.on[r]
        late = {t for t in on if not frees or any(self.held[u] < 0 and (u == t or u in self.before[t]) for u in on)}
        us = min(self.head[t] for t in late)
        if frees:
            work = price and self.free(r, min(late, key=self.needed), price)
            for stream, count in {(self.p.stream[t], self.p.count[t]) for t in on}:
                sets = self.sets(r, stream)
                work += count * max(done_us - price * held for done, done_us, held in sets if not done & late)
            us -= floor(work)
        return max(us, 0), late

    def follows(self, op: Op, other: Op) -> bool:
        """Whether the op can only start when the other one is over: by data, in turn, or for its memory."""
        (t, k), (u, y) = op, other
        if u == t or u in self.before[t]:
            return y <= k - (u == t)
        common = set(self.p.ranks[t]) & set(self.p.ranks[u]) if y <= k and self.p.stream[t] == self.p.stream[u] else ()
        return any(
            all(-self.most(op, r, 0, Fraction(1), (u, over)) > self.room[r] - self.needed(t) for over in (0, y))
            for r in common
        )

    def follow(self, row: str) -> tuple[int, int | None, Op | None]:
        """(µs, rank, op) at the end of a row of arguments: the op's head, or the rank's idle time before the op."""
        us, rank, at, late = 0, None, None, set(range(len(self.p.tasks)))
        for word in row.split():
            what, _, rest = word.partition("@")
            if not rest:
                t, k = self.p.op(word)
                op = (t, self.p.count[t] - 1 - k) if self.backward else (t, k)
                require(
                    rank is None or (rank in self.p.ranks[t] and (at or t in late)),
                    f"{word} is not what rank {rank} waits for",
                )
                require(at is None or at == op or self.follows(op, at), f"nothing says that {word} comes so late")
                if rank is None and at is not None:
                    lag = self.lag.get((at[0], t), 0) if at[1] == op[1] else 0
                    us += self.p.duration[at[0]] * (op[1] - at[1] if at[0] == t else 1) + lag
                us, at = max(us, self.release[t] if rank is None else 0), op
                continue
            r, price = int(rest.partition(":")[0]), Fraction(rest.partition(":")[2] or 0)
            require(price >= 0 and (at is None or r in self.p.ranks[at[0]]), f"{word} does not fit its op")
            if what in ("first", "frees"):
                require(at is None, f"{word} must be the first word")
                (us, late), rank = self.beginning(r, price, what == "frees"), r
            else:
                require(at is not None and (rank, what) in ((None, "idle"), (r, "work")), f"{word} is out of place")
                work = self.most(at, r, 1 if what == "idle" else -1, price) + (price and self.free(r, at[0], price))
                us, rank = (max(0, us - floor(work)), r) if what == "idle" else (us + max(0, ceil(-work)), None)
        return us, rank, at


def area(p: Problem, r: int, held: list) -> int:
    """Bytes × µs that rank r has to hold, over its room, without the corners at both ends of the step."""
    views, room = (View(p, False), View(p, True)), p.limits[r] - p.static[r]
    left = {t: p.held[t] for t in p.on[r]}
    total = sum(p.peak[t] * p.duration[t] for t in p.on[r])
    for first, last, size in ((p.index[a], p.index[b], size) for a, b, size in held):
        left[first], left[last] = left[first] - size, left[last] + size
        total += size * (views[0].path[first, last] + p.duration[last])
        require(size >= 0 and p.held[first] > 0 > p.held[last], "only what one task holds and another frees counts")
    require(all(size == 0 or 0 < size <= p.held[t] for t, size in left.items()), "some bytes are freed twice, or never")
    corners, ends = 0, 0
    for view in views:
        at_once, head = max(map(view.needed, p.on[r])), min(view.head[t] for t in p.on[r])
        slope = min((Fraction(p.duration[t], view.held[t]) for t in p.on[r] if view.held[t] > 0), default=0)
        slope = slope if room > at_once and not view.left[r] else 0
        corners += head * room + int((room - at_once) ** 2 * slope / 2)
        ends += head + ceil((room - at_once) * slope)
    least, more = ceil(Fraction(p.rounds * total, room)), ceil(Fraction(p.rounds * total + corners, room))
    return more if least >= ends else least


def proven_us(p: Problem, proof: dict[str, Any]) -> int | None:
    """The bound that the certificate proves; None for one by CP-SAT or in words, which it does not tell."""
    if proof["argument"] in ("CP-SAT", "words"):
        return None
    together = p.cut_common() if proof.get("without_common") else 0
    if proof["argument"] == "area":
        return together + area(p, proof["rank"], proof["held"])
    (us, rank, op), (tail, rank_too, op_too) = (View(p, b).follow(proof[("before", "after")[b]]) for b in (False, True))
    if proof["argument"] == "path":
        require(rank is rank_too is None and op is not None and op_too is not None, "a path is one of heads")
        require(op_too == (op[0], p.count[op[0]] - 1 - op[1]), "both ways do not meet in one op")
        return together + us + p.duration[op[0]] + tail
    require(proof["argument"] == "load" and rank == rank_too == proof["rank"], "the load is not of one rank")
    require(not op or not op_too or op_too == (op[0], p.count[op[0]] - 1 - op[1]), "idle times do not meet in one op")
    return together + us + sum(p.count[t] * p.duration[t] for t in p.on[rank]) + tail
