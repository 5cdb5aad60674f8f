"""What all ranks must agree on: before a plan runs, and before a batch of another size does."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh

from rota.errors import PipelineError
from rota.models import Stages
from rota.plan import Plan
from rota.runtime.json_messages import all_gather_json
from rota.runtime.launcher_files import digest
from rota.runtime.meshes import pipelines_of
from rota.runtime.reducing.shared_weights import SharedWeight
from rota.runtime.transport import together


def refuse_differences(plan: Plan, stages: Stages, shared: list[SharedWeight], mesh: DeviceMesh | None = None) -> None:
    """Raises PipelineError, on all ranks, unless all have one plan, stages joined alike and the same shared weights.

    And unless they are the plan's ranks.

    With a mesh, the plan's ranks are those along "pp".
    """
    layout = None if mesh is None else (mesh.mesh.tolist(), mesh.mesh_dim_names)
    joined = [[*edge] for edge in stages.edges], stages.inputs
    with together("comparing plans"):  # before anything that could fail on one rank alone
        told = all_gather_json([digest(plan), *(_digest_of(each) for each in (joined, shared, layout))])
    for i, what in enumerate(("plan", "graph of stages", "set of tied and replicated weights", "mesh")):
        for rank, other in enumerate(told):
            if other[i] != told[0][i]:
                raise PipelineError(f"rank {rank} has another {what} than rank 0; give all ranks the same {what}")
    num_ranks = len(pipelines_of(mesh)[0])
    if num_ranks != plan.num_ranks:
        there = f"{num_ranks} processes were started" if mesh is None else f"the mesh has {num_ranks} along 'pp'"
        start = f"start {plan.num_ranks}" if mesh is None else f"make it with pp={plan.num_ranks}"
        replicas = ", or give Pipeline a mesh with replicas" if mesh is None and not num_ranks % plan.num_ranks else ""
        raise PipelineError(
            f"the plan is for {plan.num_ranks} ranks, but {there}; {start}, or plan for {num_ranks}{replicas}"
        )


def _digest_of(value: object) -> str:
    """Of numbers, texts and tuples and lists of them."""
    return hashlib.sha256(repr(value).encode()).hexdigest()


def refuse_devices(stages: Stages, local: tuple[int, ...]) -> None:
    """Raises PipelineError where one of the `local` stages is not on the CPU."""
    for stage in local:
        for name, tensor in stages[stage].state_dict().items():
            if tensor.device.type != "cpu":
                raise PipelineError(f"{name} of stage {stage} is on {tensor.device}; only CPU stages can be run")


# --- batches ----------------------------------------------------------------------------------------------------------


class GivenBatch(NamedTuple):
    """What a process tells of its batch: what it reads (see `Intake.given`), and the rows of inputs and targets."""

    inputs: dict[str, list[str]]
    rows: list[int]
    target_rows: list[int]


def batch_differences(given: Sequence[GivenBatch], pipelines: list[list[int]], names: Sequence[str]) -> str:
    """What may be right, but explains an op that fails: ranks and replicas with other batches. "" if there is nothing.

    `given` and `names` are by process, `pipelines` are the processes of each pipeline by rank.
    """
    alike = [*pipelines, *map(list, zip(*pipelines, strict=True))]  # the ranks of a pipeline, and a rank's replicas
    found = [_input_difference(given, group, names) for group in alike]
    found += [_row_difference(given, pipeline, names) for pipeline in pipelines]
    return "; ".join(dict.fromkeys(filter(None, found)))


def _input_difference(given: Sequence[GivenBatch], group: list[int], names: Sequence[str]) -> str:
    """The first value of which two of the group read another."""
    first: dict[tuple[str, int], tuple[int, str]] = {}
    for process in group:
        for of_input, shapes in given[process].inputs.items():
            for m, shape in enumerate(shapes):
                other, known = first.setdefault((of_input, m), (process, shape)) if shape else (process, shape)
                if shape != known:
                    at = f"as input {of_input} of micro-batch {m}"
                    return f"{at} {names[process]} was given {shape}, {names[other]} {known}"
    return ""


def _row_difference(given: Sequence[GivenBatch], pipeline: list[int], names: Sequence[str]) -> str:
    """Inputs and targets with other numbers of rows, of which neither is a multiple of the other."""
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
    """ "4", or "4, 3, 4" where micro-batches differ."""
    return ", ".join(map(str, rows if len({*rows}) > 1 else rows[:1]))
