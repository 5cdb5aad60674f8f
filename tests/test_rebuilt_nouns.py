"""Nouns that are made from others keep all of their fields, except those that they are made to change."""

from collections.abc import Collection
from dataclasses import fields, replace
from typing import Any

import pytest

from rota import AllReduceTimes, Cluster, Costs, Kind, Link, Machine, Placement, Plan, SharedLink, place, schedules
from rota.core.plan import Usage
from rota.runtime.execution import forwards_of
from rota.schedules import NAMED
from rota.search.unfolding import Unfolding

ALL_REDUCES = (AllReduceTimes(2, ((1, 2), (100, 30))), AllReduceTimes(4, ((1, 3), (100, 40))))
CLUSTER = Cluster(
    limit_bytes=(10**9,) * 4,
    link=Link(1, 2),
    links=((0, 1, Link(7, 8)),),
    shared=(SharedLink("host", 13, (0, 1, 2, 3), (0, 1, 2, 3)),),
    all_reduces=ALL_REDUCES,
)
COSTS = Costs(
    forward_us=(10, 11, 12, 13),
    backward_us=(20, 21, 22, 23),
    weight_us=(9, 8, 7, 6),
    activation_bytes=(100, 101, 102, 103),
    input_frees_bytes=(50, 51, 52, 53),
    boundary_bytes=(60, 61, 62),
    gradient_bytes=(70, 71, 72),
    forward_peak_bytes=(1, 2, 3, 4),
    backward_peak_bytes=(5, 6, 7, 8),
    weight_peak_bytes=(9, 10, 11, 12),
    static_bytes=(1000, 1001, 1002, 1003),
    state_bytes=(200, 201, 202, 203),
    snapshot_bytes=(300, 301, 302, 303),
    reduce_us=(30, 31, 32, 33),
    optimizer_us=(40, 41, 42, 43),
    recompute_us=(9, 8, 7, None),
    checkpoint_bytes=(20, 21, 22, 23),
    note="measured",
    microbatch_rows=2,
    spread_us=(4, 3, 2, 1),
)


def plan() -> Plan:
    """With every field, on four ranks; two samples are cut in two chunks, and the chunks differ."""
    placements = [place(replace(costs, recompute_us=None), CLUSTER) for costs in (COSTS, COSTS)]
    tasks = tuple(replace(task, duration_us=task.duration_us + 1) for task in placements[1].tasks)
    placements[1] = replace(placements[1], tasks=tasks)
    placement = Placement.of_classes(placements, (0, 1, 0, 1), sample_of=(0, 0, 1, 1))
    made = schedules.seq1f1b(placement, 4)
    served = (tuple(transfer for _, transfer in made.shared_transfers.transfers()),)
    usage = Usage(("a", "b", "c"), 2, 2, (1, 1, 1, 1), "measured")
    return replace(made, usage=usage, service_orders=served)


def same_but(before: Any, after: Any, changed: Collection[str]) -> None:
    """All fields of `before` are set, and are the same in `after`, but for those that are `changed`."""
    for field in fields(before):
        if field.name not in changed:
            value = getattr(before, field.name)
            assert value not in ((), None, 0, ""), f"{field.name} is not set, so nothing is tested"
            assert getattr(after, field.name) == value, field.name


def test_the_cluster_of_a_pipeline_has_all_that_its_machine_has() -> None:
    machine = Machine(4, link=CLUSTER)
    same_but(CLUSTER, machine.cluster(4, 1), ())
    same_but(CLUSTER, machine.cluster(2, 2), {"limit_bytes", "links", "shared", "all_reduces"})
    assert machine.cluster(2, 2).all_reduces == ALL_REDUCES[:1]


def test_the_forwards_of_a_plan_are_that_plan() -> None:
    before = plan()
    after = forwards_of(before)
    same_but(before, after, {"placement", "orders", "service_orders", "merged_replicas"})
    same_but(before.placement, after.placement, {"tasks", "edges", "step_ends"})
    wanted = tuple(t for t in before.service_orders[0] if t.source.kind is t.target.kind is Kind.F)
    assert after.service_orders == (wanted,)


def test_an_unfolded_step_has_the_same_ranks() -> None:
    placement = plan().placement
    same_but(placement, Unfolding(placement).problem.original, {"tasks", "edges", "step_ends", "class_of", "sample_of"})


def test_one_class_of_microbatches_has_what_all_have() -> None:
    placement = plan().placement
    for of_class in (placement.classes[1], placement.average):
        same_but(placement, of_class, {"tasks", "edges", "class_of", "sample_of"})
        for before, after in zip(placement.tasks, of_class.tasks, strict=True):
            assert (before.stage, before.kind, before.ranks) == (after.stage, after.kind, after.ranks)


@pytest.mark.parametrize("name", [name for name, family in NAMED.items() if family.stages_per_rank > 1])
def test_costs_that_are_cut_for_a_family_keep_their_sums_and_their_notes(name: str) -> None:
    cut = NAMED[name].costs_from(COSTS)
    split = {"backward_us", "weight_us"} if NAMED[name].backward != "split" else set()
    assert (cut.note, cut.microbatch_rows) == (COSTS.note, COSTS.microbatch_rows)
    for field in fields(COSTS):
        value = getattr(COSTS, field.name)
        if isinstance(value, tuple) and field.name not in {*split, "boundary_bytes", "gradient_bytes"}:
            assert sum(filter(None, getattr(cut, field.name))) == sum(filter(None, value)), field.name
