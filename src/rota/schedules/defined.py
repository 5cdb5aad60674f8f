"""The named schedules that a placement allows, as candidates and for comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rota.errors import RotaError
from rota.placement import Placement
from rota.plan import Plan
from rota.schedules.families import FAMILIES
from rota.stopping import look


def named_plans(
    placement: Placement, num_microbatches: int, looking_at: Callable[[str], None]
) -> Iterator[tuple[str, Plan]]:
    """(name, plan) of each schedule that is defined here, but for `zb_auto`, which is a search itself."""
    for family in FAMILIES:
        if family.name == "zb_auto":
            continue
        looking_at(family.name)
        look()
        try:
            plan = family(placement, num_microbatches)
            assert plan.nodes  # raises PlanError where the placement is none that a schedule thinks of
        except RotaError:
            continue  # for another placement, or other numbers
        look()
        yield family.name, plan
