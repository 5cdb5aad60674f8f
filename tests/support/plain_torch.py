"""A plan's CSV run by PyTorch alone, as its documentation shows it: nothing of Rota's engines."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from support.networks import loss_fn
from support.torch_orders import with_waits


def plain_steps(
    rank: int,
    csv: str,
    modules: list[nn.Module],
    ranks: list[int],
    num_microbatches: int,
    batches: Iterable[tuple[Tensor, Tensor]],
    loss: Callable[..., Tensor] = loss_fn,
) -> list[tuple[dict[str, Any], Any]]:
    """For each step this rank's gradients by `stage.name`, nothing cleared before the first, and the merged output."""
    local = [stage for stage, home in enumerate(ranks) if home == rank]
    stages = [PipelineStage(modules[s], s, len(modules), torch.device("cpu")) for s in local]
    schedule = _PipelineScheduleRuntime(stages, num_microbatches, loss_fn=loss)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.csv")
        has_communication = "SEND" in csv or "REDUCE" in csv
        path.write_text(with_waits(csv) if has_communication else csv)
        schedule._load_csv(str(path), format="compute_comms" if has_communication else "compute_only")
    results = []
    for inputs, targets in batches:
        arguments = (inputs,) if 0 in local else ()
        output = schedule.step(*arguments, target=targets if len(modules) - 1 in local else None)
        gradients = {
            f"{s}.{name}": None if parameter.grad is None else parameter.grad.clone()
            for s in local
            for name, parameter in modules[s].named_parameters()
        }
        results.append((gradients, output.detach().clone() if output is not None else None))
    dist.barrier()
    return results
