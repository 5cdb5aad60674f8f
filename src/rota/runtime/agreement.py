"""What all ranks must agree on, or learn from each other: the plan, the call, the batch, the loss.

    rank 0   step      ─┐                   ┌─▶ PipelineError: rank 0 calls step(), rank 1 evaluate(); …
    rank 1   evaluate  ─┴─ one all-reduce ──┴─▶ the same, before anything has run

Every call on a pipeline begins with one message: an int64 row, reduced by element-wise maximum. It has a place for each
process's call and one for each process's number, so its size does not depend on what is called, and processes that make
different calls find out.
"""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rota.core.errors import PipelineError
from rota.core.plan import Plan
from rota.core.text import count_text
from rota.models import Stages
from rota.runtime.compute import Batch
from rota.runtime.device.choosing import Placed, describe_placed, refuse_mixed
from rota.runtime.device.local import current_device
from rota.runtime.device.numbers import bits_of, number_of
from rota.runtime.environment import MESH
from rota.runtime.faults.watchdog import Watched
from rota.runtime.fingerprints import refuse_other_data
from rota.runtime.json_messages import all_gather_json
from rota.runtime.launcher_files import digest
from rota.runtime.meshes import Processes, pipelines_of, planned_stages
from rota.runtime.microbatch_inputs import MicrobatchInputs
from rota.runtime.microbatches import Microbatches
from rota.runtime.plans import ReadyPlan
from rota.runtime.precision import LossScale
from rota.runtime.reducing.loss_counts import NUM_FLAGS as NUM_COUNT_FLAGS
from rota.runtime.reducing.shared_weights import SharedWeight
from rota.runtime.transport import MAX, Transport, collective
from rota.runtime.updates import NUM_FLAGS as NUM_UPDATE_FLAGS, Report, refuse_differences as refuse_differing_updates

# --- the plan ---------------------------------------------------------------------------------------------------------


def refuse_differences(
    plan: Plan, stages: Stages, shared: list[SharedWeight], mesh: DeviceMesh | None, reduce_dtype: torch.dtype | None
) -> torch.device:
    """Compare what all ranks made their pipelines from, and their number with the plan's. Collective.

    With a mesh, the plan's ranks are those along "pp". Returns this process's device, if its stages have no tensors
    that show it: one like the others'. Raises PipelineError, on all ranks, if their plans, edges between stages, shared
    weights, meshes, `reduce_dtype` or types of devices differ, or if two processes share an accelerator.
    """
    layout = None if mesh is None else (mesh.mesh.tolist(), mesh.mesh_dim_names)
    joined = [[*edge] for edge in stages.edges], stages.inputs
    with collective("comparing plans"):  # before anything that could fail on one rank only
        texts = map(repr, (joined, shared, layout, reduce_dtype))  # of numbers, texts, and tuples and lists of them
        digests = [digest(plan), *(hashlib.sha256(text.encode()).hexdigest() for text in texts)]
        of_ranks = all_gather_json([digests, describe_placed(stages, lambda: planned_stages(plan, mesh))])
    for i, what in enumerate(("plan", "graph of stages", "set of tied and replicated weights", "mesh", "reduce_dtype")):
        for rank, (other, _) in enumerate(of_ranks):
            if other[i] != of_ranks[0][0][i]:
                raise PipelineError(f"rank {rank} has a different {what} from rank 0; give all ranks the same {what}")
    num_ranks = len(pipelines_of(mesh)[0])
    if num_ranks != plan.num_ranks:
        started = f"{num_ranks} processes were started" if mesh is None else f"the mesh has {num_ranks} along 'pp'"
        start = f"start {plan.num_ranks}" if mesh is None else f"make it with pp={plan.num_ranks}"
        remedy = f"{start}, or plan for {num_ranks}"
        if mesh is None and not num_ranks % plan.num_ranks:
            num_replicas = num_ranks // plan.num_ranks
            replicas = f"rota.mesh(pp={plan.num_ranks}, dp={num_replicas}) for {num_replicas} replicas"
            # `rota run` tells the mesh, which may have TP shards.
            remedy = f"give Pipeline mesh={'rota.mesh()' if MESH in os.environ else replicas}, or {remedy}"
        raise PipelineError(f"the plan is for {count_text(plan.num_ranks, 'rank')}, but {started}; {remedy}")
    return current_device(refuse_mixed([Placed(*placed) for _, placed in of_ranks]))


