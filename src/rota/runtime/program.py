"""What one rank does, step by step: its ops, the receives before them and the sends after them, in the plan's order.

    plan.wire_order    … 0F1   0F1→1F1   1F0   1F0→2F0   2F1→1B… …        all ranks, one global order
    rank 1             …       receive   run   send      receive …        what touches it, the order kept

A receive that the plan puts behind an op, but ahead of the op's sends, is posted before the op runs, so that the
data travels meanwhile. Nothing else moves: posts of a pair of ranks keep the global order on both sides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from rota.errors import PipelineError
from rota.placement import Placement
from rota.plan import Plan, Transfer
from rota.tasks import Kind, Op

# Which value of a step: (index of the stage edge, whether it is the edge's gradient, micro-batch).
ValueKey = tuple[int, bool, int]


@dataclass(frozen=True, slots=True)
class Message:
    """A transfer seen from this rank. `value` tells which value travels; `column` is (route, position)."""

    transfer: Transfer
    value: ValueKey
    column: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Action:
    """Post a receive, run an op, or send; `op` is the op that reads, runs or made the value."""

    what: Literal["receive", "run", "send"]
    op: Op
    message: Message | None = None


@dataclass(slots=True)
class Program:
    """`strict` keeps the global order; `overlapped` posts receives early. `arriving`: values that come by message."""

    rank: int
    strict: list[Action] = field(default_factory=list)
    overlapped: list[Action] = field(default_factory=list)
    arriving: set[ValueKey] = field(default_factory=set)


def compile_program(plan: Plan, edge_index: dict[tuple[int, int], int], rank: int) -> Program:
    """The program of `rank`; `edge_index` numbers the (source, target) stage edges."""
    columns = _columns(plan)
    program = Program(rank)
    for action in plan.wire_order:
        if isinstance(action, Op):
            if plan.placement.ranks_of(action.stage)[0] == rank:
                program.strict.append(Action("run", action))
            continue
        if rank not in (action.sender, action.receiver):
            continue
        message = Message(action, value_key(action, edge_index), columns[action])
        if action.receiver == rank:
            program.arriving.add(message.value)
            program.strict.append(Action("receive", action.target, message))
        else:
            program.strict.append(Action("send", action.source, message))
    program.overlapped = list(_post_early(program.strict))
    return program


def value_key(transfer: Transfer, edge_index: dict[tuple[int, int], int]) -> ValueKey:
    """An activation travels along its stage edge, a gradient back along it."""
    a, b = transfer.source, transfer.target
    if a.kind is Kind.F:
        return edge_index[a.stage, b.stage], False, a.microbatch
    return edge_index[b.stage, a.stage], True, a.microbatch


def _columns(plan: Plan) -> dict[Transfer, tuple[int, int]]:
    """Where a timeline keeps the times of each transfer."""
    columns = {}
    for r, route in enumerate(plan.placement.routes):
        a, b = plan.placement.tasks[route.source], plan.placement.tasks[route.target]
        for k, m in enumerate(plan.placement.microbatches(a.stage, plan.num_microbatches)):
            transfer = Transfer(
                Op(a.stage, a.kind, m), Op(b.stage, b.kind, m), route.sender, route.receiver, route.num_bytes
            )
            columns[transfer] = (r, k)
    return columns


def _post_early(actions: Iterable[Action]) -> Iterable[Action]:
    run: Action | None = None  # the op that waits for the receives right behind it
    for action in actions:
        if run is not None and action.what != "receive":
            yield run
            run = None
        if action.what == "run":
            run = action
        else:
            yield action
    if run is not None:
        yield run


def refuse_unsupported(plan: Plan, edges: Iterable[tuple[int, int]], num_stages: int) -> None:
    """Raises PipelineError where a plan and a model's stages do not fit, or ask for what cannot be run yet."""
    placement = plan.placement
    if placement.stages != tuple(range(num_stages)):
        raise PipelineError(
            f"the plan has {placement.num_stages} stages, the model was split into {num_stages}; "
            f"split(model, {placement.num_stages}), or plan for {num_stages} stages"
        )
    kinds = _kinds_by_stage(placement)
    for task in placement.tasks:
        if len(task.ranks) > 1:
            raise PipelineError(f"task {task} is on the ranks {task.ranks}; only one rank a stage can be run")
        home = placement.ranks_of(task.stage)
        if task.ranks != home:
            raise PipelineError(
                f"task {task} is on rank {task.ranks[0]}, but stage {task.stage}'s other task on rank {home[0]}; place "
                f"a stage's forward and backward on one rank"
            )
    if placement.num_streams > 1:
        raise PipelineError(f"the plan has {placement.num_streams} separate data streams; only one can be run")
    expected = _edges_to_run(kinds, edges)
    there = {(str(placement.tasks[e.source]), str(placement.tasks[e.target])) for e in placement.edges}
    if len(there) < len(placement.edges):
        raise PipelineError("the plan's placement has an edge twice; give each pair of stages one edge")
    for told, differing in (("lacks", expected - there), ("has, against the model,", there - expected)):
        if differing:
            a, b = min(differing)
            raise PipelineError(
                f"the plan's placement {told} the edge {a} → {b}; measure the stages and plan with these "
                f"costs (rota.profile, then rota plan --costs), or place(costs, cluster, edges=stages.edges)"
            )


def _kinds_by_stage(placement: Placement) -> list[str]:
    """Each stage's kinds, "F", "FB", "FIW", "FRB" or "FRIW"; raises PipelineError on any others."""
    kinds = ["".join(k for k in "FRBIW" if placement.task(s, Kind(k))) for s in placement.stages]
    trains = any(len(of_stage) > 1 for of_stage in kinds)
    for stage, of_stage in enumerate(kinds):
        if of_stage not in (_TRAINING if trains else ("F",)):
            raise PipelineError(
                f"stage {stage} has {' '.join(of_stage)} tasks; a stage that trains has F, R if it recomputes, and B "
                f"or both I and W, and in one plan either all stages train or none"
            )
    return kinds


_TRAINING = ("FB", "FIW", "FRB", "FRIW")


def _edges_to_run(kinds: list[str], edges: Iterable[tuple[int, int]]) -> set[tuple[str, str]]:
    """The edges between tasks that the stages and the edges between them need."""
    expected = {(f"{s}{a}", f"{s}{b}") for s, of_stage in enumerate(kinds) for a, b in pairwise(of_stage)}
    for a, b in edges:
        expected.add((f"{a}F", f"{b}F"))
        if len(kinds[b]) > 1:
            back = [next(k for k in kinds[stage] if k in "BI") for stage in (b, a)]
            expected.add((f"{b}{back[0]}", f"{a}{back[1]}"))
    return expected
