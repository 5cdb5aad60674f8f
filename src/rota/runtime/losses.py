"""The mean loss of all replicas, on every rank, and what is said when it is no number."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.distributed as dist

from rota.errors import PipelineError
from rota.runtime.json_messages import all_gather_json
from rota.runtime.stopping import StopRequests
from rota.runtime.transport import together


def mean_of_all(mine: float, num_pipelines: int, add_up: Callable[[torch.Tensor], None], stops: StopRequests) -> float:
    """The mean over pipelines of the sums of their ranks' `mine`. `add_up` sums over all processes.

    It carries requests to stop along, so that all ranks hear of them at the end of the same step.
    """
    told = torch.tensor([mine, stops.asked()], dtype=torch.float64)
    add_up(told)
    total, num_asked = told.tolist()
    stops.agreed |= num_asked > 0
    return float(total / num_pipelines)


def refuse_loss(
    mean: float,
    step: int,
    name: str,
    mine: dict[int, dict[int, float]],
    empty: list[int],
    group: dist.ProcessGroup,
) -> None:
    """Raises PipelineError, on all ranks, with all losses that are not finite. Collective.

    `mine`: the losses by micro-batch that are counted on this process, the rank `name`, for each last stage. `empty`:
    the micro-batches that have no rows here.
    """
    with together("gathering losses that are not finite"):
        told = all_gather_json([name, [(stage, [*losses.items()]) for stage, losses in mine.items()], empty], group)
    places = [_told(on, stage, dict(losses)) for on, each, _ in told for stage, losses in each]
    found = "; ".join(filter(None, places)) or "each micro-batch's is finite, but not their sum"
    bad = [
        m for _, each, of_none in told for _, losses in each for m, loss in losses if m in of_none and math.isnan(loss)
    ]
    cause = "reload the last checkpoint or lower the learning rate"
    if bad:
        which = f"micro-batch{'es' if len(bad) > 1 else ''} {', '.join(map(str, bad))}"
        cause = (
            f"{which} came without rows, of which a mean is nan: give each micro-batch a row or more, or let loss_fn "
            f"return output.sum() * 0 where there are none"
        )
    raise PipelineError(
        f"step {step}: the mean loss is {mean} ({found}). Do not apply its gradients: {cause}; to go on without this "
        f"batch, set the gradients to None; to be given such losses, use Pipeline(…, allow_nonfinite_loss=True) or a "
        f"GradScaler"
    )


def _told(name: str, stage: int, losses: dict[int, float]) -> str:
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
