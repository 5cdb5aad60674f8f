"""Policies of list scheduling, and a climb over them.

A policy says when tasks would like to start, how patient ranks are, what they may hold, and how many micro-batches may
be between a forward and its backward. Good caps for a chain are those of 1F1B, one less from stage to stage. Elsewhere
caps that fill the memory of each rank are a good beginning, and they are climbed over with the rest.

Most changes of a policy leave the makespan as it is. So of two equally long steps, the climb prefers the one whose ops
start earlier on average: it has more room at the end, where a further change may shorten it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from rota.core.tasks import Kind
from rota.search.dispatching import NO_CAP, Dispatcher, busiest_us, from_starts
from rota.search.problem import NO_LIMIT, Floats, Integers, Orders, Problem
from rota.search.timing import measure, start_times

_SPREADS = (1.6, 1.3, 2.0, 1.0, 3.0, 0.7)  # how much longer a micro-batch may last than it has to
_PATIENCES = (0.25, 0.0, 0.5, 1.0, 2.0)  # what is good most often comes first: long steps have time for few
_ROOMS = (None, 2.0, 1.5, 3.0)  # caps in parts of the micro-batches that fit; None: no caps

#: (caps in parts of the memory of a rank, what each forward has at least); None: no caps
_FILLS = ((1.0, 1), (1.0, 2), (1.2, 0), (0.9, 0), (None, 0))
_HOW_PATIENT = (0.5, 1.0, 0.0, 2.0)
_ORDERS = ((0, 1, 2), (1, 0, 2), (1, 2, 0))  # places of forwards, backwards and weight gradients
_PLAIN_PART, _LONG_PLAIN_PART = 0.3, 0.5  # of the tries, as long as there are plain policies; the latter in long steps

_NEVER_US = 1 << 61
_HEAT = 0.001  # by what part a step may readily become longer at the beginning of a cycle
_LONG_OPS = 10_000  # longer steps have time for few tries: the longer, the less heat
_FIRST_CYCLE = 300  # tries
_BETTER_PART = 0.7  # of the tries, for the walk that has found the better plan
_GOOD = 6  # plain policies that are kept
_EARLY_PART = 0.2  # what a µs of the mean start counts, in µs of the objective
_SLOPING_PART = 0.3  # of the changes of caps
_SINGLE_PART = 0.4  # of the changes of wishes

Objectives = tuple[int, int]  #: µs of the objective, then of the other one of makespan and span


@dataclass(frozen=True)
class Policy:
    """Task t would like to start its k-th op at `starts_us[t]` + k · `period_us`; see `Dispatcher` for the rest."""

    starts_us: Floats  #: float64[num_tasks]
    period_us: float
    patience: Floats  #: float64[num_ranks]
    limits_bytes: Integers  #: int64[num_ranks]
    caps: Integers  #: int64[num_tasks]


@dataclass
class _Walk:
    """Annealing on policies of one family; `policy` is where it is, and its step has the value `at_us`.

    The value is the objective and a part of the mean start, see `Climb`.
    """

    plain: Iterator[Policy]
    first_heat: float
    is_long: bool  #: whether there is time for few tries: then a cycle begins again with each gain
    policy: Policy | None = None
    at_us: float | None = None
    best: Policy | None = None
    best_us: float = _NEVER_US
    good: list[tuple[float, Policy]] = field(default_factory=list)  # plain ones, from which every other cycle begins
    tries: int = 0
    cycle: int = _FIRST_CYCLE
    cycles: int = 0

    def heat(self, random: np.random.Generator) -> float:
        """By what part a step may readily become longer; it falls to 0 in each cycle, and cycles become longer."""
        self.tries += 1
        if self.tries > self.cycle:
            self.tries, self.cycle, self.cycles = 0, self.cycle * 5 // 4, self.cycles + 1
            if self.cycles % 2 and self.good:
                self.at_us, self.policy = self.good[int(random.integers(len(self.good)))]
            elif self.best is not None:
                self.at_us, self.policy = self.best_us, self.best
        return self.first_heat * (1 - self.tries / self.cycle)

    def accepts_us(self, random: np.random.Generator) -> float:
        """The value that the next step may have for the walk to go there."""
        chance = 1 - random.random()
        if self.at_us is None:
            return _NEVER_US
        heat = self.heat(random)
        return float(self.at_us * (1 - heat * np.log(chance)))

    def go_to(self, policy: Policy, us: float) -> None:
        """Goes on from this policy, whose step has this value."""
        if self.is_long and (self.at_us is None or us < self.at_us):
            self.tries = 0
        self.policy, self.at_us = policy, us

    @property
    def good_us(self) -> float:
        """The value that a plain policy's step may have for it to be kept."""
        return self.good[-1][0] if len(self.good) == _GOOD else _NEVER_US


