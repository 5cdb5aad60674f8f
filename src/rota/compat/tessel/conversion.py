"""Blocks as a placement, and a schedule of blocks as a plan.

Each forward block is a stage, in the order in which the blocks were added. A backward block is the backward of the last
forward block on the same devices that it depends on. Blocks that nothing connects are separate components of the
placement: micro-batch m of Tessel's is then one micro-batch per component, number m * components + component.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from typing import Protocol

from rota.compat.tessel.schedule.block import Block, by_subgraph
from rota.core.cluster import Cluster
from rota.core.errors import ScheduleError
from rota.core.placement import Edge, Placement
from rota.core.plan import Plan
from rota.core.tasks import Kind, Op, Task


class _Schedule(Protocol):
    """What is read of a `SchedPlan`."""

    ndevs: int

    def added_blocks(self) -> list[Block]: ...
    def step(self, block: Block) -> int: ...
    def device(self, block: Block) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class Micro:
    """The blocks of one micro-batch, their devices, and the same as a placement, in which block i is task i."""

    blocks: tuple[Block, ...]
    devices: tuple[tuple[int, ...], ...]
    placement: Placement


def micro_of(schedule: _Schedule, memory: int | None, blocks: Sequence[Block] | None = None) -> Micro:
    """Return the blocks of one micro-batch (None: all of the schedule); `memory` is the limit per device, or None."""
    blocks = tuple(schedule.added_blocks() if blocks is None else blocks)
    if not blocks:
        raise ScheduleError("the placement has no blocks; add some")
    devices = tuple(schedule.device(block) for block in blocks)
    index = {block: i for i, block in enumerate(blocks)}
    for block in blocks:
        if not block.before <= index.keys():
            absent = next(iter(block.before - index.keys()))
            raise ScheduleError(f"{block} depends on {absent}, which is not in the placement; add it")
    edges = [(index[prev], i) for i, block in enumerate(blocks) for prev in sorted(block.before, key=index.__getitem__)]
    stages, own_edges = _stages(schedule, blocks, devices)
    tasks = tuple(
        Task(stages[i], Kind.F if block.btype == "forward" else Kind.B, devices[i], block.span, block.memory)
        for i, block in enumerate(blocks)
    )
    edges += [pair for pair in own_edges if pair not in edges]
    cluster = Cluster.uniform(schedule.ndevs, memory)
    return Micro(blocks, devices, Placement(tasks, tuple(Edge(*edge) for edge in edges), cluster))


def _stages(
    schedule: _Schedule, blocks: Sequence[Block], devices: Sequence[tuple[int, ...]]
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the stage of each block, and (forward, backward) of each stage that has both."""
    forwards = [i for i, block in enumerate(blocks) if block.btype == "forward"]
    stages = [-1] * len(blocks)
    for stage, i in enumerate(forwards):
        stages[i] = stage
    unmatched, pairs, num_stages = set(forwards), [], len(forwards)
    backwards = sorted(set(range(len(blocks))) - unmatched, key=lambda i: (schedule.step(blocks[i]), i))
    for i in backwards:
        ancestors = _ancestors(blocks[i])
        candidates = [f for f in unmatched if devices[f] == devices[i] and blocks[f] in ancestors]
        if candidates:
            last = max(candidates, key=lambda f: (schedule.step(blocks[f]), f))
            unmatched.remove(last)
            pairs.append((last, i))
            stages[i] = stages[last]
        else:
            stages[i], num_stages = num_stages, num_stages + 1
    return stages, pairs


def _ancestors(block: Block) -> set[Block]:
    """Return all blocks that a block depends on, directly or not."""
    found: set[Block] = set()
    pending = [block]
    while pending:
        new = pending.pop().before - found
        found |= new
        pending += new
    return found


def to_plan(schedule: _Schedule, memory: int | None) -> Plan:
    """Return the plan of a schedule; see `SchedPlan.to_plan`."""
    blocks = by_subgraph(schedule.added_blocks())
    for (gid, _), block in blocks.items():
        model = blocks[gid, 0]
        if (block.span, block.memory, block.btype) != (model.span, model.memory, model.btype) or (
            schedule.device(block) != schedule.device(model)
        ):
            raise ScheduleError(f"{block} of sub-graph {gid} is not like {model}; micro-batches are all alike")
    micro = micro_of(schedule, memory, [block for (_, mid), block in blocks.items() if mid == 0])
    task_of = {block: i for i, block in enumerate(micro.blocks)}
    ends = {(task_of[blocks[gid, 0]], mid): schedule.step(b) + b.span for (gid, mid), b in blocks.items()}
    return _plan(micro.placement, ends)


def _plan(placement: Placement, ends: dict[tuple[int, int], int]) -> Plan:
    """Return the plan in which each (task, micro-batch) ends at a step.

    Rota's pipeline needs a backward of frozen stages, too: it has no duration, and runs after all other ops, where its
    ranks do not wait for each other.
    """
    frozen = _frozen(placement)
    tasks, edges, num_components = list(placement.tasks), list(placement.edges), placement.num_components
    nmicros, nsteps = 1 + max(mid for _, mid in ends), max(ends.values())
    backward = {task.stage: i for i, task in enumerate(tasks) if task.kind is Kind.B}
    for stage in frozen:
        forward = placement.index[stage, Kind.F]
        backward[stage] = len(tasks)
        tasks.append(Task(stage, Kind.B, tasks[forward].ranks, 0))
        sources = [forward, *(backward[b] for a, b in placement.stage_edges if a == stage)]
        edges += [Edge(source, backward[stage]) for source in sources]
        ends |= {(backward[stage], mid): nsteps for mid in range(nmicros)}
    rows: list[list[tuple[int, bool, int, Op]]] = [[] for _ in range(placement.num_ranks)]
    whole = replace(placement, tasks=tuple(tasks), edges=tuple(edges))
    for (i, mid), end in ends.items():
        task = tasks[i]
        op = Op(task.stage, task.kind, mid * num_components + whole.component_of[i])
        for rank in task.ranks:
            rows[rank].append((end - task.duration_us, task.duration_us > 0, i, op))
    return Plan(whole, nmicros * num_components, tuple(tuple(op for *_, op in sorted(row)) for row in rows))


def _frozen(placement: Placement) -> list[int]:
    """Return the stages without a backward, if the placement trains at all, each before those that feed it."""
    trained = {task.stage for task in placement.tasks if task.kind is Kind.B}
    consumers: dict[int, set[int]] = {stage: set() for stage in placement.stages}
    for a, b in placement.stage_edges:
        consumers[a].add(b)
    return [stage for stage in TopologicalSorter(consumers).static_order() if trained and stage not in trained]