# --- calls and runs ---------------------------------------------------------------------------------------------------

_NUM_FLAGS = 6 + NUM_UPDATE_FLAGS + NUM_COUNT_FLAGS
_MOST_NAMES = 4


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

    def __init__(self, _: int) -> None:
        #: Whether it makes gradients, and whether it returns a loss.
        self.is_step = "STEP" in self.name
        self.has_loss = self.is_step or self.name == "EVALUATE"
        #: Whether gradients are reduced at the end, and whether it ends only when the device does.
        self.syncs, self.waits = "WITHOUT_SYNC" not in self.name, "BEGIN_STEP" not in self.name


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


class Brought(NamedTuple):
    """What a rank brings to the beginning of a run."""

    call: Call
    seed: int
    scale: float  # as `step` was given it
    num_ended: int  # of this rank's steps of begin_step: those that have ended
    report: Report  # see `Updates.report`
    count_flags: Sequence[int]  # see `LossCounts.flags`


class Agreed(NamedTuple):
    """What all ranks agreed on before a run."""

    learns: bool  # values are sent with their layouts
    seed: int
    asking: list[int]  # the ranks of this pipeline that ask for outputs
    count_flags: list[int]  # see `LossCounts.begin`
    num_ended: int  # of the steps of begin_step: those that have ended on all ranks


