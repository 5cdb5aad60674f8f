"""What one rank does, step by step: its ops, the receives before them and the sends after them, in the plan's order.

    plan.wire_order    … 0F1   0F1→1F1   1F0   1F0→2F0   2F1→1B… …        all ranks, one global order
    rank 1             …       receive   run   send      receive …        its own actions, in that order

`rota.runtime.prefetch_receives` moves the receives forward, so that the data travels while ops run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from rota.errors import PipelineError
from rota.models import Stages
from rota.placement import Placement
from rota.plan import Plan, Transfer
from rota.tasks import Kind, Op

# Which value of a step: (index of the stage edge, whether it is the edge's gradient, micro-batch).
ValueKey = tuple[int, bool, int]


@dataclass(frozen=True, slots=True)
class Message:
    """A transfer seen from this rank. `value` is the key of the value that travels; `column` is (route, position)."""

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
    """One rank's actions, in the global order.

    `arriving`: values that come by message. `num_uses`: by (edge, is gradient), how often a value made here is sent or
    read here. `unsent`: edges whose values this rank does not send, though their gradients come by message.
    """

    rank: int
    actions: list[Action] = field(default_factory=list)
    arriving: set[ValueKey] = field(default_factory=set)
    num_uses: dict[tuple[int, bool], int] = field(default_factory=dict)
    unsent: set[int] = field(default_factory=set)


def compile_program(plan: Plan, edge_index: dict[tuple[int, int], int], rank: int) -> Program:
    """The program of `rank`; `edge_index` numbers the (source, target) stage edges."""
    columns = _columns(plan)
    program = Program(rank)
    for action in plan.wire_order:
        if isinstance(action, Op):
            if rank in plan.placement.ranks_of(action.stage):
                program.actions.append(Action("run", action))
            continue
        if rank not in (action.sender, action.receiver):
            continue
        message = Message(action, value_key(action.source, action.target, edge_index), columns[action])
        if action.receiver == rank:
            program.arriving.add(message.value)
            program.actions.append(Action("receive", action.target, message))
        else:
            program.actions.append(Action("send", action.source, message))
    program.num_uses = _num_uses(plan.placement, edge_index, rank)
    sent = {a.message.value[:2] for a in program.actions if a.what == "send" and a.message}
    program.unsent = {edge for edge, is_gradient, _ in program.arriving if is_gradient and (edge, False) not in sent}
    return program


def _num_uses(placement: Placement, edge_index: dict[tuple[int, int], int], rank: int) -> dict[tuple[int, bool], int]:
    """How often the value that `rank` makes for an edge is sent or read here: 0 if only the task's first rank sends."""
    sender = {(route.source, route.target, route.receiver): route.sender for route in placement.routes}
    uses: dict[tuple[int, bool], int] = {}
    for edge in placement.edges:
        source, target = placement.tasks[edge.source], placement.tasks[edge.target]
        if source.stage != target.stage:
            key = value_key(Op(source.stage, source.kind, 0), Op(target.stage, target.kind, 0), edge_index)
            senders = [sender.get((edge.source, edge.target, receiver), receiver) for receiver in target.ranks]
            uses[key[:2]] = senders.count(rank)
    return uses


def value_key(a: Op, b: Op, edge_index: dict[tuple[int, int], int]) -> ValueKey:
    """The key of what `a` makes for `b`: an activation travels forward along its stage edge, a gradient backward."""
    if a.kind is Kind.F:
        return edge_index[a.stage, b.stage], False, a.microbatch
    return edge_index[b.stage, a.stage], True, a.microbatch


def _columns(plan: Plan) -> dict[Transfer, tuple[int, int]]:
    """(route, position) of each transfer: the index of its times in a timeline."""
    columns = {}
    for r, route in enumerate(plan.placement.routes):
        a, b = plan.placement.tasks[route.source], plan.placement.tasks[route.target]
        for k, m in enumerate(plan.placement.microbatches(a.stage, plan.num_microbatches)):
            transfer = Transfer(
                Op(a.stage, a.kind, m), Op(b.stage, b.kind, m), route.sender, route.receiver, route.num_bytes
            )
            columns[transfer] = (r, k)
    return columns


def for_all_streams(stages: Stages, plan: Plan) -> Stages:
    """The stages, repeated for each of the plan's data streams. Raises PipelineError if their number does not fit."""
    num_components = plan.placement.num_components
    num_stages, left = divmod(plan.placement.num_stages, num_components)
    if num_components == 1 or left:  # stages left over are in no data stream: an edge is missing
        return stages
    if num_stages != len(stages):
        raise PipelineError(
            f"the plan has {num_components} data streams of {num_stages} stages each, which share weights, but the "
            f"model was split into {len(stages)}; split(model, {num_stages}), or join the plan's stages by edges"
        )
    return stages.repeated(num_components)


def refuse_other_cuts(stages: Stages, plan: Plan) -> None:
    """Raises PipelineError if `split` cut the model in other places than the plan's: its costs would be wrong."""
    if plan.cuts is not None and stages.cuts is not None and stages.cuts != plan.cuts:
        made, planned = (", ".join(cuts) or "nowhere" for cuts in (stages.cuts, plan.cuts))
        raise PipelineError(
            f"the model was cut at {made}, but the plan is for {planned}: rota.split(model, plan.num_stages, plan.cuts)"
        )


def refuse_unsupported(plan: Plan, edges: Iterable[tuple[int, int]], num_stages: int) -> None:
    """Raises PipelineError if a plan and a model's stages do not fit, or need something that is not supported yet."""
    placement = plan.placement
    if placement.stages != tuple(range(num_stages)):
        raise PipelineError(
            f"the plan has {placement.num_stages} stages, the model was split into {num_stages}; "
            f"split(model, {placement.num_stages}), or plan for {num_stages} stages"
        )
    kinds = _kinds_by_stage(placement)
    for task in placement.tasks:
        home = placement.ranks_of(task.stage)
        if task.ranks != home:
            raise PipelineError(
                f"task {task} is on rank {_listed(task.ranks)}, but stage {task.stage}'s other task on rank "
                f"{_listed(home)}; place a stage's forward and backward on the same ranks"
            )
    expected = _edges_to_run(kinds, edges)
    there = {(str(placement.tasks[e.source]), str(placement.tasks[e.target])) for e in placement.edges}
    if len(there) < len(placement.edges):
        raise PipelineError("the plan's placement has an edge twice; give each pair of stages one edge")
    for verb, differing in (("lacks", expected - there), ("has, unlike the model,", there - expected)):
        if differing:
            a, b = min(differing)
            raise PipelineError(
                f"the plan's placement {verb} the edge {a} → {b}; measure the stages and plan with these "
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


def _listed(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))


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