class Climb:
    """Annealing on policies: plain ones, and in between them changes of the best one, or of a good plain one.

    Those that go by the kinds of tasks and those that go by times are two walks, as either family may be the better
    one to begin with; the walk that has found the better plan has more tries.

    They compare steps by the objective plus `_EARLY_PART` of the mean start of all ops that another one waits for.
    """

    def __init__(self, problem: Problem, is_span: bool, seed: int) -> None:
        self.problem = problem
        self.is_span = is_span
        self.random = np.random.default_rng(seed)
        self.dispatcher = Dispatcher(problem)
        self.capped = np.flatnonzero(self.dispatcher.memory.backward_of >= 0)
        #: Per task that has a cap, µs between it and its backward.
        self.between_us = problem.heads_us[self.dispatcher.memory.backward_of] - problem.heads_us
        self.most = _most_in_flight(problem)
        #: int64[num_ranks]: the most that one op keeps.
        self.largest_held_bytes = np.array([problem.held_bytes[on].max(initial=0) for on in problem.tasks_on], np.int64)
        self.period_us = busiest_us(problem)
        kinds = np.array([task.kind.value for task in problem.placement.tasks])
        self.of_kind = [np.flatnonzero(kinds == kind) for kind in sorted(set(kinds.tolist()))]
        self.is_read = problem.outputs.first[1:] > problem.outputs.first[:-1]
        self.awaited = np.flatnonzero(self.is_read[problem.task_of] | ~self.is_read.any())  #: int64[...], nodes
        self.least_mean_us = 0.0  #: the least mean start so far
        self.is_long = int(problem.first_op[-1]) > _LONG_OPS
        heat = _HEAT * min(1.0, _LONG_OPS / int(problem.first_op[-1]))
        self.walks = [_Walk(plain, heat, self.is_long) for plain in (self._by_kind(), self._by_time())]
        self.key: Objectives | None = None
        self.orders: Orders | None = None

    def try_one(self) -> None:
        """Tries the next plain policy, or a change of the best; it is given up once it is certain not to be kept."""
        better, other = sorted(self.walks, key=lambda walk: walk.best_us)
        walk = better if self.random.random() < _BETTER_PART else other
        is_plain = walk.policy is None or self.random.random() < (_LONG_PLAIN_PART if self.is_long else _PLAIN_PART)
        plain = policy = next(walk.plain, None) if is_plain else None
        if policy is None:
            assert walk.policy is not None, "there are plain policies"
            policy = self._changed(walk.policy)
        accepted_us = walk.accepts_us(self.random)
        most_us = accepted_us if plain is None else max(accepted_us, walk.good_us)
        value_us = self._value_us(policy, most_us - _EARLY_PART * self.least_mean_us)
        if value_us is None:
            walk.policy = walk.policy or policy
            return
        if plain is not None:
            walk.good = sorted([*walk.good, (value_us, plain)], key=lambda pair: pair[0])[:_GOOD]
        if value_us <= accepted_us:
            walk.go_to(policy, value_us)
        if value_us <= walk.best_us:
            walk.best, walk.best_us = policy, value_us

    def _value_us(self, policy: Policy, most_us: float) -> float | None:
        """How good the policy's step is; None where nothing fits, or it is certain to last longer than `most_us`."""
        priorities = from_starts(self.problem, policy.starts_us, policy.period_us)
        limits = policy.patience, policy.limits_bytes, policy.caps
        orders = self.dispatcher(priorities, *limits, _NEVER_US if self.is_span else int(most_us))
        if orders is None:
            return None
        tables = self.dispatcher.tables
        starts_us = start_times(tables, orders)
        assert starts_us is not None
        makespan_us, span_us = measure(tables, self.problem.step_ends, orders, starts_us)
        key = (span_us, makespan_us) if self.is_span else (makespan_us, span_us)
        if self.key is None or key <= self.key:
            self.key, self.orders = key, orders
        mean_us = float(starts_us[self.awaited].mean())
        self.least_mean_us = min(self.least_mean_us or mean_us, mean_us)
        return key[0] + _EARLY_PART * mean_us

    def _plain(self, starts: Floats, period_us: float, patience: float, caps: Integers) -> Policy:
        patiences = np.full(len(self.problem.limits_bytes), patience)
        return Policy(starts, period_us, patiences, self.problem.limits_bytes, caps)

    def _by_kind(self) -> Iterator[Policy]:
        """Forwards before backwards or after them; of a kind, what is deepest goes first. No time counts.

        Caps keep the forwards back, so they may go first: what is deepest then never waits.
        """
        problem, tasks = self.problem, self.problem.placement.tasks
        depths = problem.heads_us / max(int(problem.heads_us.max(initial=0)), 1)
        is_forward = self.dispatcher.memory.backward_of >= 0
        is_weight = np.array([task.kind is Kind.W for task in tasks])
        all_caps = [self._filling_caps(*shape) for shape in (_FILLS if len(self.capped) else _FILLS[-1:])]
        for order, way in product(_ORDERS, (-1.0, 1.0)):
            places = np.select([is_forward, is_weight], [order[0], order[2]], order[1])
            for caps, (other_way, patience) in product(all_caps, product((1.0, -1.0), _HOW_PATIENT)):
                starts = places + 0.5 * depths * np.where(is_forward, way, other_way)
                yield self._plain(self.period_us * starts, 0.0, patience, caps)

    def _by_time(self) -> Iterator[Policy]:
        """Tasks that nothing waits for come last of all, or when their turn comes."""
        problem = self.problem
        heads = problem.heads_us.astype(np.float64)
        last = 4 * heads.max(initial=0) + self.period_us * problem.num_microbatches
        all_caps = [self._caps(room) for room in (_ROOMS if len(self.capped) else _ROOMS[:1])]
        if len(self.capped):
            all_caps.insert(1, self._filling_caps(*_FILLS[0]))
        if len(self.capped) and self.is_long:
            all_caps = [self._filling_caps(*shape) for shape in _FILLS]
        put_offs = (0.0,) if self.is_read.all() else (last, 0.0)
        for put_off, spread, patience, caps in product(put_offs, _SPREADS, _PATIENCES, all_caps):
            yield self._plain(spread * heads + put_off * ~self.is_read, self.period_us, patience, caps)

    def _caps(self, room: float | None) -> Integers:
        """Caps in proportion to the time between a forward and its backward, `room` times what fits for the longest."""
        problem, capped = self.problem, self.capped
        caps = np.full(len(problem.counts), NO_CAP)
        if room is None:
            return caps
        held = [np.maximum(problem.held_bytes[tasks], 0).sum() for tasks in problem.tasks_on]
        limited = [
            limit / size for limit, size in zip(problem.limits_bytes, held, strict=True) if limit < NO_LIMIT and size
        ]
        fitting = min(limited, default=float(len(held)))
        parts = self.between_us[capped] / max(self.between_us[capped].max(initial=0), 1)
        caps[capped] = np.maximum(np.rint(room * fitting * parts), 1)
        return caps

    def _filling_caps(self, room: float | None, least: int) -> Integers:
        """Caps that fill `room` times the memory of each rank: `least` per forward, and a share of what is left.

        The longer it takes from a forward to its backward, the larger is its share.
        """
        problem = self.problem
        caps = np.full(len(problem.counts), NO_CAP)
        for rank, on in enumerate(problem.tasks_on):
            tasks = np.intersect1d(on, self.capped)
            if room is None or not len(tasks):
                continue
            limit = problem.limits_bytes[rank]
            held_bytes = float(problem.held_bytes[tasks].clip(1).mean())
            fitting = limit / held_bytes if limit < NO_LIMIT else float(problem.num_ranks * len(tasks))
            parts = self.between_us[tasks] / max(self.between_us[tasks].sum(), 1)
            shares = np.rint(least + max(room * fitting - least * len(tasks), 0) * parts)
            caps[tasks] = np.minimum(caps[tasks], np.maximum(shares, 1))
        return caps

    def _changed(self, policy: Policy) -> Policy:
        """Changes caps, wishes or patience of some neighbours, or what one rank may hold."""
        random = self.random
        choice = random.integers(8)
        if choice < 3 and len(self.capped):
            return self._with_other_caps(policy)
        if choice == 3:
            return self._with_other_patience(policy)
        if choice == 4:
            limits = policy.limits_bytes.copy()
            rank = random.integers(len(limits))
            more = self.largest_held_bytes[rank] * random.integers(-2, 3)
            limits[rank] = min(self.problem.limits_bytes[rank], limits[rank] + more)
            return replace(policy, limits_bytes=limits)
        return self._with_other_wishes(policy)

    def _with_other_wishes(self, policy: Policy) -> Policy:
        """Tasks of one kind would like to start later or sooner: one, or a stretch of stages, all alike or sloping."""
        random = self.random
        tasks = self.of_kind[int(random.integers(len(self.of_kind)))]
        if random.random() < _SINGLE_PART:
            tasks, slope = tasks[random.integers(len(tasks), size=1)], np.ones(1)
        else:
            tasks = tasks[self._stretch(len(tasks))]
            slope = self._slope(len(tasks)) if random.random() < 0.5 else np.ones(len(tasks))
        starts = policy.starts_us.copy()
        starts[tasks] += slope * self.period_us * random.normal() * random.choice((0.3, 1.0, 3.0))
        return replace(policy, starts_us=starts)

    def _with_other_caps(self, policy: Policy) -> Policy:
        """Of neighbours by one or two; or of a stretch of stages, the more the closer to one end."""
        random = self.random
        if random.random() < _SLOPING_PART:
            tasks = self.capped[self._stretch(len(self.capped))]
            more = np.rint(self._slope(len(tasks)) * random.choice((-4, -3, -2, 2, 3, 4))).astype(np.int64)
        else:
            tasks = self.capped[self._neighbours(len(self.capped))]
            more = np.full(len(tasks), random.choice((-2, -1, 1, 2)))
        caps, most = policy.caps.copy(), self.most[tasks]
        caps[tasks] = np.clip(np.minimum(caps[tasks], most) + more, 1, most)
        return replace(policy, caps=caps)

    def _with_other_patience(self, policy: Policy) -> Policy:
        patience = policy.patience.copy()
        ranks = self._neighbours(len(patience)) if self.random.random() < 0.7 else slice(None)
        patience[ranks] = np.maximum(patience[ranks] + 0.4 * self.random.normal(), 0)
        return replace(policy, patience=patience)

    def _stretch(self, count: int) -> slice:
        """From one index below `count` to another."""
        first, last = sorted(self.random.integers(count, size=2).tolist())
        return slice(first, last + 1)

    def _slope(self, count: int) -> Floats:
        """From 0 to 1 or back, in even steps."""
        slope = np.linspace(0.0, 1.0, count)
        return slope if self.random.random() < 0.5 else 1.0 - slope

    def _neighbours(self, count: int) -> slice:
        """One index below `count`, or as many neighbours as there are ranks at most."""
        first = int(self.random.integers(count))
        is_one = self.random.random() < 0.5
        width = 1 if is_one else int(self.random.integers(1, self.problem.placement.num_ranks + 1))
        return slice(first, first + width)


def _most_in_flight(problem: Problem) -> Integers:
    """int64[num_tasks]: how many micro-batches of a task fit, as far as the task alone holds memory."""
    most = problem.counts.copy()
    for rank, on in enumerate(problem.tasks_on):
        most[on] = np.minimum(most[on], problem.limits_bytes[rank] // problem.held_bytes[on].clip(1))
    return np.maximum(most, 1)
