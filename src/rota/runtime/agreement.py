"""What all ranks must agree on, or learn from each other: the plan, the call, the batch, the loss.

    rank 0   step      ─┐                   ┌─▶ PipelineError: rank 0 calls step(), rank 1 evaluate(); …
    rank 1   evaluate  ─┴─ one all-reduce ──┴─▶ the same, before anything has run

Every call on a pipeline begins with one message: an int64 row, reduced by element-wise maximum. It has a place for each
process's call and one for each process's number, so its size does not depend on what is called, and processes that make
different calls find out.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from itertools import zip_longest
from typing import Any, NamedTuple, final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rota.core.errors import PipelineError
from rota.core.plan import Plan
from rota.core.units import count_text
from rota.models import Stages
from rota.runtime.compute import Batch
from rota.runtime.device.choosing import Placed, describe_placed, refuse_mixed
from rota.runtime.device.local import current_device
from rota.runtime.environment import MESH
from rota.runtime.execution import Execution
from rota.runtime.fingerprints import Fingerprints, refuse_other_data
from rota.runtime.json_messages import all_gather_json
from rota.runtime.launcher_files import digest
from rota.runtime.meshes import Processes, pipelines_of
from rota.runtime.microbatch_inputs import MicrobatchInputs
from rota.runtime.microbatches import Microbatches
from rota.runtime.number_bits import bits_of, number_of
from rota.runtime.precision import LossScale
from rota.runtime.ready_plans import ReadyPlan
from rota.runtime.reducing.loss_counts import NUM_FLAGS as NUM_COUNT_FLAGS
from rota.runtime.reducing.shared_weights import SharedWeight
from rota.runtime.step_losses import LATER
from rota.runtime.transport import Transport, collective
from rota.runtime.updates import NUM_FLAGS as NUM_UPDATE_FLAGS, Report, refuse_differences as refuse_differing_updates

# --- the plan ---------------------------------------------------------------------------------------------------------


def refuse_differences(
    plan: Plan,
    stages: Stages,
    shared: list[SharedWeight],
    mesh: DeviceMesh | None,
) -> torch.device:
    """Compare what all ranks made their pipelines from, and their number with the plan's. Collective.

    With a mesh, the plan's ranks are those along "pp".

    Returns:
        This process's device, if its stages have no tensors that show it: one like the others'.

    Raises:
        PipelineError: on all ranks, if their plans, edges between stages, shared weights, meshes or types of devices
            differ, or if two processes share an accelerator.
    """
    layout = None if mesh is None else (mesh.mesh.tolist(), mesh.mesh_dim_names)
    joined = [[*edge] for edge in stages.edges], stages.inputs
    with collective("comparing plans"):  # before anything that could fail on one rank only
        digests = [digest(plan), *(_digest_of(each) for each in (joined, shared, layout))]
        of_ranks = all_gather_json([digests, describe_placed(stages, lambda: _local_stages(plan, mesh))])
    for i, what in enumerate(("plan", "graph of stages", "set of tied and replicated weights", "mesh")):
        for rank, (other, _) in enumerate(of_ranks):
            if other[i] != of_ranks[0][0][i]:
                raise PipelineError(f"rank {rank} has a different {what} from rank 0; give all ranks the same {what}")
    num_ranks = len(pipelines_of(mesh)[0])
    if num_ranks != plan.num_ranks:
        there = f"{num_ranks} processes were started" if mesh is None else f"the mesh has {num_ranks} along 'pp'"
        start = f"start {plan.num_ranks}" if mesh is None else f"make it with pp={plan.num_ranks}"
        remedy = f"{start}, or plan for {num_ranks}"
        if mesh is None and not num_ranks % plan.num_ranks:
            num_replicas = num_ranks // plan.num_ranks
            found = f"rota.mesh(pp={plan.num_ranks}, dp={num_replicas}) for {num_replicas} replicas"
            # `rota run` tells the mesh, which may have TP shards.
            remedy = f"give Pipeline mesh={'rota.mesh()' if MESH in os.environ else found}, or {remedy}"
        raise PipelineError(f"the plan is for {count_text(plan.num_ranks, 'rank')}, but {there}; {remedy}")
    return current_device(refuse_mixed([Placed(*placed) for _, placed in of_ranks]))


def _local_stages(plan: Plan, mesh: DeviceMesh | None) -> tuple[int, ...]:
    """The stages of this process; none if the plan has no such rank."""
    mine = dist.get_rank()
    rank = next(pipeline.index(mine) for pipeline in pipelines_of(mesh) if mine in pipeline)
    return plan.placement.stages_on(rank) if rank < plan.num_ranks else ()


def _digest_of(value: object) -> str:
    """The digest of numbers, texts, and tuples and lists of them."""
    return hashlib.sha256(repr(value).encode()).hexdigest()


# --- calls and runs ---------------------------------------------------------------------------------------------------

_NUM_FLAGS = 6 + NUM_UPDATE_FLAGS + NUM_COUNT_FLAGS
_MOST_NAMES = 4
_NO_REPORT = Report()


class Call(IntEnum):
    """What users call on all ranks at once."""

    STEP = 1
    STEP_WITHOUT_SYNC = 2
    EVALUATE = 3
    FORWARD = 4
    FORWARD_WITHOUT_OUTPUTS = 5
    CLIP_GRAD_NORM = 6
    TIMELINE = 7
    BEGIN_STEP = 8
    BEGIN_STEP_WITHOUT_SYNC = 9
    SAVE = 10
    BEGIN_EPOCH = 11

    @property
    def is_step(self) -> bool:
        """Whether it makes gradients."""
        return self in (Call.STEP, Call.STEP_WITHOUT_SYNC, Call.BEGIN_STEP, Call.BEGIN_STEP_WITHOUT_SYNC)

    @property
    def has_loss(self) -> bool:
        """Whether it returns a loss."""
        return self.is_step or self is Call.EVALUATE

    @property
    def syncs(self) -> bool:
        """Whether gradients are reduced at the end."""
        return self not in (Call.STEP_WITHOUT_SYNC, Call.BEGIN_STEP_WITHOUT_SYNC)

    @property
    def waits(self) -> bool:
        """Whether it ends only when the device does."""
        return self not in (Call.BEGIN_STEP, Call.BEGIN_STEP_WITHOUT_SYNC)


_WORDS = {
    Call.STEP: "step()",
    Call.STEP_WITHOUT_SYNC: "step(sync=False)",
    Call.EVALUATE: "evaluate()",
    Call.FORWARD: "forward()",
    Call.FORWARD_WITHOUT_OUTPUTS: "forward()",  # with and without outputs are one call
    Call.CLIP_GRAD_NORM: "clip_grad_norm_()",
    Call.TIMELINE: "timeline()",
    Call.BEGIN_STEP: "begin_step()",
    Call.BEGIN_STEP_WITHOUT_SYNC: "begin_step(sync=False)",
    Call.SAVE: "Checkpoints.save()",
    Call.BEGIN_EPOCH: "Checkpoints.steps() for another epoch",
}


class Begun(NamedTuple):
    """What all ranks agreed on before a run."""

    with_layouts: bool  # values are sent with their layouts
    seed: int
    asking: list[int]  # the ranks of this pipeline that ask for outputs
    batch: Batch  # with the shares that all ranks give the micro-batches
    count_flags: list[int]  # see `LossCounts.begin`
    num_ended: int  # of the steps of begin_step: those that have ended on all ranks


@final
class Agreement:
    """What the ranks of a pipeline agree on at each call. All methods except `explain` are collective.

    With `dynamic_shapes`, layouts may be new in every run. `check_data`: when to compare what ranks were given,
    "first", "always" or "never".
    """

    def __init__(
        self,
        processes: Processes,
        transport: Transport,
        loss_scale: LossScale,
        dynamic_shapes: bool,
        check_data: str,
    ) -> None:
        self._processes, self._transport = processes, transport
        self._names, self._mine = processes.names, dist.get_rank()
        self._loss_scale, self._dynamic_shapes = loss_scale, dynamic_shapes
        self._check_data = check_data
        self._is_checked: set[bool] = set()  # what was given to a step, and to an evaluation
        #: Of the last batch that all ranks compared: its sizes, and the weights of its micro-batches.
        self._compared: WeakKeyDictionary[ReadyPlan, tuple[object, _Weights]] = WeakKeyDictionary()
        self._differences = ""  # between what the ranks were given
        self.num_calls = 0  # that this rank has begun

    def share(self, call: Call, doing: str, number: float = 0.0) -> list[float]:
        """All processes' `number`s of 0 or more, inf or nan, if all make this `call`. `doing`: see `_all_reduce`."""
        return self._all_reduce(call, doing, number=number).numbers

    def begin(
        self,
        call: Call,
        ready: ReadyPlan,
        batch: Batch,
        seed: int,
        scale: float,
        num_ended: int,
        report: Report = _NO_REPORT,
        count_flags: Sequence[int] = (0,) * NUM_COUNT_FLAGS,
    ) -> Begun:
        """Before a run: whether layouts may be new, and one seed for all.

        `num_ended`: how many of this rank's steps of begin_step have ended. `report`: see `Updates.report`.

        Raises:
            PipelineError: on all processes, if their calls, plans, scales or gradient scalers differ, or what they were
                given does not fit together.
        """
        is_new = max(ready.execution.is_new(batch), int(self._dynamic_shapes))
        checks = self._check_data == "always" or (self._check_data == "first" and call.is_step not in self._is_checked)
        compares = checks or not self._knows_weights(ready, batch)
        seed = seed if self._processes.is_first else 0
        flags = is_new, compares, seed, -num_ended, *self._loss_scale.flags(), *report.flags(), *count_flags
        row = self._all_reduce(call, "waiting for the others to begin the step", flags, scale, ready.number)
        layouts, must_compare, seed, most_running, most, least, *others = row.flags
        refuse_differing_updates(others[:NUM_UPDATE_FLAGS], report, self._names, self._processes.everyone)
        self._refuse_plans(row.plans)
        self._loss_scale.refuse_differences(most, least)
        self._refuse_scales(row.numbers)
        if layouts > 1:
            ready.execution.forget_layouts()
        shares, padding = self._weights_of(ready, batch, bool(must_compare), checks, call)
        if (shares, padding) != (batch.shares, batch.padding):
            batch = replace(batch, shares=shares, padding=padding)
        processes = enumerate(self._processes.pipeline_processes)
        asking = [rank for rank, process in processes if row.calls[process] is Call.FORWARD]
        return Begun(bool(layouts), seed, asking, batch, others[NUM_UPDATE_FLAGS:], -most_running)

    def _knows_weights(self, ready: ReadyPlan, batch: Batch) -> bool:
        """Whether this rank knows what each micro-batch weighs without asking the others."""
        if ready.rows:
            return ready.inputs.have_rows(batch, ready.rows)
        return ready in self._compared and self._compared[ready][0] == _sizes_of(batch)

    def _weights_of(self, ready: ReadyPlan, batch: Batch, must_compare: bool, checks: bool, call: Call) -> _Weights:
        """What each micro-batch weighs; if any rank does not know it, all compare what they were given."""
        if must_compare:
            found = self._compare(ready.inputs, batch, checks, call)
            self._is_checked.add(call.is_step)
            self._compared[ready] = _sizes_of(batch), found
            return found
        if ready.rows:
            return _Weights(ready.inputs.shares(ready.rows), ())
        return self._compared[ready][1]

    def explain(self, error: Exception, execution: Execution[Any]) -> None:
        """Raise a PipelineError instead of an op's `error` if the ranks' batches do not fit together."""
        if self._differences and execution.failed is not None and not isinstance(error, PipelineError):
            raise PipelineError(
                f"{execution.failed} failed on {self._names[self._mine]} ({type(error).__name__}: {error}); the ranks' "
                f"batches do not fit together, which may be why: {self._differences}. Give all ranks the same batch"
            ) from error

    def _all_reduce(
        self, call: Call, doing: str, flags: Sequence[int] = (), number: float = 0.0, plan: int = 0
    ) -> _Row:
        """The maxima of all processes' flags; by process what it calls, its number and its plan.

        Args:
            call: what this process calls.
            doing: what the ranks are doing, for the error if one is lost.
            flags: whole numbers of 64 bits, at most `_NUM_FLAGS`.
            number: 0 or more, inf or nan.
            plan: the number of the plan that is to run; 0 if none is, or the pipeline's own.

        Raises:
            PipelineError: on all processes, unless all make the same call.
        """
        self.num_calls += 1
        size = len(self._names)
        row = [0] * (_NUM_FLAGS + 3 * size)
        row[: len(flags)] = flags
        row[_NUM_FLAGS + self._mine] = int(call)
        row[_NUM_FLAGS + size + self._mine] = bits_of(number)
        row[_NUM_FLAGS + 2 * size + self._mine] = plan
        maxima = torch.tensor(row, device="cpu")
        self._transport.all_reduce(maxima, dist.ReduceOp.MAX, doing)
        row = maxima.tolist()
        calls = [Call(code) for code in row[_NUM_FLAGS : _NUM_FLAGS + size]]
        self._refuse_differences(calls)
        by_process = row[_NUM_FLAGS + size :]
        return _Row(row[: len(flags)], calls, [*map(number_of, by_process[:size])], by_process[size:])

    def _refuse_differences(self, calls: list[Call]) -> None:
        if len({*calls}) == 1:
            return
        by_word: dict[str, list[str]] = {}
        for name, call in zip(self._names, calls, strict=True):
            by_word.setdefault(_WORDS[call], []).append(name)
        if len(by_word) > 1:
            told = "; ".join(
                f"{listed(names)} {'calls' if len(names) == 1 else 'call'} {word}" for word, names in by_word.items()
            )
            raise PipelineError(
                f"the ranks make different calls at once: {told}; make the same calls in the same order on all ranks"
            )

    def _refuse_plans(self, plans: list[int]) -> None:
        for pipeline in self._processes.pipelines:
            for process in pipeline:
                if plans[process] != plans[pipeline[0]]:
                    raise PipelineError(
                        f"{self._names[process]} has another plan for this step than {self._names[pipeline[0]]}, or "
                        f"other sizes of micro-batches; give all ranks of a replica the same, as rota.Planner does"
                    )

    def _refuse_scales(self, scales: list[float]) -> None:
        for pipeline in self._processes.pipelines:
            first = pipeline[0]
            for process in pipeline:
                if scales[process] != scales[first]:
                    raise PipelineError(
                        f"{self._names[first]} gave step scale={scales[first]:g}, {self._names[process]} "
                        f"{scales[process]:g}; give all ranks the same"
                    )

    def _compare(self, inputs: MicrobatchInputs, batch: Batch, checks: bool, call: Call) -> _Weights:
        """Gather what the others were given, and refuse what does not fit together. Collective."""
        given_here = batch.given if inputs.reads_inputs else Microbatches([])
        wanted_here = batch.wanted if inputs.reads_targets else Microbatches([])
        mine = GivenBatch(
            [*batch.rows],
            [*batch.target_rows],
            [*given_here.sizes],
            [*wanted_here.sizes],
            given_here.num_rows,
            wanted_here.num_rows,
            [*max(given_here.padding, wanted_here.padding, key=len)],
            inputs.fingerprints(batch) if checks else {},
        )
        processes = self._processes
        with collective("comparing batches"):
            given = [GivenBatch(*fields) for fields in all_gather_json(mine, processes.everyone)]
            refuse_other_data(
                [each.fingerprints for each in given],
                processes.pipelines,
                processes.num_tp_shards,
                self._names,
                compare_replicas=call.is_step,
            )
        for pipeline in processes.pipelines:
            _refuse_uneven_rows([given[process] for process in pipeline], len(batch.shares))
        differences = (_row_difference(given, pipeline, self._names) for pipeline in processes.pipelines)
        self._differences = "; ".join(filter(None, differences))
        return _weights([given[process] for process in processes.pipeline_processes], inputs)


