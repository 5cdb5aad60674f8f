"""Refuse, before anything runs, what PyTorch's pipeline engine cannot run."""

from __future__ import annotations

from typing import Any

import torch

from rota.errors import PipelineError, ScheduleError
from rota.models import Stages
from rota.plan import Plan
from rota.runtime.messages import tensors_in
from rota.schedule_csv import require_chain

_REMEDY = "or run the plan by Rota's engine (rota.Pipeline)"
_OLDEST = (2, 13)  # in earlier versions every received tensor requires a gradient, and every gradient is sent


def refuse_what_torch_cannot_run(stages: Stages, plan: Plan, dynamic_shapes: bool) -> None:
    """Raise PipelineError unless the plan's stages and the model's stages are a chain, each stage on one rank."""
    refuse_old_torch()
    if dynamic_shapes:
        raise PipelineError(
            f"dynamic_shapes=True, but PyTorch's engine receives into buffers made beforehand: use False, {_REMEDY}"
        )
    if plan.placement.sample_of:
        raise PipelineError(f"the plan cuts samples into chunks, which PyTorch's engine does not know: {_REMEDY[3:]}")
    if plan.placement.class_of:
        raise PipelineError(
            f"the plan's micro-batches differ, and PyTorch's engine receives into buffers of one shape: plan equal "
            f"ones, {_REMEDY}"
        )
    num_stages = plan.placement.num_stages
    if plan.placement.stages != tuple(range(len(stages))):
        raise PipelineError(
            f"the plan has {num_stages} stages, the model was split into {len(stages)}; "
            f"split(model, {num_stages}), or plan for {len(stages)} stages"
        )
    try:
        require_chain(plan.placement, _REMEDY)
    except ScheduleError as error:
        raise PipelineError(str(error)) from None
    chain = {(stage, stage + 1) for stage in range(num_stages - 1)}
    for a, b in sorted(chain ^ {edge[:2] for edge in stages.edges}):
        verb = "lacks" if (a, b) in chain else "has"
        raise PipelineError(
            f"PyTorch's engine runs a chain of stages 0, 1, …, but the model {verb} the edge {a} -> {b}: split it into "
            f"a chain, {_REMEDY}"
        )
    _refuse_ties(stages, plan)


def refuse_old_torch() -> None:
    """Raise PipelineError if PyTorch's engine is older than what is tested."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < _OLDEST:
        raise PipelineError(
            f"torch is {torch.__version__}; PyTorch's engine can be used from 2.13 on: update, {_REMEDY}"
        )


def refuse_options(**given: object) -> None:
    """Raise PipelineError if an option is given that only Rota's engine has."""
    for name, value in given.items():
        if value is not None:
            raise PipelineError(f"{name}={value!r} is not an option of PyTorch's engine here: leave it out, {_REMEDY}")


def _refuse_ties(stages: Stages, plan: Plan) -> None:
    """Raise PipelineError for weights tied over ranks: PyTorch's engine does not sum their gradients."""
    homes: dict[int, tuple[int, str]] = {}
    for stage in range(len(stages)):
        rank = plan.placement.ranks_of(stage)[0]
        for name, parameter in stages[stage].named_parameters():
            other, other_name = homes.setdefault(id(parameter), (rank, f"{name!r} of stage {stage}"))
            if other != rank:
                raise PipelineError(
                    f"parameter {name!r} of stage {stage} on rank {rank} is tied to {other_name} on rank {other}, and "
                    f"PyTorch's engine sums no gradients over ranks: place these stages on one rank, {_REMEDY}"
                )


def refuse_ragged(inputs: list[Any]) -> None:
    """Raise PipelineError if micro-batches have different shapes."""
    first = _shapes(inputs[0])
    for m, microbatch in enumerate(inputs):
        if _shapes(microbatch) != first:
            raise PipelineError(
                f"micro-batch {m} has inputs of the shapes {_shapes(microbatch)}, micro-batch 0 of {first}, and "
                f"PyTorch's engine receives into buffers of one shape: give equal ones, {_REMEDY}"
            )


def _shapes(microbatch: Any) -> list[list[int]]:
    return [list(tensor.shape) for tensor in tensors_in(microbatch)]
