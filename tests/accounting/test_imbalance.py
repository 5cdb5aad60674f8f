"""Ranks with uneven work: what it costs, and why no cut balances them."""

from __future__ import annotations

import json
from dataclasses import replace

from rota import schedules
from rota.accounting import explain
from rota.core.cluster import Cluster
from rota.core.costs import Costs
from rota.core.placing import place, wave
from rota.core.plan import Plan
from rota.core.timeline import Timeline
from rota.core.usage import Usage

_CUTS = ("a", "b", "c", "d", "e", "f", "g")


def uneven(num_layers: tuple[int, ...] | None, forward_us: tuple[int, ...] = (10, 10, 10, 40, 30, 10, 10, 10)) -> Plan:
    """Eight stages on four ranks, down and back up: rank 3 has the two in the middle."""
    costs = Costs(forward_us, forward_us)
    plan = schedules.hanayo(wave(costs, Cluster.uniform(4)), 4)
    return plan if num_layers is None else replace(plan, usage=Usage(_CUTS, 1, 1, num_layers))


def told(plan: Plan | Timeline) -> str:
    text = explain(plan).to_text()
    return next((line for line in text.split("\n") if line.startswith("The work of the ranks is uneven")), "")


def test_a_rank_whose_stages_have_one_layer_each_cannot_be_relieved_by_cuts() -> None:
    plan = uneven((2, 1, 1, 1, 1, 1, 1, 1))
    assert not [one for one in explain(plan).suggestions if one.what == "cut"]
    assert told(plan) == (
        "The work of the ranks is uneven: rank 3 has 115% more than the mean, rank 0 38% less. A step takes at least "
        "as long as the work of rank 3, 560 µs; with as much work in all, but the same on every rank, it could take "
        "260 µs at best. Stages 3 and 4 of rank 3 have one layer each (9 layers in 8 stages), so other cuts can only "
        "exchange layers, not divide them. Try fewer stages per rank, of more layers each, or more places to cut, "
        "inside the blocks (`--cuts`, or rota.CutPoint in the model)."
    )
    fields = json.loads(explain(plan).to_json())["imbalance"]
    assert (fields["busiest"], fields["work_us"], fields["even_us"]) == (3, 560, 260)


def test_what_is_said_is_a_bound() -> None:
    plan = uneven((2, 1, 1, 1, 1, 1, 1, 1))
    found = explain(plan).imbalance
    assert found is not None
    assert found.even_us < found.work_us <= explain(plan).timeline.makespan_us
    even = uneven(None, (16, 16, 16, 17, 16, 16, 16, 17))  # as much work in all
    assert found.even_us == 4 * 2 * (16 + 17) - 4
    assert found.even_us <= explain(even).timeline.makespan_us < explain(plan).timeline.makespan_us


def test_a_plan_that_does_not_know_its_layers_gets_cuts() -> None:
    plan = uneven((2, 1, 1, 1, 1, 1, 1, 1))
    assert plan.usage is not None
    unknown = replace(plan, usage=replace(plan.usage, num_layers=()))
    found = explain(unknown)
    assert any(one.what == "cut" for one in found.suggestions)  # its slowest stage may have several layers
    assert found.imbalance is None


def test_where_no_cut_is_advised_and_layers_are_not_known_autoplan_is_named() -> None:
    placement = place(Costs((10, 10, 10), (20, 20, 20)), Cluster.uniform(2), [0, 1, 1])
    placement = placement.forward_only()
    assert told(schedules.forward_only(placement, 4)) == (
        "The work of the ranks is uneven: rank 1 has 33% more than the mean, rank 0 33% less. A step takes at least as "
        "long as the work of rank 1, 80 µs; with as much work in all, but the same on every rank, it could take "
        "60 µs at best. The plan does not say how many layers its stages have. Stages of several layers can be cut "
        "elsewhere, as `rota autoplan MODEL.py` does."
    )


def test_ranks_of_one_stage() -> None:
    costs = Costs((10, 10, 40), (10, 10, 40))
    plan = schedules.gpipe(place(costs, Cluster.uniform(3)), 4)
    plan = replace(plan, usage=Usage(("a", "b"), 1, 1, (2, 2, 1)))
    assert "Stage 2 of rank 2 has one layer (5 layers in 3 stages), so other cuts" in told(plan)
    assert "Try fewer ranks per pipeline, or more places to cut" in told(plan)


def test_even_ranks_and_those_for_which_a_cut_is_advised_are_not_told() -> None:
    assert told(uneven((2, 1, 1, 1, 1, 1, 1, 1), (10,) * 8)) == ""
    assert told(uneven((2, 1, 1, 9, 9, 1, 1, 1))) == ""
    assert any(one.what == "cut" for one in explain(uneven((2, 1, 1, 9, 9, 1, 1, 1))).suggestions)
