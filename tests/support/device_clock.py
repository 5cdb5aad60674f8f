"""When the kernels of device programs run, if each takes its planned time and no device runs out of room for them."""

from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from graphlib import TopologicalSorter
from typing import NamedTuple

from rota.core.plan import Plan
from rota.core.programs.device_steps import DeviceProgram
from rota.core.simulation import simulate

Node = tuple[Hashable, int]


class Run(NamedTuple):
    """By rank and step: when it starts, when it no longer waits for another rank, and when it ends."""

    starts_us: list[list[int]]
    meets_us: list[list[int]]
    ends_us: list[list[int]]


def nodes_of(programs: Sequence[DeviceProgram]) -> list[list[Node]]:
    """By rank and step a name, which steps that meet on a communicator share."""
    nodes: list[list[Node]] = []
    for program in programs:
        numbers: Counter[Hashable] = Counter()
        nodes.append([])
        for i, step in enumerate(program.steps):
            numbers[step.communicator] += 1
            nodes[-1].append(
                (step.communicator, numbers[step.communicator]) if step.communicator else (program.rank, i)
            )
    return nodes


def steps_before(program: DeviceProgram) -> list[set[int]]:
    """By step: those that it waits for, by an event or on its stream."""
    last: dict[str, int] = {}
    before = []
    for i, step in enumerate(program.steps):
        before.append({*step.waits, *([last[step.stream]] if step.stream in last else [])})
        last[step.stream] = i
    return before


def run(plan: Plan, programs: Sequence[DeviceProgram]) -> Run:
    timeline, nodes, before = simulate(plan), nodes_of(programs), [*map(steps_before, programs)]
    lasts_us: dict[Node, int] = {}
    places: dict[Node, list[tuple[int, int]]] = defaultdict(list)
    for rank, program in enumerate(programs):
        ops_us = (end - start for start, end in zip(timeline.starts_us[rank], timeline.ends_us[rank], strict=True))
        for i, step in enumerate(program.steps):
            places[nodes[rank][i]].append((rank, i))
            if step.what == "run":
                lasts_us[nodes[rank][i]] = next(ops_us)
            elif step.what == "send" and step.message is not None:
                route, k = step.message.column
                lasts_us[nodes[rank][i]] = timeline.arrived_us[route][k] - timeline.sent_us[route][k]
    waits = {node: {nodes[rank][b] for rank, i in parts for b in before[rank][i]} for node, parts in places.items()}
    starts_us, meets_us, ends_us = ([[0] * len(program.steps) for program in programs] for _ in range(3))
    for node in TopologicalSorter(waits).static_order():
        for rank, i in places[node]:
            starts_us[rank][i] = max((ends_us[rank][b] for b in before[rank][i]), default=0)
        meets = max(starts_us[rank][i] for rank, i in places[node])
        for rank, i in places[node]:
            meets_us[rank][i], ends_us[rank][i] = meets, meets + lasts_us.get(node, 0)
    return Run(starts_us, meets_us, ends_us)
