"""On devices that really hang: the proof accepts exactly the orders that finish there."""

import random
from collections import Counter
from collections.abc import Callable

import pytest

from rota.core.programs.device_steps import device_programs
from rota.schedules import FAMILIES, Family
from support import fake_nccl
from support.device_orders import (
    Programs,
    family_plans,
    is_proved,
    overtaken_on_a_channel,
    shuffled,
    swapped_on_a_channel,
    with_early_receives,
    with_pair_communicators,
)
from support.random_plans import random_plan

pytestmark = pytest.mark.sampled


def unchanged(programs: Programs, rng: random.Random) -> Programs:
    return programs


def early(programs: Programs, rng: random.Random) -> Programs:
    return [with_early_receives(program) for program in programs]


def moved(programs: Programs, rng: random.Random) -> Programs:
    num_moves = rng.choice([1, 3, 10, 40])
    return [shuffled(program, rng, num_moves) for program in programs]


def swapped(programs: Programs, rng: random.Random) -> Programs:
    return swapped_on_a_channel(programs, rng) or programs


def overtaken(programs: Programs, rng: random.Random) -> Programs:
    """Both sides agree, but its op waits for what the overtaken message brings: a cycle through events."""
    for _ in range(3):
        programs = overtaken_on_a_channel(programs, rng) or programs
    return programs


@pytest.mark.parametrize("mutate", [unchanged, early, moved, swapped, overtaken])
@pytest.mark.parametrize("paired", [False, True], ids=["directed", "paired"])
def test_the_proof_accepts_exactly_what_finishes(
    mutate: Callable[[Programs, random.Random], Programs], paired: bool
) -> None:
    verdicts: Counter[tuple[bool, bool]] = Counter()
    for seed in range(60):
        rng = random.Random(f"{seed} {mutate.__name__}")
        plan = random_plan(seed, 2 + seed % 3)[1]
        programs = mutate(device_programs(plan, tied=[(0, 1)]), rng)
        if paired:
            programs = [with_pair_communicators(program) for program in programs]
        for serial in (False, True):
            proved = is_proved(programs, serial)
            assert proved == fake_nccl.finishes(programs, serial), (seed, serial)
            verdicts[serial, proved] += 1
    assert verdicts[True, True] > 0
    if mutate is unchanged:
        assert verdicts[True, False] == verdicts[False, False] == 0
    elif mutate is not early or paired:
        assert verdicts[False, False] > 0
    else:
        assert verdicts[True, False] > 0


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_families(family: Family) -> None:
    """Even where a host may have only one kernel in the queue of its device."""
    for plan in list(family_plans([family], [2, 4]))[:4]:
        programs = device_programs(plan)
        for queue_length in (1, 3, 10**9):
            fake_nccl.run(programs, serial=True, queue_length=queue_length)
