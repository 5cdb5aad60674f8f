"""The best schedule for any placement, with a proof of how good it is."""

from rota.search.bounds import Bound, bounds_of
from rota.search.finding import find_plan
from rota.search.periodic.memory_frontier import Frontier, Point, find_frontier
from rota.search.periodic.steady import Steady, SteadyResult, find_steady
from rota.search.repeating import Repeating, find_repeating
from rota.search.result import NamedPlan, Progress, SearchResult, gap

__all__ = [
    "Bound",
    "Frontier",
    "NamedPlan",
    "Point",
    "Progress",
    "Repeating",
    "SearchResult",
    "Steady",
    "SteadyResult",
    "bounds_of",
    "find_frontier",
    "find_plan",
    "find_repeating",
    "find_steady",
    "gap",
]
