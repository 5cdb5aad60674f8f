"""Searches with their progress on the screen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rota.cli.requirements import require_search
from rota.cli.screen import progress_line
from rota.core.placement import Placement
from rota.core.units import size_text

if TYPE_CHECKING:
    from rota.search import Frontier, Point, SearchResult
    from rota.search.result import Objective

#: Instead of a schedule's name: search for the best order.
SEARCH = "search"
STARTING = "starting (the first search on a machine compiles for about ten seconds)"


def search_plan(
    placement: Placement, num_microbatches: int, time_limit_s: float | None, objective: Objective = "makespan"
) -> SearchResult:
    """The best plan that `find_plan` finds; a `time_limit_s` of None means 10."""
    require_search()
    from rota.search import find_plan

    with progress_line() as show:
        show(STARTING)
        return find_plan(
            placement, num_microbatches, objective=objective, time_limit_s=time_limit_s or 10.0, progress=show
        )


def search_frontier(placement: Placement, time_limit_s: float | None) -> Frontier:
    """The curve that `find_frontier` finds; a `time_limit_s` of None means 60."""
    require_search()
    from rota.search import find_frontier

    with progress_line() as show:
        show(STARTING)
        return find_frontier(placement, time_limit_s=time_limit_s or 60.0, progress=lambda point: show(_text(point)))


def _text(point: Point) -> str:
    return f"{size_text(point.limit_bytes)} per rank: {float(point.us_per_microbatch):,.1f} µs per micro-batch"