class _Row(NamedTuple):
    """What `Agreement._all_reduce` returns; all but `flags` by process."""

    flags: list[int]
    calls: list[Call]
    numbers: list[float]
    plans: list[int]


def _sizes_of(batch: Batch) -> object:
    return batch.rows, batch.target_rows, batch.given.num_rows, batch.wanted.num_rows


def listed(names: Sequence[str]) -> str:
    """The names as text for messages: "rank 0, rank 1 and 7 more"."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


# --- batches ----------------------------------------------------------------------------------------------------------


class GivenBatch(NamedTuple):
    """What a process was given.

    The rows of inputs and targets that it reads; `sizes` of all micro-batches of inputs and targets, where a list was
    given or they differ; the rows of whole batches that were split, and which micro-batches are padding. All of it is
    empty for what the process does not read.
    """

    rows: list[int]
    target_rows: list[int]
    sizes: list[int] = []  # noqa: RUF012 - never mutated
    target_sizes: list[int] = []  # noqa: RUF012
    num_rows: int = 0
    num_target_rows: int = 0
    padding: list[int] = []  # noqa: RUF012
    fingerprints: Fingerprints = {}  # noqa: RUF012


class _Weights(NamedTuple):
    """Each micro-batch's share of a mean loss, and which of them are padding."""

    shares: list[float]
    padding: tuple[int, ...]


