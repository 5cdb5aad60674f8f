"""Blocks as a placement, a schedule as a plan, and what the search found as a schedule.

A forward block is a stage, in the order in which they were added. A backward block is the backward of the last forward
block on the same devices that it follows from. Blocks that nothing joins are streams of their own: micro-batch m of
Tessel is then a micro-batch of each stream, number m * streams + stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter

from rota.compat.tessel.schedule.block import Block
from rota.compat.tessel.schedule.schedplan import SchedPlan
from rota.compat.tessel.unrolling import blocks_of
from rota.costs import Cluster
from rota.errors import ScheduleError
from rota.placement import Edge, Placement
from rota.plan import Plan
from rota.search import Repeating
from rota.tasks import Kind, Op, Task


@dataclass(frozen=True)
class Micro:
    """The blocks of one micro-batch, their devices, and the placement that they are: block i is task i."""

    blocks: tuple[Block, ...]
    devices: tuple[tuple[int, ...], ...]
    placement: Placement


def micro_of(schedule: SchedPlan, memory: int | None) -> Micro:
    """`schedule` has the blocks of one micro-batch; `memory` is the limit of each device, None for no limit."""
    blocks = schedule.added_blocks()
    if not blocks:
        raise ScheduleError("the placement has no blocks; add some")
    devices = tuple(schedule.device(block) for block in blocks)
    place = {block: i for i, block in enumerate(blocks)}
    for block in blocks:
        if not block.before <= place.keys():
            absent = next(iter(block.before - place.keys()))
            raise ScheduleError(f"{block} depends on {absent}, which is not in the placement; add it")
    edges = [(place[prev], i) for i, block in enumerate(blocks) for prev in sorted(block.before, key=place.__getitem__)]
    stages, own = _stages(schedule, blocks, devices)
    tasks = tuple(
        Task(stages[i], Kind.F if block.btype == "forward" else Kind.B, devices[i], block.span, block.memory)
        for i, block in enumerate(blocks)
    )
    edges += [pair for pair in own if pair not in edges]
    cluster = Cluster.uniform(schedule.ndevs, memory)
    return Micro(tuple(blocks), devices, Placement(tasks, tuple(Edge(*edge) for edge in edges), cluster))


def _stages(
    schedule: SchedPlan, blocks: Sequence[Block], devices: Sequence[tuple[int, ...]]
) -> tuple[list[int], list[tuple[int, int]]]:
    """The stage of each block, and (forward, backward) of each stage that has both."""
    forward = [i for i, block in enumerate(blocks) if block.btype == "forward"]
    stages = [-1] * len(blocks)
    for stage, i in enumerate(forward):
        stages[i] = stage
    free, own, num_stages = set(forward), [], len(forward)
    order = sorted(set(range(len(blocks))) - free, key=lambda i: (schedule.step(blocks[i]), i))
    for i in order:
        known = _ancestors(blocks[i])
        mine = [f for f in free if devices[f] == devices[i] and blocks[f] in known]
        if mine:
            last = max(mine, key=lambda f: (schedule.step(blocks[f]), f))
            free.remove(last)
            own.append((last, i))
            stages[i] = stages[last]
        else:
            stages[i], num_stages = num_stages, num_stages + 1
    return stages, own


def _ancestors(block: Block) -> set[Block]:
    found: set[Block] = set()
    waiting = [block]
    while waiting:
        new = waiting.pop().before - found
        found |= new
        waiting += new
    return found


def to_schedule(micro: Micro, found: Repeating) -> SchedPlan:
    """What was found, as blocks; sub-graph `gid` is the placement's block of this number."""
    schedule = SchedPlan(micro.placement.num_ranks)
    new: dict[tuple[int, int], Block] = {}
    for gid, (block, starts) in enumerate(zip(micro.blocks, found.starts_us, strict=True)):
        for mid, start in enumerate(starts):
            new[gid, mid] = Block(mid, block.span, block.memory, block.btype, gid)
            schedule.add_block(new[gid, mid], micro.devices[gid], start)
    place = {block: i for i, block in enumerate(micro.blocks)}
    for (gid, mid), twin in new.items():
        for prev in micro.blocks[gid].before:
            Block.make_dependency(new[place[prev], mid], twin)
    repeated = frozenset(new[gid, mid] for gid, mid in enumerate(found.middle))
    bounds = [(schedule.step(block), schedule.step(block) + block.span) for block in repeated]
    schedule.repetend = min(first for first, _ in bounds), max(last for _, last in bounds)
    schedule.repeated, schedule.period = repeated, found.period_us
    return schedule


def to_plan(schedule: SchedPlan, memory: int | None) -> Plan:
    """See `SchedPlan.to_plan`."""
    blocks = blocks_of(schedule)
    first = SchedPlan(schedule.ndevs)
    for (gid, mid), block in blocks.items():
        model = blocks[gid, 0]
        if (block.span, block.memory, block.btype) != (model.span, model.memory, model.btype) or (
            schedule.device(block) != schedule.device(model)
        ):
            raise ScheduleError(f"{block} of sub-graph {gid} is not like {model}; micro-batches are all alike")
        if mid == 0:
            first.add_block(block, schedule.device(block), schedule.step(block))
    micro = micro_of(first, memory)
    task_of = {block: i for i, block in enumerate(micro.blocks)}
    ends = {(task_of[blocks[gid, 0]], mid): schedule.step(b) + b.span for (gid, mid), b in blocks.items()}
    return _plan(micro.placement, ends)


def _plan(placement: Placement, ends: dict[tuple[int, int], int]) -> Plan:
    """By the end of each (task, micro-batch). Rota's pipeline wants a backward of frozen stages too: of no time, at the
    end of all, where its ranks need not wait for each other.
    """
    frozen = _frozen(placement)
    tasks, edges, streams = list(placement.tasks), list(placement.edges), placement.num_components
    nmicros, nsteps = 1 + max(mid for _, mid in ends), max(ends.values())
    backward = {task.stage: i for i, task in enumerate(tasks) if task.kind is Kind.B}
    for stage in frozen:
        own = placement.index[stage, Kind.F]
        backward[stage] = len(tasks)
        tasks.append(Task(stage, Kind.B, tasks[own].ranks, 0))
        sources = [own, *(backward[b] for a, b in placement.stage_edges if a == stage)]
        edges += [Edge(source, backward[stage]) for source in sources]
        ends |= {(backward[stage], mid): nsteps for mid in range(nmicros)}
    rows: list[list[tuple[int, bool, int, Op]]] = [[] for _ in range(placement.num_ranks)]
    whole = Placement(tuple(tasks), tuple(edges), placement.cluster)
    for (i, mid), end in ends.items():
        task = tasks[i]
        op = Op(task.stage, task.kind, mid * streams + whole.component_of[i])
        for rank in task.ranks:
            rows[rank].append((end - task.duration_us, task.duration_us > 0, i, op))
    return Plan(whole, nmicros * streams, tuple(tuple(op for *_, op in sorted(row)) for row in rows))


def _frozen(placement: Placement) -> list[int]:
    """In a placement that trains, the stages with no backward, each before those that feed it."""
    trained = {task.stage for task in placement.tasks if task.kind is Kind.B}
    fed_by: dict[int, set[int]] = {stage: set() for stage in placement.stages}
    for a, b in placement.stage_edges:
        fed_by[a].add(b)
    return [stage for stage in TopologicalSorter(fed_by).static_order() if trained and stage not in trained]
