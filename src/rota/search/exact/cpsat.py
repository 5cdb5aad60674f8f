"""How this search calls CP-SAT: the same answer on every run, within a budget, and Ctrl-C ends it."""

from __future__ import annotations

from math import ceil
from threading import Thread
from time import monotonic

from ortools.sat.python import cp_model

from rota.search.budget import Budget

_S_PER_UNIT = 2.0  # seconds of an ordinary machine per unit of CP-SAT's own count of work
_LOOK_EVERY_S = 0.05  # how often to look whether the search as a whole is over
_MOST_STOPPING_S = 0.2  # how long to wait for a solver that was told to stop, before it is left to end by itself


def solve(
    model: cp_model.CpModel, budget: Budget, seed: int = 0, *, relaxes: bool = True
) -> tuple[int, cp_model.CpSolver]:
    """(status, solver), when the model is solved or the budget is used up.

    With one worker, what is found depends only on the number of steps; on models of this size it was also the fastest.
    Without `relaxes` it neither probes nor uses linear relaxations: faster where these tell little.
    """
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.num_workers = 1
    parameters.random_seed = seed
    parameters.max_deterministic_time = budget.left_s / _S_PER_UNIT
    if not relaxes:
        parameters.linearization_level = 0
        parameters.cp_model_probing_level = 0
    parameters.catch_sigint_signal = False
    status = [int(cp_model.UNKNOWN)]

    def run() -> None:
        status[0] = int(solver.solve(model))

    thread = Thread(target=run)  # the main thread stays free, for only it receives Ctrl-C
    thread.start()
    try:
        while thread.is_alive() and not budget.must_stop:
            thread.join(_LOOK_EVERY_S)
    finally:
        is_done = _stopped(thread, solver)
    if not is_done:
        return int(cp_model.UNKNOWN), solver
    budget.spend(solver.response_proto.deterministic_time * _S_PER_UNIT)
    return status[0], solver


def raised(bound_us: int, solver: cp_model.CpSolver) -> int:
    """The larger of this bound and the one that the solver has proven, if it has ended."""
    try:
        return max(bound_us, ceil(solver.best_objective_bound))
    except RuntimeError:  # it was left to end by itself, and has no bound yet
        return bound_us


def _stopped(thread: Thread, solver: cp_model.CpSolver) -> bool:
    """Ends the solver: whether it has ended within `_MOST_STOPPING_S`. Simplifying a model may last longer."""
    deadline_s = monotonic() + _MOST_STOPPING_S
    while thread.is_alive() and monotonic() < deadline_s:
        solver.stop_search()
        thread.join(_LOOK_EVERY_S)
    return not thread.is_alive()