def _weights(of_ranks: Sequence[GivenBatch], inputs: MicrobatchInputs) -> _Weights:
    """From the targets' sizes if any rank has them, else the inputs'."""
    sizes = [given.target_sizes for given in of_ranks] + [given.sizes for given in of_ranks]
    shares = inputs.shares(next(filter(None, sizes), ()))
    padding = next(filter(None, (given.padding for given in of_ranks)), [])
    return _Weights(shares, tuple(padding))


def _refuse_uneven_rows(of_ranks: Sequence[GivenBatch], n: int) -> None:
    """Rows that do not divide evenly are split alike only if inputs and targets have the same number."""
    rows, target_rows = max(given.num_rows for given in of_ranks), max(given.num_target_rows for given in of_ranks)
    if rows and target_rows and rows != target_rows and (rows % n or target_rows % n):
        raise PipelineError(
            f"inputs have {rows} rows and targets {target_rows}, which do not both divide into {n} micro-batches, so "
            f"it is not known which targets belong to which rows; give the same number of rows, such as targets with a "
            f"row per example, or lists of {n} micro-batches"
        )


def _row_difference(given: Sequence[GivenBatch], pipeline: list[int], names: Sequence[str]) -> str:
    """Inputs and targets with different numbers of rows, of which neither is a multiple of the other; or "".

    `given` and `names` are by process. It may be intended, but explains an op that fails.
    """
    reader = next((process for process in pipeline if given[process].rows), None)
    if reader is None:
        return ""
    for process in pipeline:
        known, rows = given[reader].rows, given[process].target_rows
        if rows and any(a % max(b, 1) and b % max(a, 1) for a, b in zip_longest(known, rows, fillvalue=known[-1])):
            told = f"{names[reader]} has inputs of {_told(known)} rows per micro-batch"
            return f"{told}, {names[process]} targets of {_told(rows)}"
    return ""


