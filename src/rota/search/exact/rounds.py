"""All states of a long step, micro-batch by micro-batch: exact, whatever the number of micro-batches.

Where memory leaves few micro-batches in flight, a step goes through the same states again and again, if states are
compared by how much further each task is than the slowest one. So the states form a graph with cycles that does not
depend on the length of the step, and the least time that a step takes from a state until j more micro-batches are
complete is found for j = 0, 1, 2, … (Bellman, "On a routing problem", 1958). From one j to the next it grows by the
period of the best steady state in the end, so a few dozen rounds bound steps of any length.

Tasks of all ranks that hold nothing and begin or end a micro-batch can all be done first or last. They are left out of
the states, and put before and after the best order in the end.
"""

from __future__ import annotations

from math import comb, gcd, prod
from typing import NamedTuple

import numpy as np

from rota.compiled import inner, loop
from rota.core.stopping import look
from rota.search.budget import Budget
from rota.search.exact.state_space import SPARE, STATES, Bytes, Step, Words, find, rehash, room_for, step_of, successors
from rota.search.problem import NO_LIMIT, Integers, Orders, Problem, without_common_tasks
from rota.search.transfer_levels import counting_transfers

_MOST_BYTES = 220_000_000  # of all arrays that are then doubled
_MOST_PLACES = 400_000  # about, of the micro-batches in flight
_FIRST_STATES = 1 << 14
_AT_ONCE = 2_000  # states that are followed up between two looks at the clock
_MOST_COMPONENTS = 4  # two bits for each in `Graph.progress`
_KEPT_EVERY = 12  # rounds
_MOST_PERIOD = 12  # micro-batches after which times may grow by a constant again
_UNKNOWN = np.int32(1 << 30)
_S_PER_STATE, _S_PER_EDGE = 4.5e-6, 4e-9  # nominal seconds, about
_CLOSING_PART = 0.85  # of the most open states at a time: once fewer are open, their number goes on falling
_EDGES, _DONE = 0, 2  #: places in `Graph.meta` beside STATES
_RUNNING, _FULL, _TOO_MANY, _FINISHED = range(4)  #: what `_explore` answers


class Graph(NamedTuple):
    """States without the micro-batches that are complete, and the edges out of each."""

    keys: Bytes  #: uint8[most, …]: ops begun of each task, what each rank runs + 1, for how long still
    table: Words  #: int32[power of 2]: states by hash, or -1
    first: Integers  #: int64[most + 1]: of each state's edges
    target: Words  #: int32[most edges]
    passes: Words  #: int32[most edges], in units of time
    progress: Bytes  #: uint8[most edges]: micro-batches that become complete, two bits for each component
    meta: Integers  #: int64[3]