@final
class Agreement:
    """What the ranks of a pipeline agree on at each call. All methods are collective.

    With `dynamic_shapes`, layouts may be new in every run. `check_data`: when to compare what ranks were given,
    "first", "always" or "never".
    """

    def __init__(
        self,
        processes: Processes,
        transport: Transport,
        loss_scale: LossScale,
        watched: Watched,
        dynamic_shapes: bool,
        check_data: str,
    ) -> None:
        self._processes, self._transport, self._watched = processes, transport, watched
        self._names, self._process = processes.names, dist.get_rank()
        self._loss_scale, self._dynamic_shapes = loss_scale, dynamic_shapes
        self._check_data = check_data
        self._is_checked: set[bool] = set()  # what was given to a step, and to an evaluation
        self._row = array("q", bytes(8 * (_NUM_FLAGS + 3 * len(self._names))))
        self._tensor = torch.frombuffer(self._row, dtype=torch.int64)  # of the same memory

    def share(self, call: Call, doing: str, number: float = 0.0) -> list[float]:
        """All processes' `number`s of 0 or more, inf or nan, if all make this `call`. `doing`: see `_all_reduce`."""
        return [*map(number_of, self._all_reduce(call, doing, number=number).bits)]

    def begin(self, ready: ReadyPlan, batch: Batch, brought: Brought) -> Agreed:
        """Before a run: whether layouts may be new, one seed for all, and what each micro-batch of `batch` weighs.

        Raises PipelineError, on all processes, if their calls, plans, scales or gradient scalers differ, or if what
        they were given does not fit together.
        """
        call, report = brought.call, brought.report
        is_new = max(ready.execution.is_new(batch), int(self._dynamic_shapes))
        checks = self._check_data == "always" or (self._check_data == "first" and call.is_step not in self._is_checked)
        compares = checks or not self._knows_weights(ready, batch)
        seed = brought.seed if self._processes.is_first else 0
        agreed = is_new, compares, seed, -brought.num_ended, *self._loss_scale.flags()
        flags = *agreed, *report.flags(), *brought.count_flags
        row = self._all_reduce(call, "waiting for the others to begin the step", flags, brought.scale, ready.number)
        layouts, must_compare, seed, most_running, most, least, *others = row.flags
        refuse_differing_updates(others[:NUM_UPDATE_FLAGS], report, self._names, self._processes.everyone)
        self._refuse_plans(row.plans)
        self._loss_scale.refuse_differences(most, least)
        self._refuse_scales(row.bits)
        if layouts > 1:
            ready.execution.forget_layouts()
        batch.shares, batch.padding = self._weights_of(ready, batch, bool(must_compare), checks, call)
        processes = () if call.has_loss else enumerate(self._processes.pipeline_processes)
        asking = [rank for rank, process in processes if row.calls[process] == Call.FORWARD]
        return Agreed(bool(layouts), seed, asking, others[NUM_UPDATE_FLAGS:], -most_running)

    def _knows_weights(self, ready: ReadyPlan, batch: Batch) -> bool:
        """Whether this rank knows what each micro-batch weighs without asking the others."""
        if ready.sizes:
            return ready.inputs.have_rows(batch, ready.rows)
        return ready.compared[0] == _sizes_of(batch)

    def _weights_of(self, ready: ReadyPlan, batch: Batch, must_compare: bool, checks: bool, call: Call) -> _Weights:
        """What each micro-batch weighs; if any rank does not know it, all compare what they were given."""
        if must_compare:
            weights = self._compare(ready.inputs, batch, checks, call)
            self._is_checked.add(call.is_step)
            ready.compared = _sizes_of(batch), weights
            return weights
        return _Weights(ready.inputs.shares(ready.rows), ()) if ready.sizes else ready.compared[1]

    def _all_reduce(
        self, call: Call, doing: str, flags: Sequence[int] = (), number: float = 0.0, plan: int = 0
    ) -> _Row:
        """The maxima of all processes' flags; by process what it calls, its number and its plan.

        `doing`: for the error if a rank is lost. `flags`: at most `_NUM_FLAGS`. `number`: 0 or more, inf or nan.
        `plan`: the number of the plan that is to run; 0 if none is, or the pipeline's own. Raises PipelineError, on all
        processes, unless all make the same call.
        """
        self._watched.num_calls += 1
        size, row = len(self._names), self._row
        row[:] = array("q", bytes(8 * len(row)))
        row[: len(flags)] = array("q", flags)
        row[_NUM_FLAGS + self._process :: size] = array("q", (call, bits_of(number), plan))
        self._transport.all_reduce(self._tensor, MAX, doing)
        agreed = row.tolist()
        codes, bits, plans = (agreed[a : a + size] for a in range(_NUM_FLAGS, len(row), size))
        if codes.count(call) < size:
            self._refuse_differences([*map(Call, codes)])
        return _Row(agreed[: len(flags)], codes, bits, plans)

    def _refuse_differences(self, calls: list[Call]) -> None:
        by_word: dict[str, list[str]] = {}
        for name, call in zip(self._names, calls, strict=True):
            by_word.setdefault(_WORDS[call], []).append(name)
        if len(by_word) > 1:
            calling = "; ".join(
                f"{listed(names)} {'calls' if len(names) == 1 else 'call'} {word}" for word, names in by_word.items()
            )
            raise PipelineError(
                f"the ranks make different calls at once: {calling}; make the same calls in the same order on all ranks"
            )

    def _refuse_plans(self, plans: list[int]) -> None:
        if differing := self._differing(plans):
            first, other = (self._names[process] for process in differing)
            raise PipelineError(
                f"{other} has another plan for this step than {first}, or other sizes of micro-batches; give all ranks "
                f"of a replica the same, as rota.Planner does"
            )

    def _refuse_scales(self, bits: list[int]) -> None:
        if differing := self._differing(bits):
            first, other = differing
            raise PipelineError(
                f"{self._names[first]} gave step scale={number_of(bits[first]):g}, {self._names[other]} "
                f"{number_of(bits[other]):g}; give all ranks the same"
            )

    def _differing(self, by_process: Sequence[int]) -> tuple[int, int] | None:
        """The first process of a pipeline and another one of it with another number; None if there is none."""
        for first, *others in self._processes.pipelines:
            for other in others:
                if by_process[other] != by_process[first]:
                    return first, other
        return None

    def _compare(self, inputs: MicrobatchInputs, batch: Batch, checks: bool, call: Call) -> _Weights:
        """Gather what the others were given, and refuse what does not fit together. Collective."""
        split_inputs = batch.split_inputs if inputs.reads_inputs else Microbatches([])
        split_targets = batch.split_targets if inputs.reads_targets else Microbatches([])
        own_rows = _Rows(
            [*split_inputs.sizes],
            [*split_targets.sizes],
            split_inputs.num_rows,
            split_targets.num_rows,
            [*max(split_inputs.padding, split_targets.padding, key=len)],
        )
        own_fingerprints = inputs.fingerprints(batch) if checks else {}
        processes = self._processes
        with collective("comparing batches"):
            gathered = all_gather_json([own_rows, own_fingerprints], processes.everyone)
            refuse_other_data(
                [fingerprints for _, fingerprints in gathered],
                processes.pipelines,
                processes.num_tp_shards,
                self._names,
                compare_replicas=call.is_step,
            )
        rows = [_Rows(*fields) for fields, _ in gathered]
        for pipeline in processes.pipelines:
            _refuse_uneven_rows([rows[process] for process in pipeline], len(batch.inputs))
        return _weights([rows[process] for process in processes.pipeline_processes], inputs)


