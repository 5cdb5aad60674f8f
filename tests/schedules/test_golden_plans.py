"""The orders of every family, kept as files that read as pictures: a line a rank, a column a time slot.

After a wanted change: ROTA_WRITE_GOLDEN=1 pytest tests/schedules/test_golden_plans.py, then read the difference.
"""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from rota import Cluster, Costs, Plan, simulate
from rota.schedules import FAMILIES, Family

FOLDER = Path(__file__).parent / "plans"
NUM_RANKS, NUM_MICROBATCHES = 4, 8


def plan_of(family: Family) -> Plan:
    costs = Costs.uniform(NUM_RANKS * family.stages_per_rank, 1, 1, 1, activation_bytes=2)
    placement = family.place(family.adapted(costs), Cluster.uniform(NUM_RANKS))
    if family.name == "seq1f1b":
        placement = placement.in_chunks(4, NUM_MICROBATCHES)
    return family(placement, NUM_MICROBATCHES)


def picture(plan: Plan) -> str:
    """The CSV with every op in the slot in which it runs if all take one slot, blank cells between."""
    unit = replace(plan.placement, tasks=tuple(replace(task, duration_us=1) for task in plan.placement.tasks))
    timeline = simulate(Plan(unit, plan.num_microbatches, plan.orders))
    width = max(len(str(op)) for order in plan.orders for op in order)
    lines = []
    for order, starts in zip(plan.orders, timeline.starts_us, strict=True):
        cells = dict(zip(starts, map(str, order), strict=True))
        lines.append(",".join(f"{cells.get(slot, ''):<{width}}" for slot in range(starts[-1] + 1)).rstrip())
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_orders_are_as_they_were(family: Family) -> None:
    plan = plan_of(family)
    path = FOLDER / f"{family.name}.csv"
    if os.environ.get("ROTA_WRITE_GOLDEN"):
        path.write_text(picture(plan))
    assert picture(plan) == path.read_text()
    assert Plan.from_csv(path.read_text(), plan.placement) == plan


def test_every_file_belongs_to_a_family() -> None:
    assert {path.stem for path in FOLDER.glob("*.csv")} == {family.name for family in FAMILIES}
