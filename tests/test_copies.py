"""Placements that offload, and copies in orders without them."""

from dataclasses import replace

import pytest
from hypothesis import assume, given, settings, strategies as st

from rota import Cluster, Costs, Kind, Op, Placement, PlacementError, Plan, check, explain, idle, place, simulate
from rota.accounting.causes import Cause
from rota.calibration.placement_costs import costs_of
from rota.core.copies import with_copies, without_copies
from rota.schedules import NAMED
from rota.search.finding import find_plan
from support.core_strategies import Chooser, deal, linear_extension, placed
from support.sampling import some


def alone(copied: int = 50) -> Placement:
    """One stage on one rank, of whose 50 bytes so many are copied, 10 per µs."""
    costs = Costs((2,), (4,), activation_bytes=(50,), offload_bytes=(copied,))
    return place(costs, Cluster.uniform(1).with_host_links(10))


def ops(text: str) -> tuple[Op, ...]:
    return tuple(map(Op.parse, text.split()))


def test_a_step_with_copies_by_hand() -> None:
    """F takes 2 and B 4, each copy 5: F0 from 0, O0 and L0 at 7, B0 from 12."""
    timeline = simulate(Plan(alone(), 1, (ops("0F0 0O0 0L0 0B0"),)))
    assert timeline.starts_us == ((0, 7, 7, 12),)
    assert timeline.memory(0) == [(0, 50), (2, 50), (7, 50), (12, 50), (16, 0)]
    assert [interval[1:4] for interval in idle(timeline)] == [(2, 7, Cause.COPY), (7, 12, Cause.COPY)]
    assert "copies to and from the host that take no time" in explain(timeline).to_text()
    assert costs_of(alone()).offload_bytes == (50,)


def test_memory_is_free_between_the_two_copies() -> None:
    """Two micro-batches of 50 bytes in 70."""
    placement = alone(40)
    plan = Plan(placement, 2, (ops("0F0 0O0 0F1 0O1 0L1 0B1 0L0 0B0"),))
    assert simulate(plan).peak_memory_bytes == (60,)
    assert Plan.from_json(plan.to_json()) == plan


def resized(placement: Placement, kind: Kind, num_bytes: int) -> Placement:
    tasks = [replace(t, held_bytes=num_bytes) if t.kind is kind else t for t in placement.tasks]
    return replace(placement, tasks=tuple(tasks))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: resized(p, Kind.O, -49), "num_bytes of the edge 0F -> 0O is 50, but held_bytes of task 0O is -49"),
        (lambda p: resized(p, Kind.L, 60), "num_bytes of the edge 0L -> 0B is 50, but held_bytes of task 0L is 60"),
        (lambda p: replace(p, cluster=Cluster.uniform(1)), "no shared link between rank 0 and its host"),
        (lambda p: alone(51), r"offload_bytes\[0\] is 51, but F of this stage holds 50"),
    ],
)
def test_half_copies_are_refused(change: object, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        change(alone())  # type: ignore[operator]


@given(placed(wired=True), st.integers(1, 5), st.integers(0, 2**16), st.integers(0, 60))
@settings(max_examples=some(150))
def test_copies_added_to_any_order_give_a_plan(
    placement: Placement, num_microbatches: int, seed: int, limit_bytes: int
) -> None:
    """All ops are there, in the same order; copies are begun in the order of what they are for; and it ends."""
    placement = replace(placement, cluster=replace(placement.cluster, limit_bytes=(limit_bytes,) * placement.num_ranks))
    base = without_copies(placement)
    assume(base is not placement)
    plan = deal(base, num_microbatches, linear_extension(base, num_microbatches, Chooser(seed), in_order=False))
    copied = with_copies(plan, placement)
    simulate(copied)
    for before, after in zip(plan.orders, copied.orders, strict=True):
        assert tuple(op for op in after if not op.kind.is_copy) == before
        backwards = [op[::2] for op in before if op.kind in (Kind.B, Kind.I) and placement.task(op.stage, Kind.L)]
        assert [op[::2] for op in after if op.kind is Kind.L] == backwards
        forwards = [op[::2] for op in before if op.kind is Kind.F and placement.task(op.stage, Kind.O)]
        assert [op[::2] for op in after if op.kind is Kind.O] == forwards


def test_1f1b_in_half_its_memory_takes_no_longer() -> None:
    """Copies of half the activations take as long as a forward."""
    costs = Costs.uniform(8, 25, 50, activation_bytes=1000, offload_bytes=(750, 750, 750, 500, 500, 250, 0, 0))
    plain = NAMED["1f1b"](place(replace(costs, offload_bytes=()), Cluster.uniform(8)), 32)
    placement = place(costs, Cluster.uniform(8, 4000).with_host_links(30))
    plan = NAMED["1f1b"](placement, 32)
    check(plan)
    assert max(simulate(plain).peak_memory_bytes) == 8000
    assert simulate(plan).makespan_us == simulate(plain).makespan_us


def test_a_search_beats_what_fits_without_copies() -> None:
    costs = Costs.uniform(4, 5, 5, 5, activation_bytes=12)
    kept = find_plan(place(costs, Cluster.uniform(4, 24)), 8, time_limit_s=2, deterministic=True)
    cluster = Cluster.uniform(4, 24 * 10).with_host_links(15)
    costs = replace(costs, activation_bytes=(120,) * 4, offload_bytes=(120, 120, 0, 0))
    result = find_plan(place(costs, cluster), 8, time_limit_s=2, deterministic=True)
    assert kept.makespan_us == 205
    assert result.bound_us <= result.makespan_us <= 160
    assert simulate(result.plan).makespan_us == result.makespan_us


def test_ranks_on_one_link_are_served_in_turn() -> None:
    costs = Costs.uniform(2, 2, 4, activation_bytes=50, offload_bytes=50)
    placement = place(costs, Cluster.uniform(2).with_host_links(10, ranks_per_link=2), edges=[])
    timeline = simulate(Plan(placement, 2, (ops("0F0 0O0 0L0 0B0"), ops("1F1 1O1 1L1 1B1"))))
    assert timeline.sent_us == ((2,), (7,), (7,), (12,))
