"""The best steady state of a placement: which period a long step can repeat with, and a proof that none is shorter.

A period T of one micro-batch of each stream is looked for from the proven bound upwards, by growing steps, then by
bisection; every rhythm found is retimed to its true least period. No rhythm at T − 1 is the proof. Where memory is
tight, several micro-batches a period reach rates between those of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Literal

import numpy as np

from rota.placement import Placement
from rota.search.bounds.memory_bounds import period_bound
from rota.search.budget import Budget
from rota.search.dispatching import serial
from rota.search.periodic.loop import Loop
from rota.search.periodic.modulo import Answer, Period, Window
from rota.search.periodic.offsets import anneal
from rota.search.periodic.retiming import Rhythm
from rota.search.periodic.steady_state import Steady
from rota.search.problem import Integers
from rota.search.timing import Tables, fits, start_times
from rota.stopping import Stopped

_MOST_COPIES = 6
_SOLVE_S, _PROVE_S, _POLISH_S = 0.8, 2.0, 0.1  # nominal, for CP-SAT at a time
_MOST_ROOMS = 20  # how often the room for what transfers hold is guessed
_SIMULATE_S = 0.005  # nominal, about, for the plans of a rhythm
_COPIES_S = 4.0  # nominal, for one number of micro-batches a period
_FIRST_STEP = 16  # this part of a bound the second period tried lies from the first
_PRECISION = 200  # this part of a period is not worth another attempt, but for a proof


@dataclass(frozen=True)
class SteadyResult:
    """`bound_us`: no steady state takes less for a micro-batch, however many make a period.

    `proven_for`: whether none of as many micro-batches a period takes less.
    """

    steady: Steady
    bound_us: Fraction
    proven_for: bool

    @property
    def is_optimal(self) -> bool:
        return self.steady.us_per_microbatch <= self.bound_us


def find_steady(
    placement: Placement,
    budget: Budget,
    *,
    microbatches_per_period: int | None = None,
    in_flight: int | None = None,
    seed: int = 0,
    room_bytes: tuple[int, ...] = (),
    num_microbatches: int | None = None,
) -> SteadyResult | None:
    """The steady state of least time per micro-batch, then least latency, then memory; None if none was found.

    None too where not even a micro-batch alone fits, or it leaves something behind on a rank with a limit.
    `in_flight` as in `Window`: the most micro-batches of a stream that a period mixes. `room_bytes` as in `Problem`.
    It fits at flat starts and when it is unrolled to `num_microbatches` (None: to several lengths). Where rhythms fit
    at flat starts alone, the search goes on with ever more room for what is then held.
    """
    best: SteadyResult | None = None
    room = np.array(room_bytes or (0,) * placement.num_ranks, np.int64)
    copies = range(1, _MOST_COPIES + 1) if microbatches_per_period is None else (microbatches_per_period,)
    for _ in range(_MOST_ROOMS):
        loop = Loop(placement, tuple(room.tolist()))
        best, over = _with_room(loop, copies, budget, in_flight, seed, num_microbatches, best)
        if not over.any() or budget.is_over or (best is not None and best.is_optimal):
            break
        room += over
    return best


def _with_room(
    loop: Loop,
    copies: Iterable[int],
    budget: Budget,
    in_flight: int | None,
    seed: int,
    num_microbatches: int | None,
    best: SteadyResult | None,
) -> tuple[SteadyResult | None, Integers]:
    """`best` or a better one; and by how much the fastest that did not fit when unrolled was over the limits."""
    over = np.zeros(loop.placement.num_ranks, np.int64)
    if any(limit is not None and loop.left_bytes(rank) > 0 for rank, limit in enumerate(loop.limits_bytes)):
        return best, over
    one_by_one = _one_by_one(loop)
    if one_by_one is None:
        return best, over
    bound_us, streams = period_bound(loop.placement), loop.placement.num_components
    for num_copies in copies:
        below = None if best is None else ceil(best.steady.us_per_microbatch * num_copies * streams)
        search = _Search(loop, num_copies, bound_us * streams, budget, seed, in_flight, num_microbatches)
        search.start(one_by_one)
        rhythm = search.run(below)
        over = over if over.any() else search.over_bytes
        if rhythm is not None:
            best = SteadyResult(Steady.of(loop.placement, num_copies, rhythm), bound_us, search.is_proven)
        if budget.is_over or (best is not None and (best.is_optimal or best.steady.period_us == 1)):
            break
    return best, over


def _one_by_one(loop: Loop) -> Rhythm | None:
    """One micro-batch of each stream after the other; None if even that does not fit."""
    orders = serial(loop.problem)
    starts = start_times(Tables.of(loop.problem), orders)
    if starts is None or not fits(loop.problem, orders):
        return None
    period_us = max(int((starts + loop.problem.durations_us).max()) + max(loop.problem.lags_us.values(), default=0), 1)
    place = {task: i for i, task in enumerate(loop.problem.topological)}
    return Rhythm(period_us, tuple(starts.tolist()), tuple(place[task] for task in range(loop.num_tasks)))


class _Search:
    """For the least period of `num_copies` micro-batches of each stream. None is less than `proven_us`."""

    def __init__(
        self,
        loop: Loop,
        num_copies: int,
        bound_us: Fraction,
        budget: Budget,
        seed: int,
        in_flight: int | None,
        num_microbatches: int | None,
    ) -> None:
        self.num_microbatches = num_microbatches
        self.has_carries = any(loop.carried)
        #: Of the fastest rhythm that fits at flat starts alone.
        self.over_bytes = np.zeros(loop.placement.num_ranks, np.int64)
        self.loop, self.num_copies, self.seed, self.in_flight = loop, num_copies, seed, in_flight
        self.budget, self.spare = budget.share(_COPIES_S), budget.share(_SOLVE_S)
        self.proven_us = max(ceil(bound_us * num_copies), 1)
        self.best: Rhythm | None = None
        self.most_us = 0

    @property
    def is_proven(self) -> bool:
        """Room kept free makes the limits lower than they are: what is not found there proves nothing."""
        return self.best is not None and self.best.period_us <= self.proven_us

    def start(self, one_by_one: Rhythm) -> None:
        """From one micro-batch after the other; nothing that needs longer than that is worth a look."""
        self.most_us = one_by_one.period_us * self.num_copies
        if self.num_copies == 1:
            self.take(one_by_one)

    def run(self, below_us: int | None) -> Rhythm | None:
        """The rhythm of the least period, if it is less than `below_us`."""
        low = self.proven_us  # where to look next; nothing was found below it
        step = max(low // _FIRST_STEP, 1)
        tried = low
        while not self._try(tried):
            low, tried, step = tried + 1, tried + step, step * 2
            if self.budget.is_over or tried >= (self.most_us if below_us is None else below_us):
                break
        if self.best is None and below_us is None:  # one micro-batch after the other always goes
            window = self._window(self.num_copies * self.loop.critical_us)
            self._take_answer(self._solved(window, self.spare))
        while self.best is not None and not self.budget.is_over:
            high = self.best.period_us
            if high - max(low, self.proven_us) < max(high // _PRECISION, 1):
                break
            middle = (max(low, self.proven_us) + high) // 2
            if not self._try(middle):
                low = middle + 1
        if self.best is None or (below_us is not None and self.best.period_us >= below_us):
            return None
        self._prove()
        self._polish()
        return self.best

    def _solved(
        self,
        window: Window,
        budget: Budget,
        goal: Literal["any", "latency", "memory"] = "any",
        hint_us: Sequence[int] | None = None,
    ) -> Answer:
        try:
            model = Period(window, goal)
            if hint_us is not None:
                model.hint(hint_us)
            return model.solve(budget, self.seed)
        except Stopped:  # the best so far stays
            return Answer(None, False)

    def _window(self, period_us: int, latency_us: int | None = None) -> Window:
        return Window(self.loop, self.num_copies, period_us, latency_us, self.in_flight)

    def take(self, rhythm: Rhythm | None) -> bool:
        """Whether it is faster than the best, and fits."""
        if rhythm is None or (self.best is not None and rhythm.period_us >= self.best.period_us):
            return False
        if self._fits(rhythm):
            self.best = rhythm
        return self.best is rhythm

    def _take_answer(self, answer: Answer) -> bool:
        """With earliest starts, else with the model's."""
        return self.take(answer.rhythm) or (self.has_carries and self.take(answer.as_solved))

    def _fits(self, rhythm: Rhythm) -> bool:
        """Orders were made to fit; what transfers hold depends on the times."""
        if not self.has_carries:
            return True
        steady = Steady.of(self.loop.placement, self.num_copies, rhythm)
        over = np.array(steady.over_bytes(self.num_microbatches))
        self.budget.spend(_SIMULATE_S)
        if not self.over_bytes.any():
            self.over_bytes = over
        return not over.any()

    def _try(self, period_us: int) -> bool:
        """Whether there is a rhythm of at most this period now."""
        if self.best is not None and self.best.period_us <= period_us:
            return True
        window = self._window(period_us)
        answer = self._solved(window, self.budget.share(_SOLVE_S))
        self._take_answer(answer)
        if answer.rhythm is None and answer.is_proven:
            self._note_none(period_us)
            return False
        if answer.rhythm is None and not self.budget.is_over and self.in_flight is None:  # annealing knows no cuts
            with suppress(Stopped):  # the best so far stays
                self.take(anneal(window, self.budget, self.seed))
        return self.best is not None and self.best.period_us <= period_us

    def _note_none(self, period_us: int) -> None:
        if not any(self.loop.room_bytes):
            self.proven_us = max(self.proven_us, period_us + 1)

    def _prove(self) -> None:
        """That there is none a µs shorter."""
        while self.best is not None and not self.is_proven and not self.budget.is_over:
            answer = self._solved(self._window(self.best.period_us - 1), self.budget.share(_PROVE_S))
            if answer.rhythm is None and answer.is_proven:
                self._note_none(self.best.period_us - 1)
            if not self._take_answer(answer):
                return

    def _polish(self) -> None:
        """The same period with less latency, then with less memory."""
        if self._solve_for("latency"):
            self._solve_for("memory")

    def _solve_for(self, goal: Literal["latency", "memory"]) -> bool:
        """Whether none is better."""
        assert self.best is not None
        window = self._window(self.best.period_us, self._latency_us(self.best))
        answer = self._solved(window, self.budget.share(_POLISH_S), goal, self.best.starts_us)
        for rhythm in (answer.rhythm, answer.as_solved if self.has_carries else None):
            if rhythm is not None and self._fits(rhythm):
                self.best = rhythm
                break
        return answer.is_proven

    def _latency_us(self, rhythm: Rhythm) -> int:
        durations, u = self.loop.durations_us, self.num_copies
        ends = (start + durations[node // u] for node, start in enumerate(rhythm.starts_us))
        return max(ends) - min(rhythm.starts_us)
