"""A device has room for all kernels that can be on it at once: tried in every order of service of its streams."""

import pytest
from hypothesis import assume, given, settings, strategies as st

from rota.core.cluster import Cluster, Link, SharedLink
from rota.core.costs import Costs
from rota.core.errors import PipelineError, PlanError
from rota.core.placing import bidirectional, place
from rota.core.plan import Plan
from rota.core.programs.device_order import check_device_order, prove
from rota.core.programs.device_steps import device_programs
from rota.core.programs.occupancy import MostCtas, most_ctas, num_slots
from rota.runtime.device.choosing import ctas_within
from rota.schedules import NAMED, one_f_one_b
from support.device_orders import family_plans
from support.random_plans import random_plan
from support.sampling import some
from support.service_orders import explore

MOST_STEPS = 30  # of all ranks: the orders of more are too many

#: The least room with which no order hangs, and the most kernels that any order brings onto a device.
NEEDED = {
    ("forward_only", 3, 3): (1, 3),
    ("gpipe", 2, 3): (2, 3),
    ("gpipe", 3, 2): (2, 4),
    ("1f1b", 2, 3): (2, 3),
    ("zb_h1", 3, 2): (2, 3),
    ("interleaved_1f1b", 2, 2): (2, 3),
    ("chimera", 2, 2): (2, 2),
}


@given(st.integers(0, 10**6), st.integers(2, 3), st.booleans())
@settings(max_examples=some(200))
def test_no_order_of_service_hangs_with_room_for_a_kernel_of_each_stream(
    seed: int, num_ranks: int, early: bool
) -> None:
    plan = random_plan(seed, num_ranks)[1]
    programs = device_programs(plan, tied=[(0, 1)])
    assume(sum(len(program.steps) for program in programs) <= MOST_STEPS)
    slots = prove(programs).num_slots
    explored = explore(programs, slots)
    assert not explored.hangs
    assert explored.most_at_once <= slots
    assert explore(programs, slots + 1) == explored


@pytest.mark.parametrize(("name", "num_ranks", "num_microbatches"), NEEDED, ids=lambda value: str(value))
def test_what_named_schedules_need(name: str, num_ranks: int, num_microbatches: int) -> None:
    """With room for one kernel, all but a forward hang in some order, though none does in the order of launch."""
    family = NAMED[name]
    num_stages = num_ranks * (1 if family.place is bidirectional else family.stages_per_rank)
    costs = family.adapted(Costs.uniform(num_stages, 10, 10, 10))
    plan = family(family.place(costs, Cluster.uniform(num_ranks, latency_us=3)), num_microbatches)
    programs = device_programs(plan, replicas=False)
    slots = prove(programs, serial=True).num_slots
    needed = next(number for number in range(1, slots + 1) if not explore(programs, number).hangs)
    most = explore(programs, slots).most_at_once
    assert (needed, most) == NEEDED[name, num_ranks, num_microbatches]
    assert needed <= most <= slots


def test_the_streams_of_a_placement_are_those_of_its_programs() -> None:
    plans = [random_plan(seed, 2 + seed % 6)[1] for seed in range(100)] + [*family_plans(ranks=(2, 4))]
    for plan in plans:
        for replicas in (False, True):
            tied = [(0, plan.num_ranks - 1), (plan.num_ranks - 1, 0), (0, 1)]
            programs = device_programs(plan, tied=tied, replicas=replicas)
            assert num_slots(plan.placement, tied, replicas=replicas) == prove(programs).num_slots


def chain(num_bytes: int = 0, cluster: Cluster | None = None) -> Plan:
    return one_f_one_b(place(Costs.uniform(3, boundary_bytes=num_bytes), cluster or Cluster.uniform(3)), 4)


def test_multiprocessors_are_shared_by_the_kernels_that_can_be_there_at_once() -> None:
    placement = chain().placement
    assert check_device_order(chain()).num_slots == num_slots(placement) == 6  # 4 channels, ops, reductions
    assert most_ctas(placement, 6, 132) == MostCtas(22, {})
    assert most_ctas(placement, 6, 6).everywhere == 1
    with pytest.raises(PlanError, match=r"up to 6 kernels .* but it has 5 multiprocessors") as caught:
        most_ctas(placement, 6, 5)
    assert caught.value.reason == "device order"


@pytest.mark.parametrize(
    ("gb_per_s", "num_bytes", "expected"),
    [(400, 64_000_000, 20), (50, 64_000_000, 3), (1, 64_000_000, 1), (400, 60_000, 3), (400, 1_000, 1)],
)
def test_a_channel_gets_what_its_link_and_its_messages_need(gb_per_s: int, num_bytes: int, expected: int) -> None:
    """20 GB/s for each CTA; a message of 60 kB takes 1 µs at 400 GB/s, as times are whole, and so has 60 GB/s."""
    placement = chain(num_bytes, Cluster.uniform(3, latency_us=7, bytes_per_us=1000 * gb_per_s)).placement
    most = most_ctas(placement, 6, 132)
    assert most.between == dict.fromkeys([(0, 1), (1, 2), (1, 0), (2, 1)], expected)
    assert (most.on((0, 1)), most.on((0, 2)), most.on(())) == (expected, 22, 22)
    assert most_ctas(placement, 6, 6).on((0, 1)) == 1


def test_the_rate_of_a_shared_link_alone_limits_nothing() -> None:
    cluster = Cluster((None,) * 3, Link(5), shared=(SharedLink("host", 100, (0, 1), (1, 2)),))
    assert most_ctas(chain(1000, cluster).placement, 6, 132).between == {}


def test_what_the_user_asks_of_nccl_must_leave_room(monkeypatch: pytest.MonkeyPatch) -> None:
    placement = chain().placement
    for wish in ("", "26", "many"):
        monkeypatch.setenv("NCCL_MAX_CTAS", wish)
        assert ctas_within(132, placement, [], 1).everywhere == 26
    assert ctas_within(132, placement, [(0, 2)], 2).everywhere == 22
    monkeypatch.setenv("NCCL_MAX_CTAS", "27")
    with pytest.raises(PipelineError, match=r"NCCL_MAX_CTAS is 27, .* 5 kernels .* set it to at most 26, or unset it"):
        ctas_within(132, placement, [], 1)
