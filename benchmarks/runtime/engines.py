"""What is compared: Rota's pipeline, PyTorch's runtime on the same orders, and a loop by hand."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from by_hand import ByHand
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.nn.functional import mse_loss

from rota import Cluster, Costs, Pipeline, Plan, Stages, place
from rota.schedules import one_f_one_b

ROWS, WIDTH = 4, 8

Engine = tuple[Callable[[], object], Callable[[], None]]  # a step, and what ends the engine


def plan_for(num_ranks: int, num_microbatches: int) -> Plan:
    costs = Costs.uniform(num_ranks, 5000, 10000, boundary_bytes=ROWS * WIDTH * 4)
    return one_f_one_b(place(costs, Cluster.uniform(num_ranks)), num_microbatches)


def data(num_microbatches: int, rows: int = ROWS, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(num_microbatches * rows, width), torch.randn(num_microbatches * rows, width)


def linear_layers(num_ranks: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH) for _ in range(num_ranks)]


def ours(plan: Plan, _: int, modules: list[nn.Module]) -> Engine:
    pipeline = Pipeline(Stages(modules), plan, mse_loss)
    inputs, targets = data(plan.num_microbatches)
    return lambda: pipeline.step(inputs, targets), pipeline.close


def pytorch(plan: Plan, rank: int, modules: list[nn.Module]) -> Engine:
    stage = PipelineStage(modules[rank], rank, plan.num_ranks, torch.device("cpu"))
    schedule = _PipelineScheduleRuntime([stage], plan.num_microbatches, loss_fn=mse_loss)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.csv")
        path.write_text(plan.to_csv(communication=True))
        schedule._load_csv(str(path), format="compute_comms")
    inputs, targets = data(plan.num_microbatches)
    arguments = (inputs,) if rank == 0 else ()
    target = targets if rank == plan.num_ranks - 1 else None
    return lambda: schedule.step(*arguments, target=target, return_outputs=False), lambda: None


def by_hand(plan: Plan, rank: int, modules: list[nn.Module]) -> Engine:
    loop = ByHand(modules[rank], mse_loss, torch.empty(ROWS, WIDTH), plan.num_microbatches)
    inputs, targets = (whole.tensor_split(plan.num_microbatches) for whole in data(plan.num_microbatches))
    return lambda: loop.step(inputs, targets), lambda: None


ENGINES = {"Rota": ours, "PyTorch": pytorch, "by hand": by_hand}
