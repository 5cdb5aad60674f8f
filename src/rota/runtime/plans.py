"""The plans of a pipeline: whether they fit its stages, and all that a step needs of each, made before the step.

    pipeline.prepare(plan, sizes) ──▶ Execution, MicrobatchInputs, reductions ──▶ step(…, plan=plan)    swaps, and runs

The plans of one pipeline have the same tasks on the same ranks, and the same edges. Everything else may differ: the
number of micro-batches, their durations and sizes, and all orders.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from typing import Any, final
from weakref import WeakKeyDictionary

from rota.core.copies import without_copies
from rota.core.errors import PipelineError
from rota.core.placement import Placement
from rota.core.plan import Plan
from rota.core.simulation import check
from rota.core.tasks import Kind, values_of
from rota.models import Stages
from rota.runtime.bound_actions import ThisRank
from rota.runtime.compute import Compute
from rota.runtime.execution import Execution, forwards_of
from rota.runtime.launcher_files import digest
from rota.runtime.layouts import KnownLayouts, Size
from rota.runtime.losses import LossFn, needs_target
from rota.runtime.microbatch_inputs import MicrobatchInputs
from rota.runtime.recorder import Record
from rota.runtime.reducing.gradient_sync import GradientSync, Reductions

_TRAINING = ("FB", "FIW", "FRB", "FRIW")  # the kinds of a stage
_MOST_READY = 8  # a plan that is made for one batch is not used again


@final
@dataclass(slots=True, eq=False, weakref_slot=True)
class ReadyPlan:
    """A plan, how this rank runs it, and what it reads of a batch.

    `number` is the same on all ranks that have the same plan; 0 for the plan of the pipeline. `sizes`: of each
    micro-batch, as `Pipeline.prepare` was given them; () if they are not known. `reductions`: None in evaluation.
    """

    plan: Plan
    number: int
    sizes: tuple[Size, ...]
    execution: Execution
    inputs: MicrobatchInputs
    reductions: Reductions | None
    #: Of the last batch that all ranks compared: its sizes, and the weights of its micro-batches.
    compared: tuple[object, Any] = (None, None)

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows of each micro-batch, as all ranks know them; () if they do not."""
        return tuple(size[0] for size in self.sizes)


@final
class ReadyPlans:
    """The plans of a pipeline that are ready, those that were used last. `compute`: of all that train."""

    def __init__(
        self, stages: Stages, plan: Plan, loss_fn: LossFn | None, compute: Compute, here: ThisRank, sync: GradientSync
    ) -> None:
        self._stages, self._loss_fn, self._here, self._sync = stages, loss_fn, here, sync
        self._compute, self._takes_target = compute, loss_fn is None or needs_target(loss_fn)
        self._known, self._known_in_evaluation = KnownLayouts(), KnownLayouts()
        self._ready: OrderedDict[int, ReadyPlan] = OrderedDict()  # by the identity of the plan
        self._forwards: WeakKeyDictionary[ReadyPlan, ReadyPlan] = WeakKeyDictionary()
        #: That of the pipeline.
        self.base = self._make(plan, 0, ())

    def get(self, plan: Plan | None, sizes: Sequence[Sequence[int]] = ()) -> ReadyPlan:
        """The plan, ready; it is made ready now if it is not. None: that of the pipeline."""
        if plan is None or plan is self.base.plan:
            if sizes:
                raise PipelineError("sizes are given without a plan; give step the plan that they belong to")
            return self.base
        wanted = tuple(tuple(size) for size in sizes)
        ready = self._ready.get(id(plan))
        if ready is None or ready.plan is not plan or ready.sizes != wanted:
            _refuse_other_placement(plan.placement, self.base.plan.placement)
            _refuse_sizes(wanted, plan.num_microbatches)
            check(plan)
            ready = self._ready[id(plan)] = self._make(plan, _number_of(plan, wanted), wanted)
        self._ready.move_to_end(id(plan))  # it was used last, so it is the last to go
        if len(self._ready) > _MOST_READY:
            self._ready.popitem(last=False)
        return ready

    def forwards(self, plan: Plan | None, sizes: Sequence[Sequence[int]] = ()) -> ReadyPlan:
        """The forwards of the plan, ready."""
        training = self.get(plan, sizes)
        if training not in self._forwards:
            forwards = forwards_of(training.plan)
            compute = Compute(self._stages, forwards.placement, self._loss_fn, device=self._here.device)
            here = replace(self._here, record=Record(self._here.rank), tied=())
            known = self._known_in_evaluation
            execution = Execution(self._stages, forwards, compute, here, sizes=training.sizes, known=known)
            ready = replace(training, plan=forwards, execution=execution, reductions=None, compared=(None, None))
            self._forwards[training] = ready
        return self._forwards[training]

    def _make(self, plan: Plan, number: int, sizes: tuple[Size, ...]) -> ReadyPlan:
        rank, device = self._here.rank, self._here.device.torch_device
        reductions = self._sync.reductions(plan)
        execution = Execution(self._stages, plan, self._compute, self._here, reductions.hooks, sizes, self._known)
        inputs = MicrobatchInputs(self._stages, plan, rank, device, self._takes_target, warns=not number)
        return ReadyPlan(plan, number, sizes, execution, inputs, reductions)