class _Row(NamedTuple):
    """What `Agreement._all_reduce` returns; all but `flags` by process."""

    flags: list[int]
    calls: list[int]
    bits: list[int]  # of the numbers
    plans: list[int]


def _sizes_of(batch: Batch) -> object:
    return batch.rows, batch.target_rows, batch.split_inputs.num_rows, batch.split_targets.num_rows


def listed(names: Sequence[str]) -> str:
    """The names as text for messages: "rank 0, rank 1 and 7 more"."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


# --- batches ----------------------------------------------------------------------------------------------------------


class _Rows(NamedTuple):
    """The rows that a process was given.

    `sizes` of all micro-batches of inputs and targets, where a list was given or they differ; the rows of whole batches
    that were split, and which micro-batches are padding. All of it is empty for what the process does not read.
    """

    sizes: list[int]
    target_sizes: list[int]
    num_rows: int
    num_target_rows: int
    padding: list[int]


class _Weights(NamedTuple):
    """Each micro-batch's share of a mean loss, and which of them are padding."""

    shares: list[float]
    padding: tuple[int, ...]


def _weights(by_rank: Sequence[_Rows], inputs: MicrobatchInputs) -> _Weights:
    """From the targets' sizes if any rank has them, else the inputs'."""
    sizes = [rank.target_sizes for rank in by_rank] + [rank.sizes for rank in by_rank]
    shares = inputs.shares(next(filter(None, sizes), ()))
    return _Weights(shares, next((tuple(rank.padding) for rank in by_rank if rank.padding), ()))


def _refuse_uneven_rows(by_rank: Sequence[_Rows], n: int) -> None:
    """Rows that do not divide evenly are split alike only if inputs and targets have the same number."""
    rows, target_rows = max(rank.num_rows for rank in by_rank), max(rank.num_target_rows for rank in by_rank)
    if rows and target_rows and rows != target_rows and (rows % n or target_rows % n):
        raise PipelineError(
            f"inputs have {rows} rows and targets {target_rows}, which do not both divide into {n} micro-batches, so "
            f"it is not known which targets belong to which rows; give the same number of rows, such as targets with a "
            f"row per example, or lists of {n} micro-batches"
        )
