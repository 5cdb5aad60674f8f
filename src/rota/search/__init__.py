"""The best schedule for any placement, with a proof of how good it is."""

from rota.search.bounds import Bound, bounds_of
from rota.search.finding import find_plan
from rota.search.frontier import Frontier, Point, find_frontier
from rota.search.repeating import Repeating, find_repeating
from rota.search.result import NamedPlan, Progress, SearchResult, gap
from rota.search.steady import SteadyResult, find_steady
from rota.search.steady_state import Steady

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
