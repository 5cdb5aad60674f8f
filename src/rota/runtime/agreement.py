"""What all ranks must agree on before a plan runs."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rota.errors import PipelineError
from rota.models import Stages
from rota.plan import Plan
from rota.runtime.handover import digest
from rota.runtime.meshes import pipelines_of
from rota.runtime.shared import SharedWeight
from rota.runtime.transport import together


def refuse_differences(plan: Plan, stages: Stages, shared: list[SharedWeight], mesh: DeviceMesh | None = None) -> None:
    """Raises PipelineError, on all ranks, unless all have one plan, stages joined alike and the same shared weights.

    And unless they are the plan's ranks.

    With a mesh, the plan's ranks are those along "pp".
    """
    told: list[Any] = [None] * dist.get_world_size()
    with together("comparing plans"):  # before anything that could fail on one rank alone
        layout = None if mesh is None else (mesh.mesh.tolist(), mesh.mesh_dim_names)
        joined = stages.edges, stages.inputs
        dist.all_gather_object(told, (digest(plan), joined, shared, layout))
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


def refuse_devices(stages: Stages, local: tuple[int, ...]) -> None:
    """Raises PipelineError where one of the `local` stages is not on the CPU."""
    for stage in local:
        for name, tensor in stages[stage].state_dict().items():
            if tensor.device.type != "cpu":
                raise PipelineError(f"{name} of stage {stage} is on {tensor.device}; only CPU stages can be run")
