"""Every named schedule at every size: valid where it is defined, and elsewhere it names sizes that work."""

import re
from collections.abc import Iterator

import pytest

from rota import Cluster, Costs, Kind, Op, Plan, ScheduleError, bidirectional, check, simulate, wave
from rota.schedules import FAMILIES, NAMED, Family, PipeSchedule, zb_h1, zb_h2
from rota.schedules.table import best, compare_schedules, to_json, to_text
from support.sampling import MOST_RANKS, microbatches

pytestmark = pytest.mark.sampled

FORWARD_US, INPUT_US, WEIGHT_US = 7, 6, 5
SEVERAL_STAGES_PER_RANK = {
    "interleaved_1f1b": [1, 2, 3, 4],
    "interleaved_zb": [1, 2, 3, 4],
    "looped_bfs": [1, 2, 3, 4],
    "gpipe": [1, 2, 3, 4],
    "forward_only": [1, 2, 3, 4],
}


def plan_of(family: Family, num_ranks: int, stages_per_rank: int, num_microbatches: int) -> Plan:
    num_stages = num_ranks * (1 if family.place is bidirectional else stages_per_rank)
    costs = family.adapted(Costs.uniform(num_stages, FORWARD_US, INPUT_US, WEIGHT_US, activation_bytes=2))
    return family(family.place(costs, Cluster.uniform(num_ranks)), num_microbatches)


def sizes(family: Family) -> Iterator[tuple[int, int, int]]:
    """(ranks, stages per rank, micro-batches)."""
    rounds = SEVERAL_STAGES_PER_RANK.get(family.name, [family.stages_per_rank])
    for num_ranks in range(1, MOST_RANKS + 1):
        for stages_per_rank in rounds:
            for num_microbatches in microbatches(num_ranks):
                yield num_ranks, stages_per_rank, num_microbatches


#: Those of V, of waves, of two directions and of chunks have tests of every size of their own.
OF_CHAINS = [family for family in FAMILIES if family.place not in (wave, bidirectional) and family.name != "seq1f1b"]


@pytest.mark.parametrize("family", OF_CHAINS, ids=lambda family: family.name)
def test_every_size(family: Family) -> None:
    refused = set()
    for size in sizes(family):
        try:
            plan = plan_of(family, *size)
        except ScheduleError as error:
            refused.add(str(error))
        else:
            check(plan)
    assert len(refused) < len(list(sizes(family))) / 2
    for told in refused:
        assert told.startswith(f"{family.name}: ")
        assert re.search(r"; (give|place|use|plan|split)", told), told


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_no_microbatch_is_refused(family: Family) -> None:
    with pytest.raises(ScheduleError, match="num_microbatches is 0"):
        plan_of(family, 2 if family.place is not bidirectional else 4, family.stages_per_rank, 0)


@pytest.mark.parametrize("name", [family.name for family in FAMILIES if family.bubble is not None])
def test_published_bubbles(name: str) -> None:
    """At sizes where the papers' assumptions hold: micro-batches a multiple of the ranks, no transfers."""
    for num_ranks, a_rank in ((2, 2), (4, 2), (4, 3), (8, 3)):
        costs = Costs.uniform(num_ranks, 24, 12, 12, activation_bytes=2)
        if name in ("zb_h2", "zb_v"):  # what they promise needs F = I = W
            costs = Costs.uniform(num_ranks, 12, 12, 12, activation_bytes=2)
        num_microbatches = num_ranks if name == "chimera" else a_rank * num_ranks
        (row,) = compare_schedules(costs, Cluster.uniform(num_ranks), num_microbatches, [NAMED[name]])
        assert row.problem == ""
        assert row.bubble_us == pytest.approx(row.formula_us)


def test_zero_bubble_by_hand_holds_what_it_promises() -> None:
    for num_ranks in (2, 4, 8):
        for num_microbatches in (2 * num_ranks, 3 * num_ranks):
            costs = Costs.uniform(num_ranks, 10, 10, 10, activation_bytes=2)
            placement = NAMED["zb_h1"].place(costs, Cluster.uniform(num_ranks))
            assert max(simulate(zb_h1(placement, num_microbatches)).peak_memory_bytes) == 2 * num_ranks
            timeline = simulate(zb_h2(placement, num_microbatches))
            assert max(timeline.peak_memory_bytes) <= 2 * (2 * num_ranks - 1)
            assert timeline.span_us == 30 * num_microbatches  # no bubble at all


