"""On PyTorch's engine neither its own orders nor those of plans can hang; with deferred receives many can."""

import random
import re
from collections import Counter

import pytest

from rota import Cluster, Costs, Plan, interleaved
from rota.core.errors import FormatError, PlanError, ScheduleError
from rota.core.programs.device_order import prove
from rota.core.programs.torch_order import check_torch_order, first_differences, has_communication, torch_programs
from rota.interop.torch_order import derived
from rota.schedules import FAMILIES, NAMED, Family
from support import fake_nccl
from support.core_strategies import deal, linear_extension
from support.device_orders import family_plans, is_proved
from support.sampling import some

NUM_RANDOM_PLANS = some(60)


def a_plan(name: str, num_ranks: int, num_microbatches: int = 8) -> Plan:
    family = NAMED[name]
    costs = family.adapted(Costs.uniform(num_ranks * family.stages_per_rank))
    return family(family.place(costs, Cluster.uniform(num_ranks)), num_microbatches)


def random_chain_plan(seed: int) -> Plan:
    """Ops in any order that the data allow."""
    rng = random.Random(seed)
    num_ranks, per_rank = rng.randint(2, 4), rng.randint(1, 2)
    costs = Costs.uniform(num_ranks * per_rank, rng.randint(1, 9), rng.randint(1, 9), rng.choice([0, 3]))
    latency_us = rng.choice([0, 4, 30])
    placement = interleaved(costs, Cluster.uniform(num_ranks, latency_us=latency_us))
    num_microbatches = rng.randint(1, 6)
    return deal(placement, num_microbatches, linear_extension(placement, num_microbatches, rng, in_order=False))


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name != "forward_only"], ids=lambda family: family.name)
def test_neither_plans_nor_what_pytorch_derives_can_hang(family: Family) -> None:
    for plan in family_plans([family], (2, 4)):
        try:
            text = plan.to_csv(communication=True)
        except ScheduleError:
            continue  # not a chain
        assert check_torch_order(text).num_kernels == plan.num_ops + 2 * len(plan.transfers)
        assert check_torch_order(derived(plan.to_csv())) == check_torch_order(text)


def test_the_proof_accepts_exactly_what_finishes_on_devices_that_hang() -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_RANDOM_PLANS):
        plan = random_chain_plan(seed)
        for way, text in {
            "plan": plan.to_csv(communication=True),
            "derived": derived(plan.to_csv()),
            "deferred": derived(plan.to_csv(), defers_receives=True),
        }.items():
            for by_pair, serial in ((True, False), (False, False), (False, True)):
                programs = torch_programs(text, by_pair=by_pair)
                verdict = is_proved(programs, serial)
                assert verdict == fake_nccl.finishes(programs, serial), (seed, way, by_pair, serial)
                seen[f"{way} {verdict}"] += 1
    assert seen["plan False"] == seen["derived False"] == 0
    assert min(seen[f"deferred {verdict}"] for verdict in (True, False)) > NUM_RANDOM_PLANS // 20


def test_deferred_receives_hang_and_swap_messages_and_the_error_says_where() -> None:
    text = derived(a_plan("1f1b", 2).to_csv(), defers_receives=True)
    with pytest.raises(PlanError, match=r"each pair of ranks has a communicator .* in a cycle: rank 1: receive ") as e:
        check_torch_order(text)
    assert e.value.reason == "device order"
    assert "waits for send 1B0→0B0, which needs the receive of rank 0; rank 0: receive 1B0→0B0 waits for" in str(
        e.value
    )
    text = derived(a_plan("zb_v", 2).to_csv(), defers_receives=True)
    with pytest.raises(PlanError, match=re.escape("channel 0→1: operation 3 is send 0F2→1F2 on rank 0, but receive")):
        check_torch_order(text)


def test_a_cycle_over_several_pairs_needs_one_communicator_for_all() -> None:
    plan = NAMED["gpipe"](interleaved(Costs.uniform(8), Cluster.uniform(4)), 8)
    text = derived(plan.to_csv(), defers_receives=True)
    with pytest.raises(PlanError, match=r"where all messages share the group's communicator .* wait in a cycle"):
        check_torch_order(text)
    prove(torch_programs(text, by_pair=True), serial=False)


def test_csvs_without_communication_or_with_other_orders() -> None:
    plan = a_plan("zb_h1", 4)
    plain, ours, theirs = plan.to_csv(), plan.to_csv(communication=True), derived(plan.to_csv())
    assert (has_communication(plain), has_communication(ours), has_communication("0F0,0B0")) == (False, True, True)
    with pytest.raises(FormatError, match="the CSV has no communication; write it by"):
        check_torch_order(plain)
    assert first_differences(ours, ours) == ""
    assert first_differences(theirs, ours) == "rank 1: 1RECV_B0 for 1RECV_F3, rank 2: 2RECV_B0 for 2RECV_F2"
    with pytest.raises(FormatError, match="Invalid backward microbatches for stage 0"):
        derived("0F0,\n1F0\n")
    with pytest.raises(FormatError, match="Expected compute-only schedule but found communication"):
        derived(ours)
