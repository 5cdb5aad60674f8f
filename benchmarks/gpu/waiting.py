"""`python benchmarks/gpu/waiting.py`: kernels that wait for another rank beside an op, and the room that plans need.

It needs no GPU: kernels take their planned times. For each schedule, on 8 ranks with 32 micro-batches: the messages
that wait beside an op, on average over the time of all ops, and how much longer than planned the step takes, for
receives that may start

    early     with the allocation of a buffer up to two ops before the op that reads
    now       with the op during which the message is sent, as `device_steps` has it
    strict    at their place in the plan's order
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from rota import Cluster, Costs, Plan, simulate
from rota.core.placing import bidirectional
from rota.core.programs.actions import compile_programs
from rota.core.programs.device_steps import DeviceProgram, device_program
from rota.core.programs.occupancy import num_slots
from rota.schedules import NAMED
from support import device_clock
from support.device_orders import with_early_receives

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_v", "v_half", "dualpipe", "chimera")
NUM_RANKS, NUM_MICROBATCHES = 8, 32
MESSAGE_BYTES, BYTES_PER_US = 64_000_000, 400_000


def main() -> None:
    receives, sends, step = "receives: early | now | strict", "sends: now | strict", "step: now | strict"
    print(f"| schedule | {receives} | {sends} | {step} | slots |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in SCHEDULES:
        plan = planned(name)
        strict = programs_of(plan, allocates_early=False)
        now = programs_of(plan, allocates_early=True)
        early = [with_early_receives(program) for program in now]
        (early_receives, _, _), waits, late = (waiting(plan, programs) for programs in (early, now, strict))
        cells = (early_receives, waits[0], late[0], waits[1], late[1])
        steps = (f"{100 * (us / simulate(plan).makespan_us - 1):+.1f}%" for us in (waits[2], late[2]))
        slots = num_slots(plan.placement, replicas=False)
        print(f"| {name} | {' | '.join(f'{cell:.2f}' for cell in cells)} | {' | '.join(steps)} | {slots} |")


def planned(name: str) -> Plan:
    family = NAMED[name]
    num_stages = NUM_RANKS * (1 if family.place is bidirectional else family.stages_per_rank)
    costs = family.adapted(
        Costs.uniform(num_stages, 1000, 2000, 1000, activation_bytes=0, boundary_bytes=MESSAGE_BYTES)
    )
    cluster = Cluster.uniform(NUM_RANKS, latency_us=10, bytes_per_us=BYTES_PER_US)
    return family(family.place(costs, cluster), NUM_MICROBATCHES)


def programs_of(plan: Plan, *, allocates_early: bool) -> list[DeviceProgram]:
    edge_index: defaultdict[tuple[int, int], int] = defaultdict(count().__next__)
    timeline = simulate(plan)
    programs = compile_programs(plan, edge_index, range(plan.num_ranks))
    return [device_program(timeline, program, replicas=False, allocates_early=allocates_early) for program in programs]


def waiting(plan: Plan, programs: Sequence[DeviceProgram]) -> tuple[float, float, int]:
    """Receives and sends that wait beside an op, on average over the time of all ops, and when the last kernel ends."""
    run = device_clock.run(plan, programs)
    beside_us, ops_us = {"receive": 0, "send": 0}, 0
    for rank, program in enumerate(programs):
        ops = [*spans(program, "run", run.starts_us[rank], run.ends_us[rank])]
        ops_us += sum(end - start for start, end in ops)
        for what in beside_us:
            for begun, met in spans(program, what, run.starts_us[rank], run.meets_us[rank]):
                beside_us[what] += sum(max(0, min(met, end) - max(begun, start)) for start, end in ops)
    return beside_us["receive"] / ops_us, beside_us["send"] / ops_us, max(map(max, run.ends_us))


def spans(program: DeviceProgram, what: str, starts: list[int], ends: list[int]) -> Iterator[tuple[int, int]]:
    for step, start, end in zip(program.steps, starts, ends, strict=True):
        if step.what == what:
            yield start, end


if __name__ == "__main__":
    main()
