"""The lists of device steps on simulated devices: no race, no memory freed too early, and no wait in vain."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from rota.cluster import Cluster
from rota.costs import Costs
from rota.placing import place
from rota.plan import Plan
from rota.programs.device_steps import DeviceProgram, device_programs
from rota.schedules import FAMILIES, Family, one_f_one_b
from support.device_orders import Programs, family_plans
from support.random_plans import random_plan
from support.sampling import some
from support.sim_device import FreedTooEarlyError, RaceError
from support.sim_device.steps import run_steps


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_no_family_has_a_race(family: Family) -> None:
    for plan in family_plans([family], [2, 4]):
        runners = run_steps(device_programs(plan), num_steps=1)
        assert all(runner.device.syncs == [] for runner in runners)


def test_no_random_plan_has_a_race() -> None:
    for seed in range(some(60)):
        run_steps(device_programs(random_plan(seed, 2 + seed % 3)[1], tied=[(0, 1)]))


def plan_with_ties() -> Plan:
    costs = Costs.uniform(3, 10, 20, boundary_bytes=8)
    return one_f_one_b(place(costs, Cluster.uniform(3, latency_us=5)), 4)


def without_one_wait(programs: Programs) -> Iterator[tuple[str, DeviceProgram, int, int, Programs]]:
    """Each wait of each step taken out in turn."""
    for program in programs:
        for i, step in enumerate(program.steps):
            for w in step.waits:
                steps = list(program.steps)
                steps[i] = replace(step, waits=tuple(other for other in step.waits if other != w))
                changed = replace(program, steps=tuple(steps))
                mutant = [changed if p.rank == program.rank else p for p in programs]
                yield f"rank {program.rank}: {step} after {program.steps[w]}", program, i, w, mutant


def is_needless(program: DeviceProgram, i: int, w: int) -> bool:
    """A receive need not wait for its buffer's allocation if nothing ran on the compute stream since another wait.

    So the buffers of two receives that were allocated at once need one wait, and the first ones of all none: but a
    step is one of many, and another one has run before it.
    """
    step = program.steps[i]
    if step.what != "receive":
        return False
    earlier = [a for other in program.steps[:i] if other.stream == step.stream for a in other.waits]
    ran_since = [k for k in range(max(earlier, default=-1), w) if program.steps[k].what == "run"]
    return bool(earlier) and max(earlier) < w and not ran_since


def is_found(programs: Programs) -> bool:
    try:
        run_steps(programs)
    except (RaceError, FreedTooEarlyError):
        return True
    return False


def test_each_wait_is_needed() -> None:
    programs = device_programs(plan_with_ties(), tied=[(0, 2), (0, 1)])
    found, kinds = 0, set()
    for name, program, i, w, mutant in without_one_wait(programs):
        if is_needless(program, i, w):
            assert not is_found(mutant), name
            continue
        assert is_found(mutant), name
        found += 1
        kinds.add((program.steps[i].what, program.steps[w].what))
    assert found > 60
    assert kinds == {
        ("receive", "allocate"),
        ("run", "receive"),
        ("send", "run"),
        ("release", "send"),
        ("reduce", "run"),
        ("join", "reduce"),
        ("sum", "join"),
        ("join", "sum"),
    }


def test_a_release_that_comes_with_the_send_is_too_early() -> None:
    """What is sent must be held: freeing it when its kernel is enqueued lets the compute stream reuse it."""
    programs = device_programs(plan_with_ties())
    for program in programs:
        steps = [replace(s, waits=()) if s.what == "release" else s for s in program.steps]
        mutant = [replace(p, steps=tuple(steps)) if p.rank == program.rank else p for p in programs]
        with pytest.raises(FreedTooEarlyError, match=r"was freed, and compute may reuse it, while send \d"):
            run_steps(mutant)