def _number_of(plan: Plan, sizes: tuple[Size, ...]) -> int:
    """The same number of 1 or more for the same plan and sizes; another one for others."""
    text = f"{digest(plan)}{sizes}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 2 | 1


# --- plans of batches -------------------------------------------------------------------------------------------------


def _refuse_other_placement(placement: Placement, base: Placement) -> None:
    """Raises PipelineError unless the tasks are on the ranks they have in `base`, with the same edges between them."""
    ours, theirs = ([(str(task), task.ranks) for task in placed.tasks] for placed in (base, placement))
    if ours != theirs:
        differing = next(pair for pair in zip_longest(theirs, ours) if pair[0] != pair[1])
        words = [f"{task[0]} on rank {_listed(task[1])}" if task else "nothing" for task in differing]
        raise PipelineError(
            f"the plan of this step has {words[0]} where the pipeline's plan has {words[1]}; plan each batch for the "
            f"same stages on the same ranks, or make another Pipeline"
        )
    if placement.num_ranks != base.num_ranks or _edges(placement) != _edges(base):
        raise PipelineError(
            f"the plan of this step has {placement.num_ranks} ranks and the edges {_edges(placement)}, the pipeline's "
            f"plan {base.num_ranks} and {_edges(base)}; plan each batch for the same placement"
        )


def _edges(placement: Placement) -> list[tuple[int, int]]:
    return [(edge.source, edge.target) for edge in placement.edges]


def _refuse_sizes(sizes: tuple[Size, ...], num_microbatches: int) -> None:
    if sizes and len(sizes) != num_microbatches:
        raise PipelineError(
            f"sizes has {len(sizes)} entries for {num_microbatches} micro-batches; give (rows, length) of each"
        )
    for m, size in enumerate(sizes):
        whole = all(type(number) is int and number >= 0 for number in size)
        if not size or not whole or len(size) != len(sizes[0]):
            raise PipelineError(
                f"sizes[{m}] is {size!r}; give whole numbers of 0 or more, rows first, the same number for each "
                f"micro-batch, such as (rows, length)"
            )


# --- plans and stages -------------------------------------------------------------------------------------------------


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
    _refuse_half_offload(plan.placement)
    placement = without_copies(plan.placement)
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
    planned = {(str(placement.tasks[e.source]), str(placement.tasks[e.target])) for e in placement.edges}
    if len(planned) < len(placement.edges):
        raise PipelineError("the plan's placement has an edge twice; give each pair of stages one edge")
    for verb, differing in (("lacks", expected - planned), ("has, unlike the model,", planned - expected)):
        if differing:
            a, b = min(differing)
            raise PipelineError(
                f"the plan's placement {verb} the edge {a} → {b}; measure the stages and plan with these "
                f"costs (rota.profile, then rota plan --costs), or place(costs, cluster, edges=stages.edges)"
            )


def _refuse_half_offload(placement: Placement) -> None:
    """Raises PipelineError unless each stage that offloads copies to the host and back, and does not recompute."""
    tasks = placement.tasks
    edges = {(tasks[e.source].stage, tasks[e.source].kind, tasks[e.target].kind) for e in placement.edges}
    for stage in {task.stage for task in tasks if task.kind.is_copy}:
        forward, offload = placement.task(stage, Kind.F), placement.task(stage, Kind.O)
        back = Kind.B if placement.task(stage, Kind.B) else Kind.I
        way = ((Kind.F, Kind.O), (Kind.O, Kind.L), (Kind.L, back))
        if forward is None or offload is None or any((stage, *pair) not in edges for pair in way):
            raise PipelineError(
                f"stage {stage} lacks a part of F → O → L → {back}; let rota.place make it, from offload_bytes"
            )
        for held, freed in zip(*map(values_of, (forward.held_bytes, offload.held_bytes)), strict=False):
            if not 0 < -freed <= held:
                raise PipelineError(f"stage {stage} offloads {-freed} bytes of the {held} that its F holds")
        if placement.task(stage, Kind.R):
            raise PipelineError(
                f"the plan recomputes and offloads stage {stage}, which is not supported yet; give it either "
                f"recompute_us or offload_bytes"
            )


def refuse_offload(plan: Plan, what: str) -> None:
    """Raises PipelineError if the plan offloads, which accelerators and sharded weights do not yet."""
    if any(task.kind is Kind.O for task in plan.placement.tasks):
        raise PipelineError(
            f"the plan offloads activations, which is supported on CPUs only, not with {what}; plan without "
            f"offload_bytes"
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


def _edges_to_run(kinds: list[str], edges: Iterable[tuple[int, int]]) -> set[tuple[str, str]]:
    """The edges between tasks that the stages and the edges between them need."""
    expected = {(f"{s}{a}", f"{s}{b}") for s, of_stage in enumerate(kinds) for a, b in pairwise(of_stage)}
    for a, b in edges:
        expected.add((f"{a}F", f"{b}F"))
        if len(kinds[b]) > 1:
            back = [next(k for k in kinds[stage] if k in "BI") for stage in (b, a)]
            expected.add((f"{b}{back[0]}", f"{a}{back[1]}"))
    return expected