def test_varuna_recomputes_one_microbatch_at_a_time() -> None:
    costs = Costs.uniform(4, 10, 20, activation_bytes=100, checkpoint_bytes=1, recompute_us=(10, 10, 10, None))
    plan = NAMED["varuna"](NAMED["varuna"].place(costs, Cluster.uniform(4)), 12)
    timeline = simulate(plan)
    assert max(timeline.peak_memory_bytes[:3]) < 2 * 100
    for stage in range(3):
        order = [op for op in plan.orders[stage] if op.kind is not Kind.F]
        assert order == [op for m in range(12) for op in (Op(stage, Kind.R, m), Op(stage, Kind.B, m))]
    assert [op.kind for op in plan.orders[3]] == [Kind.F, Kind.B] * 12


class AllForwardsFirst(PipeSchedule):
    def steps(self, stage: int) -> Iterator[Op | str]:
        for m in self.microbatches(stage):
            yield f"{stage}F{m}"
        for m in self.microbatches(stage):
            yield Op(stage, Kind.B, m)


def test_your_own_schedule() -> None:
    placement = NAMED["gpipe"].place(Costs.uniform(3), Cluster.uniform(3))
    assert AllForwardsFirst(placement, 4).plan() == NAMED["gpipe"](placement, 4)
    with pytest.raises(ScheduleError, match="AllForwardsFirst: num_microbatches is 0"):
        AllForwardsFirst(placement, 0)
    two = NAMED["gpipe"].place(Costs.uniform(4), Cluster.uniform(2))
    with pytest.raises(ScheduleError, match="rank 0 has the stages 0, 2"):
        AllForwardsFirst(two, 1).plan()


def test_table() -> None:
    costs = Costs.uniform(4, 1000, 2000, activation_bytes=1000)
    rows = compare_schedules(costs, Cluster.uniform(4, limit_bytes=4500), 8)
    assert {row.name for row in rows} == {family.name for family in FAMILIES} - {"forward_only", "seq1f1b"}
    winner = best(rows)
    assert winner.activation_bytes <= 4500
    assert all(
        row.makespan_us >= winner.makespan_us for row in rows if row.fits and row.makespan_us and winner.makespan_us
    )
    text = to_text(rows, 4500)
    assert f"▸  {winner.name}" in text
    assert "gpipe" in text.split("over the limit")[-2].splitlines()[-1]
    assert to_json(rows).count('"best": true') == 1


def test_uneven_costs_are_cut_among_a_ranks_stages() -> None:
    costs = Costs(forward_us=(10, 30), backward_us=(20, 60), activation_bytes=(8, 4), static_bytes=(100, 50))
    halves = NAMED["zb_v"].costs_from(costs)
    assert halves.forward_us == (5, 15, 15, 5)
    assert halves.weight_us == (5, 15, 15, 5)
    assert halves.static_bytes == (50, 25, 25, 50)


def test_times_that_stages_cannot_share_are_refused() -> None:
    rows = compare_schedules(Costs.uniform(4, 1, 2), Cluster.uniform(4), 8)
    problems = {row.name: row.problem for row in rows if row.stages_per_rank == 2 and row.makespan_us is None}
    assert "forward_us of rank 0 is 1, which 2 stages cannot share" in problems["zb_v"]
    assert set(problems) == {family.name for family in FAMILIES if family.stages_per_rank == 2}


def test_what_travels_between_stages_that_were_cut() -> None:
    """A number for all edges stays; of several the largest counts, as the new boundaries are not known."""
    chain = {"forward_us": (2, 2, 2), "backward_us": (4, 4, 4), "edges": ((0, 1), (1, 2))}
    for costs in (
        Costs(**chain, boundary_bytes=7, gradient_bytes=5),  # type: ignore[arg-type]
        Costs(**chain, boundary_bytes=(7, 3), gradient_bytes=(2, 5)),  # type: ignore[arg-type]
    ):
        cut = NAMED["interleaved_1f1b"].costs_from(costs)
        assert (cut.num_stages, cut.edges, cut.boundary_bytes, cut.gradient_bytes) == (6, None, 7, 5)


def test_transfers_count_for_every_family() -> None:
    """At a byte a µs each way of 7 bytes takes 7 µs."""
    free, slow = (
        {row.name: row.makespan_us or 0 for row in compare_schedules(costs, Cluster.uniform(4, bytes_per_us=1), 8)}
        for costs in (Costs.uniform(4, 4, 8), Costs.uniform(4, 4, 8, boundary_bytes=7))
    )
    assert {name for name, makespan_us in slow.items() if makespan_us < free[name] + 2 * 7} == set()
