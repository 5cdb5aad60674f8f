"""Other orders for a plan whose costs have changed, searched for while the plan runs, in a process of its own.

python -m rota.search.reordering

    request   {"plan": …, "others": […], "time_limit_s": 10.0}: the plan that runs, and others, all with the new costs
    answer    {"plan": …, "how": …, "before_us": …, "makespan_us": …, "bound_us": …}, or {"error": …}

One line of JSON each. The process has the lowest priority, and ends when its input does: with the process that has
started it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from math import ceil
from typing import Any, NamedTuple

from rota.checking import check
from rota.errors import RotaError, SearchError
from rota.placement import Placement
from rota.plan import Plan
from rota.search.finding import find_plan
from rota.simulation import simulate

_LOWEST_PRIORITY = 19


class Reordered(NamedTuple):
    """The best orders found for a plan; the plan itself if no others are faster.

    `how` they were found. `before_us` is the makespan of the plan as it was, `bound_us` a lower bound for all orders
    that need no more memory.
    """

    plan: Plan
    how: str
    before_us: int
    makespan_us: int
    bound_us: int


def reorder(
    plan: Plan, others: Sequence[Plan] = (), *, time_limit_s: float = 10.0, deterministic: bool = False
) -> Reordered:
    """The fastest orders for the same tasks on the same ranks, within the memory that a rank may use.

    A rank without a memory limit may use as much as `plan` or one of the `others` does there.

    Args:
        plan: The plan that runs, with the costs to search for.
        others: Plans of the same placement. Of those that are as fast as what the search finds the first counts.
        time_limit_s: How long to search, in seconds.
        deterministic: As for `find_plan`.

    Returns:
        The plan, checked, with the rest of `plan` as it was.

    Raises:
        PlanError: `plan` or one of the others must not run.
    """
    for one in (plan, *others):
        check(one)
    best, how, least_us = plan, "the same orders", simulate(plan).makespan_us
    before_us, bound_us = least_us, 0
    for other in others:
        if (makespan_us := simulate(other).makespan_us) < least_us:
            best, how, least_us = other, "another plan's orders", makespan_us
    with suppress(SearchError):  # nothing that fits was found in that time
        found = find_plan(
            _limited(plan.placement, (plan, *others)),
            plan.num_microbatches,
            time_limit_s=time_limit_s,
            deterministic=deterministic,
        )
        bound_us = min(ceil(found.bound_us), least_us)
        if found.timeline.makespan_us < least_us:
            orders, service_orders = found.plan.orders, found.plan.service_orders
            best, how = replace(plan, orders=orders, service_orders=service_orders), found.how
            check(best)
            least_us = simulate(best).makespan_us
    return Reordered(best, how, before_us, least_us, bound_us)


def _limited(placement: Placement, plans: Sequence[Plan]) -> Placement:
    """The placement with a limit for each rank: its own, or else the most that one of the plans needs there."""
    peaks = [simulate(plan).peak_memory_bytes for plan in plans]
    limits = tuple(
        max(of_rank) if limit is None else limit
        for limit, of_rank in zip(placement.cluster.limit_bytes, zip(*peaks, strict=True), strict=True)
    )
    return replace(placement, cluster=replace(placement.cluster, limit_bytes=limits))


# --- the process ------------------------------------------------------------------------------------------------------


def main() -> None:
    """Answer one request."""
    os.nice(_LOWEST_PRIORITY)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output is not for the caller
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_input, daemon=True).start()
    answers.write(f"{json.dumps(_answer(request))}\n")
    answers.flush()


def _end_with_input() -> None:
    sys.stdin.readline()
    os._exit(0)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    try:
        others = [Plan.from_json(text) for text in request["others"]]
        found = reorder(Plan.from_json(request["plan"]), others, time_limit_s=request["time_limit_s"])
    except RotaError as error:
        return {"error": str(error)}
    except Exception:
        return {"error": traceback.format_exc()}
    return {**found._asdict(), "plan": found.plan.to_json()}


if __name__ == "__main__":
    main()
