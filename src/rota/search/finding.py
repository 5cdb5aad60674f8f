"""`find_plan`: several methods take turns, the best plan is kept, and a proven bound says how good it is."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import get_args

from rota.costs import Cluster, Costs
from rota.placement import Placement
from rota.placing import wave
from rota.search.budget import Budget
from rota.search.portfolio import Portfolio
from rota.search.result import Objective, Progress, SearchResult
from rota.search.validation import refuse_wrong, refuse_wrong_options, seconds_of
from rota.stopping import ended_by_ctrl_c, guarded


def find_plan(
    placement: Placement,
    num_microbatches: int,
    *,
    objective: Objective = "makespan",
    time_limit_s: float = 10.0,
    seed: int = 0,
    deterministic: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> SearchResult:
    """The order that finishes first, for any placement, and how far from the best possible it may still be.

    Objectives: "makespan"; "span", the longest busy window of a rank; "period", time per micro-batch in steady state.
    Never worse than a named schedule that fits. Ctrl-C ends the search with the best so far; a second one breaks off.
    An answer that is proven optimal is the same on every run; another one depends on how far the search comes in
    `time_limit_s`, unless `deterministic`: then that many nominal seconds of work are done, however long they take.
    `progress` is called with each better plan and each method's turn. An error that it raises ends the search like
    Ctrl-C: it is warned of and told in `stopped_by`, and raised where no plan was found yet. The first search of all
    compiles for some ten seconds, which do not count. Raises SearchError if no plan that fits was found.
    """
    refuse_wrong(placement, num_microbatches, objective, get_args(Objective))
    refuse_wrong_options(seed, progress)
    seconds = seconds_of(time_limit_s)
    compile_once()
    budget = Budget(seconds, deterministic)
    with ended_by_ctrl_c(budget):
        search = Portfolio(placement, num_microbatches, objective, budget, seed, guarded(progress, budget))
        search.run()
        return search.result()


@cache
def compile_once() -> None:
    """All compiled code, by a small search that needs it; kept on disk, from where later processes load it."""
    costs = Costs.uniform(4, 3, 2, 2, activation_bytes=2)
    placement = wave(costs, Cluster.uniform(2, 4, latency_us=1))
    for objective in get_args(Objective):
        search = Portfolio(placement, 5, objective, Budget(0.02, deterministic=True), 0, lambda _: None)
        search.run()