def _told(rows: Sequence[int]) -> str:
    """Rows per micro-batch as text: "4", or "4, 3, 4" where micro-batches differ."""
    return ", ".join(map(str, rows if len({*rows}) > 1 else rows[:1]))


# --- the loss ---------------------------------------------------------------------------------------------------------


def refuse_loss(
    mean: float,
    step: int,
    name: str,
    mine: dict[int, dict[int, float]],
    empty: list[int],
    group: dist.ProcessGroup | None,
) -> None:
    """Refuse a mean loss that is not finite. Collective.

    Args:
        mean: the mean loss.
        step: the number of the step.
        name: this process's name, for messages.
        mine: the losses that this process counts: by last stage, then by micro-batch.
        empty: the micro-batches without rows, as this process was given them.
        group: all processes; None: refuse it only on this rank, in begin_step.

    Raises:
        PipelineError: always, and with a group on all ranks, with all losses that are not finite.
    """
    of_ranks: list[Any] = [[name, [(stage, [*losses.items()]) for stage, losses in mine.items()], empty]]
    if group is not None:
        with collective("gathering losses that are not finite"):
            of_ranks = all_gather_json(of_ranks[0], group)
    places = [_nonfinite_text(on, stage, dict(losses)) for on, each, _ in of_ranks for stage, losses in each]
    found = "; ".join(filter(None, places))
    bad = [
        m
        for _, each, of_none in of_ranks
        for _, losses in each
        for m, loss in losses
        if m in of_none and math.isnan(loss)
    ]
    cause = _without_rows(bad)
    if group is None:
        elsewhere = "the ranks of the last stage say for which micro-batches"
        if any(mine.values()):
            elsewhere = "each micro-batch's is finite here, but the sum over all is not"
        told, then = found or elsewhere, f"{LATER}; {cause or 'lower the learning rate'}"
    else:
        told = found or "each micro-batch's is finite, but their sum is not"
        cause = cause or "reload the last checkpoint or lower the learning rate"
        then = f"Do not apply its gradients: {cause}; to go on without this batch, set the gradients to None"
    raise PipelineError(f"step {step}: the mean loss is {mean} ({told}). {then}; {_TO_GET_SUCH}")


_TO_GET_SUCH = "to be given such losses, use Pipeline(…, allow_nonfinite_loss=True) or a GradScaler"


def _without_rows(microbatches: list[int]) -> str:
    """What to do about micro-batches without rows; "" if there are none."""
    if not microbatches:
        return ""
    which = f"micro-batch{'es' if len(microbatches) > 1 else ''} {', '.join(map(str, microbatches))}"
    return (
        f"{which} had no rows, so their mean is nan: give each micro-batch a row or more, or let loss_fn return "
        f"output.sum() * 0 where there are none"
    )


def _nonfinite_text(name: str, stage: int, losses: dict[int, float]) -> str:
    by_value: dict[str, list[int]] = {}
    for microbatch, loss in losses.items():
        if not math.isfinite(loss):
            by_value.setdefault(str(loss), []).append(microbatch)
    if not by_value:
        return ""
    values = (
        f"{value} for micro-batch{'es' if len(of) > 1 else ''} {', '.join(map(str, of))}"
        for value, of in by_value.items()
    )
    return f"{', '.join(values)} at stage {stage} on {name}"
