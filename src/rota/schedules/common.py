"""Shared by several families: checks of the placement, and the pattern that most of them follow."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from graphlib import TopologicalSorter

from rota.core.errors import ScheduleError
from rota.core.placement import Placement
from rota.core.stopping import look
from rota.core.tasks import Kind, Op

BACKWARD_KINDS = (Kind.R, Kind.B, Kind.I, Kind.W)


def depth(placement: Placement) -> dict[int, int]:
    """For each stage, the number of edges on its longest path forward to a last stage."""
    after: dict[int, list[int]] = {stage: [] for stage in placement.stages}
    for source, target in placement.stage_edges:
        after[source].append(target)
    depths: dict[int, int] = {}
    for stage in TopologicalSorter(after).static_order():  # last stages first
        depths[stage] = max((depths[target] + 1 for target in after[stage]), default=0)
    return depths


def backward_ops(placement: Placement, stage: int, microbatch: int) -> list[Op]:
    """The kinds of op that follow a forward: (R) B, or (R) I W."""
    return [Op(stage, kind, microbatch) for kind in BACKWARD_KINDS if (stage, kind) in placement.index]


def alternate(
    placement: Placement,
    forwards: Sequence[tuple[int, int]],
    backwards: Sequence[tuple[int, int]],
    warmup: int,
    rounds_without_weight: range = range(0),
) -> tuple[Op, ...]:
    """One rank's order: `warmup` forwards, then forward and backward in turn, then the backwards that are left.

    `forwards` and `backwards` are (stage, micro-batch) in order. With a split backward each round does one W, the
    oldest, except in `rounds_without_weight`; the W that are left come at the end.

        warmup 2:  F0 F1 F2 I0 W0 F3 I1 W1 I2 W2 …        without W in round 0:  F0 F1 F2 I0 F3 I1 W0 I2 W1 … W2
    """
    look()
    order = [Op(stage, Kind.F, m) for stage, m in forwards[:warmup]]
    weights: deque[Op] = deque()
    for i, (stage, m) in enumerate(backwards):
        order += [Op(stage, Kind.F, m) for stage, m in forwards[warmup + i : warmup + i + 1]]
        ops = backward_ops(placement, stage, m)
        order += [op for op in ops if op.kind is not Kind.W]
        weights += [op for op in ops if op.kind is Kind.W]
        if weights and i not in rounds_without_weight:
            order.append(weights.popleft())
    return (*order, *weights)


def count_off(
    placement: Placement, stages: Sequence[int], steps: Iterable[str], num_microbatches: int
) -> tuple[Op, ...]:
    """A rank's ops in order.

    The step "F1" is F of the next micro-batch of `stages[1]`; "I1" (with R before it) and "W1" mean the same for I and
    W, and "B1" is I and W. A step for more micro-batches than a stage has is left out.
    """
    batches = [placement.microbatches(stage, num_microbatches) for stage in stages]
    done: Counter[tuple[str, int]] = Counter()
    ops: list[Op] = []
    for step in steps:
        letter, place = step[0], int(step[1])
        for kind in "IW" if letter == "B" else letter:
            done[kind, place] += 1
            for m in batches[place][done[kind, place] - 1 : done[kind, place]]:
                backward = [op for op in backward_ops(placement, stages[place], m) if op.kind is not Kind.W]
                ops += backward if kind == Kind.I else [Op(stages[place], Kind(kind), m)]
    return tuple(ops)


def require_microbatches(name: str, num_microbatches: int) -> None:
    """Raises ScheduleError for fewer than one micro-batch."""
    if num_microbatches < 1:
        raise ScheduleError(f"{name}: num_microbatches is {num_microbatches}; give 1 or more")


def require_one_stage_per_rank(name: str, placement: Placement) -> None:
    """Raises ScheduleError if a rank has several stages."""
    for rank in range(placement.num_ranks):
        if len(stages := placement.stages_on(rank)) > 1:
            raise ScheduleError(
                f"{name}: rank {rank} has the stages {', '.join(map(str, stages))}, but {name} takes one stage per "
                f"rank; place one stage per rank, or use interleaved_1f1b or gpipe"
            )


def require_split(name: str, placement: Placement) -> None:
    """Raises ScheduleError unless every stage has I and W."""
    for stage in placement.stages:
        if not {(stage, Kind.I), (stage, Kind.W)} <= placement.index.keys():
            raise ScheduleError(
                f"{name}: stage {stage} has no I and W; give the costs weight_us, to split the backward"
            )


def require_chain_on(name: str, placement: Placement, ranks: Sequence[int], shape: str) -> None:
    """Raises ScheduleError unless the stages are a chain with stage i on `ranks[i]`; `shape` says how to place them."""
    stages = placement.stages
    chain = {(a, a + 1) for a in stages[:-1]}
    if stages != tuple(range(len(ranks))) or set(placement.stage_edges) != chain:
        raise ScheduleError(f"{name}: needs a chain of stages; place it by {shape}")
    for stage in stages:
        if placement.ranks_of(stage) != (ranks[stage],):
            on = ", ".join(map(str, placement.ranks_of(stage)))
            raise ScheduleError(
                f"{name}: stage {stage} is on rank {on}, but belongs on rank {ranks[stage]}; place it by {shape}"
            )


def require_v(name: str, placement: Placement, num_microbatches: int) -> None:
    """Raises ScheduleError unless each rank s has the stages s and 2p - 1 - s, all of them with I and W."""
    require_microbatches(name, num_microbatches)
    down = range(placement.num_ranks)
    require_chain_on(name, placement, [*down, *reversed(down)], "rota.wave(costs, cluster), with two stages per rank")
    require_split(name, placement)


def num_rounds(name: str, placement: Placement, step: int, shape: str) -> int:
    """How often the stages go round the ranks, `step` stages each time. Raises ScheduleError if not a whole number."""
    if placement.num_stages % step:
        raise ScheduleError(
            f"{name}: {placement.num_stages} stages do not go round {placement.num_ranks} ranks; place a multiple of "
            f"{step} stages by {shape}"
        )
    return placement.num_stages // step
