"""Varuna's schedule as a plan."""

from __future__ import annotations

from rota.costs import Cluster, Costs
from rota.placing import place
from rota.plan import Plan
from rota.schedules import varuna


def plan_of(num_stages: int, num_microbatches: int, costs: Costs | None = None, cluster: Cluster | None = None) -> Plan:
    """The order is Varuna's whatever the costs; without any, they are its own ticks: 1 for F and R, 2 for B."""
    if costs is None:
        costs = Costs.uniform(num_stages, 1, 2, recompute_us=(*(1,) * (num_stages - 1), None))
    return varuna(place(costs, cluster or Cluster.uniform(num_stages)), num_microbatches)
