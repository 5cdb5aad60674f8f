"""`find_plan`: the best order for a step, whose micro-batches are alike or differ, with a proof of how good it is.

Where they differ, the search of the unfolded step (see `unfolding`) keeps the sequence of the micro-batches first,
which leaves fewer choices; then, unless it is to be kept, what was found is where the search of all orders begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from typing import get_args

from rota.core.errors import SearchError
from rota.core.placement import Placement
from rota.core.plan import Plan
from rota.core.simulation import check, simulate
from rota.core.stopping import ended_by_ctrl_c, guarded
from rota.schedules.families import named_plans
from rota.search.budget import Budget
from rota.search.portfolio import Portfolio
from rota.search.problem import Problem
from rota.search.result import ANY_SEQUENCE, KEPT_SEQUENCE, Objective, Progress, SearchResult
from rota.search.unfolding import Unfolding
from rota.search.validation import refuse_wrong, refuse_wrong_progress, seconds_of

_KEPT_SHARE = 0.4  # of the budget, for orders that keep the sequence


def find_plan(
    placement: Placement,
    num_microbatches: int,
    *,
    objective: Objective = "makespan",
    time_limit_s: float = 10.0,
    deterministic: bool = False,
    keep_sequence: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> SearchResult:
    """Search for the fastest order for a placement, with a proven bound on how much faster any order can be.

    The plan is never worse than a named schedule that fits and that there was time to make. Ctrl-C ends the search with
    the best so far; a second one aborts. An answer that is proven optimal is the same on every run; another one depends
    on how far the search gets in `time_limit_s`, unless it is `deterministic`. Loops are compiled when a search first
    needs them on a machine, which takes some seconds and does not count.

    Args:
        placement: The tasks of one micro-batch, and the cluster with its memory limits. Its micro-batches may differ
            (`Placement.of_classes`).
        num_microbatches: Micro-batches per step.
        objective: What is minimized: "makespan"; "span", the longest busy window of a rank; or "period", the time per
            micro-batch in steady state.
        time_limit_s: How long to search, in seconds.
        deterministic: Do `time_limit_s` nominal seconds of work, however long they last; the answer is then the same
            on every run.
        keep_sequence: Where micro-batches differ: whether every task takes them in their sequence. The plan is then the
            best one that does; `SearchResult.among` says which plans the proof covers.
        progress: Called with each better plan and each method's turn. An error that it raises ends the search like
            Ctrl-C: it is issued as a warning and reported in `stopped_by`, or raised if no plan was found by then.

    Returns:
        The best plan found, checked (above 50,000 ops only by the search's own loops), with a proven bound.

    Raises:
        SearchError: An argument is invalid, or no plan that fits was found.
    """
    refuse_wrong(placement, num_microbatches, objective, get_args(Objective))
    refuse_wrong_progress(progress)
    budget = Budget(seconds_of(time_limit_s), deterministic)
    with ended_by_ctrl_c(budget):
        if not placement.is_alike:
            return _find_differing(placement, objective, keep_sequence, budget, guarded(progress, budget))
        problem = Problem(placement, num_microbatches)
        return Portfolio(problem, objective, budget, guarded(progress, budget)).run()


def _find_differing(
    placement: Placement,
    objective: Objective,
    keep_sequence: bool,
    budget: Budget,
    progress: Callable[[Progress], None],
) -> SearchResult:
    """`find_plan` for micro-batches that differ."""
    unfolding = Unfolding(placement, keeps_sequence=True)
    named = [*named_plans(placement, unfolding.num_microbatches, lambda _: None)]
    plans = [*named]
    if not keep_sequence:
        with suppress(SearchError):  # another sequence may fit
            first = _search(unfolding, objective, budget.share(_KEPT_SHARE * budget.seconds), progress, named)
            plans.append((first.how, unfolding.fold(first.plan)))
        unfolding = Unfolding(placement)
    result = _search(unfolding, objective, budget, progress, plans)
    plan = unfolding.fold(result.plan)
    check(plan)
    timeline = simulate(plan)
    names = {name for name, _ in named}
    return replace(
        result,
        plan=plan,
        value_us=Fraction(timeline.span_us if objective == "span" else timeline.makespan_us),
        named=tuple(schedule for schedule in result.named if schedule.name in names),
        among=KEPT_SEQUENCE if keep_sequence else ANY_SEQUENCE,
    )


def _search(
    unfolding: Unfolding,
    objective: Objective,
    budget: Budget,
    progress: Callable[[Progress], None],
    plans: Iterable[tuple[str, Plan]],
) -> SearchResult:
    """The result for the unfolded step."""
    unfolded = ((name, unfolding.unfold(plan)) for name, plan in plans)
    return Portfolio(unfolding.problem, objective, budget, progress, unfolded).run()
