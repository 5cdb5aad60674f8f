"""What the jobs train: blocks of a transformer's MLP, cut into stages, and the same unsplit on the same device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import rota
from rota import Cluster, Op, Pipeline, Plan, Stages, simulate
from rota.core.errors import ScheduleError
from rota.schedules import Family
from support.device_orders import OF_ANY_MODEL, family_plans
from support.networks import loss_fn

ROWS, WIDTH = 6, 16
DTYPES = {"float64": torch.float64, "float32": torch.float32}
Gradients = Mapping[tuple[int, str], Tensor]


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(dropout), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.layers(self.norm(x))
        return y


def blocks(num_stages: int, dtype: torch.dtype = torch.float32, width: int = WIDTH, **options: Any) -> Stages:
    """The same weights on every rank."""
    torch.manual_seed(0)
    return Stages([Block(width, **options).to(dtype) for _ in range(num_stages)])


def batch_of(
    num_microbatches: int, device: torch.device, seed: int = 1, dtype: torch.dtype = torch.float32, **sizes: int
) -> tuple[Tensor, Tensor]:
    """Drawn on the CPU: the same on all ranks and devices."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, num_microbatches * sizes.get("rows", ROWS), sizes.get("width", WIDTH))
    x, target = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).unbind()
    return x.to(device), target.to(device)


def unsplit_step(stages: Stages, batch: tuple[Tensor, Tensor], num_microbatches: int) -> float:
    """The unsplit model, micro-batch by micro-batch; gradients are added to `.grad`."""
    total = 0.0
    for x, target in zip(*(part.chunk(num_microbatches) for part in batch), strict=True):
        loss = loss_fn(stages.run(x), target) / num_microbatches
        loss.backward()
        total += loss.item()
    return total


def clear(stages: Stages) -> None:
    for module in stages.modules:
        module.zero_grad(set_to_none=True)


def worst(found: Gradients, expected: Gradients) -> float:
    """The largest difference, relative to the largest number of the tensor that it is in.

    A tensor of nearly nothing counts as a thousandth of the largest of all.
    """
    assert found.keys() <= expected.keys(), f"without a gradient in the unsplit model: {found.keys() - expected.keys()}"
    sizes = {key: float(tensor.abs().max()) for key, tensor in expected.items()}
    floor = max(sizes.values()) / 1000
    differences = [
        float((tensor - expected[key]).abs().max()) / max(sizes[key], floor) for key, tensor in found.items()
    ]
    return max(differences, default=0.0)


def trains(plan: Plan) -> bool:
    return any(task.kind.makes_weight_gradients for task in plan.placement.tasks)


def on_one_rank(plan: Plan) -> Plan:
    """All stages on one rank, the ops in the order in which they start: a plan for one device."""
    placement = plan.placement
    tasks = tuple(replace(task, ranks=(0,)) for task in placement.tasks)
    starts = {span.work: span.start_us for span in simulate(plan).op_spans()}
    order = tuple(
        sorted((op for op in starts if isinstance(op, Op)), key=lambda op: (starts[op], op.microbatch, op.stage))
    )
    alone = replace(placement, tasks=tasks, cluster=Cluster.uniform(1), static_bytes=(), step_ends=())
    return Plan(alone, plan.num_microbatches, (order,))


def plan_of(family: Family, num_ranks: int) -> Plan | None:
    """On one rank it has the stages and the order of the family on four."""
    found = next(family_plans([family], [max(num_ranks, 4) if num_ranks == 1 else num_ranks]), None)
    return on_one_rank(found) if found is not None and num_ranks == 1 else found


def plans(num_ranks: int, families: Sequence[Family] = OF_ANY_MODEL) -> dict[str, Plan]:
    """By name; families that are not defined for so many ranks are left out."""
    found: dict[str, Plan] = {}
    for family in families:
        try:
            plan = plan_of(family, num_ranks)
        except (ScheduleError, ValueError):
            continue
        if plan is not None:
            found[family.name] = plan
    return found


def pipeline_on(device: torch.device, stages: Stages, plan: Plan, **options: Any) -> Pipeline:
    """A pipeline whose own stages are on `device`."""
    stages.to(device, rota.local_stages(plan, options.get("mesh")))
    return Pipeline(stages, plan, loss_fn, **options)
