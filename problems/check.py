"""Verifies problems from their definition, without Rota: python problems/check.py [FILE or FOLDER …]

Recomputes the makespan and the memory of each plan, and the bound of each certificate, as README.md beside this file
defines them. Prints a table; the exit code is 1 if anything does not match.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from certificates import WrongError, proven_us, require


class Problem:
    """The fields of a file, with tasks as indices; op (t, k) is the k-th micro-batch of task t's data stream."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.tasks = [name for name, *_ in fields["tasks"]]
        self.index = {name: t for t, name in enumerate(self.tasks)}
        require(len(self.index) == len(self.tasks), "a task is listed twice")
        self.ranks = [tuple(ranks) for _, ranks, *_ in fields["tasks"]]
        self.duration, self.held, self.peak = ([task[i] for task in fields["tasks"]] for i in (2, 3, 4))
        require(min(self.duration) >= 0 <= min(self.peak), "a duration or a peak is negative")
        self.limits, self.static = fields["cluster"]["limit_bytes"], fields["static_bytes"]
        self.num_ranks = len(self.limits)
        self.on = [[t for t, ranks in enumerate(self.ranks) if r in ranks] for r in range(self.num_ranks)]
        self.ends = {stage: (reduce_us, optimizer_us) for stage, reduce_us, optimizer_us in fields["step_ends"]}
        self.stage = [int(name[:-1]) for name in self.tasks]
        self.edges = [(self.index[a], self.index[b], size) for a, b, size in fields["edges"]]
        links = {(a, b): rest for a, b, *rest in reversed(fields["cluster"]["links"])}
        self.routes = []  # (source, target, sender, receiver, bytes, µs)
        for a, b, size in self.edges:
            alike = len(self.ranks[a]) == len(self.ranks[b])
            for i, receiver in enumerate(self.ranks[b]):
                sender = self.ranks[a][i if alike else 0]
                if sender != receiver:
                    latency, rate = links.get((sender, receiver), fields["cluster"]["link"])
                    self.routes.append((a, b, sender, receiver, size, latency + (-(-size // rate) if rate else 0)))
        self.lag = {(a, b): 0 for a, b, _ in self.edges}  # µs until the last rank of the target has its data
        for a, b, *_, us in self.routes:
            self.lag[a, b] = max(self.lag[a, b], us)
        part = list(range(len(self.tasks)))  # data streams: connected components, by their lowest stages
        for a, b in [*self.lag, *((t, self.stage.index(stage)) for t, stage in enumerate(self.stage))]:
            old, new = part[b], part[a]
            part = [new if p == old else p for p in part]
        order = sorted(set(part), key=lambda p: min(self.stage[t] for t in range(len(part)) if part[t] == p))
        self.stream, self.num_streams = [order.index(p) for p in part], len(order)
        self.rounds = fields["num_microbatches"] // self.num_streams
        self.count = [len(range(s, fields["num_microbatches"], self.num_streams)) for s in self.stream]

    def op(self, text: str) -> tuple[int, int]:
        match = re.fullmatch(r"(\d+[FBIWR])(\d+)", text)
        require(match is not None and match[1] in self.index, f"{text} is not an op of the problem")
        t, (k, stream) = self.index[match[1]], divmod(int(match[2]), self.num_streams)
        require(stream == self.stream[t] and k < self.count[t], f"{text} is not a micro-batch of its task")
        return t, k

    def gradients(self, stage: int) -> list[int]:
        return [t for t, name in enumerate(self.tasks) if self.stage[t] == stage and name[-1] in "BW"]

    def ranks_of_end(self, stage: int) -> tuple[int, ...]:
        return self.ranks[(self.gradients(stage) or [self.stage.index(stage)])[0]]

    def cut_common(self) -> int:
        """Cut out the time in which all ranks work together, with transfers and reductions meanwhile; its µs."""
        busy, cut = {r for ranks in self.ranks for r in ranks}, 0
        for t, ranks in enumerate(self.ranks):
            if len(ranks) == len(busy) > 1:
                cut += self.count[t] * self.duration[t]
                self.duration[t] = 0
        self.lag = dict.fromkeys(self.lag, 0)
        self.ends = {stage: (0, optimizer_us) for stage, (_, optimizer_us) in self.ends.items()}
        return cut


# --- the plan ---------------------------------------------------------------------------------------------------------


def simulate(p: Problem, rows: list[str]) -> tuple[int, list[int]]:
    """(makespan, peak bytes of each rank): everything starts as soon as what it waits for is over."""
    require(len(rows) == p.num_ranks, "the plan does not have one order per rank")
    orders = [[p.op(text) for text in row.split()] for row in rows]
    for r, order in enumerate(orders):
        wanted = {(t, k) for t in p.on[r] for k in range(p.count[t])}
        require(len(order) == len(wanted) and set(order) == wanted, f"rank {r} does not do exactly its ops")
    waits: dict[tuple[int, int], int] = defaultdict(int)
    followers = defaultdict(list)
    for order in orders:
        for before, after in pairwise(order):
            followers[before].append((after, 0))
            waits[after] += 1
    for (a, b), lag in p.lag.items():
        for k in range(p.count[a]):
            followers[a, k].append(((b, k), lag))
            waits[b, k] += 1
    start = {op: 0 for order in orders for op in order}
    ready = [op for op in start if not waits[op]]
    for op in ready:  # grows
        for after, lag in followers[op]:
            start[after] = max(start[after], start[op] + p.duration[op[0]] + lag)
            waits[after] -= 1
            if not waits[after]:
                ready.append(after)
    require(len(ready) == len(start), "the orders wait in a cycle")
    end = {op: us + p.duration[op[0]] for op, us in start.items()}
    last = [*end.values(), *(step_end(p, r, order, end) for r, order in enumerate(orders))]
    return max(last), [peak_bytes(p, r, order, start, end) for r, order in enumerate(orders)]


def step_end(p: Problem, r: int, order: list, end: dict) -> int:
    """When the rank's reductions, one after the other, and then its optimizer steps are over."""
    place = {op: i for i, op in enumerate(order)}
    stages = []
    for stage in (stage for stage in p.ends if r in p.ranks_of_end(stage)):
        ops = [(t, k) for t in p.gradients(stage) for k in range(p.count[t]) if (t, k) in place]
        stages.append((max((place[op] for op in ops), default=-1), stage))
    now = 0
    for position, stage in sorted(stages):
        now = max(now, end[order[position]] if position >= 0 else 0) + p.ends[stage][0]
    return max(now, end[order[-1]] if order else 0) + sum(p.ends[stage][1] for _, stage in stages)


def peak_bytes(p: Problem, r: int, order: list, start: dict, end: dict) -> int:
    """The most bytes held; at one instant, ends come first, and ops of no duration one after the other."""
    events = []  # (µs, sort, bytes): 0 transfers end, 1 ops end, 2 transfers start, 3 ops start
    received: dict[int, int] = defaultdict(int)
    for a, b, sender, receiver, size, us in p.routes:
        if r not in (sender, receiver) or not size:
            continue
        for k in range(p.count[a]):
            events.append((end[a, k], 2, size))
            if r == sender:
                events.append((end[a, k] + us, 0, -size))
        if r == receiver:
            received[b] += size
    for op in order:
        t = op[0]
        events.append((start[op], 3, max(p.held[t], 0) + p.peak[t]))
        sort = 1 if end[op] > start[op] else 3
        events.append((end[op], sort, min(p.held[t], 0) - p.peak[t] - received[t]))
    events.sort(key=lambda event: event[:2])  # stable: ops of one instant stay in the rank's order
    level = most = p.static[r]
    for *_, change in events:
        level += change
        most = max(most, level)
    return most


# --- files ------------------------------------------------------------------------------------------------------------


def check(path: Path) -> str:
    """One line on a file. Raises WrongError."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    makespan, peaks = simulate(Problem(fields), fields["orders"])
    require(fields["name"] == path.stem, f"the problem is called {fields['name']}")
    require(makespan == fields["makespan_us"], f"the plan takes {makespan} µs, not {fields['makespan_us']}")
    require(peaks == fields["peak_bytes"], f"the plan holds {peaks} bytes")
    over = [r for r, limit in enumerate(fields["cluster"]["limit_bytes"]) if limit is not None and peaks[r] > limit]
    require(not over, f"the plan exceeds the limits of the ranks {over}")
    bound, proven = fields["bound_us"], proven_us(Problem(fields), fields["certificate"])
    require(proven is None or proven >= bound, f"the certificate proves {proven} µs, not {bound}")
    require(bound <= makespan, f"the bound of {bound} µs is above the plan")
    return f"{makespan:>12,} {bound:>12,} {1 - bound / max(makespan, 1):>8.2%}  {fields['certificate']['argument']}"


def main() -> int:
    given = [Path(name) for name in sys.argv[1:]] or [Path(__file__).parent]
    paths = [path for one in given for path in (sorted(one.glob("*.json")) if one.is_dir() else [one])]
    wrong = 0
    for path in paths:
        try:
            print(f"{path.stem:<52}{check(path)}", flush=True)
        except (WrongError, LookupError, TypeError, ValueError, OSError) as error:
            print(f"{path.stem:<52}WRONG: {type(error).__name__}: {error}", flush=True)
            wrong += 1
    print(f"{len(paths) - wrong} of {len(paths)} files are right")
    return int(wrong > 0 or not paths)


if __name__ == "__main__":
    sys.exit(main())