class Rounds:
    """One search, which goes on from turn to turn.

    States do not know what complete micro-batches still hold: if they hold anything, orders may not fit.

    Attributes:
        bound_us: No plan takes less, as far as is known.
        is_over: Whether going on is of no use: all is proven, or there are too many states.
        orders: Of the best step, once it is known and better than the given value.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.bound_us = 0
        self.orders: Orders | None = None
        apart, self.together_us = without_common_tasks(problem)
        counted = counting_transfers(apart)
        self.before, self.after = _outer_tasks(counted)
        self.kept = [t for t in range(len(counted.counts)) if t not in {*self.before, *self.after}]
        step = step_of(counted, self.kept)
        self.unit_us = max(1, gcd(*step.durations_us.tolist()))
        self.step = step._replace(durations_us=step.durations_us // self.unit_us)
        _, first, component_of = np.unique(problem.component_of[self.kept], return_index=True, return_inverse=True)
        self.component_of = component_of.astype(np.int64)
        self.rounds = int(sum(problem.counts[self.kept[i]] for i in first))
        self.still_bytes = max(1, -(-int(self.step.durations_us.max(initial=1)).bit_length() // 8))
        self.is_over = not self._is_promising()
        self.graph: Graph | None = None
        self.values: _Values | None = None
        self.most_open = 0  # states that were found and not yet followed up, at a time

    def _is_promising(self) -> bool:
        """Whether memory leaves so few micro-batches in flight that there may be few states."""
        step = self.step
        most_units = int((self.problem.counts[self.kept] * step.durations_us).sum())
        if not self.kept or max(self.component_of) >= _MOST_COMPONENTS or most_units >= _UNKNOWN // 4:
            return False
        places = []
        for component in range(max(self.component_of) + 1):
            tasks = np.flatnonzero(self.component_of == component).tolist()
            firsts = [t for t in tasks if step.sources_first[t] == step.sources_first[t + 1]]
            in_flight = 0
            for task in firsts:
                rank = int(step.ranks[step.ranks_first[task]])
                if step.held_bytes[task] <= 0 or step.limits_bytes[rank] == NO_LIMIT:
                    return False
                in_flight = max(in_flight, int(step.limits_bytes[rank] // step.held_bytes[task]))
            for rank in range(len(step.limits_bytes)):
                on_rank = step.tasks[step.tasks_first[rank] : step.tasks_first[rank + 1]]
                if step.held_bytes[on_rank][self.component_of[on_rank] == component].sum() < 0:
                    return False  # states do not know how much room complete micro-batches have made
            places.append(comb(len(tasks) + in_flight, in_flight))
        return prod(places) <= _MOST_PLACES

    def run(self, value_us: int, budget: Budget) -> None:
        """Goes on for a makespan of less than `value_us`, until the budget is used up or nothing is left to be done."""
        if self.graph is None:
            self.graph = _first_graph(len(self.kept) + (1 + self.still_bytes) * len(self.step.limits_bytes))
        while not self.is_over and not budget.is_over:
            look()
            if self.values is None:
                self._explore(self.graph, budget)
            elif self.values.rounds < self.rounds:
                self.values.go_on()
                budget.spend(_S_PER_EDGE * len(self.graph.target))
            else:
                self._finish(self.values, value_us)
        if self.values is not None:
            self.bound_us = self._least_us(self.values)

    def left_s(self) -> float | None:
        """Nominal seconds until all is proven, about; None if this is over, or new states still open faster than close.

        States are followed up in the order in which they are found, so the open ones are a front that grows and then
        shrinks. Each state left may open one more, and finding the orders in the end repeats most rounds.
        """
        if self.is_over or self.graph is None:
            return None
        rounds_s = 2 * self.rounds * _S_PER_EDGE * int(self.graph.meta[_EDGES])
        if self.values is not None:
            return rounds_s * (1 - self.values.rounds / (2 * self.rounds))
        num_open = self._num_open(self.graph)
        return None if num_open > _CLOSING_PART * self.most_open else rounds_s + 2 * _S_PER_STATE * num_open

    @staticmethod
    def _num_open(graph: Graph) -> int:
        return int(graph.meta[STATES] - graph.meta[_DONE])

    def _explore(self, graph: Graph, budget: Budget) -> None:
        before = int(graph.meta[_DONE])
        answer = _explore(self.step, self.component_of, graph, self.still_bytes, _AT_ONCE)
        self.most_open = max(self.most_open, self._num_open(graph))
        budget.spend(_S_PER_STATE * int(graph.meta[_DONE] - before))
        is_too_large = answer == _FULL and sum(array.nbytes for array in graph) > _MOST_BYTES
        if answer == _TOO_MANY or is_too_large:
            self.is_over, self.graph = True, None
        elif answer == _FULL:
            self.graph = _grown(graph)
        elif answer == _FINISHED:
            self.graph, in_flight = _sorted(graph, self.component_of)
            self.values = _Values(self.graph, in_flight)

    def _finish(self, values: _Values, value_us: int) -> None:
        """Once all rounds are done: the orders, if they are better."""
        self.is_over, self.bound_us = True, self._least_us(values)
        has_all_tasks = len(self.before) + len(self.kept) + len(self.after) == len(self.problem.counts)
        if self.bound_us < value_us and has_all_tasks:
            self.orders = self._orders(values.graph.keys, values.way(self.rounds))
        self.graph = self.values = None

    def _least_us(self, values: _Values) -> int:
        return self.together_us + self.unit_us * values.bound(self.rounds)

    def _orders(self, keys: Bytes, way: list[tuple[int, int]]) -> Orders | None:
        """The orders of a way, rows of (state, progress); None if components are not complete alike."""
        problem, num_tasks = self.problem, len(self.kept)
        complete, begun = np.zeros(num_tasks, np.int64), np.zeros(num_tasks, np.int64)
        rows: list[list[int]] = [[] for _ in range(problem.placement.num_ranks)]

        def add(task: int, count: int) -> None:
            for rank in problem.ranks[task].tolist():
                rows[rank] += [task] * count

        for task in self.before:
            add(task, int(problem.counts[task]))
        for state, progress in way:
            complete += progress >> (2 * self.component_of) & 3
            begun_by_then = complete + keys[state, :num_tasks]
            for i in np.flatnonzero(begun_by_then > begun).tolist():
                add(self.kept[i], 1)
            begun = begun_by_then
        if (begun != problem.counts[self.kept]).any():
            return None
        for task in self.after:
            add(task, int(problem.counts[task]))
        return np.array([task for row in rows for task in row], np.int32)


class _Values:
    """For each state the least time until j more micro-batches are complete, for the latest values of j.

    A few are kept, from which `way` finds the others again.
    """

    def __init__(self, graph: Graph, in_flight: Words) -> None:
        self.graph, self.in_flight = graph, in_flight
        parts = sum(graph.progress >> shift & 3 for shift in range(0, 2 * _MOST_COMPONENTS, 2))
        self.steps = np.asarray(parts, np.uint8)  # micro-batches that an edge completes
        self.depth = int(self.steps.max(initial=1))
        self.root = int(np.flatnonzero(~graph.keys.any(axis=1))[0])
        self.rounds = -1
        self.latest: list[Words] = []  # of the rounds up to `rounds`
        self.kept: dict[int, list[Words]] = {}
        self.go_on()

    def go_on(self) -> None:
        """One more round."""
        self.rounds += 1
        self.latest = [*self.latest[-_MOST_PERIOD - self.depth :], self._next(self.latest, self.rounds)]
        if self.rounds % _KEPT_EVERY == 0:
            self.kept[self.rounds] = self.latest[-self.depth :]

    def _next(self, latest: list[Words], j: int) -> Words:
        """The times until j micro-batches are complete, from those until fewer are."""
        look()
        values: Words = np.full((self.depth + 1, len(self.in_flight)), _UNKNOWN, np.int32)
        for back in range(1, min(self.depth, len(latest)) + 1):
            values[back] = latest[-back]
        _round(self.graph, self.steps, self.in_flight, self.root, values, j)
        return values[0].copy()

    def bound(self, num_rounds: int) -> int:
        """A lower bound for so many micro-batches; after `num_rounds` of `go_on` the exact value.

        If all times of `depth` rounds in succession are by `more` longer than p rounds before, so are all later ones.
        """
        if self.rounds >= num_rounds:
            return int(self.latest[num_rounds - self.rounds - 1][self.root])
        best = int(self.latest[-1][self.root])
        for period in range(1, len(self.latest) - self.depth + 1):
            if self.rounds - period - self.depth < int(self.in_flight.max(initial=0)):
                continue  # not all states have a value yet
            rounds = zip(self.latest[-self.depth :], self.latest[-self.depth - period : -period], strict=True)
            more = min(int((late - early)[early < _UNKNOWN].min()) for late, early in rounds)
            times = -(-(num_rounds - self.rounds) // period)
            start = num_rounds - times * period - self.rounds - 1  # in `latest`
            best = max(best, int(self.latest[start][self.root]) + times * more)
        return best

    def way(self, num_rounds: int) -> list[tuple[int, int]]:
        """The fastest way from the first state: rows of (state, progress on the way to it)."""
        graph, state, left, rows = self.graph, self.root, num_rounds, []
        values: dict[int, Words] = {}  # by round
        complete = np.zeros(_MOST_COMPONENTS, np.int64)
        self.latest = []
        while left or state != self.root:
            if any(j not in values for j in range(max(0, left - self.depth), left + 1)):
                values = self._block(left)
            best = None
            for edge in range(int(graph.first[state]), int(graph.first[state + 1])):
                j = left - int(self.steps[edge])
                target = int(graph.target[edge])
                if j < 0 or values[left][state] != int(graph.passes[edge]) + values[j][target]:
                    continue
                then = complete + (int(graph.progress[edge]) >> np.arange(0, 2 * _MOST_COMPONENTS, 2) & 3)
                if best is None or then.max() < best[0].max():
                    best = (then, edge, j, target)
            assert best is not None
            complete, edge, left, state = best
            rows.append((state, int(graph.progress[edge])))
        return rows

    def _block(self, last: int) -> dict[int, Words]:
        """The times of some rounds up to `last`, from those that were kept."""
        first = max(0, last - self.depth) // _KEPT_EVERY * _KEPT_EVERY
        rounds = list(self.kept[first])
        begin = first + 1 - len(rounds)
        for j in range(first + 1, last + 1):
            rounds.append(self._next(rounds, j))
        return dict(enumerate(rounds, begin))


def _outer_tasks(problem: Problem) -> tuple[list[int], list[int]]:
    """Tasks of no duration that hold nothing, before all others of their micro-batch and after them.

    Of a task of several ranks all ranks are the same: those that work at all.
    """
    num_tasks = len(problem.counts)
    costs = problem.durations_us, problem.held_bytes, problem.peak_bytes
    is_free = [len(problem.ranks[t]) > 1 and not any(cost[t] for cost in costs) for t in range(num_tasks)]
    result = []
    for rows in (problem.inputs, problem.outputs):
        neighbours = [{*row[::2].tolist()} for row in rows]
        outer: list[int] = []
        while more := [t for t in range(num_tasks) if is_free[t] and t not in outer and neighbours[t] <= {*outer}]:
            outer += more
        result.append(outer)
    before, after = result
    return before, [t for t in after[::-1] if t not in before]


def _first_graph(width: int) -> Graph:
    graph = Graph(
        np.zeros((_FIRST_STATES, width), np.uint8),
        np.full(4 * _FIRST_STATES, -1, np.int32),
        np.zeros(_FIRST_STATES + 1, np.int64),
        np.empty(8 * _FIRST_STATES, np.int32),
        np.empty(8 * _FIRST_STATES, np.int32),
        np.empty(8 * _FIRST_STATES, np.uint8),
        np.zeros(3, np.int64),
    )
    find(graph.keys, graph.table, graph.meta, np.zeros(width, np.uint8))
    return graph


def _grown(graph: Graph) -> Graph:
    """The same with more room for what is short."""
    num_states, num_edges = int(graph.meta[STATES]), int(graph.meta[_EDGES])
    if len(graph.keys) - num_states <= SPARE:
        keys = np.zeros((2 * len(graph.keys), graph.keys.shape[1]), np.uint8)
        keys[:num_states] = graph.keys[:num_states]
        table = np.full(2 * len(graph.table), -1, np.int32)
        rehash(keys, table, num_states)
        graph = graph._replace(keys=keys, table=table, first=np.resize(graph.first, len(keys) + 1))
    if len(graph.target) - num_edges <= SPARE:
        graph = graph._replace(
            target=np.concatenate([graph.target, graph.target]),
            passes=np.concatenate([graph.passes, graph.passes]),
            progress=np.concatenate([graph.progress, graph.progress]),
        )
    return graph


def _sorted(graph: Graph, component_of: Integers) -> tuple[Graph, Words]:
    """The graph without spare room, each state before those that it leads to; int32[num_states]: what is in flight.

    Edges that complete a micro-batch may lead to states before.
    """
    num_states, num_edges = int(graph.meta[STATES]), int(graph.meta[_EDGES])
    order, first = np.empty(num_states, np.int32), np.zeros(num_states + 1, np.int64)
    target, passes = np.empty(num_edges, np.int32), np.empty(num_edges, np.int32)
    progress = np.empty(num_edges, np.uint8)
    result = Graph(graph.keys[:0], graph.table[:0], first, target, passes, progress, graph.meta)
    _sort(graph, result, order)
    keys = graph.keys[order]
    in_flight = np.zeros(num_states, np.int32)
    for component in range(int(component_of.max()) + 1):
        in_flight += keys[:, : len(component_of)][:, component_of == component].max(axis=1)
    return result._replace(keys=keys), in_flight


@inner
def _unpack(packed: Bytes, num_tasks: int, num_ranks: int, still_bytes: int, key: Words) -> None:
    """Fills the key of a state."""
    for task in range(num_tasks):
        key[task] = packed[task]
    for rank in range(num_ranks):
        key[num_tasks + rank] = np.int32(packed[num_tasks + rank]) - 1
        still = np.int32(0)
        for i in range(still_bytes):
            still = still * 256 + packed[num_tasks + num_ranks + rank * still_bytes + i]
        key[num_tasks + num_ranks + rank] = still


@inner
def _pack(key: Words, num_tasks: int, num_ranks: int, still_bytes: int, packed: Bytes) -> None:
    """Fills the bytes of a key."""
    for task in range(num_tasks):
        packed[task] = key[task]
    for rank in range(num_ranks):
        packed[num_tasks + rank] = key[num_tasks + rank] + 1
        still = key[num_tasks + num_ranks + rank]
        for i in range(still_bytes):
            packed[num_tasks + num_ranks + (rank + 1) * still_bytes - 1 - i] = still & 255
            still >>= 8


@loop
def _explore(step: Step, component_of: Integers, graph: Graph, still_bytes: int, most: int) -> int:
    """Adds the edges of so many states, and the states that they lead to."""
    keys, table, first, target, passes, progress, meta = graph
    num_tasks, num_ranks = len(step.durations_us), len(step.limits_bytes)
    room = room_for(step)
    children, passed = room.children, room.passed
    key, packed = np.empty(num_tasks + 2 * num_ranks, np.int32), np.empty(keys.shape[1], np.uint8)
    complete = np.empty(_MOST_COMPONENTS, np.int32)
    while most > 0:
        state = meta[_DONE]
        if state == meta[STATES]:
            return _FINISHED
        if len(keys) - meta[STATES] <= SPARE or len(target) - meta[_EDGES] <= SPARE:
            return _FULL
        most -= 1
        _unpack(keys[state], num_tasks, num_ranks, still_bytes, key)
        num_children = successors(key, step, room)
        if num_children < 0:
            return _TOO_MANY
        for i in range(num_children):
            child = children[i]
            for component in range(_MOST_COMPONENTS):
                complete[component] = 255
            for task in range(num_tasks):
                if child[task] > 250:
                    return _TOO_MANY
                complete[component_of[task]] = min(complete[component_of[task]], child[task])
            parts = 0
            for component in range(_MOST_COMPONENTS):
                if complete[component] < 255:
                    if complete[component] > 3:
                        return _TOO_MANY
                    parts |= complete[component] << (2 * component)
            for task in range(num_tasks):
                child[task] -= complete[component_of[task]]
            _pack(child, num_tasks, num_ranks, still_bytes, packed)
            edge = meta[_EDGES]
            target[edge] = find(keys, table, meta, packed)
            passes[edge], progress[edge] = passed[i], parts
            meta[_EDGES] += 1
        meta[_DONE] += 1
        first[meta[_DONE]] = meta[_EDGES]
    return _RUNNING


@loop
def _sort(graph: Graph, result: Graph, order: Words) -> None:
    """Orders the states (Kahn, "Topological sorting of large networks", 1962), and the edges with them."""
    first, target, progress = graph.first, graph.target, graph.progress
    num_states = len(order)
    waits = np.zeros(num_states, np.int32)
    for edge in range(first[num_states]):
        if progress[edge] == 0:
            waits[target[edge]] += 1
    num_ordered = 0
    for state in range(num_states):
        if waits[state] == 0:
            order[num_ordered] = state
            num_ordered += 1
    done = 0
    while done < num_ordered:
        state = order[done]
        done += 1
        for edge in range(first[state], first[state + 1]):
            if progress[edge] == 0:
                waits[target[edge]] -= 1
                if waits[target[edge]] == 0:
                    order[num_ordered] = target[edge]
                    num_ordered += 1
    for i in range(num_states):
        waits[order[i]] = i
    edges = 0
    for i in range(num_states):
        for edge in range(first[order[i]], first[order[i] + 1]):
            result.target[edges] = waits[target[edge]]
            result.passes[edges], result.progress[edges] = graph.passes[edge], progress[edge]
            edges += 1
        result.first[i + 1] = edges


@loop
def _round(graph: Graph, steps: Bytes, in_flight: Words, root: int, values: Words, j: int) -> None:
    """Fills values[0]: the least time of each state until j micro-batches are complete; values[i]: j - i."""
    first, target, passes = graph.first, graph.target, graph.passes
    for state in range(len(in_flight) - 1, -1, -1):
        least = _UNKNOWN
        if in_flight[state] <= j:
            if j == 0 and state == root:
                least = np.int32(0)
            for edge in range(first[state], first[state + 1]):
                least = min(least, passes[edge] + values[steps[edge], target[edge]])
        values[0, state] = min(least, _UNKNOWN)
