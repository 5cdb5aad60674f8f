"""Compiles loops in a thread of its own, part by part, while a search looks at the clock and for Ctrl-C.

Compiling takes seconds, once on a machine, and nothing can interrupt it. Later processes load the loops from disk, in
some hundredths of a second per part. A search asks only for the parts that it is about to use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from functools import cache
from pathlib import Path

import numpy as np
from numba import njit
from numba.core import event

from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.placing import place, wave
from rota.core.stopping import look
from rota.search import bounds
from rota.search.budget import Budget
from rota.search.critical_path import CriticalPath
from rota.search.dispatching import Dispatcher, Memory, guesses, serial
from rota.search.exact.rounds import Rounds
from rota.search.exact.state_space import rehash
from rota.search.local.moves import State, anneal
from rota.search.periodic.loop import Loop
from rota.search.periodic.modulo import Interval
from rota.search.periodic.offsets import anneal_offsets
from rota.search.periodic.retiming import Wait, retime
from rota.search.problem import NO_LIMIT, Orders, Problem
from rota.search.timing import Tables, peaks, replay, score, start_times
from rota.search.transfer_levels import Transfers, peaks_with_transfers

_LOOK_EVERY_S = 0.02

# numba loads half of itself when it first compiles: that is a part of importing it.
njit(lambda: 0)()  # type: ignore[call-arg]


class Part(Enum):
    """Loops that are compiled together."""

    TIMING = "times and memory of orders"
    DISPATCHING = "list scheduling"
    BOUNDS = "bounds"
    TRANSFERS = "what transfers hold"
    OFFSETS = "steady states"
    MOVES = "local search"
    WINDOWS = "heads and tails of orders"
    ROUNDS = "all states, round by round"


class _Compiler:
    """The thread, which ends when all that was asked for is compiled."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._wanted: list[Part] = []
        self._ready: set[Part] = set()
        self._thread: threading.Thread | None = None
        self._may_go_on = threading.Event()
        self._may_go_on.set()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing new is compiled in the block, which has the processor for itself."""
        self._may_go_on.clear()
        try:
            yield
        finally:
            self._may_go_on.set()

    def is_ready(self, *parts: Part) -> bool:
        """Whether these parts are compiled; they are from now on, soon, if they are not."""
        if self._ready.issuperset(parts):
            return True
        with self._changed:
            self._wanted += [part for part in parts if part not in self._ready and part not in self._wanted]
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._compile, name="rota: compiling loops")
                self._thread.start()
        return False

    def wait_for(self, *parts: Part, most_s: float = float("inf")) -> bool:
        """Returns when these parts are compiled (True), or after `most_s`. Raises Stopped if the search must stop."""
        waited_s = 0.0
        while not self.is_ready(*parts):
            if waited_s >= most_s:
                return False
            look()
            with self._changed:
                self._changed.wait(_LOOK_EVERY_S)
            waited_s += _LOOK_EVERY_S
        return True

    def _compile(self) -> None:
        with suppress(_MainThreadEnded), event.install_listener("numba:compile", _Pauses(self._may_go_on)):
            while True:
                with self._changed:
                    if not self._wanted:
                        self._thread = None
                        return
                    part = self._wanted[0]
                with suppress(Exception):  # then the search compiles by itself, and shows the error
                    _EXERCISES[part]()
                with self._changed:
                    self._ready.add(part)
                    self._wanted.remove(part)
                    self._changed.notify_all()


class _MainThreadEnded(BaseException):
    pass


class _Pauses(event.Listener):
    """Between two loops the thread may have to wait, and it ends when the program ends, which would wait for it."""

    def __init__(self, may_go_on: threading.Event) -> None:
        self._may_go_on, self._thread = may_go_on, threading.current_thread()

    def on_start(self, _: object) -> None:
        if threading.current_thread() is not self._thread:
            return
        while not self._may_go_on.wait(_LOOK_EVERY_S) and threading.main_thread().is_alive():
            pass
        if not threading.main_thread().is_alive():
            raise _MainThreadEnded

    def on_end(self, _: object) -> None:
        pass


_compiler = _Compiler()
is_ready, wait_for, paused = _compiler.is_ready, _compiler.wait_for, _compiler.paused


def are_on_disk() -> bool:
    """Whether an earlier process has compiled loops: where numba keeps them, in `NUMBA_CACHE_DIR` if that is set."""
    return any(Path(replay.stats.cache_path).glob("timing.replay-*.nbi"))


# --- each part's loops, used once on a small step --------------------------------------------------------------------


@cache
def _small_step() -> tuple[Problem, Orders]:
    costs = Costs.uniform(4, 3, 2, 2, activation_bytes=2, boundary_bytes=1)
    problem = Problem(wave(costs, Cluster.uniform(2, 10, latency_us=1)), 4)
    return problem, serial(problem)


def _time() -> None:
    problem, orders = _small_step()
    score(problem, orders)
    peaks(problem, orders)


def _dispatch() -> None:
    problem, _ = _small_step()
    Dispatcher(problem)(next(guesses(problem)))


def _bound() -> None:
    bounds.best(_small_step()[0])


def _count_transfers() -> None:
    problem, orders = _small_step()
    tables = Tables.of(problem)
    starts_us = start_times(tables, orders)
    assert starts_us is not None
    peaks_with_transfers(tables, Transfers.of(problem), orders, starts_us)


def _anneal_offsets() -> None:
    anneal_offsets(Interval(Loop(_small_step()[0].given), 1, 20), Budget(0.001, deterministic=True))
    retime(1, [Wait(0, 0, 1, 1)])


def _anneal() -> None:
    problem, orders = _small_step()
    tables, state, best = Tables.of(problem), State.of(problem, orders, 0), np.array([1000, 1000])
    anneal(tables, problem.step_ends, Memory.of(problem), state, best, False, np.array([1.0, 0.5]), 1000, 0)


def _find_paths() -> None:
    problem, orders = _small_step()
    CriticalPath(problem, of_span=False).paths(orders)


def _try_rounds() -> None:
    problem = Problem(place(Costs.uniform(2, 1, 1, activation_bytes=1), Cluster.uniform(2, 1)), 2)
    Rounds(problem).run(NO_LIMIT, Budget(1.0, deterministic=True))
    rehash(np.zeros((1, 1), np.uint8), np.full(2, -1, np.int32), 0)  # once there are many states


_EXERCISES: dict[Part, Callable[[], None]] = {
    Part.TIMING: _time,
    Part.DISPATCHING: _dispatch,
    Part.BOUNDS: _bound,
    Part.TRANSFERS: _count_transfers,
    Part.OFFSETS: _anneal_offsets,
    Part.MOVES: _anneal,
    Part.WINDOWS: _find_paths,
    Part.ROUNDS: _try_rounds,
}
