"""Training on a mesh, and the same by the unsplit model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import rota
from rota import Cluster, Costs, Op, Pipeline, Plan, Stages, interleaved, place
from rota.schedules import NAMED
from support.networks import batch_of, loss_fn

NUM_MICROBATCHES, NUM_STEPS, ACCUMULATE, MAX_NORM = 4, 10, 2, 0.5

LATE_W = "zb, a forward between I and W"

State = dict[tuple[int, str], Tensor]


class Trained(NamedTuple):
    """What a process, or the unsplit model, has after training: losses and norms of all steps, its parameters."""

    losses: list[float]
    norms: list[float]
    parameters: State


class Case(NamedTuple):
    """`wrap(stage module, mesh)` gives the module that is trained."""

    schedule: str
    pp: int
    dp: int
    wrap: Callable[..., nn.Module] | None = None
    recomputed: bool = False  # by R


def plan_of(case: Case, num_microbatches: int = NUM_MICROBATCHES) -> Plan:
    if case.schedule.startswith("interleaved"):
        return NAMED[case.schedule](
            interleaved(costs_for(case, 2 * case.pp), Cluster.uniform(case.pp)), num_microbatches
        )
    if case.schedule == LATE_W:
        orders = ("0F0 0F1 0F2 0F3 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3", "1F0 1I0 1F1 1W0 1I1 1F2 1W1 1I2 1F3 1W2 1I3 1W3")
        placement = place(costs_for(case, 2), Cluster.uniform(2))
        return Plan(placement, 4, tuple(tuple(map(Op.parse, order.split())) for order in orders))
    return NAMED[case.schedule](place(costs_for(case, case.pp), Cluster.uniform(case.pp)), num_microbatches)


def costs_for(case: Case, num_stages: int) -> Costs:
    recompute = {"recompute_us": 1} if case.recomputed else {}
    return Costs.uniform(num_stages, 1, 1, weight_us=1 if "z" in case.schedule else None, **recompute)


def global_batches() -> list[tuple[Tensor, Tensor]]:
    """For each replica of two, or one, equal parts."""
    return [batch_of(2 * NUM_MICROBATCHES, seed) for seed in range(NUM_STEPS * ACCUMULATE)]


def part_of(batch: tuple[Tensor, Tensor], pipeline: Pipeline) -> tuple[Tensor, Tensor]:
    """This replica's part of a global batch."""
    x, target = (tensor.chunk(pipeline.num_replicas)[pipeline.replica] for tensor in batch)
    return x, target


def train_on_mesh(rank: int, stages: Stages, case: Case) -> Trained:
    """Ten steps of Adam with clipping, accumulation and a scheduler."""
    mesh = rota.mesh(pp=case.pp, dp=case.dp)
    plan, stages = plan_of(case), copy.deepcopy(stages)  # what a job is given is in memory that its processes share
    if case.wrap is not None:
        mine = plan.placement.stages_on(mesh.get_local_rank("pp"))
        stages = Stages([case.wrap(m, mesh) if s in mine else m for s, m in enumerate(stages.modules)], stages.edges)
    with torch.no_grad():  # replicas begin with other weights than the first, which counts
        for p in stages[0].parameters() if mesh.get_local_rank("dp") and case.wrap is None else ():
            p.add_(1)
    losses, norms = [], []
    batches = iter(global_batches())
    with Pipeline(stages, plan, loss_fn, mesh=mesh) as pipeline:
        optimizer = torch.optim.Adam(pipeline.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            for i in range(ACCUMULATE):
                batch = part_of(next(batches), pipeline)
                losses.append(pipeline.step(*batch, scale=1 / ACCUMULATE, sync=i == ACCUMULATE - 1))
            norms.append(pipeline.clip_grad_norm_(MAX_NORM).item())
            optimizer.step()
            scheduler.step()
        return Trained(losses, norms, parameters_of(pipeline))


def parameters_of(pipeline: Pipeline) -> State:
    found = {}
    for stage, module in pipeline.local_stages.items():
        for name, p in module.named_parameters():
            whole = p.full_tensor() if hasattr(p, "full_tensor") else p
            found[stage, name] = whole.detach().clone()
    return found


def train_serially(stages: Stages) -> Trained:
    losses, norms = [], []
    batches = iter(global_batches())
    parameters = list(nn.ModuleList(stages.modules).parameters())
    optimizer = torch.optim.Adam(parameters, lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        for _ in range(ACCUMULATE):
            x, target = next(batches)
            loss = loss_fn(stages.run(x), target)
            (loss / ACCUMULATE).backward()
            losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(parameters, MAX_NORM).item())
        optimizer.step()
        scheduler.step()
    state = {(s, name): p.detach() for s, m in enumerate(stages.modules) for name, p in m.named_parameters()}
    return Trained(losses, norms, state)


def assert_trained_alike(by_rank: list[Trained], serial: Trained, tolerance: float = 1e-10) -> None:
    """Every process has the serial losses and norms; all parameters are somewhere, and equal wherever they are."""
    found: set[tuple[int, str]] = set()
    for trained in by_rank:
        torch.testing.assert_close(trained.losses, serial.losses, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(trained.norms, serial.norms, rtol=tolerance, atol=tolerance)
        found |= trained.parameters.keys()
        for key, parameter in trained.parameters.items():
            torch.testing.assert_close(parameter, serial.parameters[key], rtol=tolerance, atol=tolerance)
    assert found == serial.parameters.keys()


def on_each(rank: int, function: Callable[..., Any], cases: list[tuple[Any, ...]]) -> list[Any]:
    """Several cases in one job of the pool."""
    return [function(rank, *arguments) for arguments in cases]
