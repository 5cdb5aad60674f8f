"""What all ranks must agree on before a plan runs."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from rota.errors import PipelineError
from rota.models import Stages
from rota.plan import Plan
from rota.runtime.handover import digest
from rota.runtime.shared import SharedWeight
from rota.runtime.transport import together


def refuse_differences(plan: Plan, shared: list[SharedWeight]) -> None:
    """Raises PipelineError, on all ranks, unless all have one plan and the same shared weights, and are its ranks."""
    told: list[Any] = [None] * dist.get_world_size()
    with together("comparing plans"):  # before anything that could fail on one rank alone
        dist.all_gather_object(told, (digest(plan), shared))
    for i, what in enumerate(("plan", "set of tied and replicated weights")):
        for rank, other in enumerate(told):
            if other[i] != told[0][i]:
                raise PipelineError(f"rank {rank} has another {what} than rank 0; give all ranks the same {what}")
    if len(told) != plan.num_ranks:
        raise PipelineError(
            f"the plan is for {plan.num_ranks} ranks, but {len(told)} processes were started; "
            f"start {plan.num_ranks}, or plan for {len(told)}"
        )


def refuse_devices(stages: Stages, local: tuple[int, ...]) -> None:
    """Raises PipelineError where one of the `local` stages is not on the CPU."""
    for stage in local:
        for name, tensor in stages[stage].state_dict().items():
            if tensor.device.type != "cpu":
                raise PipelineError(f"{name} of stage {stage} is on {tensor.device}; only CPU stages can be run")
