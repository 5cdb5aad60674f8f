"""CP-SAT as this search uses it: the same answer on every run, within a budget, ended by Ctrl-C."""

from __future__ import annotations

from threading import Thread

from ortools.sat.python import cp_model

from rota.search.budget import Budget

_S_A_UNIT = 2.0  # an ordinary machine's seconds for one unit of CP-SAT's own count of work
_LOOK_EVERY_S = 0.05  # whether the search as a whole is over


def solve(model: cp_model.CpModel, budget: Budget, seed: int = 0) -> tuple[int, cp_model.CpSolver]:
    """(status, solver), when the model is solved or the budget over.

    One worker: what it finds depends on the count of its steps alone, and on models of this size it was the fastest.
    """
    solver = cp_model.CpSolver()
    parameters = solver.parameters
    parameters.num_workers = 1
    parameters.random_seed = seed
    parameters.max_deterministic_time = budget.left_s / _S_A_UNIT
    parameters.catch_sigint_signal = False
    status = [int(cp_model.UNKNOWN)]

    def run() -> None:
        status[0] = int(solver.solve(model))

    thread = Thread(target=run, daemon=True)  # beside the main thread, which alone hears of Ctrl-C
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK_EVERY_S)
        if budget.must_stop:
            solver.stop_search()
    budget.spend(solver.response_proto.deterministic_time * _S_A_UNIT)
    return status[0], solver
