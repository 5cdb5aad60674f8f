"""Whether a plan and a model's stages fit together."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from rota.core.errors import PipelineError
from rota.core.placement import Placement
from rota.core.plan import Plan
from rota.core.tasks import Kind
from rota.models import Stages


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
